"""Faults that users of other systems reported, as small cases through ``LLM`` with real models.

The chain models (see ``models.py``) say what a table tells them to, so that each end and each text can be had.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import LLM, CheckpointError, OutOfBlocks, SamplingParams, UnsupportedSimd
from kvcore._kvcore import available_simd, simd
from kvcore.loading import RandomWeights
from kvcore.models.families import spec_from_config
from models import (
    END,
    EXACT,
    PAIR,
    REFERENCE,
    TINY,
    add_tokenizer,
    assert_nothing_held,
    chain_folder,
    copy_reference,
    expected,
    meta,
    recorded,
    table_folder,
)
from oracle import Oracle

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
GQA = REFERENCE / "llama_gqa"


def chain(*texts: bytes | list[int]) -> dict[int, int]:
    """Successors that say each text once its first token is there. No token may have two."""
    successors: dict[int, int] = {}
    for text in texts:
        for token, following in itertools.pairwise(text):
            assert successors.setdefault(token, following) == following
    return successors


def talker(folder: Path, *texts: bytes | list[int], **options: Any) -> LLM:
    """A chain model with a tokenizer; it ends texts with END."""
    add_tokenizer(chain_folder(folder, chain(*texts), eos_token_id=END))
    return LLM(folder, **{"num_kv_blocks": 32, **options})


# -- 2: a full hit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_trap_2_full_hit(length: int) -> None:
    prompt = expected("llama_gqa")["input_ids"][:length]
    with LLM(GQA, num_kv_blocks=16, **EXACT) as llm, recorded(llm) as rows:
        cold, hit = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert cold.num_cached_tokens == 0
        assert hit.num_cached_tokens == length - 1  # to the token
        assert rows(cold).tobytes() == rows(hit).tobytes()


# -- 4: two equal prompts in one step --------------------------------------------------------------------------------


def test_trap_4_equal_prompts_in_one_step() -> None:
    prompt = expected("llama_gqa")["input_ids"][:32]
    with LLM(GQA, num_kv_blocks=16, **EXACT) as llm, recorded(llm) as rows:
        (solo,) = llm.generate(prompt, GREEDY, use_cache=False)
        both = llm.generate([prompt, prompt], GREEDY)
        # they came together, and the second waited for what it shares with the first
        assert [output.num_cached_tokens for output in both] == [0, 31]
        assert {rows(output).tobytes() for output in [solo, *both]} == {rows(solo).tobytes()}
        assert_nothing_held(llm)
        # 4 (b): an evicted block is no longer found
        other = np.arange(250) % 320
        llm.generate(other, GREEDY)
        assert llm.stats()["cache"]["evictions"] > 0
        (again,) = llm.generate(prompt, GREEDY)
        assert rows(again).tobytes() == rows(solo).tobytes()


# -- 6: decoding over the boundary -----------------------------------------------------------------------------------


def test_trap_6_blocks_while_decoding() -> None:
    with LLM.from_config(TINY, num_kv_blocks=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)
        used = []
        for _ in llm.stream(range(16), params):
            used.append(llm.stats()["cache"]["used"])
        # the prompt, then 18 decode steps; the last token ends the request
        assert used == [1] + [2] * 16 + [3] + [0]


# -- 7: leaks --------------------------------------------------------------------------------------------------------

ENDS: list[Callable[[LLM, int], None]] = []


def ends(case: Callable[[LLM, int], None]) -> Callable[[LLM, int], None]:
    ENDS.append(case)
    return case


def _letters(i: int, n: int = 40) -> str:
    """A prompt of its own for each loop, but for the common front of two blocks, that the model goes on from with c."""
    return "y" * 32 + f"{i:04d}" * (n // 4) + "b"


@ends
def _by_eos(llm: LLM, i: int) -> None:
    (output,) = llm.generate(_letters(i), SamplingParams(temperature=0, max_tokens=50))
    assert (output.text, output.finish_reason, output.token_ids[-1]) == ("cdefghij", "stop", END)


@ends
def _by_length(llm: LLM, i: int) -> None:
    outputs = llm.generate([_letters(i), _letters(i + 1)], SamplingParams(temperature=0, max_tokens=3))
    assert [(o.text, o.finish_reason) for o in outputs] == [("cde", "length")] * 2


@ends
def _by_stop_string(llm: LLM, i: int) -> None:
    (output,) = llm.generate(_letters(i), SamplingParams(temperature=0, max_tokens=50, stop=["fg"]))
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("cde", "stop", "fg")


@ends
def _by_a_raising_callback(llm: LLM, i: int) -> None:
    def callback(text: str) -> None:
        if text == "e":
            raise ZeroDivisionError(text)

    def consume() -> None:
        for item in llm.stream(_letters(i), SamplingParams(temperature=0, max_tokens=50)):
            callback(item.text)

    with pytest.raises(ZeroDivisionError):
        consume()


@ends
def _by_leaving_the_loop(llm: LLM, i: int) -> None:
    for item in llm.stream(_letters(i), SamplingParams(temperature=0, max_tokens=50)):
        if item.text == "d":
            break


@ends
def _by_an_error_between_steps(llm: LLM, i: int) -> None:
    """Abort three requests, of which one waits (max_num_seqs is 2) and the others read prompts or decode by now."""
    steps, step = itertools.count(), llm._engine.step

    def stepping() -> Any:
        if next(steps) == i % 13:
            raise ZeroDivisionError
        return step()

    llm._engine.step = stepping
    try:
        with pytest.raises(ZeroDivisionError):
            llm.generate([_letters(i, n) for n in (40, 300, 40)], SamplingParams(temperature=0, max_tokens=50))
    finally:
        del llm._engine.step


@ends
def _by_an_error_of_the_model(llm: LLM, i: int) -> None:
    decoder, forward = llm._decoder, llm._decoder.forward
    calls = itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) == i % 4:
            raise ZeroDivisionError
        return forward(*args)

    decoder.forward = failing
    try:
        with pytest.raises(ZeroDivisionError):
            llm.generate([_letters(i), _letters(i + 1)], SamplingParams(temperature=0, max_tokens=50))
    finally:
        del decoder.forward


@ends
def _by_a_failed_allocation(llm: LLM, i: int) -> None:
    """Somebody else holds nearly all blocks, and the request has got its cached front already."""
    llm.generate("y" * 33, SamplingParams(temperature=0, max_tokens=1))
    cache = llm.cache
    others = cache.add([1] * (cache.num_free_blocks - 4) * cache.block_size, use_prefix=False)
    try:
        cache.plan([(others, cache.num_tokens(others))])
        before = cache.stats()
        with pytest.raises(OutOfBlocks, match="needed"):
            llm.generate("y" * 32 + "z" * 80, SamplingParams(temperature=0, max_tokens=5))
        after = cache.stats()
        assert {k: after[k] for k in ("used", "num_sequences", "tokens")} == {
            k: before[k] for k in ("used", "num_sequences", "tokens")
        }
        cache.check()
    finally:
        cache.free(others)


@ends
def _by_asking_for_logits(llm: LLM, i: int) -> None:
    assert llm.logits([i % 256] * 20).shape == (20, 258)


@ends
def _by_recomputing(llm: LLM, i: int) -> None:
    (output,) = llm.generate(_letters(i), SamplingParams(temperature=0, max_tokens=50), use_cache=False)
    assert output.text == "cdefghij"


def test_trap_7_no_end_leaks(tmp_path: Path) -> None:
    said = [*b"bcdefghij", END]
    with talker(tmp_path, said, max_num_batched_tokens=64, max_num_seqs=2, num_kv_blocks=48) as llm:
        for i in range(1000):
            ENDS[i % len(ENDS)](llm, i)
            assert_nothing_held(llm)
        stats = llm.stats()
        assert stats["cache"]["evictions"] > 100
        assert stats["num_cached_tokens"] > 1000
        reasons = stats["num_finished"]
        assert all(reasons[reason] > 50 for reason in ("stop", "length", "abort", "error")), reasons


# -- 10: what never fits ---------------------------------------------------------------------------------------------


def test_trap_10_never_fits() -> None:
    with LLM.from_config(TINY, num_kv_blocks=49, block_size=16) as llm:
        long, short = [1] * 1002, [1, 2, 3]
        for call in (
            lambda: llm.generate(long, GREEDY),
            lambda: llm.generate([long, short], GREEDY),
            lambda: llm.generate([short, long], GREEDY),
            lambda: llm.stream(long, GREEDY),
            lambda: llm.logits(long),
        ):
            with pytest.raises(OutOfBlocks, match=r"63 blocks of 16 needed, 49 available|need 63 blocks .* 49 are"):
                call()
            assert_nothing_held(llm)
            (output,) = llm.generate(short, GREEDY)
            assert len(output.token_ids) == 6


def test_trap_10_ends_with_length_at_capacity() -> None:
    """63 blocks hold 1,008 tokens. The prompt's 1,000 and eight more fit, and the last one needs no place."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM.from_config(TINY, num_kv_blocks=63) as llm:
        prompt = np.random.default_rng(1).integers(0, 96, 1000)
        for use_cache in (True, False):
            (output,) = llm.generate(prompt, params, use_cache=use_cache)
            assert (len(output.token_ids), output.finish_reason) == (9, "length")
        with LLM.from_config(TINY, num_kv_blocks=64) as larger:
            assert larger.generate(prompt, params)[0].token_ids[:9] == output.token_ids
            assert len(larger.generate(prompt, params)[0].token_ids) == 24
        # two of them take turns
        outputs = llm.generate([prompt, prompt[::-1], prompt], params)
        assert [len(o.token_ids) for o in outputs] == [9] * 3
        assert outputs[0].token_ids == outputs[2].token_ids == output.token_ids
        assert_nothing_held(llm)


