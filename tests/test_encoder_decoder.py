"""Encoder-decoders on their reference models: transformers' numbers, and law 1 in every way that a request can go."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from kvcore.checkpoint.config import load_config
from kvcore.models.encoder_decoder import EncoderDecoder
from kvcore.models.families import spec_from_config
from models import EXACT, REFERENCE, add_tokenizer, assert_same_bits, copy_reference, expected, meta, recorded
from test_llm import interrupt_at

FOLDERS = ["bart", "marian", "t5", "t5_gated", "whisper"]
CASES = [*((name, "config.json") for name in FOLDERS), ("t5_gated", "config.v4.json")]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def load(name: str, tmp_path: Path, config: str = "config.json", **options: Any) -> LLM:
    folder = REFERENCE / name if config == "config.json" else copy_reference(name, tmp_path / "model", config)
    return LLM(folder, **{**EXACT, "num_kv_blocks": 40, **options})


def source(want: dict[str, np.ndarray], suffix: str = "") -> dict[str, Any]:
    """What the encoder is given in a reference folder."""
    if "input_features" in want:
        return {"input_features": want[f"input_features{suffix}"]}
    return {"encoder_token_ids": want[f"input_ids{suffix}"].tolist()}


def prompt(want: dict[str, np.ndarray], suffix: str = "") -> dict[str, Any]:
    """The same with the tokens from which the greedy continuation starts."""
    return {**source(want, suffix), "decoder_token_ids": want["greedy_prompt_ids"].tolist()}


def assert_nothing_held(llm: LLM) -> None:
    """Law 2: the cross group is among the counts."""
    llm.cache.check()
    stats = llm.cache.stats()
    assert (stats["used"], stats["num_sequences"]) == (0, 0), stats
    assert stats["free"] + stats["cached"] == stats["total"], stats


def decoder_of(llm: LLM) -> EncoderDecoder:
    decoder = llm._decoder
    assert isinstance(decoder, EncoderDecoder)
    return decoder


@pytest.mark.parametrize(("name", "config"), CASES)
def test_logits_in_float32(name: str, config: str, tmp_path: Path) -> None:
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    with load(name, tmp_path, config) as llm:
        for case in ("", "_16"):
            got = llm.logits(want[f"decoder_input_ids{case}"], encoder=source(want, case))
            np.testing.assert_allclose(got, want[f"logits{case}"], rtol=0, atol=atol)
        assert_nothing_held(llm)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_encoder(name: str, tmp_path: Path) -> None:
    want = expected(name)
    with load(name, tmp_path) as llm:
        decoder, hidden = decoder_of(llm), list[np.ndarray]()
        encoded = decoder.encoder(decoder.encoder_input(source(want)), hidden)
        np.testing.assert_allclose(hidden[0], want["encoder_hidden_after_layer0"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(encoded, want["encoder_last_hidden_state"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_way_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Cold and warm, alone and in company, in chunks, without the cache, and on any number of threads."""
    want = expected(name)
    rows: list[np.ndarray] = []
    long = {**source(want), "decoder_token_ids": want["decoder_input_ids"].tolist()}
    for options in ({"num_threads": 1}, {"num_threads": 2, "max_num_batched_tokens": 5}):
        with load(name, tmp_path, **options) as llm, recorded(llm) as logits:
            (cold,) = llm.generate(prompt(want), GREEDY)
            company = llm.generate([prompt(want), prompt(want, "_16"), long, prompt(want)], GREEDY)
            (bare,) = llm.generate(prompt(want), GREEDY, use_cache=False)
            assert cold.token_ids == want["greedy_ids"].tolist()
            for output in (cold, company[0], company[3], bare):
                rows.append(logits(output))
                assert_same_bits(rows[-1], rows[0], options)
            start = want["greedy_prompt_ids"].tolist()
            whole = llm.logits(start + cold.token_ids[:-1], encoder=source(want))[len(start) - 1 :]
            assert_same_bits(whole, rows[0], options)
            assert_nothing_held(llm)


