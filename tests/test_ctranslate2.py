"""CTranslate2's Whisper files: the tensors of Hugging Face come back, and damage gives an error."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.checkpoint.ctranslate2 import CTranslate2Weights, is_ctranslate2
from kvcore.checkpoint.source import open_checkpoint
from kvcore.errors import CheckpointError

KINDS = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
D, FF, VOCAB, LAYERS = 8, 12, 20, 2


def whisper() -> dict[str, np.ndarray]:
    """A small random model under Hugging Face's names."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (D, 5, 3), "model.encoder.conv1.bias": (D,),
        "model.encoder.conv2.weight": (D, D, 3), "model.encoder.conv2.bias": (D,),
        "model.encoder.embed_positions.weight": (10, D), "model.decoder.embed_positions.weight": (7, D),
        "model.decoder.embed_tokens.weight": (VOCAB, D),
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        shapes |= {f"model.{side}.layer_norm.{end}": (D,) for end in ("weight", "bias")}
        for layer in range(LAYERS):
            prefix = f"model.{side}.layers.{layer}."
            for attention in ("self_attn",) if side == "encoder" else ("self_attn", "encoder_attn"):
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{prefix}{attention}.{name}.weight"] = (D, D)
                    if name != "k_proj":
                        shapes[f"{prefix}{attention}.{name}.bias"] = (D,)
                shapes |= {f"{prefix}{attention}_layer_norm.{end}": (D,) for end in ("weight", "bias")}
            shapes |= {f"{prefix}final_layer_norm.{end}": (D,) for end in ("weight", "bias")}
            shapes |= {f"{prefix}fc1.weight": (FF, D), f"{prefix}fc1.bias": (FF,)}
            shapes |= {f"{prefix}fc2.weight": (D, FF), f"{prefix}fc2.bias": (D,)}
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def variables_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As CTranslate2's converter names and joins them."""
    found: dict[str, np.ndarray] = {"decoder/embeddings/weight": tensors["model.decoder.embed_tokens.weight"]}
    for end in ("weight", "bias"):
        found |= {f"encoder/conv{i}/{end}": tensors[f"model.encoder.conv{i}.{end}"] for i in (1, 2)}
    ends = {"gamma": "weight", "beta": "bias"}
    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = tensors[f"model.{side}.embed_positions.weight"]
        found |= {f"{side}/layer_norm/{a}": tensors[f"model.{side}.layer_norm.{b}"] for a, b in ends.items()}
        found[f"{side}/num_heads"] = np.array(2, np.int16)
        for layer in range(LAYERS):
            ours, theirs = f"model.{side}.layers.{layer}.", f"{side}/layer_{layer}/"
            attentions = {"self_attention": "self_attn"} | ({"attention": "encoder_attn"} if side == "decoder" else {})
            for their_name, name in attentions.items():
                zeros = np.zeros(D, np.float16)
                for end in ("weight", "bias"):
                    q, k, v, out = (
                        tensors.get(f"{ours}{name}.{part}_proj.{end}", zeros) for part in ("q", "k", "v", "out")
                    )
                    joined = [np.concatenate([q, k, v])] if name == "self_attn" else [q, np.concatenate([k, v])]
                    for i, array in enumerate([*joined, out]):
                        found[f"{theirs}{their_name}/linear_{i}/{end}"] = array
                for a, b in ends.items():
                    found[f"{theirs}{their_name}/layer_norm/{a}"] = tensors[f"{ours}{name}_layer_norm.{b}"]
            for a, b in ends.items():
                found[f"{theirs}ffn/layer_norm/{a}"] = tensors[f"{ours}final_layer_norm.{b}"]
            for i in (0, 1):
                for end in ("weight", "bias"):
                    found[f"{theirs}ffn/linear_{i}/{end}"] = tensors[f"{ours}fc{i + 1}.{end}"]
    return found | {"decoder/pre_norm": np.array(1, np.int8), "decoder/activation": np.array(3, np.int8)}


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def build(
    variables: dict[str, np.ndarray],
    version: int = 6,
    spec: str = "WhisperSpec",
    alias: str = "decoder/embeddings/weight",
) -> bytes:
    data = struct.pack("<I", version) + string(spec) + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        data += string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", KINDS[array.dtype.name], array.nbytes) + array.tobytes()
    return data + struct.pack("<I", 1) + string("decoder/projection/weight") + string(alias)


TENSORS = whisper()
WHOLE = build(variables_of(TENSORS))


def write(folder: Path, data: bytes) -> Path:
    (folder / "model.bin").write_bytes(data)
    return folder / "model.bin"