def test_requests_wait_while_blocks_are_short() -> None:
    """Forty requests in a pool for two: each as if it were alone, and nothing is stuck."""
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 96, int(random.integers(1, 60))).tolist() for _ in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in random.integers(1, 40, 40)]
    with LLM.from_config(TINY, num_kv_blocks=14) as tight, LLM.from_config(TINY, num_kv_blocks=600) as ample:
        got, want = tight.generate(prompts, params), ample.generate(prompts, params)
        assert [o.token_ids for o in got] == [o.token_ids for o in want]
        assert [len(o.token_ids) for o in got] == [p.max_tokens for p in params]
        assert tight.stats()["num_steps"] > ample.stats()["num_steps"]
        assert_nothing_held(tight)


# -- 11: empty prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", ["", [], [[]], [""], ["a", ""], [[1], []], np.array([], np.int64), {"prompt": ""}])
def test_trap_11_empty_prompts(prompts: Any, tmp_path: Path) -> None:
    with talker(tmp_path, b"abc") as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=r"prompts?(\[\d\])?: expected at least one|not empty|one prompt"):
                call(prompts, GREEDY)
        with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
            llm.logits([])
        with pytest.raises(ValueError, match=r"max_tokens: expected None or an integer of at least 1, got 0"):
            llm.generate("a", SamplingParams(max_tokens=0))
        assert llm.generate("a", SamplingParams(temperature=0, max_tokens=2))[0].text == "bc"


