"""``LLM`` on the reference models, against what transformers computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, SamplingParams
from models import EXACT, LLAMAS, REFERENCE, assert_nothing_held, copy_reference, expected, meta, recorded

CASES = [(name, config) for name in LLAMAS for config in ("config.json", "config.v4.json")]
CASES = [(name, config) for name, config in CASES if (REFERENCE / name / config).exists()]
DYNAMIC = "llama_rope_dynamic"
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def load(name: str, tmp_path: Path, config: str = "config.json", **options: Any) -> LLM:
    folder = REFERENCE / name if config == "config.json" else copy_reference(name, tmp_path / "model", config)
    return LLM(folder, **{**EXACT, "num_kv_blocks": 32, **options})


def test_all_folders_are_there() -> None:
    assert len(LLAMAS) == 6
    assert len(CASES) == 11


@pytest.mark.parametrize(("name", "config"), CASES)
def test_logits_in_float32(name: str, config: str, tmp_path: Path) -> None:
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    with load(name, tmp_path, config) as llm:
        for prompt in ("", "_16"):
            ids = want[f"input_ids{prompt}"]
            got = llm.logits(ids)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want[f"logits{prompt}"], rtol=0, atol=atol)
            assert llm.stats()["cache"]["cached"] == 0  # nothing left for others to find
        assert_nothing_held(llm)


@pytest.mark.parametrize("max_num_batched_tokens", [5, 2048])
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("name", "config"), CASES)
def test_greedy_tokens_in_float32(
    name: str, config: str, use_cache: bool, max_num_batched_tokens: int, tmp_path: Path
) -> None:
    want = expected(name)
    prompt = want["input_ids"]
    with load(name, tmp_path, config, max_num_batched_tokens=max_num_batched_tokens) as llm:
        (output,) = llm.generate(prompt, GREEDY, use_cache=use_cache)
        assert output.token_ids == want["greedy_ids"].tolist()
        assert output.finish_reason == "length"
        assert output.num_computed_tokens == (37 + 39 if use_cache else sum(range(37, 37 + 40)))
        # on a prefix hit, in company
        other = want["input_ids_16"]
        common = int((prompt[: len(other) - 1] == other[:-1]).cumprod().sum())
        outputs = llm.generate([prompt, other, prompt], GREEDY, use_cache=use_cache)
        assert [o.num_cached_tokens for o in outputs] == [36 * use_cache, common * use_cache, 36 * use_cache]
        assert outputs[0].token_ids == outputs[2].token_ids == want["greedy_ids"].tolist()
        assert_nothing_held(llm)


# -- dynamic rope, whose frequencies follow the length ---------------------------------------------------------------


@pytest.mark.parametrize("config", ["config.json", "config.v4.json"])
def test_dynamic_rope_recomputed_at_each_length(config: str, tmp_path: Path) -> None:
    """Each sequence given whole, so that every token turns by the frequencies of the whole length."""
    want = expected(DYNAMIC)
    ids = want["input_ids"].tolist()
    with load(DYNAMIC, tmp_path, config) as llm:
        for token in want["greedy_ids_recompute"].tolist():
            assert int(llm.logits(ids)[-1].argmax()) == token
            ids.append(token)
        assert_nothing_held(llm)
    assert want["greedy_ids_recompute"].tolist() != want["greedy_ids"].tolist()


def test_dynamic_rope_shares_only_equal_frequencies(tmp_path: Path) -> None:
    """Prompts of different lengths beyond the limit share no blocks: their keys turn by different frequencies."""
    ids = expected(DYNAMIC)["input_ids"].tolist()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def cached(llm: LLM, length: int) -> int:
        return llm.generate(ids[:length], params)[0].num_cached_tokens

    with load(DYNAMIC, tmp_path) as llm:
        assert cached(llm, 37) == 0
        assert cached(llm, 37) == 36
        assert cached(llm, 36) == 0
        assert cached(llm, 32) == 0  # within the limit: not scaled, and not the key of 37
        assert cached(llm, 25) == 24
        assert cached(llm, 32) == 31
        assert llm.max_model_len is None


# -- other number formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LLAMAS)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Three times the distance of transformers in bfloat16 is allowed, and tokens count at clear margins."""
    want, tolerance = expected(name), meta(name)["tolerance"]["bfloat16"]
    largest, rms = 3 * tolerance["transformers_max_abs_diff"], 3 * tolerance["transformers_rms_diff"]
    with load(name, tmp_path, dtype="auto", kv_cache_dtype="auto") as llm:
        assert llm.cache.dtype == "bfloat16"
        for prompt in ("", "_16"):
            difference = llm.logits(want[f"input_ids{prompt}"]) - want[f"logits{prompt}"]
            assert np.abs(difference).max() < largest
            assert np.sqrt(np.mean(difference**2)) < rms
            assert np.abs(difference).max() > 1e-3  # it is bfloat16 indeed
        tokens, clear = _forced(llm, want, largest)
        assert clear.sum() >= 10
        assert (tokens == want["greedy_ids"])[clear].all()


