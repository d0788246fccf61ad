"""Several answers to a prompt: parallel samples, the best of several, and beams."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams
from kvcore.engine.engine import Engine
from kvcore.engine.sampling_params import BeamSearchParams
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidArgument, OutOfBlocks
from mocks import MockCache, MockDecoder, MockTokenizer
from models import EXACT, REFERENCE, assert_nothing_held
from test_engine import finish, raiser
from test_llm import make as make_llm

EOS = 31


def make(num_blocks: int = 200, **options: Any) -> Engine:
    return Engine(MockDecoder(MockCache(num_blocks)), **{"eos_token_ids": [EOS], **options})


def run(engine: Engine, prompt: list[int], params: Any, name: str = "a", **options: Any) -> list[Sequence]:
    seq = engine.add_request(name, prompt, params, **options)
    answers = [seq, *seq.siblings]
    while engine.has_unfinished:
        engine.step()
        engine._cache.check()  # type: ignore[attr-defined]
    engine._cache.check_empty()  # type: ignore[attr-defined]
    return answers


def tokens(answers: list[Sequence]) -> list[list[int]]:
    return [seq.token_ids[seq.prompt_len :] for seq in answers]


# -- n ---------------------------------------------------------------------------------------------------------------


def test_trap_26_parallel_samples() -> None:
    params = SamplingParams(n=4, seed=42, max_tokens=12, ignore_eos=True)
    prompt = [1, 2, 3, 4, 5, 6]
    expected = tokens(run(make(), prompt, params))
    assert len({tuple(t) for t in expected}) == 4
    assert expected[0] == tokens(run(make(), prompt, SamplingParams(seed=42, max_tokens=12, ignore_eos=True)))[0]
    for options in ({"max_num_seqs": 2}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 2}, {"num_blocks": 6}):
        assert tokens(run(make(**options), prompt, params)) == expected
    assert tokens(run(make(), prompt, params, use_cache=False)) == expected
    # beside others
    engine = make(12)
    others = [engine.add_request(str(i), [i] * 5, SamplingParams(n=2, max_tokens=6)) for i in range(3)]
    assert tokens(run(engine, prompt, params)) == expected
    assert all(s.finished for other in others for s in [other, *other.siblings])


def test_the_prompt_is_computed_once() -> None:
    engine = make()
    answers = run(engine, list(range(17)), SamplingParams(n=5, seed=1, max_tokens=4, ignore_eos=True))
    assert engine.stats()["num_computed_tokens"] == 17 + 5 * 3
    assert sum(seq.num_computed_tokens for seq in answers) == 17 + 5 * 3
    assert engine.metrics.num_prompt_tokens == 17


def test_ends_of_one_answer_concern_no_other() -> None:
    engine = make()
    seq = engine.add_request("a", [1, 2], SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True))
    answers = [seq, *seq.siblings]
    for _ in range(3):
        engine.step()
    engine.finish("a", "stop", "text", 1)
    while engine.has_unfinished:
        engine.step()
    assert [s.finish_reason for s in answers] == ["length", "stop", "length"]
    assert [s.num_generated for s in answers] == [30, 3, 30]
    engine._cache.check_empty()  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_answers(steps: int) -> None:
    engine = make()
    seq = engine.add_request("a", [1, 2], SamplingParams(n=3, seed=5, max_tokens=30, ignore_eos=True))
    answers = [seq, *seq.siblings]
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    assert not engine.has_unfinished
    assert {s.finish_reason for s in answers} == {"abort"}
    engine._cache.check_empty()  # type: ignore[attr-defined]


def test_answers_through_llm() -> None:
    llm = make_llm(tokenizer=MockTokenizer())
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, logprobs=0)
    (output,) = llm.generate("hello", params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert all(c.finish_reason == "length" and len(c.token_ids) == 5 for c in output.outputs)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for item in llm.stream("hello", params):
        for c in item.outputs:
            streamed[c.index] += c.token_ids
    assert [streamed[i] for i in range(3)] == [c.token_ids for c in output.outputs]
    assert output.usage.output_tokens == 15
    llm.cache.check_empty()


def test_one_stop_string_does_not_silence_the_others() -> None:
    llm = make_llm(tokenizer=MockTokenizer())
    params = SamplingParams(n=4, seed=1, max_tokens=40, ignore_eos=True, temperature=3.0)
    free = llm.generate("hello", params)[0].outputs
    stop = next(t for t in free[2].text if t not in free[0].text + free[1].text + free[3].text)
    params = SamplingParams(n=4, seed=1, max_tokens=40, ignore_eos=True, temperature=3.0, stop=stop)
    stopped = llm.generate("hello", params)
    reasons = [c.finish_reason for c in stopped[0].outputs]
    assert reasons == ["length", "length", "stop", "length"]
    assert stopped[0].outputs[2].text == free[2].text[: free[2].text.index(stop)]
    assert [c.text for i, c in enumerate(stopped[0].outputs) if i != 2] == [
        c.text for i, c in enumerate(free) if i != 2
    ]


def test_best_of() -> None:
    llm = make_llm()
    params = SamplingParams(n=6, seed=1, max_tokens=6, ignore_eos=True, logprobs=0)
    every = llm.generate([1, 2, 3], params)[0].outputs
    ranked = sorted(every, key=lambda c: -(c.cumulative_logprob or 0))
    best = llm.generate([1, 2, 3], SamplingParams(n=2, best_of=6, seed=1, max_tokens=6, ignore_eos=True))[0].outputs
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1]
    assert best[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)
    items = list(llm.stream([1, 2, 3], SamplingParams(n=2, best_of=6, seed=1, max_tokens=6, ignore_eos=True)))
    assert len(items) == 1
    assert [c.token_ids for c in items[0].outputs] == [c.token_ids for c in best]
    llm.cache.check_empty()


def test_answers_of_a_real_model_share_blocks() -> None:
    prompt = np.random.default_rng(0).integers(0, 320, 40).tolist()
    params = SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True)
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=40, **EXACT) as llm:
        stream = llm.stream(prompt, params)
        next(stream)
        next(stream)
        # two whole blocks for all, and for each its own copy of the third
        assert llm.stats()["cache"]["used"] == 2 + 4
        several = [c.token_ids for c in llm.generate(prompt, params)[0].outputs]
        assert several == [c.token_ids for c in llm.generate(prompt, params, use_cache=False)[0].outputs]
        del stream
        assert_nothing_held(llm)


# -- timeouts and callbacks ------------------------------------------------------------------------------------------


def test_timeouts() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=700, ignore_eos=True, temperature=0)
    outputs = llm.generate([[1], [2, 3]], params, timeout=0.0)
    assert [(o.finish_reason, o.outputs[0].stop_reason, o.token_ids) for o in outputs] == [("abort", "timeout", [])] * 2

    def slowly(token_ids: Any, logits: Any) -> Any:
        time.sleep(0.002)  # 700 tokens take longer than the timeout on any machine
        return logits

    (output,) = llm.generate([[1]], replace(params, logits_processors=[slowly]), timeout=0.5)
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 700
    llm.cache.check_empty()
    assert llm.generate([1], params, timeout=1e9)[0].finish_reason == "length"
    for bad, error in ((-1, InvalidArgument), ("1", TypeError), (math.nan, InvalidArgument)):
        with pytest.raises(error, match="timeout"):
            llm.generate([1], params, timeout=bad)  # type: ignore[arg-type]


def test_abort_by_name() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
    llm.abort("nothing")

    def callback(item: Any) -> None:
        if item.prompt_token_ids == [2] and item.metrics.num_generation_tokens == 3:
            llm.abort(item.request_id)

    outputs = llm.generate([[1], [2]], params, callback=callback)
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 10), ("abort", 3)]
    llm.abort(outputs[0].request_id)
    stream = llm.stream([1], params)
    first = next(stream)
    llm.abort(first.request_id)
    assert [item.finish_reason for item in stream] == ["abort"]
    llm.cache.check_empty()


def test_what_another_calls_step_brings_is_told_as_well() -> None:
    """A call from within a callback runs the first request to its end; its answer, or error, is the first call's."""
    llm = make_llm()
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    (expected,) = llm.generate([[1]], params)
    items: list[Any] = []

    def callback(item: Any) -> None:
        items.append(item)
        if len(items) == 1:
            llm.generate([[2]], SamplingParams(max_tokens=20, ignore_eos=True))

    (output,) = llm.generate([[1]], params, callback=callback)
    told = [token for item in items for token in item.token_ids]
    assert output.token_ids == told == expected.token_ids
    assert [item.finished for item in items] == [False] * (len(items) - 1) + [True]

    def fails(token_ids: list[int], logits: Any) -> Any:
        if len(token_ids) == 4:
            raise RuntimeError("no fourth")
        return logits

    items.clear()
    failing = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, logits_processors=[fails])
    with pytest.raises(RuntimeError, match="no fourth"):
        llm.generate([[1]], failing, callback=callback)
    llm.cache.check_empty()


