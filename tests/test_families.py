"""Every family on its reference model: transformers' numbers, and law 1 in every way that a request can go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import LLM, BeamSearchParams, SamplingParams
from kvcore.checkpoint.config import load_config
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.models.families import FAMILIES, spec_from_config
from kvcore.models.shape import cache_layers
from kvcore.models.spec import check_weights, unused_tensors
from kvcore.plan import count_parameters
from models import EXACT, REFERENCE, assert_same_bits, copy_reference, expected, meta, recorded

ALL = sorted(folder.name for folder in REFERENCE.iterdir() if (folder / "config.json").exists())
FOLDERS = [name for name in ALL if not load_config(REFERENCE / name).get("is_encoder_decoder")]
"""Decoders; tests/test_encoder_decoder.py has the others."""

ALL_CASES = [(name, config) for name in ALL for config in ("config.json", "config.v4.json")]
ALL_CASES = [(name, config) for name, config in ALL_CASES if (REFERENCE / name / config).exists()]
CASES = [(name, config) for name, config in ALL_CASES if name in FOLDERS]
OTHERS = [(name, config) for name, config in CASES if not name.startswith("llama")]
"""What tests/test_llm_reference.py does not have."""

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DYNAMIC = "llama_rope_dynamic"


def load(name: str, tmp_path: Path, config: str = "config.json", **options: Any) -> LLM:
    folder = REFERENCE / name if config == "config.json" else copy_reference(name, tmp_path / "model", config)
    return LLM(folder, **{**EXACT, "num_kv_blocks": 40, **options})


def assert_nothing_held(llm: LLM) -> None:
    """Law 2, for caches of one group and of several."""
    llm.cache.check()
    stats = llm.cache.stats()
    assert (stats["used"], stats["num_sequences"]) == (0, 0), stats
    assert stats["free"] + stats["cached"] == stats["total"], stats
    assert llm.cache.num_free_blocks == llm.cache.num_blocks


def test_every_family_has_its_folder() -> None:
    assert {load_config(REFERENCE / name)["model_type"] for name in ALL} == set(FAMILIES)


@pytest.mark.parametrize(("name", "config"), OTHERS)
def test_logits_in_float32(name: str, config: str, tmp_path: Path) -> None:
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    with load(name, tmp_path, config) as llm:
        for prompt in ("", "_16"):
            got = llm.logits(want[f"input_ids{prompt}"])
            np.testing.assert_allclose(got, want[f"logits{prompt}"], rtol=0, atol=atol)
        assert_nothing_held(llm)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_way_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """Cold and warm, whole and in chunks, alone and in company, without the cache, and on any number of threads."""
    want = expected(name)
    prompt, other = want["input_ids"].tolist(), want["input_ids_16"].tolist()
    rows: list[np.ndarray] = []
    for options in ({"num_threads": 1}, {"num_threads": 2, "max_num_batched_tokens": 5}):
        with load(name, tmp_path, **options) as llm, recorded(llm) as logits:
            (cold,) = llm.generate(prompt, GREEDY)
            company = llm.generate([prompt, other, prompt[:20], prompt], GREEDY)
            (bare,) = llm.generate(prompt, GREEDY, use_cache=False)
            assert cold.token_ids == want["greedy_ids"].tolist()
            assert [o.num_cached_tokens for o in (cold, company[0], bare)] == [0, 36, 0]
            for output in (cold, company[0], company[3], bare):
                rows.append(logits(output))
                assert_same_bits(rows[-1], rows[0], (options, output.num_cached_tokens))
            if name != DYNAMIC:  # there a prompt's length turns its keys
                whole = llm.logits(prompt + cold.token_ids[:-1])[36:]
                assert_same_bits(whole, rows[0], options)
            assert_nothing_held(llm)


@pytest.mark.parametrize("name", FOLDERS)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Weights and cache as they come: no more than three times as far from float32 as transformers is."""
    want, tolerance = expected(name), meta(name)["tolerance"]["bfloat16"]
    with load(name, tmp_path, dtype="bfloat16", kv_cache_dtype="bfloat16") as llm:
        difference = np.abs(llm.logits(want["input_ids"]) - want["logits"])
        # rounding may send a token to another expert: then judge by the share of positions
        far = (difference.max(axis=1) > 3 * tolerance["transformers_max_abs_diff"]).mean()
        assert far <= (0.1 if "experts" in meta(name)["tests"] or "routing" in meta(name)["tests"] else 0)
        assert np.sqrt(np.mean(difference**2)) < 3 * tolerance["transformers_rms_diff"] + 1e-3


@pytest.mark.parametrize(("name", "config"), ALL_CASES)
def test_specs(name: str, config: str) -> None:
    """Both styles give one spec, with the file's tensors, and the cache and size that ``kvcore plan`` tells."""
    folder = REFERENCE / name
    read = load_config(folder / config)
    spec = spec_from_config(read)
    same = spec_from_config(load_config(folder))
    assert replace(spec, ignored_tensors=()) == replace(same, ignored_tensors=())
    weights = SafetensorsWeights.open(folder)
    check_weights(spec, weights)
    names = {tensor.name for tensor in spec.all_tensors()}
    assert {n for n in weights.names() if n not in names} == set(), unused_tensors(spec, weights)
    assert spec.cache_layers() == cache_layers(read)
    stored = {t.name: t.stored_shape for t in spec.all_tensors() if t.name in weights}
    parameters = count_parameters(read)
    assert sum(int(np.prod(shape)) for shape in stored.values()) == parameters.total


