"""LoRA adapters on a decoder: what they add, for which rows, and what they are refused for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvcore import LLM
from kvcore.checkpoint.lora import LoraPair, LoraWeights
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError
from kvcore.models.lora import Adapter
from models import EXACT, REFERENCE, assert_same_bits

Floats = npt.NDArray[np.float32]
IDS = list(range(3, 40))

TARGETS: dict[str, tuple[str, ...]] = {
    "llama_gqa": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "llama_tied_bias_headdim": ("k_proj", "down_proj"),
    "gemma2": ("q_proj", "o_proj", "up_proj", "down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
    "glm4": ("v_proj", "gate_up_proj"),
    "gpt2": ("c_attn", "attn.c_proj", "mlp.c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "cohere": ("q_proj", "gate_proj"),
    "olmo2": ("q_proj", "down_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
"""Modules of families that are built differently: fused, stored [in, out], parallel, with norms behind."""


def weights_of(name: str) -> dict[str, np.ndarray]:
    weights = SafetensorsWeights.open(REFERENCE / name)
    return {tensor: weights.get(tensor).astype(np.float32) for tensor in weights.names()}


def is_target(module: str, targets: Sequence[str]) -> bool:
    return any(module.endswith(f".{target}") for target in targets) and "experts" not in module


def lora_of(name: str, targets: Sequence[str], seed: int = 0, rank: int = 3) -> LoraWeights:
    """An adapter that changes these modules in every layer."""
    random = np.random.default_rng(seed)
    modules = {}
    for tensor, weight in weights_of(name).items():
        module = tensor.removesuffix(".weight")
        if tensor.endswith(".weight") and weight.ndim == 2 and is_target(module, targets):
            out, inner = weight.shape[::-1] if name == "gpt2" else weight.shape
            a = random.standard_normal((rank, inner), np.float32) / np.float32(np.sqrt(inner))
            modules[module] = LoraPair(a, random.standard_normal((out, rank), np.float32) / 4)
    return LoraWeights(f"adapter {seed}", f"{seed:032x}", modules)


def merged(name: str, lora: LoraWeights, to: Path) -> Path:
    """A folder whose weights are those of the model plus B A, in float32."""
    tensors = weights_of(name)
    for module, pair in lora.modules.items():
        delta = pair.b @ pair.a
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + (delta.T if name == "gpt2" else delta)
    to.mkdir()
    shutil.copyfile(REFERENCE / name / "config.json", to / "config.json")
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, to / "model.safetensors")
    return to


def forward(llm: LLM, rows: Sequence[tuple[list[int], Adapter | None]], last_only: bool = False) -> list[Floats]:
    """The logits of prompts that go through together, each with its adapter; no prefix is shared."""
    decoder, cache = llm._decoder, llm.cache
    handles = [cache.add(ids, use_prefix=False) for ids, _ in rows]
    batch = cache.plan([(handle, len(ids)) for handle, (ids, _) in zip(handles, rows, strict=True)])
    starts = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    adapters = [
        (
            adapter,
            np.concatenate([np.arange(starts[i], starts[i + 1]) for i, row in enumerate(rows) if row[1] is adapter]),
        )
        for adapter in {id(adapter): adapter for _, adapter in rows if adapter is not None}.values()
    ]
    logits = decoder.forward(
        batch,
        np.concatenate([ids for ids, _ in rows]),
        np.concatenate([np.arange(len(ids)) for ids, _ in rows]),
        np.concatenate([np.full(len(ids), len(ids)) for ids, _ in rows]),
        starts[1:] - 1 if last_only else np.arange(starts[-1]),
        adapters=adapters,
    )
    cache.commit(batch)
    for handle in handles:
        cache.free(handle)
    return np.split(logits, range(1, len(rows)) if last_only else starts[1:-1])


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_is_what_merged_weights_are(name: str, tmp_path: Path) -> None:
    lora = lora_of(name, TARGETS[name])
    assert len({module.rpartition(".")[2] for module in lora.modules}) == len(
        {t.rpartition(".")[2] for t in TARGETS[name]}
    )
    with LLM(merged(name, lora, tmp_path / "merged"), num_kv_blocks=16, **EXACT) as llm:
        want = llm.logits(IDS)
    with LLM(REFERENCE / name, num_kv_blocks=16, **EXACT) as llm:
        plain = llm.logits(IDS)
        (got,) = forward(llm, [(IDS, llm._decoder.adapter(lora))])
        assert_same_bits(llm.logits(IDS), plain)
    assert np.abs(want - plain).max() > 0.3
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-3)


@pytest.fixture(
    scope="module", params=[("llama_gqa", {}), ("phi3", {"quantization": "int8"}), ("mixtral", {})], ids=str
)
def fixture_llm(request: pytest.FixtureRequest) -> Any:
    name, options = request.param
    with LLM(REFERENCE / name, num_kv_blocks=64, num_threads=2, **options) as llm:
        yield llm, [llm._decoder.adapter(lora_of(name, TARGETS[name], seed)) for seed in (1, 2)]


@given(st.data())
def test_a_rows_bits_depend_on_its_own_adapter_alone(fixture_llm: Any, data: st.DataObject) -> None:
    """Law 1, with adapters: alone and beside rows with none, the same or another one; all rows and the last alone."""
    llm, adapters = fixture_llm
    prompts = st.lists(st.integers(3, 300), min_size=1, max_size=20)
    rows = data.draw(st.lists(st.tuples(prompts, st.sampled_from([None, *adapters])), min_size=1, max_size=5))
    together = forward(llm, rows)
    last = forward(llm, rows, last_only=True)
    for row, logits, final in zip(rows, together, last, strict=True):
        (alone,) = forward(llm, [row])
        assert_same_bits(logits, alone)
        assert_same_bits(final, alone[-1:])
        if row[1] is None:
            assert_same_bits(alone, llm.logits(row[0]))


def test_more_rows_than_go_through_an_mlp_together(fixture_llm: Any) -> None:
    llm, (first, second) = fixture_llm
    random = np.random.default_rng(0)
    rows = [(random.integers(3, 300, 110).tolist(), adapter) for adapter in (first, None, second, None, first)]
    for row, logits in zip(rows, forward(llm, rows), strict=True):
        assert_same_bits(logits, forward(llm, [row])[0])


def test_what_does_not_fit_is_refused() -> None:
    with LLM(REFERENCE / "llama_gqa", num_kv_blocks=4) as llm:
        good = lora_of("llama_gqa", ["q_proj"])
        for module, pair, message in (
            ("model.layers.0.self_attn.q_prj", None, r"q_prj': expected one .*\(down_proj, gate_proj, .*v_proj of"),
            ("lm_head", None, "module 'lm_head': expected one"),
            ("model.layers.9.self_attn.q_proj", None, r"layers\.9\.self_attn\.q_proj': expected one"),
            ("model.layers.0.self_attn.q_proj", LoraPair(np.ones((3, 5), np.float32), np.ones((64, 3), np.float32)),
             r"expected lora_A \[rank, 64\] and lora_B \[64, rank\], got \[3, 5\] and \[64, 3\]"),
        ):  # fmt: skip
            pair = pair or next(iter(good.modules.values()))
            with pytest.raises(CheckpointError, match=message) as error:
                llm._decoder.adapter(LoraWeights("folder", "0" * 32, {**good.modules, module: pair}))
            assert str(error.value).startswith("folder: ")
    with LLM(REFERENCE / "mixtral", num_kv_blocks=4) as llm:
        expert = "model.layers.0.block_sparse_moe.experts.0.w1"
        pair = LoraPair(np.ones((1, 48), np.float32), np.ones((64, 1), np.float32))
        with pytest.raises(CheckpointError, match=r"experts\.0\.w1': expected one of this model's that can be adapted"):
            llm._decoder.adapter(LoraWeights("folder", "0" * 32, {expert: pair}))