def test_a_callback_that_raises_ends_its_request_only() -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0)
    expected = [o.token_ids for o in llm.generate([[1], [2], [3]], params)]
    seen: list[list[int]] = []

    def callback(item: Any) -> None:
        if item.prompt_token_ids == [2] and len(seen) > 6:
            raise RuntimeError("no more")
        seen.append(item.token_ids)

    outputs = llm.generate([[1], [2], [3]], params, callback=callback)
    assert [o.finish_reason for o in outputs] == ["length", "abort", "length"]
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
    assert outputs[1].token_ids == expected[1][: len(outputs[1].token_ids)]
    assert isinstance(outputs[1].error, RuntimeError)
    assert [o.error for o in outputs if o is not outputs[1]] == [None, None]
    llm.cache.check_empty()
    with pytest.raises(TypeError, match="callback"):
        llm.generate([1], params, callback=3)  # type: ignore[arg-type]


# -- beams -----------------------------------------------------------------------------------------------------------


def reference_beams(prompt: list[int], params: BeamSearchParams, eos: set[int]) -> list[tuple[list[int], float]]:
    """The same search, a whole forward pass for each beam and step, and all candidates sorted."""
    engine = make()
    width, finished = params.beam_width, []
    beams: list[tuple[list[int], float]] = [([], 0.0)]

    def score(answer: list[int], total: float) -> float:
        return total / len(answer) ** params.length_penalty

    for length in range(1, params.max_tokens + 1):
        candidates = []
        for i, (answer, total) in enumerate(beams):
            row = engine.logits(prompt + answer)[-1].astype(np.float64)
            logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            candidates += [(total + logs[token], i, token) for token in range(len(logs))]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        following: list[tuple[list[int], float]] = []
        for rank, (total, i, token) in enumerate(candidates):
            if len(following) == width:
                break
            answer = [*beams[i][0], token]
            if token in eos:
                if rank < width:
                    finished.append((answer, score(answer, total)))
            else:
                following.append((answer, total))
        beams = following
        finished = sorted(finished, key=lambda f: -f[1])[:width]
        if len(finished) == width:
            reach = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            if params.early_stopping is True or finished[-1][1] >= beams[0][1] / reach**params.length_penalty:
                return finished
    finished += [(answer, score(answer, total)) for answer, total in beams]
    return sorted(finished, key=lambda f: -f[1])[:width]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beams_are_those_of_a_plain_search(width: int, early_stopping: Any, penalty: float) -> None:
    for seed, ends in itertools.product(range(3), ({31}, {3, 7, 12, 31})):
        prompt = [(seed + i * i) % 31 for i in range(6)]
        params = BeamSearchParams(beam_width=width, max_tokens=7, early_stopping=early_stopping, length_penalty=penalty)
        expected = reference_beams(prompt, params, ends)
        for options in ({}, {"num_blocks": 4 * width + 1}, {"max_num_batched_tokens": 3}):
            answers = run(make(eos_token_ids=ends, **options), prompt, params)
            assert tokens(answers) == [answer for answer, _ in expected]
            search = answers[0].search
            assert search is not None
            np.testing.assert_allclose([h.score for h in search.finished], [s for _, s in expected], rtol=1e-9)