@pytest.mark.parametrize("name", FOLDERS)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Weights and cache as they come: no more than three times as far from float32 as transformers is."""
    want, tolerance = expected(name), meta(name)["tolerance"]["bfloat16"]
    with load(name, tmp_path, dtype="bfloat16", kv_cache_dtype="bfloat16") as llm:
        difference = np.abs(llm.logits(want["decoder_input_ids"], encoder=source(want)) - want["logits"])
        assert difference.max() < 3 * tolerance["transformers_max_abs_diff"]
        assert np.sqrt(np.mean(difference**2)) < 3 * tolerance["transformers_rms_diff"] + 1e-3


def test_the_start_token_is_the_default(tmp_path: Path) -> None:
    want = expected("t5")
    with load("t5", tmp_path) as llm:
        (output,) = llm.generate(source(want), GREEDY)
        assert output.prompt_token_ids == [0] == want["greedy_prompt_ids"].tolist()
        assert output.token_ids == want["greedy_ids"].tolist()
        assert [item.token_ids[0] for item in llm.stream(source(want), GREEDY)] == output.token_ids


def test_texts_go_into_the_encoder(tmp_path: Path) -> None:
    folder = add_tokenizer(copy_reference("t5", tmp_path / "model"))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(folder, num_kv_blocks=20, **EXACT) as llm:
        (want,) = llm.generate({"encoder_token_ids": [*b"translate"]}, params)
        for text in ("translate", {"prompt": "translate"}, {"prompt": "translate", "decoder_token_ids": [0]}):
            (output,) = llm.generate(text, params)
            assert output.prompt == "translate"
            assert (output.prompt_token_ids, output.token_ids) == ([0], want.token_ids)
        with pytest.raises(ValueError, match="not empty"):
            llm.generate("")
        with pytest.raises(ValueError, match="expected a model with a chat template"):
            llm.chat([{"role": "user", "content": "translate"}])

        async def answer() -> list[int]:
            return [t async for item in AsyncLLM(llm).generate("translate", params) for t in item.token_ids]

        assert asyncio.run(answer()) == want.token_ids


def test_prefixes_are_shared_only_behind_the_same_input(tmp_path: Path) -> None:
    want = expected("bart")
    decoder_ids = want["decoder_input_ids"].tolist()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with load("bart", tmp_path) as llm:
        cached = [
            llm.generate({**source(want, case), "decoder_token_ids": decoder_ids}, params)[0].num_cached_tokens
            for case in ("", "_16", "", "_16")
        ]
        assert cached == [0, 0, 20, 20]


@pytest.mark.parametrize(("name", "blocks"), [("t5", 9), ("bart", 9), ("whisper", 7)])
def test_preempted_requests_are_encoded_again_to_the_same_bits(name: str, blocks: int, tmp_path: Path) -> None:
    want = expected(name)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [prompt(want, case) for case in ("", "_16", "", "_16", "")]
    with load(name, tmp_path) as llm, recorded(llm) as logits:
        alone = [logits(llm.generate(each, params)[0]) for each in prompts]
    with load(name, tmp_path, num_kv_blocks=blocks, enable_prefix_caching=False) as llm, recorded(llm) as logits:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["num_preemptions"] > 0
        for output, rows in zip(outputs, alone, strict=True):
            assert_same_bits(logits(output), rows, output.request_id)
        assert_nothing_held(llm)


@pytest.mark.parametrize("blocks", [40, 11])
def test_beams_share_what_the_encoder_gives(blocks: int, tmp_path: Path) -> None:
    """One input, whatever the number of beams; and again after a preemption."""
    want = expected("bart")
    params = BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)
    with load("bart", tmp_path) as llm:
        alone = llm.beam_search(prompt(want), params)[0]
    with load("bart", tmp_path, num_kv_blocks=blocks, max_num_seqs=12) as llm:
        cross = max(group["used"] for group in watch(llm, prompt(want), params) if group["kind"] == "cross")
        assert cross == 3  # 37 tokens
        together = llm.beam_search([prompt(want)] * 4, params)
        assert llm.stats()["num_preemptions"] > 0 or blocks == 40
        for output in together:
            assert [s.tokens for s in output.sequences] == [s.tokens for s in alone.sequences]
            assert [s.cum_logprob for s in output.sequences] == [s.cum_logprob for s in alone.sequences]
        assert_nothing_held(llm)


def watch(llm: LLM, prompt: Any, params: BeamSearchParams) -> list[dict[str, Any]]:
    """The groups' counts at each step of a beam search."""
    counts: list[dict[str, Any]] = []
    decoder, forward = llm._decoder, llm._decoder.forward

    def counting(*args: Any, **options: Any) -> Any:
        counts.extend(llm.cache.stats()["groups"])
        return forward(*args, **options)

    decoder.forward = counting
    llm.beam_search(prompt, params)
    decoder.forward = forward
    return counts