# -- 20: sizes -------------------------------------------------------------------------------------------------------


def compare(config: dict[str, Any], length: int = 40, **options: Any) -> None:
    """A model with random weights in float32, against the oracle with the same weights."""
    spec = spec_from_config(config)
    oracle = Oracle(spec, RandomWeights(spec, 7), np.float64)
    ids = np.random.default_rng(9).integers(0, spec.vocab_size, length)
    want = oracle.logits(ids)
    with LLM.from_config(config, seed=7, num_kv_blocks=16, **EXACT, **options) as llm:
        np.testing.assert_allclose(llm.logits(ids), want, rtol=0, atol=2e-5 * max(1.0, np.abs(want).max()))
        best = np.sort(want[-1])
        if best[-1] - best[-2] > 1e-3:
            assert llm.generate(ids, SamplingParams(temperature=0, max_tokens=1))[0].token_ids == [want[-1].argmax()]
        assert_nothing_held(llm)


SMALL = TINY | {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(("head_dim", "rows"), [(8, 32), (None, 24), (6, 24), (2, 8), (10, 40)])
def test_trap_20_head_dim(head_dim: int | None, rows: int) -> None:
    config = SMALL | {"head_dim": head_dim}
    assert spec_from_config(config).tensor("q_proj.weight", 0).shape == (rows, 24)
    with LLM.from_config(config, num_kv_blocks=4) as llm:
        assert llm.cache.head_dim == rows // 4
    compare(config)
    if head_dim is None:
        compare(SMALL)


def test_trap_20_partial_rotation() -> None:
    """Half of 8 dimensions turn: 4 to 7 keep their values at every position, in every layer."""
    config = SMALL | {"head_dim": 8, "partial_rotary_factor": 0.5, "num_hidden_layers": 3}
    compare(config)
    with LLM.from_config(config, num_kv_blocks=4, **EXACT) as llm:
        cache = llm.cache
        # One token again and again: each layer's input is the same at every position, as all values are equal.
        handle = cache.add([5] * 40, use_prefix=False)
        batch = cache.plan([(handle, 40)])
        ids = np.arange(40, dtype=np.int64)
        llm._decoder.forward(batch, np.full(40, 5, np.int64), ids, np.full(40, 40, np.int64), ids[-1:])
        cache.commit(batch)
        theta = 10000.0
        for layer in range(3):
            k, v = cache.read(layer, handle)
            np.testing.assert_allclose(v, np.broadcast_to(v[:1], v.shape), rtol=0, atol=1e-4)
            np.testing.assert_allclose(k[..., 4:], np.broadcast_to(k[:1, :, 4:], (40, 2, 4)), rtol=0, atol=1e-4)
            for pair in range(2):
                # the frequencies are over 4, and halves of the turning part are paired: 0 with 2, 1 with 3
                angles = np.arange(40) * theta ** (-2 * pair / 4)
                x, y = k[0, :, pair], k[0, :, pair + 2]
                turned = np.outer(np.cos(angles), x) - np.outer(np.sin(angles), y)
                np.testing.assert_allclose(k[:, :, pair], turned, rtol=0, atol=1e-4)
        cache.free(handle)
        assert_nothing_held(llm)


@settings(max_examples=40, deadline=None)
@given(
    # With one value a norm is a sign: it amplifies rounding without bound where the residual stream passes zero.
    hidden=st.integers(2, 70),
    inner=st.integers(1, 70),
    vocab=st.integers(2, 100),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (5, 1), (7, 7)]),
    head_dim=st.integers(1, 40).map(lambda n: 2 * n),
    layers=st.integers(1, 3),
    length=st.integers(1, 40),
    chunk=st.sampled_from([1, 5, 16, 64]),
    tied=st.booleans(),
)
def test_trap_20_any_size(
    hidden: int,
    inner: int,
    vocab: int,
    heads: tuple[int, int],
    head_dim: int,
    layers: int,
    length: int,
    chunk: int,
    tied: bool,
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }
    compare(config, length, max_num_batched_tokens=chunk)