def test_tensors_and_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    (tmp_path / "config.json").write_text(json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3]}))
    weights = CTranslate2Weights(path)
    assert weights.names() == sorted(TENSORS)
    for name, want in TENSORS.items():
        got = weights.get(name)
        assert (got.shape, got.dtype) == (weights.shape(name), weights.dtype(name)) == (want.shape, want.dtype)
        assert np.array_equal(got, want), name
        assert got.flags.aligned
    assert weights.unused() == []
    assert weights.blocks("model.encoder.conv1.weight") is None
    assert "x" not in weights
    with pytest.raises(CheckpointError, match=r"model\.bin: tensor 'x': expected, got no such tensor"):
        weights.get("x")
    for model in (tmp_path, path):
        config = open_checkpoint(model).config
        assert {key: config[key] for key in ("d_model", "encoder_layers", "decoder_ffn_dim", "num_mel_bins")} == {
            "d_model": D, "encoder_layers": LAYERS, "decoder_ffn_dim": FF, "num_mel_bins": 5,
        }  # fmt: skip
        assert (config["max_source_positions"], config["max_target_positions"], config["vocab_size"]) == (10, 7, VOCAB)
        assert (config["encoder_attention_heads"], config["eos_token_id"]) == (2, 50256)
        assert (config["suppress_tokens"], config["begin_suppress_tokens"]) == ([1, 2], [3])
    assert open_checkpoint(tmp_path).tokenizer_source == tmp_path


def changed(name: str, array: Any) -> bytes:
    variables = variables_of(TENSORS)
    if array is None:
        del variables[name]
    else:
        variables[name] = array
    return build(variables)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (build({}, version=7), "version: expected one of 4, 5, 6, got 7"),
        (build({}, spec="TransformerSpec"), "spec: expected WhisperSpec, as no other is supported"),
        (build(variables_of(TENSORS), alias="x"), "alias 'decoder/projection/weight': expected the name of a variable"),
        (WHOLE + b"x", "expected the end of the file, got 1 more bytes"),
        (changed("encoder/num_heads", None), "encoder/num_heads: expected an integer, got none"),
        (changed("encoder/num_heads", np.array(-1, np.int16)), "encoder/num_heads: expected an integer of at least 0"),
        (changed("decoder/pre_norm", np.array(0, np.int8)), "decoder/pre_norm: expected 1, got 0"),
        (changed("decoder/activation", np.array(0, np.int8)), "decoder/activation: expected 3, got 0"),
        (changed("decoder/embeddings/weight", None), "alias .*: expected the name of a variable"),
        (changed("encoder/conv1/weight", None), r"tensor 'model\.encoder\.conv1\.weight': expected, got no such"),
        (changed("decoder/layer_0/self_attention/linear_0/weight", np.ones((25, D), np.float16)), "3 matrices in one"),
        (changed("encoder/conv1/weight", np.ones(5, np.float16)), r"expected 3 dimensions, got shape \[5\]"),
        (changed("encoder/conv1/weight", np.ones((1,) * 5, np.float16)), "expected at most 4 dimensions, got 5"),
        (changed("encoder/conv1/weight", np.ones((0, 4), np.float16)), "expected bytes for float16"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as error:
        CTranslate2Weights(path).to_config()
    assert str(error.value).startswith(str(path))


def test_integers_are_refused_when_asked_for(tmp_path: Path) -> None:
    name = "decoder/layer_0/ffn/linear_0/weight"
    weights = CTranslate2Weights(write(tmp_path, changed(name, np.ones((FF, D), np.int8))))
    with pytest.raises(CheckpointError, match=r"fc1\.weight: expected float32, float16 or bfloat16, got int8"):
        weights.get("model.decoder.layers.0.fc1.weight")


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.sampled_from([b"\xff" * 4, bytes(4), b"\x01", b"\x80"])),
        max_size=3,
    ),
    st.integers(0, len(WHOLE)) | st.just(len(WHOLE)),
)
def test_damage_gives_an_error_or_a_model(tmp_path: Path, edits: list[tuple[int, bytes]], size: int) -> None:
    data = bytearray(WHOLE)
    for position, content in edits:
        data[position : position + len(content)] = content
    path = write(tmp_path, bytes(data[:size]))
    tracemalloc.start()
    try:
        weights = CTranslate2Weights(path)
        weights.to_config()
        for name in weights.names():
            weights.get(name)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


def test_other_files_are_none(tmp_path: Path) -> None:
    assert is_ctranslate2(write(tmp_path, WHOLE))
    for content in (b"", b"PK\x03\x04" + bytes(100), b"\x80\x02}q", b"GGUF"):
        assert not is_ctranslate2(write(tmp_path, content))
    assert not is_ctranslate2(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="got a pickle file"):
        open_checkpoint(write(tmp_path, b"PK\x03\x04" + bytes(100)))