def test_answers_share_what_the_encoder_gives(tmp_path: Path) -> None:
    want = expected("marian")
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    with load("marian", tmp_path) as llm:
        (output,) = llm.generate(prompt(want), params)
        assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
        (again,) = llm.generate(prompt(want), params)
        assert [a.token_ids for a in again.outputs] == [a.token_ids for a in output.outputs]
        assert_nothing_held(llm)


def encodings(llm: LLM) -> list[Any]:
    """Takes down what the encoder is given from now on."""
    seen: list[Any] = []
    decoder, encode = decoder_of(llm), decoder_of(llm).encode
    decoder.encode = lambda seq, source: (seen.append(source), encode(seq, source))[1]  # type: ignore
    return seen


def test_requests_with_the_same_input_encode_it_once(tmp_path: Path) -> None:
    """While one of them runs. A tenant's salt keeps them apart."""
    want = expected("bart")
    with load("bart", tmp_path) as llm, recorded(llm) as logits:
        (alone,) = llm.generate(prompt(want), GREEDY)
        seen = encodings(llm)
        outputs = llm.generate([prompt(want), prompt(want, "_16"), prompt(want), source(want)], GREEDY)
        assert len(seen) == 2
        for output in (outputs[0], *outputs[2:]):
            assert_same_bits(logits(output), logits(alone), output.request_id)
        seen.clear()
        llm.generate([{**prompt(want), "cache_salt": salt} for salt in "aab"], GREEDY)
        assert len(seen) == 2
        seen.clear()
        llm.generate([prompt(want)] * 2, SamplingParams(max_tokens=3, ignore_eos=True), use_cache=False)
        assert len(seen) == 6  # each of three tokens is computed from nothing
        assert_nothing_held(llm)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["t5", "marian"])
def test_any_mixture_of_requests(name: str, seed: int, tmp_path: Path) -> None:
    """Inputs of any length, some of them equal, in little space: each request has the bits that it has alone."""
    random_ = np.random.default_rng(seed)
    inputs = [random_.integers(3, 300, int(random_.integers(1, 60))).tolist() for _ in range(4)]
    prompts = [
        {
            "encoder_token_ids": inputs[int(random_.integers(4))],
            "decoder_token_ids": random_.integers(3, 300, int(random_.integers(1, 30))).tolist()[: 3 + 9 * i],
        }
        for i in range(10)
    ]
    params = [SamplingParams(temperature=0, max_tokens=int(random_.integers(1, 40)), ignore_eos=True) for _ in prompts]
    with load(name, tmp_path) as llm, recorded(llm) as logits:
        alone = [logits(llm.generate(p, q, use_cache=False)[0]) for p, q in zip(prompts, params, strict=True)]
    options: dict[str, Any] = {"num_kv_blocks": 8 + 2 * seed, "max_num_batched_tokens": 7 + 20 * seed}
    with load(name, tmp_path, **options) as llm, recorded(llm) as logits:
        for _ in range(2):
            for output, rows in zip(llm.generate(prompts, params), alone, strict=True):
                assert_same_bits(logits(output), rows, (output.request_id, output.num_cached_tokens))
        assert seed or llm.stats()["num_preemptions"] > 0
        assert seed < 3 or llm.stats()["num_cached_tokens"] > 0
        assert_nothing_held(llm)