# -- 21: what is in the file -----------------------------------------------------------------------------------------


def edit(folder: Path, config: dict[str, Any] | None = None, drop: str = "", **add: np.ndarray) -> Path:
    """Change a folder's configuration and tensors."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in add.items()}
    tensors.pop(drop, None)
    save_file(tensors, path)
    values = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_trap_21_tied_with_and_without_lm_head(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    name = "llama_tied_bias_headdim"
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    embedding = load_file(REFERENCE / name / "model.safetensors")["model.embed_tokens.weight"]
    stored = edit(copy_reference(name, tmp_path / "stored"), lm_head__weight=embedding)
    for folder in (REFERENCE / name, stored):
        with LLM(folder, num_kv_blocks=8, **EXACT) as llm:
            np.testing.assert_allclose(llm.logits(want["input_ids"]), want["logits"], rtol=0, atol=atol)


def test_trap_21_untied_without_lm_head(tmp_path: Path) -> None:
    folder = edit(copy_reference("llama_gqa", tmp_path / "model"), drop="lm_head.weight")
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'lm_head\.weight'.*got no such tensor"):
        LLM(folder)
    edit(folder, {"tie_word_embeddings": True})
    LLM(folder, num_kv_blocks=8).close()


@pytest.mark.parametrize("declared", [True, False])
def test_trap_21_a_bias_that_is_there_is_used(declared: bool, tmp_path: Path) -> None:
    name = "llama_tied_bias_headdim"
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    flags = {"attention_bias": declared, "mlp_bias": declared}
    folder = edit(copy_reference(name, tmp_path / "model"), flags)
    with LLM(folder, num_kv_blocks=8, **EXACT) as llm:
        np.testing.assert_allclose(llm.logits(want["input_ids"]), want["logits"], rtol=0, atol=atol)
    folder = edit(copy_reference("llama_gqa", tmp_path / "other"), {"attention_bias": True})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        LLM(folder)


def test_trap_21_unused_tensors_are_reported(tmp_path: Path) -> None:
    extra = {"model__layers__7__mlp__down_proj__weight": np.zeros(4, np.float32), "score": np.ones(3, np.float32)}
    folder = edit(copy_reference("llama_gqa", tmp_path / "model"), **extra)
    with pytest.warns(UserWarning, match=r"2 tensors are not used: model\.layers\.7\.mlp\.down_proj\.weight, score"):
        llm = LLM(folder, num_kv_blocks=8)
    with llm:
        assert len(llm.generate([1, 2], GREEDY)[0].token_ids) == 6


# -- 22: damaged files -----------------------------------------------------------------------------------------------

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 288672\n"


def _shard(folder: Path) -> None:
    weights = {
        "lm_head.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _long_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])


def _overlap(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    (a, b) = (name for name in header if name.endswith("k_proj.weight") and (".0." in name or ".1." in name))
    header[a]["data_offsets"] = header[b]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (_shard, r"model-00002-of-00002\.safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model"),
    "cut by a byte": (_cut, r"model\.safetensors"),
    "a header of 2^63 bytes": (_long_header, r"model\.safetensors"),
    "overlapping offsets": (_overlap, r"model\.safetensors"),
    "an LFS pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(LFS) and None,
        r"model\.safetensors.*LFS",
    ),
    "an LFS pointer as config": (
        lambda folder: (folder / "config.json").write_bytes(LFS) and None,
        r"config\.json.*LFS",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    "an empty config": (lambda folder: (folder / "config.json").write_text("") and None, r"config\.json"),
    "a broken index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]") and None,
        r"index\.json|model\.safetensors",
    ),
    "an unknown architecture": (
        lambda folder: edit(folder, {"model_type": "transmogrifier"}) and None,
        r"config\.json.*transmogrifier|transmogrifier.*llama",
    ),
    "a missing tensor": (lambda folder: edit(folder, drop="model.norm.weight") and None, r"model\.norm\.weight"),
    "another shape": (
        lambda folder: edit(folder, model__norm__weight=np.ones(63, np.float32)) and None,
        r"model\.norm\.weight.*expected shape \[64\], got \[63\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_trap_22_damaged_folders(damage: str, tmp_path: Path) -> None:
    apply, message = DAMAGES[damage]
    folder = copy_reference("llama_gqa", tmp_path / "folder")
    apply(folder)
    if damage == "a broken index":
        (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message) as caught:
        LLM(folder)
    assert str(tmp_path) in str(caught.value)


def test_trap_22_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path)


# -- 23: ends of text ------------------------------------------------------------------------------------------------


def test_trap_23_several_ends(tmp_path: Path) -> None:
    """eos_token_id 5 in config.json, [5, 7] in generation_config.json; the model says 1, 7, 2, 5, 3."""
    chain_folder(tmp_path, chain([9, 1, 7, 2, 5, 3]), vocab_size=16, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))

    def end(**params: Any) -> tuple[list[int], str | None, Any]:
        (output,) = llm.generate([9], SamplingParams(temperature=0, max_tokens=5, **params))
        return output.token_ids, output.finish_reason, output.outputs[0].stop_reason

    with LLM(tmp_path, num_kv_blocks=4) as llm:
        assert end() == ([1, 7], "stop", None)
        assert end(ignore_eos=True) == ([1, 7, 2, 5, 3], "length", None)
        assert end(ignore_eos=True, stop_token_ids=[2]) == ([1, 7, 2], "stop", 2)
        assert end(ignore_eos=True, stop_token_ids=[5, 3]) == ([1, 7, 2, 5], "stop", 5)
        assert end(stop_token_ids=[1]) == ([1], "stop", 1)
        assert llm.generate([7], SamplingParams(temperature=0, max_tokens=5))[0].token_ids == [2, 5]
        assert_nothing_held(llm)
    (tmp_path / "generation_config.json").unlink()
    with LLM(tmp_path, num_kv_blocks=4) as llm:
        assert end() == ([1, 7, 2, 5], "stop", None)


# -- 24: streamed UTF-8 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([PAIR, 0xA4, 0xA3], "🤣"),
        ([0xED, 0x95, 0x9C], "한"),
        ([0x85], "\ufffd"),
        ([0x41, 0x85, 0x42], "A\ufffdB"),
        ([PAIR, 0xA4], "\ufffd"),
        ([PAIR, 0x43], "\ufffdC"),
        ([0xED, 0x95], "\ufffd"),
        (list("naïve – 한🤔".encode()), "naïve – 한🤔"),
    ],
)
def test_trap_24_streamed_characters(tokens: list[int], text: str, tmp_path: Path) -> None:
    with talker(tmp_path, b"ab") as llm:
        params = SamplingParams(temperature=0, max_tokens=50)
        said = iter([])
        decoder, forward = llm._decoder, llm._decoder.forward

        def scripted(*args: Any) -> Any:
            logits = forward(*args)
            logits[:] = 0
            logits[0, next(said)] = 9
            return logits

        decoder.forward = scripted
        try:
            for prompt in ("é한", [0xF0, 0x9F]):  # what comes from the prompt is not in the pieces, nor half of it
                said = iter([*tokens, END])
                (whole,) = llm.generate(prompt, params)
                assert whole.text == text
                said = iter([*tokens, END])
                items = list(llm.stream(prompt, params))
                assert "".join(item.text for item in items) == text
                if "\ufffd" not in text:
                    assert all("\ufffd" not in item.text for item in items)
        finally:
            del decoder.forward


# -- 25, 26: sampling ------------------------------------------------------------------------------------------------


def sampled(llm: LLM, *params: dict[str, Any]) -> list[list[int]]:
    """One request per set of parameters, in one batch, each on the row of token 0."""
    each = [SamplingParams(**{"ignore_eos": True, "max_tokens": 1, **p}) for p in params]
    return [output.token_ids for output in llm.generate([[0]] * len(params), each)]


def test_trap_25_sampling(tmp_path: Path) -> None:
    table = np.zeros((3, 3))
    table[:] = [2.875, 2.9551, 11.0625]
    with LLM(table_folder(tmp_path / "three", table), num_kv_blocks=32) as llm:
        assert sampled(llm, {"temperature": 1e-5}, {"temperature": 0}) == [[2], [2]]
        assert sampled(llm, {"temperature": 1e-300}, {"temperature": 5e-324}) == [[2], [2]]

    table[:] = [1.0, 1.5, 1.25]
    with LLM(table_folder(tmp_path / "flat", table), num_kv_blocks=600) as llm:
        seeds = range(60)
        plain = sampled(llm, *({"seed": s} for s in seeds))
        assert {token for (token,) in plain} == {0, 1, 2}
        for top_k in (3, 4, 2**31, 0, -1):
            assert sampled(llm, *({"seed": s, "top_k": top_k} for s in seeds)) == plain
        assert sampled(llm, *({"seed": s, "top_k": 1} for s in seeds)) == [[1]] * 60
        assert sampled(llm, *({"seed": s, "min_p": 1} for s in seeds)) == [[1]] * 60
        assert {token for (token,) in sampled(llm, *({"seed": s, "top_k": 2} for s in seeds))} == {1, 2}
        assert {token for (token,) in sampled(llm, *({"seed": s, "top_p": 0.5} for s in seeds))} == {1, 2}
        # frequencies are those of the distribution
        weights = np.exp([1.0, 1.5, 1.25])
        many = np.array(sampled(llm, *({"seed": s} for s in range(3000))))[:, 0]
        np.testing.assert_allclose(np.bincount(many) / 3000, weights / weights.sum(), rtol=0, atol=0.03)
        # whoever is beside it changes nothing
        mixed = [{"seed": s} for s in seeds]
        mixed[1::2] = [{"temperature": 0}, {"top_k": 1, "temperature": 5}, {"top_p": 0.01}] * 10
        assert sampled(llm, *mixed)[::2] == plain[::2]
        assert sampled(llm, *mixed)[1::2] == [[1]] * 30


@pytest.mark.parametrize("params", [{"stop_token_ids": [3]}, {"stop_token_ids": [0, 2**40]}, {"logprobs": 4}])
def test_trap_25_ids_outside_of_the_vocabulary(params: dict[str, Any], tmp_path: Path) -> None:
    with LLM(table_folder(tmp_path, np.eye(3)), num_kv_blocks=4) as llm:
        for call in (llm.generate, llm.stream):
            with pytest.raises(ValueError, match=f"{next(iter(params))}: expected .*(vocabulary|3)"):
                call([0], SamplingParams(**params))
        with pytest.raises(ValueError, match=r"token ids from 0 to 2 .*got 3"):
            llm.generate([0, 3], GREEDY)
        assert len(llm.generate([0], GREEDY)[0].token_ids) == 6


def test_trap_26_a_seed_gives_the_same_tokens_beside_anything() -> None:
    flat = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=42)
    others = [
        SamplingParams(temperature=1.5, max_tokens=n, ignore_eos=True, seed=s) for n, s in ((20, None), (5, 7), (9, 42))
    ]
    prompt = [1, 2, 3, 4, 5]
    with LLM.from_config(TINY, num_kv_blocks=64) as llm:
        (alone,) = llm.generate(prompt, flat)
        for order in itertools.permutations([flat, *others]):
            outputs = llm.generate([prompt] * 4, list(order))
            assert outputs[order.index(flat)].token_ids == alone.token_ids
            assert outputs[order.index(others[2])].token_ids == alone.token_ids[:9]
        assert llm.generate(prompt, flat, use_cache=False)[0].token_ids == alone.token_ids
        assert "".join(str(i.token_ids) for i in llm.stream(prompt, flat)) == "".join(f"[{t}]" for t in alone.token_ids)
        unseeded = [output.token_ids for output in llm.generate([prompt] * 8, others[0])]
        assert len({tuple(tokens) for tokens in unseeded}) == 8


def test_trap_26_the_seed_of_the_model() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)

    def tokens(seed: int | None) -> list[list[int]]:
        with LLM(GQA, seed=seed, num_kv_blocks=32) as llm:
            return [output.token_ids for output in llm.generate([[1, 2, 3]] * 4, params)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(None) != tokens(None)
    assert len({tuple(t) for t in tokens(5)}) == 4


# -- the counts of the article ---------------------------------------------------------------------------------------


def test_counts_of_processed_positions() -> None:
    """A prompt of 1,000 tokens and 100 new ones: 104,950 positions without the cache, 1,099 with it."""
    prompt = np.random.default_rng(0).integers(0, 96, 1000)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM.from_config(TINY | {"num_hidden_layers": 1}, num_kv_blocks=150) as llm:
        (cached,) = llm.generate(prompt, params)
        (bare,) = llm.generate(prompt, params, use_cache=False)
        (hit,) = llm.generate(prompt, params)
        assert cached.token_ids == bare.token_ids == hit.token_ids
        assert (cached.num_computed_tokens, cached.num_cached_tokens) == (1_099, 0)
        assert (bare.num_computed_tokens, bare.num_cached_tokens) == (104_950, 0)
        assert (hit.num_computed_tokens, hit.num_cached_tokens) == (1_099 - 999, 999)
        assert llm.stats()["num_computed_tokens"] == 1_099 + 104_950 + 100


# -- 27, 28: processes, signals, threads -----------------------------------------------------------------------------

WORKER = TINY | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Large enough that its products go to several threads."""

