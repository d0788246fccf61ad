"""What weights will take, told before they are read, against what they take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ggufs import convert
from kvcore import LLM, InvalidArgument
from kvcore._kvcore import Linear
from kvcore.checkpoint.source import open_checkpoint
from kvcore.loading import Options, make_spec
from kvcore.models.held import held_nbytes, held_quantization
from models import REFERENCE, TINY

FOLDERS = sorted(path.parent for path in REFERENCE.glob("*/config.json"))
OPTIONS: list[tuple[str, str]] = [
    ("float32", "none"), ("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "int8"), ("float32", "int4"),
]  # fmt: skip


@contextmanager
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts no packed matrix can be made."""
    with monkeypatch.context() as patch:
        patch.setattr("kvcore.models.reader.Linear", None)
        yield


def told(model: Path, dtype: str, quantization: str) -> int:
    checkpoint = open_checkpoint(model)
    spec = make_spec(checkpoint.config, Options())
    return held_nbytes(spec, checkpoint.weights, dtype=dtype, quantization=held_quantization(quantization, dtype))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_is_told_is_what_is_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, quantization in OPTIONS:
        with nothing_read(monkeypatch):
            expected = told(folder, dtype, quantization)
        with LLM(folder, dtype=dtype, quantization=quantization, num_kv_blocks=8) as llm:
            assert llm.weight_bytes == expected, (dtype, quantization)


@pytest.mark.parametrize("name", ["llama_tied_bias_headdim", "llama_gqa", "qwen2", "t5"])
def test_blocks_of_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds in (
        {"*.attn_q.*": "Q4_0", "*.attn_k.*": "Q4_0", "*.attn_v.*": "Q8_0", "token_embd.*": "Q8_0"},
        {"*.ffn_*": "Q4_1", "*.attn_*": "Q5_0", "token_embd.*": "Q4_0", "output.*": "Q8_0"},
        {"token_embd.*": "Q5_1", "*.ffn_down.*": "Q5_1"},
    ):
        model = convert(REFERENCE / name, tmp_path / "model.gguf", kinds={"*rel_b*": "F32", **kinds})
        for dtype, quantization in OPTIONS:
            with nothing_read(monkeypatch):
                expected = told(model, dtype, quantization)
            with LLM(model, dtype=dtype, quantization=quantization, num_kv_blocks=8) as llm:
                assert llm.weight_bytes == expected, (kinds, dtype, quantization)


def test_a_configuration_alone() -> None:
    for config in (TINY, {**TINY, "tie_word_embeddings": True}):
        spec = make_spec(config, Options())
        for dtype, quantization in OPTIONS:
            expected = held_nbytes(spec, None, dtype=dtype, quantization=held_quantization(quantization, dtype))
            with LLM.from_config(config, dtype=dtype, quantization=quantization, num_kv_blocks=8) as llm:
                assert llm.weight_bytes == expected


def test_no_memory_is_taken() -> None:
    """A model of some thousand million parameters."""
    large = {**TINY, "hidden_size": 8192, "intermediate_size": 1 << 15, "num_hidden_layers": 80, "vocab_size": 1 << 17}
    large |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    held = held_nbytes(make_spec(large, Options()), None, dtype="bfloat16", quantization="int4")
    layer = 4 * 8192**2 + 3 * 8192 * (1 << 15)
    assert held == pytest.approx(80 * layer * 5 / 8 + (1 << 30) * (2 + 8.5 / 8), rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_packed_nbytes(dtype: str) -> None:
    for outputs, inputs in [(1, 1), (32, 32), (33, 65), (100, 7)]:
        for bias in (None, np.zeros(outputs, np.float32)):
            linear = Linear(np.zeros((outputs, inputs), np.float32), bias, dtype=dtype)
            assert Linear.packed_nbytes(outputs, inputs, dtype=dtype, bias=bias is not None) == linear.nbytes


def test_packed_nbytes_bad_input() -> None:
    bad: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((0, 8), {}, InvalidArgument, "at least one output"),
        ((8, 0), {}, InvalidArgument, "at least one output"),
        ((-1, 8), {}, InvalidArgument, "out_features: expected an integer from 0"),
        ((1 << 40, 1 << 40), {}, InvalidArgument, "overflows"),
        ((8, 8.5), {}, TypeError, "in_features: expected an integer"),
        ((8, 8), {"dtype": "int3"}, InvalidArgument, "dtype: expected"),
    ]
    for args, kwargs, error, text in bad:
        with pytest.raises(error, match=text):
            Linear.packed_nbytes(*args, **kwargs)