def test_an_encoder_that_fails_ends_its_request_alone(tmp_path: Path) -> None:
    want = expected("t5")
    with load("t5", tmp_path) as llm:
        decoder, encode = decoder_of(llm), decoder_of(llm).encode

        def failing(seq: Any, given: Any) -> None:
            if len(given.token_ids) == 16:
                raise RuntimeError("broken")
            encode(seq, given)

        decoder.encode = failing  # type: ignore[method-assign]
        stream = llm.stream(prompt(want), GREEDY)
        next(stream)
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate(prompt(want, "_16"), GREEDY)
        rest = [token for item in stream for token in item.token_ids]
        assert rest == want["greedy_ids"].tolist()[-len(rest) :]
        assert_nothing_held(llm)


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace function for itself")
def test_ctrl_c_at_any_byte_code_of_encoding(tmp_path: Path) -> None:
    """On the way into the cache, with beams that come back after a preemption."""
    want = expected("t5")
    params = BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
    with load("t5", tmp_path, num_kv_blocks=5, num_threads=1, enable_prefix_caching=False) as llm:

        def work() -> list[list[int]]:
            outputs = llm.beam_search([prompt(want), prompt(want, "_16"), prompt(want)], params, progress=False)
            return [output.sequences[0].tokens for output in outputs]

        def run(count: int) -> int:
            trace, seen = interrupt_at(count)
            sys.settrace(trace)
            try:
                work()
            finally:
                sys.settrace(None)
            return seen[0]

        answers, total = work(), run(sys.maxsize)
        assert llm.stats()["num_preemptions"] > 0
        for point in sorted(random.Random(0).sample(range(total), 60)):
            with contextlib.suppress(KeyboardInterrupt):
                run(point)
            assert not llm._engine.has_unfinished  # type: ignore[union-attr]
            assert_nothing_held(llm)
        assert work() == answers


@pytest.mark.parametrize("name", FOLDERS)
def test_attention_maps(name: str, tmp_path: Path) -> None:
    want, spec = expected(name), spec_from_config(load_config(REFERENCE / name))
    ids = want["decoder_input_ids"].tolist()
    with load(name, tmp_path) as llm, load(name, tmp_path, max_num_batched_tokens=4) as chunks:
        weights = llm.attention_map(ids, source(want))
        assert weights.shape == (spec.num_layers, spec.num_heads, len(ids), len(want["encoder_last_hidden_state"]))
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
        assert_same_bits(chunks.attention_map(ids, source(want)), weights, name)
        assert_nothing_held(llm)


# -- bad inputs ------------------------------------------------------------------------------------------------------