_PREAMBLE = f"""
import os, signal, sys, threading, time
import numpy as np
from kvcore import LLM, SamplingParams

CONFIG = {WORKER!r}

def params(n):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)

def nothing_held(llm):
    llm.cache.check()
    cache = llm.stats()["cache"]
    assert cache["used"] == cache["num_sequences"] == 0, cache
    assert cache["free"] + cache["cached"] == cache["total"], cache
"""


def script(body: str, timeout: float = 60) -> str:
    """Run this in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_trap_27_fork() -> None:
    """A parallel call, a fork, and calls in the child (with the parent's model and with its own)."""
    out = script(
        """
        llm = LLM.from_config(CONFIG, num_kv_blocks=64, num_threads=2)
        prompt = list(range(300))
        before = llm.generate([prompt, prompt[:50]], params(8))
        logits = llm.logits(prompt)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(10)
                after = llm.generate([prompt, prompt[:50]], params(8))
                assert [o.token_ids for o in after] == [o.token_ids for o in before]
                assert llm.logits(prompt).tobytes() == logits.tobytes()
                nothing_held(llm)
                with LLM.from_config(CONFIG, num_kv_blocks=64, num_threads=2) as own:
                    assert own.logits(prompt).tobytes() == logits.tobytes()
                code = 0
            finally:
                os._exit(code)
        assert llm.logits(prompt).tobytes() == logits.tobytes()
        print(os.waitpid(child, 0)[1])
        """
    )
    assert out == "0"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_trap_27_one_core() -> None:
    out = script(
        """
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        with LLM.from_config(CONFIG, num_kv_blocks=64) as llm:
            llm.generate(list(range(300)), params(3))
            print(llm.cache.threads.num_threads, len(os.listdir("/proc/self/task")))
        """
    )
    assert out == "1 1"


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize(
    "call",
    [
        "llm.generate([prompt[:20], prompt[:30]], params(4000))",
        "llm.generate(prompt, params(4000), use_cache=False)",
        "llm.generate(prompt * 8, params(5))",
        "list(llm.stream(prompt, params(4000)))",
        "[llm.logits(prompt * 8) for _ in range(40)]",
    ],
)
def test_trap_28_interrupt(call: str) -> None:
    out = script(
        f"""
        llm = LLM.from_config(CONFIG | {{"max_position_embeddings": 8192, "num_hidden_layers": 4}}, num_kv_blocks=600)
        prompt = np.random.default_rng(0).integers(0, 8192, 1000).tolist()
        want = llm.generate(prompt, params(4))[0].token_ids
        sent = []

        def interrupt():
            time.sleep(0.2)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            {call}
        except KeyboardInterrupt:
            print(time.perf_counter() - sent[0])
        else:
            raise SystemExit(f"ended {{time.perf_counter() - sent[0] + 0.2:.2f}} s after its start")
        nothing_held(llm)
        assert llm.generate(prompt, params(4))[0].token_ids == want
        nothing_held(llm)
        """
    )
    assert float(out) < 1.0


def test_trap_28_other_threads_run_on() -> None:
    """A thread that counts is never kept waiting for long while the model loads, computes logits and generates."""
    config = WORKER | {"vocab_size": 16_000, "hidden_size": 768}
    stop, pauses = threading.Event(), [0.0]

    def count() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    counter = threading.Thread(target=count)
    counter.start()
    try:
        longest = {}
        for what in ("load", "logits", "generate"):
            pauses[:] = [0.0]
            start = time.perf_counter()
            if what == "load":
                llm = LLM.from_config(config, num_kv_blocks=128, **EXACT)
            elif what == "logits":
                llm.logits(np.arange(1200))
            else:
                llm.generate([[1, 2], [3]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
            longest[what] = (time.perf_counter() - start, max(pauses), len(pauses))
        llm.close()
    finally:
        stop.set()
        counter.join()
    assert longest["logits"][0] > 0.1, longest  # else this shows nothing: most of it is one native call
    for duration, pause, count_ in longest.values():
        assert pause < max(0.5 * duration, 0.2), longest
        assert count_ > duration / 0.1, longest


# -- 29: SIMD levels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied_bias_headdim"])
def test_trap_29_levels_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, atol = expected(name), meta(name)["tolerance"]["float32"]["atol"]
    bfloat16 = {}
    for level in available_simd():
        monkeypatch.setenv("KVCORE_SIMD", level)
        assert simd() == level
        with LLM(REFERENCE / name, num_kv_blocks=16, **EXACT) as llm:
            np.testing.assert_allclose(llm.logits(want["input_ids"]), want["logits"], rtol=0, atol=atol)
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            assert llm.generate(want["input_ids"], params)[0].token_ids == want["greedy_ids"].tolist()
        with LLM(REFERENCE / name, num_kv_blocks=16) as llm:
            bfloat16[level] = llm.logits(want["input_ids"])
    for level, logits in bfloat16.items():
        difference = np.abs(logits - bfloat16["scalar"]).max()
        assert difference < meta(name)["tolerance"]["bfloat16"]["transformers_max_abs_diff"], level


def test_trap_29_what_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = "avx2" if "neon" in available_simd() else "neon"
    for level in (lacking, "sse9"):
        monkeypatch.setenv("KVCORE_SIMD", level)
        with pytest.raises(UnsupportedSimd, match="KVCORE_SIMD"):
            LLM(GQA, num_kv_blocks=4)
        with pytest.raises(UnsupportedSimd, match="KVCORE_SIMD"):
            LLM.from_config(TINY, num_kv_blocks=4)
    monkeypatch.setenv("KVCORE_SIMD", "auto")
    with LLM(GQA, num_kv_blocks=4) as llm:
        assert len(llm.generate([1], GREEDY)[0].token_ids) == 6
