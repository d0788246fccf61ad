"""Speculative decoding: the same answers in fewer steps, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import LLM
from kvcore.engine.sampling_params import SamplingParams, StructuredOutputsParams
from kvcore.engine.sequence import Sequence
from kvcore.engine.speculation import Drafts, SpeculativeConfig
from kvcore.errors import InvalidArgument
from mocks import MockTokenizer
from models import EXACT, REFERENCE
from test_engine import Machine, cache_of, decoder_of, finish, generated, make
from test_llm import make as make_llm
from test_llm import talker

EAGER = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


# -- drafts ----------------------------------------------------------------------------------------------------------


def drafts(**options: Any) -> Drafts:
    return Drafts(SpeculativeConfig(**{"num_speculative_tokens": 3, **options}))


def test_what_followed_the_longest_match_is_the_draft() -> None:
    text = [1, 2, 3, 10, 11, 12, 9, 2, 3, 20, 21, 22, 1, 2, 3]
    assert drafts().propose(text, 99) == [10, 11, 12]
    assert drafts(prompt_lookup_max=2).propose(text, 99) == [20, 21, 22]  # equally long: the latest
    assert drafts().propose(text, 2) == [10, 11]
    assert drafts(prompt_lookup_min=4).propose(text, 99) == []
    assert drafts().propose(text, 0) == []


def test_a_period_goes_on() -> None:
    assert drafts(num_speculative_tokens=5).propose([9, 1, 2, 1, 2], 99) == [1, 2, 1, 2, 1]
    assert drafts().propose([4] * 3, 99) == [4, 4, 4]
    assert drafts(prompt_lookup_min=1).propose([4], 99) == []
    assert drafts().propose([4, 4], 99) == []


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
    most=st.integers(1, 9),
)
def test_the_index_finds_what_a_search_finds(text: list[int], least: int, more: int, most: int) -> None:
    """As long as there are few places to compare: each draft follows the latest of the longest matches."""
    config = SpeculativeConfig(num_speculative_tokens=most, prompt_lookup_min=least, prompt_lookup_max=least + more)
    grown = Drafts(config)
    for length in range(1, len(text) + 1):
        tokens, want = text[:length], []
        for n in range(least + more, least - 1, -1):
            ends = [end for end in range(n, length) if tokens[end - n : end] == tokens[-n:]]
            if ends and len(ends) <= 16:
                periodic = tokens[ends[-1] :] * most
                want = periodic[:most]
                break
            if ends:
                return
        places = sum(tokens[end - least : end] == tokens[-least:] for end in range(least, length))
        if places <= 16:
            assert grown.propose(tokens, 99) == want == Drafts(config).propose(tokens, 99)


def test_rejected_drafts_make_it_pause() -> None:
    one, text, asked = drafts(), [5, 5, 5], []
    for _ in range(300):
        if one.propose(text, 3):
            asked.append(len(text))
            one.judge(1, 0, len(text))
        text.append(5)
    assert asked == [3, 4, 5, 13, 29, 61, 125, 253]
    text = text[:1] * 400
    assert one.propose(text, 3)
    one.judge(1, 1, len(text))
    text.append(5)
    assert one.propose(text, 3)


def test_the_length_of_drafts_follows_their_success() -> None:
    one, text, lengths = drafts(num_speculative_tokens=8), [5] * 9, []
    for right in (8, 5, 0, 1, 2, 4, 8, 1):
        draft = one.propose(text, 99)
        lengths.append(len(draft))
        one.judge(len(draft), min(right, len(draft)), len(text))
    assert lengths == [8, 8, 6, 1, 2, 4, 8, 8]


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ([], TypeError, r"speculative_config: expected None or a dict, got list"),
        ({"num_speculative_tokens": 2, "model": "x"}, InvalidArgument, "method, num_speculative_tokens.*got 'model'"),
        ({"method": "ngram"}, InvalidArgument, "num_speculative_tokens: expected an integer, got none"),
        ({"method": "eagle", "num_speculative_tokens": 2}, InvalidArgument, "method: expected 'ngram', got 'eagle'"),
        ({"num_speculative_tokens": 0}, InvalidArgument, "num_speculative_tokens: .* at least 1, got 0"),
        ({"num_speculative_tokens": 2.0}, TypeError, "num_speculative_tokens: expected an integer, got float"),
        ({**NGRAM, "prompt_lookup_max": True}, TypeError, "prompt_lookup_max: expected an integer, got bool"),
        ({**NGRAM, "prompt_lookup_min": -1}, InvalidArgument, "prompt_lookup_min: .* at least 1, got -1"),
        ({**NGRAM, "prompt_lookup_min": 5}, InvalidArgument, r"prompt_lookup_min: expected at most 4 .*, got 5"),
    ],
)
def test_bad_configs(values: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SpeculativeConfig.from_dict(values)
    assert SpeculativeConfig.from_dict(NGRAM) == SpeculativeConfig(num_speculative_tokens=4)


# -- the engine ------------------------------------------------------------------------------------------------------


def test_a_text_that_repeats_takes_fewer_steps() -> None:
    steps = []
    for speculation in (None, EAGER):
        engine = make(script={i: i % 4 for i in range(100)}, speculation=speculation)
        seq = engine.add_request("a", [3, 0, 1, 2, 3, 0], SamplingParams(temperature=0, max_tokens=41, ignore_eos=True))
        outputs = [[o.token_id for o in engine.step()] for _ in range(41)]
        assert outputs == [[(5 + i) % 4] for i in range(41)]
        assert not engine.has_unfinished
        assert (seq.num_generated, seq.num_computed_tokens, seq.finish_reason) == (41, 46, "length")
        cache_of(engine).check_empty()
        stats = engine.stats()
        assert (stats["num_generation_tokens"], stats["num_computed_tokens"]) == (41, 46)
        steps.append(stats["num_steps"])
    assert steps == [41, 9]  # the prompt, and 40 tokens by five
    assert (stats["spec_decode_num_drafts"], stats["spec_decode_num_draft_tokens"]) == (8, 32)
    assert stats["spec_decode_num_accepted_tokens"] == 32


def test_rejected_tokens_are_in_no_count_and_in_no_block() -> None:
    """The draft says 1 2 3 4 5 and the model 1 2 9: one block of four is full then, and nobody finds another."""
    engine = make(script={9: 1, 10: 2, 11: 9, 12: 8}, speculation=EAGER)
    prompt = [1, 2, 3, 4, 5, 6, 7, 30, 29, 28]
    seq = engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=4))
    finish(engine)
    assert generated(seq) == [1, 2, 9, 8]
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] == 2  # as many as there were tokens to come
    assert stats["spec_decode_num_accepted_tokens"] == 1
    assert (seq.num_computed_tokens, stats["num_computed_tokens"]) == (13, 13)
    for tail, cached in (([1, 2, 9, 8], 12), ([1, 2, 3, 4], 12), ([1, 3, 3, 4], 8)):
        again = engine.add_request("b", prompt + tail, SamplingParams(temperature=0, max_tokens=1))
        finish(engine)
        assert again.num_cached_tokens == cached
    cache_of(engine).check_empty()


def test_drafts_take_what_is_left_of_a_batch_and_of_the_blocks() -> None:
    script = dict.fromkeys(range(100), 7)
    for num_blocks, budget in ((100, 5), (12, 64)):
        engine = make(num_blocks, script=script, speculation=EAGER, max_num_batched_tokens=budget)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        seqs = [engine.add_request(str(i), [7] * 9, params) for i in range(3)]
        finish(engine)
        assert [generated(seq) for seq in seqs] == [[7] * 8] * 3
        assert max(sum(rows) for rows in decoder_of(engine).batches) <= budget
        assert engine.stats()["num_preemptions"] == 0
        assert engine.stats()["spec_decode_num_accepted_tokens"] > 0
        cache_of(engine).check_empty()


def test_a_batch_that_lacks_blocks_goes_without_drafts_before_anybody_is_preempted() -> None:
    """Two samples share a part of a block. That it must be copied is known to ``plan`` only."""
    preemptions = []
    for speculation in (None, EAGER):
        engine = make(4, script=dict.fromkeys(range(100), 7), speculation=speculation)
        seq = engine.add_request("a", [7] * 6, SamplingParams(seed=1, n=2, max_tokens=4, ignore_eos=True))
        both = [seq, *seq.siblings]
        engine.step()
        engine.step()
        assert cache_of(engine).calls["truncate"] == (0 if speculation is None else 2)
        assert engine.stats()["num_preemptions"] == 0
        finish(engine)
        assert [generated(each) for each in both] == [[7] * 4] * 2
        preemptions.append(engine.stats()["num_preemptions"])
        cache_of(engine).check_empty()
    assert preemptions[1] <= preemptions[0]  # none on account of drafts


def test_an_end_between_tokens_that_were_accepted() -> None:
    """A stop string or an abort comes when some of them are still to be handed out."""
    for end in ("abort", "finish"):
        engine = make(script=dict.fromkeys(range(100), 7), speculation=EAGER)
        seq = engine.add_request("a", [7] * 9, GREEDY)
        for _ in range(4):
            engine.step()
        assert seq.ahead
        engine.abort("a") if end == "abort" else engine.finish("a", "stop", "text")
        assert (generated(seq), seq.num_computed_tokens, seq.metrics.num_generation_tokens) == ([7] * 4, 12, 4)
        assert engine.stats()["num_generation_tokens"] == 4
        assert engine.stats()["num_computed_tokens"] == 12
        assert engine.step() == []
        cache_of(engine).check_empty()


def _odd(token_ids: list[int], row: np.ndarray) -> np.ndarray:
    row[len(token_ids) % 5 :: 5] -= 1.0
    return row


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 3, "temperature": 0.3},
    {"seed": 4, "temperature": 0.5, "top_p": 0.9, "n": 3, "logprobs": 0},
    {"seed": 5, "temperature": 0.2, "n": 2, "best_of": 4},
    {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"temperature": 0.0, "min_tokens": 9, "ignore_eos": False},
    {"temperature": 0.0, "stop_token_ids": [3, 18]},
    {"temperature": 0.0, "logits_processors": [_odd]},
    {"temperature": 0.0, "bad_words": [], "logit_bias": {5: 1.5}, "prompt_logprobs": 1},
]


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams, bool]]:
    """(prompt, params, use_cache); prompts repeat a few tokens in many ways."""
    result = []
    for _ in range(draw(st.integers(1, 5))):
        start, period = draw(st.integers(0, 31)), draw(st.integers(1, 7))
        prompt = [(start + 5 * (i % period)) % 32 for i in range(draw(st.integers(1, 24)))]
        options = {"ignore_eos": True, **draw(st.sampled_from(PARAMS)), "max_tokens": draw(st.integers(1, 24))}
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
        result.append((prompt, SamplingParams(**options), draw(st.sampled_from([True, True, True, False]))))
    return result


@settings(max_examples=150, deadline=None)
@given(
    asked=requests(),
    num_blocks=st.sampled_from([12, 14, 400]),
    budget=st.sampled_from([1, 5, 16, 2048]),
    seats=st.integers(1, 6),
    long_from=st.sampled_from([None, 20]),
    habit=st.sampled_from([0.0, 2.0, 4.0]),
    speculation=st.builds(
        SpeculativeConfig,
        num_speculative_tokens=st.integers(1, 6),
        prompt_lookup_min=st.integers(1, 2),
        prompt_lookup_max=st.integers(2, 4),
    ),
)
def test_answers_are_the_same(
    asked: list[tuple[list[int], SamplingParams, bool]],
    num_blocks: int,
    budget: int,
    seats: int,
    long_from: int | None,
    habit: float,
    speculation: SpeculativeConfig,
) -> None:
    def run(speculation: SpeculativeConfig | None) -> Any:
        engine = make(
            num_blocks,
            long_from=long_from,
            habit=habit,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            enable_prefix_caching=True,
            speculation=speculation,
        )
        sequences: list[Sequence] = []
        for i, (prompt, params, use_cache) in enumerate(asked):
            seq = engine.add_request(str(i), prompt, params, use_cache=use_cache)
            sequences += [seq, *seq.siblings]
        streams: dict[tuple[str, int], list[Any]] = {}
        while engine.has_unfinished:
            for o in engine.step():
                told = (o.token_id, o.logprobs, o.finish_reason, o.stop_reason, o.error)
                streams.setdefault((o.request_id, o.index), []).append(told)
            cache_of(engine).check()
        cache_of(engine).check_empty()
        assert max(sum(rows) for rows in decoder_of(engine).batches) <= budget
        stats = engine.stats()
        ends = [
            (generated(s), s.logprobs, s.prompt_logprobs, s.cumulative_logprob, s.finish_reason, s.stop_reason)
            for s in sequences
        ]
        counts = [s.num_computed_tokens + s.num_cached_tokens for s in sequences]
        totals = [stats[name] for name in ("num_prompt_tokens", "num_generation_tokens", "num_finished")]
        return streams, ends, None if long_from is not None else counts, totals

    assert run(speculation) == run(None)


class SpeculatingMachine(Machine):
    """Arrivals, aborts, steps and failures in any order; the tokens are those of undisturbed runs without drafts."""

    habit = 2.5
    options = {"speculation": EAGER}  # noqa: RUF012


SpeculatingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestSpeculatingMachine = SpeculatingMachine.TestCase


# -- through LLM -----------------------------------------------------------------------------------------------------


def accepted(llm: LLM) -> int:
    return int(llm.stats()["spec_decode_num_accepted_tokens"])


@pytest.mark.parametrize("stop", [None, "g, dong, d", "ng, ding, do", "never"])
def test_pieces_of_a_stream(stop: str | None) -> None:
    """Stop strings end it at the same token, and each piece is what it is without drafts."""
    runs = []
    for config in (None, NGRAM):
        llm = talker(
            "Say it: ", "ding, dong, ding, dong, ding, dong, \u00fcber ding, dong, \u00fcber", speculative_config=config
        )
        params = SamplingParams(temperature=0, max_tokens=90, stop=stop, logprobs=1)
        items = list(llm.stream("Say it: ", params))
        pieces = [(i.text, i.token_ids, i.finish_reason, i.outputs[0].stop_reason, i.finished) for i in items]
        stats, last = llm.stats(), items[-1]
        logprobs = [i.outputs[0].logprobs for i in items]
        counts = [stats[k] for k in ("num_generation_tokens", "num_computed_tokens", "num_finished")]
        usage = (
            last.usage,
            last.num_computed_tokens,
            last.outputs[0].cumulative_logprob,
            last.metrics.num_generation_tokens,
        )
        runs.append((pieces, logprobs, counts, usage))
        assert (accepted(llm) > 0) == (config is not None)
        llm.cache.check_empty()
    assert runs[0] == runs[1]


def test_grammars() -> None:
    runs = []
    wanted = StructuredOutputsParams(regex=r"(ab|cd){3,9}x")
    params = SamplingParams(n=3, seed=1, max_tokens=40, structured_outputs=wanted)
    for config in (None, NGRAM):
        llm = make_llm(tokenizer=MockTokenizer(), speculative_config=config)
        (output,) = llm.generate("abababcdabababcd", params)
        runs.append([(c.text, c.token_ids, c.finish_reason) for c in output.outputs])
        assert (accepted(llm) > 0) == (config is not None)
        llm.cache.check_empty()
    assert runs[0] == runs[1]


KINDS = ("llama_gqa", "mistral_swa8", "gemma3_text", "deepseek_v3", "gpt_oss", "phi3_longrope", "llama_rope_dynamic")


@pytest.mark.parametrize("name", KINDS)
def test_real_models(name: str) -> None:
    """Windows, latent rows, sinks, experts, rope that depends on length; cold, on a hit, preempted, samples."""
    rng = np.random.default_rng(0)
    prompts = [np.tile(rng.integers(0, 300, 5 + i), 4)[: 20 + 2 * i].tolist() for i in range(5)]
    few: dict[str, Any] = {
        "allowed_token_ids": [3, 7, 11],
        "max_tokens": 24,
        "ignore_eos": True,
    }  # so that texts repeat
    params = [
        SamplingParams(temperature=0, logprobs=1, **few)
        if i % 2
        else SamplingParams(seed=i, n=2, temperature=0.2, **few)
        for i in range(5)
    ]
    eager = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    results = []
    for config, blocks, budget in ((None, 200, 2048), (eager, 200, 2048), (eager, 9, 2048), (eager, 200, 24)):
        with LLM(
            REFERENCE / name, num_kv_blocks=blocks, max_num_batched_tokens=budget, speculative_config=config, **EXACT
        ) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
                results.append([[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs])
            assert (llm.stats()["spec_decode_num_draft_tokens"] > 0) == (config is not None)
            assert (accepted(llm) > 0) == (config is not None)
            assert (llm.stats()["num_preemptions"] > 0) == (blocks == 9)
            llm.cache.check()
            assert llm.stats()["cache"]["used"] == llm.stats()["cache"]["num_sequences"] == 0
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_models_with_an_encoder(name: str) -> None:
    prompts: Any = [{"encoder_token_ids": [5 + i] * 9 + [11, 12]} for i in range(3)]
    params = SamplingParams(
        temperature=0, logprobs=1, max_tokens=24, ignore_eos=True, min_tokens=1, allowed_token_ids=[3, 7, 11]
    )
    results = []
    for config in (None, NGRAM):
        with LLM(REFERENCE / name, num_kv_blocks=64, speculative_config=config, **EXACT) as llm:
            outputs = llm.generate(prompts, params)
            results.append([(o.token_ids, o.outputs[0].logprobs, o.num_computed_tokens) for o in outputs])
            assert (accepted(llm) > 0) == (config is not None)
            llm.cache.check()
            assert llm.stats()["cache"]["num_sequences"] == 0
    assert results[0] == results[1]
