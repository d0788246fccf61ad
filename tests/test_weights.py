"""safetensors: traps 21 and 22, and every kind of damaged file."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvcore.checkpoint.config import load_config
from kvcore.checkpoint.weights import MAX_HEADER_BYTES, SafetensorsFile, SafetensorsWeights
from kvcore.errors import CheckpointError
from kvcore.models.families import spec_from_config
from kvcore.models.spec import check_weights, has_own_output, read_output, read_tensor, unused_tensors

REFERENCE = Path(__file__).parent / "data" / "reference"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 288672\n"


def pack(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


SMALL = pack({"a": entry(0, 8), "b": entry(8, 20, shape=[1, 3]), "__metadata__": {"format": "pt"}}, bytes(range(20)))


def test_types_and_values(tmp_path: Path) -> None:
    tensors = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "f16": np.arange(5, dtype=np.float16),
        "bf16": np.arange(7, dtype=ml_dtypes.bfloat16).reshape(7, 1),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = SafetensorsWeights.open(tmp_path)
    assert weights.names() == sorted(tensors)
    assert weights.source == str(tmp_path / "model.safetensors")
    for name, want in tensors.items():
        got = weights.get(name)
        assert got.dtype == want.dtype == weights.dtype(name)
        assert got.shape == want.shape == weights.shape(name)
        assert got.tobytes() == want.tobytes()
        assert not got.flags.writeable
        assert got.flags.c_contiguous
    assert weights.unused() == []


def test_unaligned_data_is_copied(tmp_path: Path) -> None:
    data = np.arange(2, dtype=np.float32)
    text = json.dumps({"a": entry(0, 8)}).encode()
    text += b" " * (1 - len(text) % 4 + 4)
    got = SafetensorsFile(write(tmp_path / "x.safetensors", pack(text, data.tobytes()))).get("a")
    assert got.flags.aligned
    assert np.array_equal(got, data)


def test_other_types_are_refused_by_name_when_asked_for(tmp_path: Path) -> None:
    save_file({"ids": np.arange(3), "w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights.open(tmp_path)
    assert np.array_equal(weights.get("w"), [1, 1])
    assert weights.unused() == ["ids"]
    for ask in (weights.get, weights.dtype):
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: tensor 'ids': expected F32, F16, BF16, got I64"
        ):
            ask("ids")
    with pytest.raises(CheckpointError, match="tensor 'v': expected, got no such tensor"):
        weights.get("v")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a header length of 8 bytes, got a file of 0 bytes"),
        (b"1234567", "expected a header length of 8 bytes, got a file of 7 bytes"),
        (LFS, "a Git LFS pointer stands in place of the file"),
        (pack(b"{}", b"", 1 << 63), "expected a header of at most 100000000 bytes, got 9223372036854775808"),
        (pack(b"{}", b"", MAX_HEADER_BYTES), "cut short"),
        (SMALL[:-1], "expected data_offsets .* within 19 bytes of data"),
        (SMALL + b"x", "expected 20 bytes of data, got 21"),
        (pack({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "tensor 'b': .* overlap or hole"),
        (pack({"a": entry(4, 12)}, bytes(12)), "tensor 'a': .* overlap or hole"),
        (pack({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8)), "overlap or hole"),
        (pack({"a": entry(8, 0, shape=[2])}, bytes(8)), "expected data_offsets"),
        (pack({"a": entry(0, 8, shape=[3])}, bytes(8)), r"tensor 'a': expected 12 bytes for F32 \[3\]"),
        (pack({"a": entry(0, 0, shape=[1 << 62, 4])}, b""), "expected a size that fits the file"),
        (pack({"a": entry(0, 0, shape=[0, 1 << 62, 1 << 62])}, b""), "expected a size that fits the file"),
        (pack({"a": entry(0, 8, shape=[-2])}, bytes(8)), "expected a shape of at most 32 sizes"),
        (pack({"a": entry(0, 8, shape=[1] * 32 + [2])}, bytes(8)), "expected a shape of at most 32 sizes"),
        (pack({"a": {**entry(0, 8), "shape": [2.0]}}, bytes(8)), "expected a shape"),
        (pack({"a": {**entry(0, 8), "shape": [True, 2]}}, bytes(8)), "expected a shape"),
        (pack({"a": {**entry(0, 8), "data_offsets": [0, 4, 8]}}, bytes(8)), "expected data_offsets"),
        (pack({"a": {**entry(0, 8), "dtype": "F33"}}, bytes(8)), 'expected a dtype that safetensors knows, got "F33"'),
        (pack({"a": {"shape": [2]}}, bytes(8)), "expected a dtype that safetensors knows, got null"),
        (pack({"a": 3}, b""), r"tensor 'a': expected an object, got 3 \(int\)"),
        (pack(b"[]", b""), "header: expected a JSON object"),
        (pack(b"{", b""), "header: expected JSON"),
        (pack(b"[" * 100_000, b""), "header: expected JSON"),
        (pack(b'{"\xff": 1}', b""), "header: expected JSON"),
        (pack(b'{"a": 1, "a": 1}', b""), "the key 'a' occurs twice"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = write(tmp_path / "model.safetensors", data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as info:
            SafetensorsWeights.open(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(info.value)


@pytest.mark.parametrize("size", range(len(SMALL)))
def test_cut_at_any_byte(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "x.safetensors", SMALL[:size])
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile(path)


_EDITS = st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_EDITS, st.integers(0, 5))
@example([], 0)
def test_what_the_package_refuses_is_refused(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(SMALL)
    for position, byte in edits:
        data[position] = byte
    path = write(tmp_path / "x.safetensors", bytes(data[: len(data) - cut]))
    try:
        ours = SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
        return
    try:
        with safe_open(path, "np") as theirs:
            names = sorted(theirs.keys())
            assert sorted(ours.tensors) == names
            for name in names:
                if ours.tensors[name][0] == "F32":
                    assert ours.get(name).tobytes() == theirs.get_tensor(name).tobytes()
    except SafetensorError as error:
        # its metadata must be strings; nobody reads them here
        assert "metadata" in str(error) or "invalid type" in str(error)  # noqa: PT017


# Folders


def shards(folder: Path, index: dict[str, Any] | None = None) -> None:
    save_file({"a": np.ones(2, np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(3, np.float16)}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    content = index if index is not None else {"metadata": {"total_size": 14}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards(tmp_path: Path) -> None:
    shards(tmp_path)
    weights = SafetensorsWeights.open(tmp_path)
    assert weights.names() == ["a", "b"]
    assert weights.source == str(tmp_path)
    assert weights.unused() == ["a", "b"]
    assert np.array_equal(weights.get("a"), [1, 1])
    assert weights.unused() == ["b"]


def test_missing_shard(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 shards, of which are missing: model-00002-of-00002\.safetensors"):
        SafetensorsWeights.open(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors",
     "C:model.safetensors", "a\0.safetensors", "weights.bin", "", "\ud800.safetensors", "x" * 300 + ".safetensors", 3,
     None, ["a.safetensors"]],
)  # fmt: skip
def test_an_index_must_not_reach_out_of_its_folder(tmp_path: Path, shard: Any) -> None:
    shards(tmp_path, {"weight_map": {"a": shard}})
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: 'a': expected the name of a \.safetensors"):
        SafetensorsWeights.open(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map(tmp_path: Path, index: dict[str, Any]) -> None:
    shards(tmp_path, index)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map: expected an object"):
        SafetensorsWeights.open(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards(tmp_path, {"weight_map": {"a": first, "b": first}})
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors: tensor 'b': expected here by model"):
        SafetensorsWeights.open(tmp_path)
    shards(tmp_path)
    save_file({"a": np.ones(2, np.float32), "b": np.zeros(3, np.float16)}, tmp_path / second)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: tensor 'a' is in .*00001.*, too"):
        SafetensorsWeights.open(tmp_path)


def test_other_names_are_not_guessed(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "expected.safetensors")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors .* got expected\.safetensors"):
        SafetensorsWeights.open(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors .* got an empty folder"):
        SafetensorsWeights.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected a folder with a model, got no such file or folder"):
        SafetensorsWeights.open(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a file, got no such file"):
        SafetensorsWeights.open(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a file, got a folder"):
        SafetensorsWeights.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "pytorch_model-00001-of-00002.bin"])
def test_pickles_are_refused_with_advice(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=f"got {name}.*runs whatever code.*save_pretrained"):
        SafetensorsWeights.open(tmp_path)


# A model's tensors


def model(tmp_path: Path, source: str = "llama_gqa", **changes: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    folder = REFERENCE / source
    shutil.copy(folder / "config.json", tmp_path)
    config = {**load_config(folder), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file.get(name) for name in file.tensors}, config


def opened(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Any:
    save_file(tensors, tmp_path / "model.safetensors")
    return spec_from_config(load_config(tmp_path)), SafetensorsWeights.open(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    spec, weights = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight': expected shape \[112, 64\]"):
        check_weights(spec, weights)


def test_unexpected_shape_is_named(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path, hidden_size=60, head_dim=16)
    spec, weights = opened(tmp_path, tensors)
    message = r"model\.safetensors: tensor 'model\.embed_tokens\.weight': expected shape \[320, 60\], got \[320, 64\]"
    with pytest.raises(CheckpointError, match=message):
        check_weights(spec, weights)
    with pytest.raises(CheckpointError, match=message):
        read_tensor(spec, weights, "embed_tokens.weight")


def test_type_that_cannot_be_read_is_named_before_anything_is(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    spec, weights = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight': expected F32, F16, BF16, got F64"):
        check_weights(spec, weights)


def test_untied_without_output_matrix(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path)
    del tensors["lm_head.weight"]
    spec, weights = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight': expected shape .* got no such tensor"):
        check_weights(spec, weights)


def test_tied_with_and_without_a_stored_output_matrix(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path, "llama_tied_bias_headdim")
    spec, weights = opened(tmp_path, tensors)
    assert spec.tie_word_embeddings
    check_weights(spec, weights)
    assert read_output(spec, weights) is None
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    spec, weights = opened(tmp_path, tensors)
    check_weights(spec, weights)
    assert read_output(spec, weights) is None
    assert "lm_head.weight" not in unused_tensors(spec, weights)
    tensors["lm_head.weight"][319, 3] += 1  # a model that was trained on untied: what is stored counts
    spec, weights = opened(tmp_path, tensors)
    output = read_output(spec, weights)
    assert output is not None
    assert np.array_equal(output, tensors["lm_head.weight"])


def test_an_untied_output_matrix_is_not_read_to_be_told(tmp_path: Path) -> None:
    """Of a quantised file that would expand it, gigabytes in a model of many words."""
    spec, weights = opened(tmp_path, model(tmp_path)[0])
    assert not spec.tie_word_embeddings
    assert has_own_output(spec, weights)
    assert "lm_head.weight" in weights.unused()


def test_bias_that_is_there_is_used_and_one_that_must_be_is_named(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path, "llama_tied_bias_headdim", attention_bias=False)
    spec, weights = opened(tmp_path, tensors)
    bias = read_tensor(spec, weights, "q_proj.bias", 0)
    assert bias is not None
    assert np.array_equal(bias, tensors["model.layers.0.self_attn.q_proj.bias"])
    tensors, _ = model(tmp_path, attention_bias=True)
    spec, weights = opened(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.self_attn\.q_proj\.bias': expected shape \[64\]"):
        check_weights(spec, weights)
    tensors, _ = model(tmp_path)
    spec, weights = opened(tmp_path, tensors)
    assert read_tensor(spec, weights, "q_proj.bias", 0) is None


def test_unused_tensors_are_reported(tmp_path: Path) -> None:
    tensors, _ = model(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["model.layers.3.extra.weight"] = np.ones(8, np.float32)
    spec, weights = opened(tmp_path, tensors)
    check_weights(spec, weights)
    for tensor in spec.all_tensors():
        if tensor.name in weights:
            weights.get(tensor.name)
    assert unused_tensors(spec, weights) == ["model.layers.3.extra.weight"]
