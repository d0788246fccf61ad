"""LoRA adapters on disk, as peft writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvcore.checkpoint.lora import load_lora
from kvcore.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"


def half(module: str, letter: str) -> str:
    return f"base_model.model.{module}.lora_{letter}.weight"


def adapter(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """An adapter's folder; by default one module of rank 2."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    if tensors is None:
        tensors = {
            half(Q, "A"): random.standard_normal((2, 6), np.float32),
            half(Q, "B"): random.standard_normal((4, 2), np.float32),
        }
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(("rslora", "scale"), [(False, 16 / 2), (True, 16 / np.sqrt(2))])
def test_scale(tmp_path: Path, rslora: bool, scale: float) -> None:
    folder = adapter(tmp_path / "x", use_rslora=rslora)
    lora = load_lora(folder)
    assert [*lora.modules] == [Q]
    pair, want = lora.modules[Q], stored(folder)
    assert np.array_equal(pair.a, want[half(Q, "A")])
    assert np.array_equal(pair.b, want[half(Q, "B")] * np.float32(scale))
    assert lora.source == str(folder)


def test_ranks_that_differ_and_other_types(tmp_path: Path) -> None:
    other = "model.layers.1.mlp.down_proj"
    tensors = {
        half(Q, "A"): np.ones((2, 6), ml_dtypes.bfloat16), half(Q, "B"): np.ones((4, 2), np.float16),
        half(other, "A"): np.ones((5, 6), np.float32), half(other, "B"): np.ones((4, 5), np.float32),
    }  # fmt: skip
    modules = load_lora(adapter(tmp_path, tensors, rank_pattern={"down_proj": 5})).modules
    assert modules[Q].b.dtype == modules[Q].a.dtype == np.float32
    assert (modules[Q].b == 8).all()
    assert np.allclose(modules[other].b, 16 / 5)


@pytest.mark.parametrize("name", ["q_proj", "self_attn.q_proj", Q, r"layers\.\d+\..*q_proj", "(((a+)+)+)+$"])
def test_ranks_by_name_and_by_pattern(tmp_path: Path, name: str) -> None:
    assert len(load_lora(adapter(tmp_path, r=8, rank_pattern={"proj": 5, name: 2})).modules[Q].a) == 2


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    first = load_lora(adapter(tmp_path / "a"))
    assert load_lora(adapter(tmp_path / "b")).identity == first.identity
    assert load_lora(adapter(tmp_path / "c", lora_alpha=17)).identity != first.identity
    changed = stored(tmp_path / "a")
    changed[half(Q, "A")][0, 0] += 1
    assert load_lora(adapter(tmp_path / "d", changed)).identity != first.identity
    assert len(first.identity) == 32


ONE = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (None, {"peft_type": "IA3"}, 'peft_type: expected "LORA", got "IA3"'),
        (None, {"peft_type": None}, "peft_type: expected a string, got null"),
        (None, {"use_dora": True}, "use_dora: expected False, as anything else is not supported, got true"),
        (None, {"bias": "all"}, "bias: expected 'none', as anything else"),
        (None, {"lora_bias": True}, "lora_bias: expected False"),
        (None, {"modules_to_save": ["lm_head"]}, "modules_to_save: expected None, as anything else .*lm_head"),
        (None, {"alpha_pattern": {"q_proj": 4}}, "alpha_pattern: expected {}"),
        (None, {"trainable_token_indices": [1]}, "trainable_token_indices: expected None"),
        (None, {"init_lora_weights": "pissa_niter_16"}, "init_lora_weights: expected a way that leaves the base"),
        (None, {"lora_alpha": 0}, "lora_alpha: expected a number"),
        (None, {"r": 0}, "r: expected an integer of at least 1, got 0"),
        (None, {"r": "2"}, 'r: expected an integer of at least 1, got "2"'),
        (None, {"r": 2.0}, "r: expected an integer of at least 1, got 2.0"),
        (None, {"r": 3}, f"adapter_config.json: r: expected 2, as the tensors of module '{Q}' have it, got 3"),
        (None, {"rank_pattern": {"q_proj": 3}}, "rank_pattern: expected 2, as the tensors of module .*, got 3"),
        (None, {"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj: expected an integer of at least 1, got 0"),
        (None, {"rank_pattern": {"^model.*q": 3}, "r": 4}, r"r: expected 2, .*, got \[3, 4\]"),
        (None, {"rank_pattern": 3}, "rank_pattern: expected an object, got 3"),
        (None, {"use_rslora": "yes"}, "use_rslora: expected true or false"),
        ({}, {}, "expected tensors named lora_A and lora_B, got none"),
        ({half(Q, "A"): ONE}, {}, f"module '{Q}': expected lora_A and lora_B, got no lora_B"),
        ({half(Q, "A"): ONE, half(Q, "B"): np.ones((4, 2), np.float32)}, {}, r"got \[1, 1\] and \[4, 2\]"),
        ({half(Q, "A"): np.ones(3, np.float32), half(Q, "B"): ONE}, {}, r"got \[3\] and \[1, 1\]"),
        ({half(Q, "A"): np.ones((5000, 1), np.float32), half(Q, "B"): np.ones((1, 5000), np.float32)}, {}, "to 4096"),
        ({half(Q, "A"): np.ones((1, 1), np.int32), half(Q, "B"): ONE}, {}, "expected F32, F16, BF16, got I32"),
        ({"base_model.model.lm_head.weight": ONE}, {}, "tensor 'base_model.model.lm_head.weight': expected only"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": ONE}, {}, "lora_magnitude_vector': expected only"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": ONE}, {}, "lora_embedding_A': expected only"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, np.ndarray] | None, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        load_lora(adapter(tmp_path / "x", tensors, **config))
    assert str(tmp_path / "x") in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: expected a JSON file, got no such file"):
        load_lora(tmp_path)
    (adapter(tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: expected a file, got no such file"):
        load_lora(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"expected adapter_model\.safetensors, got adapter_model\.bin"):
        load_lora(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: expected a header"):
        load_lora(tmp_path)