def test_beams_beside_others_in_a_small_pool() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    prompts = [[i, i + 1, i + 2, 4, 5] for i in range(4)]
    expected = [tokens(run(make(), prompt, params)) for prompt in prompts]
    engine = make(16, max_num_seqs=8)
    seqs = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    others = [engine.add_request(f"other {i}", [i] * 6, greedy) for i in range(3)]
    answers = [[seq, *seq.siblings] for seq in seqs]
    while engine.has_unfinished:
        engine.step()
        engine._cache.check()  # type: ignore[attr-defined]
        assert len(engine._scheduler.running) <= 8
    assert [tokens(a) for a in answers] == expected
    assert tokens(others) == [tokens(run(make(), [i] * 6, greedy))[0] for i in range(3)]
    assert engine.stats()["num_preemptions"] > 0
    engine._cache.check_empty()  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["reorder", "append", "plan", "commit"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_failure_ends_the_search_and_nothing_leaks(where: str, after: int) -> None:
    engine = make()
    cache: Any = engine._cache
    seq = engine.add_request("a", [1, 2, 3], BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True))
    cache.fail[where] = raiser(RuntimeError("broken"), after)
    with pytest.raises(RuntimeError, match="broken"):
        finish(engine)
    assert isinstance(seq.error, RuntimeError)
    assert not engine.has_unfinished
    cache.check_empty()


def test_beam_search_through_llm() -> None:
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=40, **EXACT) as llm:
        prompts = [list(range(5, 40)), [3, 1, 4]]
        params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        outputs = llm.beam_search(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert len(output.sequences) == 3
            scores = [s.score for s in output.sequences]
            assert scores == sorted(scores, reverse=True)
            for s in output.sequences:
                assert s.tokens[: len(prompt)] == prompt
                assert s.finish_reason == "length"
                logits = llm.logits(s.tokens).astype(np.float64)
                logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
                total = sum(logs[i, s.tokens[i + 1]] for i in range(len(prompt) - 1, len(s.tokens) - 1))
                assert s.cum_logprob == pytest.approx(total, abs=1e-4)
                assert s.score == pytest.approx(s.cum_logprob / 8)
            greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))
            assert output.sequences[0].cum_logprob >= (greedy[0].outputs[0].cumulative_logprob or 0) - 1e-6
        assert_nothing_held(llm)
        with pytest.raises(TypeError, match="BeamSearchParams"):
            llm.beam_search(prompts, SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="beam_width"):
            llm.beam_search(prompts, BeamSearchParams(beam_width=65, max_tokens=2))
        with pytest.raises(OutOfBlocks, match="never fit: 48 blocks of 16 needed, 40 available"):
            llm.beam_search(list(range(250)), BeamSearchParams(beam_width=3, max_tokens=2))
    llm = make_llm(tokenizer=MockTokenizer())
    (output,) = llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    assert all(isinstance(s.text, str) for s in output.sequences)