ID, FEATURES = {"encoder_token_ids": [5]}, {"input_features": np.zeros((80, 60), np.float32)}


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("whisper", "a text", r"expected a dict with 'input_features'.*got a text"),
        ("whisper", {"prompt": "a text"}, r"expected a dict with 'input_features'.*got a text"),
        ("whisper", ID, r"expected 'input_features' \(float32 \[80, frames\]\).*got 'encoder_token_ids'"),
        ("whisper", {"decoder_token_ids": [3]}, "expected 'input_features'.*got none"),
        ("whisper", {"input_features": np.zeros((128, 60), np.float32)}, r"\[80, frames\], got shape \[128, 60\]"),
        ("whisper", {"input_features": np.zeros((80, 62), np.float32)}, "at most 60 frames, got 62"),
        ("whisper", {"input_features": np.zeros((80, 0), np.float32)}, r"got shape \[80, 0\]"),
        ("whisper", {"input_features": np.full((80, 60), np.nan, np.float32)}, "finite numbers, got infinities or NaN"),
        ("whisper", {"input_features": np.full((80, 60), 1e300)}, "finite numbers, got infinities or NaN"),
        ("whisper", {**FEATURES, "decoder_token_ids": []}, "at least one token"),
        ("whisper", {**FEATURES, "decoder_token_ids": [320]}, "from 0 to 319"),
        ("whisper", {**FEATURES, "decoder_token_ids": [3] * 65}, "at most 64 tokens"),
        ("t5", [1, 2, 3], r"expected a dict with 'encoder_token_ids'.*has an encoder, got list"),
        ("t5", FEATURES, "expected 'encoder_token_ids'.*got 'input_features'"),
        ("t5", {**ID, **FEATURES}, "got the keys"),
        ("t5", {"encoder_ids": [1]}, "got the keys"),
        ("t5", {"encoder_token_ids": []}, "at least one token, got none"),
        ("t5", {"encoder_token_ids": [320]}, "from 0 to 319.*got 320"),
        ("t5", {"encoder_token_ids": [-1]}, "from 0 to 319.*got -1"),
        ("t5", "a text", "came without a tokenizer"),
        ("bart", {"encoder_token_ids": [1] * 97}, "at most 96 tokens, got 97"),
    ],
)  # fmt: skip
def test_prompts_that_are_refused(name: str, bad: Any, message: str, tmp_path: Path) -> None:
    with load(name, tmp_path) as llm:
        with pytest.raises(ValueError, match=message):
            llm.generate(bad)
        assert_nothing_held(llm)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("whisper", {"input_features": np.zeros((80, 60), np.int64)}),
        ("whisper", {"input_features": "sound"}),
        ("whisper", {"input_features": [[0.0], [0.0, 1.0]]}),
        ("t5", {"encoder_token_ids": "text"}),
        ("t5", {"encoder_token_ids": [0.5]}),
        ("t5", {"encoder_token_ids": [[1, 2]]}),
        ("t5", {"encoder_token_ids": 5}),
        ("t5", {"encoder_token_ids": [[1], [2, 3]]}),
        ("t5", {**ID, "decoder_token_ids": "text"}),
    ],
)
def test_prompts_of_wrong_types(name: str, bad: Any, tmp_path: Path) -> None:
    with load(name, tmp_path) as llm, pytest.raises(TypeError, match="expected"):
        llm.generate(bad)


def test_inputs_that_never_fit(tmp_path: Path) -> None:
    from kvcore import OutOfBlocks

    with load("t5", tmp_path, num_kv_blocks=2) as llm:
        assert llm.cache.groups[-1].num_blocks == 32  # one of the full length fits always
        with pytest.raises(OutOfBlocks, match="encoder input of 513 tokens can never fit: 33 blocks of 16 needed, 32"):
            llm.generate({"encoder_token_ids": [5] * 513})
        llm.generate({"encoder_token_ids": [5] * 512}, SamplingParams(max_tokens=2, temperature=0))
        assert_nothing_held(llm)


def test_logits_and_maps_need_what_the_model_has(tmp_path: Path) -> None:
    with load("t5", tmp_path) as llm:
        with pytest.raises(ValueError, match="encoder: expected a dict"):
            llm.logits([0])
        with pytest.raises(ValueError, match="for the encoder alone"):
            llm.logits([0], encoder={**ID, "decoder_token_ids": [0]})
        with pytest.raises(ValueError, match="expected an input for the encoder, got none"):
            llm._engine.add_request("1", [0], SamplingParams())  # type: ignore[union-attr]
    with load("llama_gqa", tmp_path) as llm:
        with pytest.raises(ValueError, match="has no encoder"):
            llm.logits([0], encoder=ID)
        with pytest.raises(ValueError, match="attention_map"):
            llm.attention_map([0], None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="got the keys"):
            llm.generate(ID)
