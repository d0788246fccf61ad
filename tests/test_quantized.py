"""Safetensors with quantised weights: float8 and mxfp4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import LLM
from kvcore.checkpoint.quantization import check_quantization, expanded
from kvcore.checkpoint.quantized import QuantizedWeights
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError
from models import EXACT, REFERENCE

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
F8 = ml_dtypes.float8_e4m3fn
TYPES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}


def save(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """safetensors with float8, which the package's numpy side does not write."""
    header, data = {}, b""
    for name, array in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def opened(folder: Path, tensors: dict[str, np.ndarray], block: tuple[int, int] | None) -> QuantizedWeights:
    return opened_as(folder, tensors, {"quant_method": "fp8", "weight_block_size": block})


def opened_as(folder: Path, tensors: dict[str, np.ndarray], entry: dict[str, Any]) -> QuantizedWeights:
    save(folder, tensors)
    weights = expanded({"quantization_config": entry}, SafetensorsWeights.open(folder))
    assert isinstance(weights, QuantizedWeights)
    return weights


def codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(F8)


@given(st.data())
def test_blocks(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Every value is its code times the scale of its block, also at edges that no block fills."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    weight = codes(*shape)
    scale_shape = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    scale = np.random.default_rng(1).uniform(0.1, 2, scale_shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("fp8")
    weights = opened(folder, {"a.weight": weight, "a.weight_scale_inv": scale}, (rows, columns))
    got = weights.get("a.weight")
    assert got.dtype == weights.dtype("a.weight") == np.float32
    for index in np.ndindex(*shape):
        of_block = scale[(*index[:-2], index[-2] // rows, index[-1] // columns)]
        assert got[index] == np.float32(weight[index]) * of_block


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_scales_of_a_tensor_or_of_rows(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    scale = np.linspace(0.5, 2, int(np.prod(shape))).astype(dtype).reshape(shape)
    tensors = {"a.weight": codes(3, 5), "a.weight_scale": scale, "a.input_scale": np.ones(1, np.float32)}
    weights = opened(tmp_path, tensors | {"norm.weight": np.ones(5, ml_dtypes.bfloat16)}, None)
    by_row = scale.astype(np.float32).reshape(-1, 1)
    assert np.array_equal(weights.get("a.weight"), tensors["a.weight"].astype(np.float32) * by_row)
    assert weights.names() == ["a.weight", "norm.weight"]
    assert "a.weight_scale" not in weights
    assert "a.weight" in weights
    assert weights.blocks("a.weight") is None
    assert weights.unused() == ["norm.weight"]
    assert weights.get("norm.weight").dtype == weights.dtype("norm.weight") == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("tensors", "block", "message"),
    [
        ({"a.weight": codes(3, 5)}, None, r"'a.weight_scale_inv': expected beside 'a.weight', got no such tensor"),
        ({"a.weight": codes(3, 5), "a.weight_scale": np.ones(5, np.float32)}, None, r"shape \[\] or .*, got \[5\]"),
        ({"a.weight": codes(3, 5), "a.weight_scale_inv": np.ones((2, 1), np.float32)}, (2, 4), r"shape \[2, 2\], got"),
        ({"a.weight": codes(3), "a.weight_scale": np.ones(1, np.float32)}, None, r"expected a matrix in float8"),
        ({"a.weight": codes(3, 3), "a.weight_scale": codes(1)}, None, r"'a.weight_scale': expected F32, F16, BF16"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, np.ndarray], block: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        opened(tmp_path, tensors, block)
    assert "model.safetensors" in str(error.value)


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def test_what_is_taken(tmp_path: Path) -> None:
    """The same codes and one scale, by every method that has such."""
    tensors = {"a.weight": codes(4, 8), "a.weight_scale": np.full((1, 1), 0.5, np.float32)}
    want = tensors["a.weight"].astype(np.float32) / 2
    for entry in (
        {**DEEPSEEK, "weight_block_size": [4, 8]},
        {"quant_method": "fbgemm_fp8", "weight_block_size": [128, 128]},
        compressed(block_structure=[4, 8]),
    ):
        assert np.array_equal(opened_as(tmp_path, tensors, entry).get("a.weight"), want)
    tensors["a.weight_scale"] = np.full((4, 1), 0.5, np.float32)
    for entry in ({"quant_method": "fp8"}, {"quant_method": "fbgemm_fp8"}, compressed(strategy="channel")):
        assert np.array_equal(opened_as(tmp_path, tensors, entry).get("a.weight"), want)
    plain = SafetensorsWeights.open(tmp_path)
    assert expanded({}, plain) is expanded({"quantization_config": None}, plain) is plain


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq, which is not supported"),
        ({"bits": 4}, "quantised by an unnamed method"),
        ([4], "quantised by an unnamed method"),
        ({**DEEPSEEK, "fmt": "e5m2"}, "quantised by fp8 in the format e5m2"),
        ({**DEEPSEEK, "weight_block_size": [0, 1]}, r"weight_block_size\[0\]: expected a number"),
        ({**DEEPSEEK, "weight_block_size": [128]}, "weight_block_size: expected two sizes of at least 1"),
        (compressed(type="int", num_bits=4), "quantised by compressed-tensors as int of 4 bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors in 0 ways"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups: expected an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "a: expected an object"),
    ],
)
def test_other_methods_are_refused_by_name(entry: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_quantization({"quantization_config": entry})


def logits_of(folder: Path, name: str, tensors: dict[str, np.ndarray], **config: Any) -> np.ndarray:
    """A model with these tensors, and with these changes to its configuration."""
    folder.mkdir()
    values = json.loads((REFERENCE / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    save(folder, tensors)
    with LLM(folder, num_kv_blocks=8, **EXACT) as llm:
        return llm.logits(list(range(3, 40)))


@pytest.mark.parametrize("name", ["llama_gqa", "deepseek_v3", "qwen3_moe"])
def test_a_quantised_folder_is_the_model_of_its_products(name: str, tmp_path: Path) -> None:
    """The same logits as a folder that holds codes times scales."""
    original = SafetensorsWeights.open(REFERENCE / name)
    quantised: dict[str, np.ndarray] = {}
    expanded_ones: dict[str, np.ndarray] = {}
    for tensor in original.names():
        weight = original.get(tensor).astype(np.float32)
        if weight.ndim == 1 or tensor.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            quantised[tensor] = expanded_ones[tensor] = weight
            continue
        blocks = [-(-size // 16) for size in weight.shape]
        scale = np.random.default_rng(len(quantised)).uniform(0.5, 2, blocks).astype(np.float32) / 64
        wide = scale.repeat(16, 0).repeat(16, 1)[: weight.shape[0], : weight.shape[1]]
        quantised[tensor] = (weight / wide).astype(F8)
        quantised[f"{tensor}_scale_inv"] = scale
        expanded_ones[tensor] = quantised[tensor].astype(np.float32) * wide
    entry = {**DEEPSEEK, "weight_block_size": [16, 16]}
    got = logits_of(tmp_path / "fp8", name, quantised, quantization_config=entry)
    assert np.array_equal(got, logits_of(tmp_path / "f32", name, expanded_ones))


# -- mxfp4 -----------------------------------------------------------------------------------------------------------

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_mxfp4_is_what_the_gguf_package_reads(
    tmp_path_factory: pytest.TempPathFactory, seed: int, experts: int, out: int, groups: int
) -> None:
    """GGUF has the same codes and scales, each block's first half in the low nibbles."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, out, groups, 16), np.uint8)
    scales = random.integers(100, 150, (experts, out, groups), np.uint8)
    tensors = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales}
    weights = opened_as(tmp_path_factory.mktemp("mxfp4"), tensors, {"quant_method": "mxfp4"})
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(experts, out, groups, 32)
    packed = nibbles[..., :16] | (nibbles[..., 16:] << 4)
    theirs = np.concatenate([scales[..., None], packed], axis=-1).reshape(-1, 17)
    want = gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.MXFP4).reshape(experts, out, groups * 32)
    assert weights.names() == [EXPERTS]
    assert weights.shape(EXPERTS) == (experts, groups * 32, out)
    assert np.array_equal(weights.get(EXPERTS), want.swapaxes(1, 2))
    assert weights.get(EXPERTS) is weights.get(EXPERTS)
    assert weights.unused() == []


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((2, 3, 1, 16), (2, 3, 2), r"_scales': expected U8 \[experts, out, blocks\], got U8 \[2, 3, 2\]"),
        ((2, 3, 1, 15), (2, 3, 1), r"_blocks': expected U8 \[experts, out, blocks, 16\], got U8 \[2, 3, 1, 15\]"),
        ((3, 1, 16), (3, 1), "_blocks': expected U8"),
        ((3,), (3,), "_blocks': expected U8"),
    ],
)
def test_mxfp4_that_does_not_fit(
    tmp_path: Path, blocks: tuple[int, ...], scales: tuple[int, ...], message: str
) -> None:
    tensors = {f"{EXPERTS}_blocks": np.zeros(blocks, np.uint8), f"{EXPERTS}_scales": np.zeros(scales, np.uint8)}
    with pytest.raises(CheckpointError, match=message):
        opened_as(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"_scales': expected, got no such tensor"):
        opened_as(tmp_path, {f"{EXPERTS}_blocks": np.zeros((1, 1, 1, 16), np.uint8)}, {"quant_method": "mxfp4"})


def test_gpt_oss_with_experts_in_mxfp4(tmp_path: Path) -> None:
    original = SafetensorsWeights.open(REFERENCE / "gpt_oss")
    plain = {tensor: original.get(tensor).astype(np.float32) for tensor in original.names()}
    quantised = dict(plain)
    random = np.random.default_rng(0)
    for tensor, weight in plain.items():
        if tensor.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, out = weight.shape
            del quantised[tensor]
            quantised[f"{tensor}_blocks"] = random.integers(0, 256, (experts, out, inner // 32, 16), np.uint8)
            quantised[f"{tensor}_scales"] = np.full((experts, out, inner // 32), 123, np.uint8)
    folder = tmp_path / "codes"
    folder.mkdir()
    weights = opened_as(folder, quantised, {"quant_method": "mxfp4"})
    expanded_ones = {tensor: weights.get(tensor).astype(np.float32) for tensor in weights.names()}
    assert sorted(expanded_ones) == original.names()
    got = logits_of(tmp_path / "mxfp4", "gpt_oss", quantised, quantization_config={"quant_method": "mxfp4"})
    assert np.array_equal(got, logits_of(tmp_path / "f32", "gpt_oss", expanded_ones))