@pytest.mark.parametrize("name", LLAMAS)
def test_float16(name: str, tmp_path: Path) -> None:
    """float16 weights and cache: no more than a bfloat16 model may differ, by far."""
    want, tolerance = expected(name), meta(name)["tolerance"]["bfloat16"]
    with load(name, tmp_path, dtype="float16", kv_cache_dtype="float16") as llm:
        difference = llm.logits(want["input_ids"]) - want["logits"]
        assert np.abs(difference).max() < tolerance["transformers_max_abs_diff"] / 4


def _forced(llm: LLM, want: dict[str, np.ndarray], margin: float) -> tuple[np.ndarray, np.ndarray]:
    """What the model says at each greedy step when it is fed the recorded tokens, and where the margin is clear."""
    prompt, recorded_ids = want["input_ids"].tolist(), want["greedy_ids"].tolist()
    if llm.max_model_len is None:  # dynamic rope: the prompt's length matters, so the prompt must stay the prompt
        return np.array(_forced_by_decoding(llm, prompt, recorded_ids)), want["greedy_margin"] > margin
    logits = llm.logits(prompt + recorded_ids[:-1])[len(prompt) - 1 :]
    return logits.argmax(axis=1), want["greedy_margin"] > margin


def _forced_by_decoding(llm: LLM, prompt: list[int], tokens: list[int]) -> list[int]:
    """Teacher forcing through ``generate``: whatever was sampled is replaced before it is fed back."""
    said: list[int] = []
    decoder = llm._decoder
    forward = decoder.forward

    def forced(*args: Any) -> np.ndarray:
        logits = forward(*args)
        said.append(int(logits[0].argmax()))
        logits[0, tokens[len(said) - 1]] = 1e3
        return logits

    decoder.forward = forced
    try:
        (output,) = llm.generate(prompt, GREEDY)
    finally:
        del decoder.forward
    assert output.token_ids == tokens
    return said


@pytest.mark.parametrize("name", LLAMAS)
def test_fp8_cache(name: str, tmp_path: Path) -> None:
    """Rounding keys and values to 8 bits moves the logits, and moves them the same way cold and on a hit."""
    want = expected(name)
    prompt = want["input_ids"]
    for dtype in ("float32", "bfloat16"):
        with load(name, tmp_path, dtype=dtype, kv_cache_dtype="fp8") as llm:
            assert llm.cache.dtype == "fp8_e4m3"
            logits = llm.logits(prompt)
            assert np.isfinite(logits).all()
            difference = logits - want["logits"]
            assert 0.01 < np.sqrt(np.mean(difference**2)) < np.std(want["logits"]) / 3
            with recorded(llm) as rows:
                (cold,) = llm.generate(prompt, GREEDY)
                (hit,) = llm.generate(prompt, GREEDY)
                (bare,) = llm.generate(prompt, GREEDY, use_cache=False)
                assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 36)
                assert cold.token_ids == hit.token_ids == bare.token_ids
                assert rows(cold).tobytes() == rows(hit).tobytes() == rows(bare).tobytes()
            assert_nothing_held(llm)