@pytest.mark.parametrize("name", FOLDERS)
def test_only_what_windows_see_is_kept(name: str, tmp_path: Path) -> None:
    """Sliding layers give back the blocks that no token will see any more."""
    windows = {layer.window for layer in spec_from_config(load_config(REFERENCE / name)).cache_layers()}
    prompt = (expected(name)["input_ids"].tolist() * 3)[:97]
    with load(name, tmp_path) as llm:
        kinds = {group.kind for group in llm.cache.groups}
        assert ("sliding_window" in kinds) == (windows != {None})
        assert not {group.window for group in llm.cache.groups} - windows
        used: dict[str, int] = {}
        for output in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)):
            if not output.finished:
                used = {group["kind"]: group["used"] for group in llm.cache.stats()["groups"]}
        assert used.get("full", 7) == used.get("latent", 7) == 7
        assert used.get("sliding_window", 0) <= 3
        assert_nothing_held(llm)


@pytest.mark.parametrize("name", ["mistral_swa8", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "phi3", "deepseek_v3"])
def test_requests_that_share_beginnings_in_little_space(name: str, tmp_path: Path) -> None:
    """Hits, evictions and returned blocks of every kind of layer change no bit of any request."""
    random = np.random.default_rng(7)
    trunk = random.integers(0, 320, 60).tolist()
    prompts = [
        trunk[: int(random.integers(1, 60))] + random.integers(0, 320, int(random.integers(0, 30))).tolist()
        for _ in range(24)
    ]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with load(name, tmp_path, num_kv_blocks=14, max_num_batched_tokens=23) as llm, recorded(llm) as logits:
        wants = [logits(llm.generate(prompt, params, use_cache=False)[0]) for prompt in prompts]
        hits = 0
        for start in range(0, len(prompts), 6):
            outputs = llm.generate(prompts[start : start + 6], params)
            hits += sum(output.num_cached_tokens for output in outputs)
            for output, want in zip(outputs, wants[start : start + 6], strict=True):
                assert_same_bits(logits(output), want, output.num_cached_tokens)
        assert hits > 100
        assert llm.cache.stats()["evictions"] > 0
        assert_nothing_held(llm)


# -- longrope: the factors of all tokens follow the length that a sequence has reached ------------------------------

LONG = "phi3_longrope"


@pytest.mark.parametrize("config", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 2048])
@pytest.mark.parametrize("use_cache", [True, False])
def test_decoding_over_the_limit(config: str, use_cache: bool, max_num_batched_tokens: int, tmp_path: Path) -> None:
    """From 12 tokens over 16: all of the sequence is computed anew, once."""
    want = expected(LONG)
    prompt, tokens = want["input_ids_cross"].tolist(), want["greedy_ids_cross"].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
    with load(LONG, tmp_path, config, max_num_batched_tokens=max_num_batched_tokens) as llm, recorded(llm) as logits:
        (output,) = llm.generate(prompt, params, use_cache=use_cache)
        assert output.token_ids == tokens
        n, p = len(tokens), len(prompt)
        assert output.num_computed_tokens == (p + n - 1 + 16 if use_cache else n * p + n * (n - 1) // 2)
        alone = logits(output)
        outputs = llm.generate([prompt, [*prompt, *tokens[:9]], prompt[:7]], params, use_cache=use_cache)
        assert_same_bits(logits(outputs[0]), alone)
        assert outputs[1].token_ids[: n - 9] == tokens[9:]
        assert_same_bits(logits(outputs[1])[: n - 9], alone[9:])
        for i in (0, 3, 4, 5, n - 1):  # as if each had been given whole
            assert_same_bits(llm.logits(prompt + tokens[:i])[-1], alone[i], i)
        assert_nothing_held(llm)


def test_both_sides_of_the_limit_share_nothing(tmp_path: Path) -> None:
    ids = expected(LONG)["input_ids"].tolist()
    params = SamplingParams(temperature=0, max_tokens=1)
    with load(LONG, tmp_path) as llm:
        cached = [llm.generate(ids[:n], params)[0].num_cached_tokens for n in (16, 37, 17, 30, 16, 10)]
        assert cached == [0, 0, 16, 29, 15, 9]


def test_forks_and_searches_over_the_limit(tmp_path: Path) -> None:
    """Answers that fork, and beams, right where their keys change."""
    prompt = expected(LONG)["input_ids_cross"].tolist()
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=9, ignore_eos=True, logprobs=0)
    answers = []
    for options in ({}, {"max_num_batched_tokens": 5, "num_threads": 1}):
        with load(LONG, tmp_path, **options) as llm:
            for ids in (prompt, [*prompt, 7, 8, 9, 10]):
                (output,) = llm.generate(ids, params)
                assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
                beams = llm.beam_search(ids, BeamSearchParams(beam_width=2, max_tokens=7, ignore_eos=True))
                answers.append(
                    [answer.token_ids for answer in output.outputs] + [list(b.tokens) for b in beams[0].sequences]
                )
                for answer in output.outputs:
                    for i, token in enumerate(answer.token_ids):
                        row = llm.logits([*ids, *answer.token_ids[:i]])[-1].astype(np.float64)
                        want = row[token] - np.log(np.exp(row).sum())
                        assert answer.logprobs[i][token].logprob == pytest.approx(want, abs=1e-4)
            assert_nothing_held(llm)
    assert answers[:2] == answers[2:]
