"""GGUF: hostile files, exact dequantisation, and the way back to Hugging Face's names and order."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf as package
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ggufs import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array_entry,
    build,
    entries_of,
    entry,
    f32,
    file_of,
    info,
    string,
    tensors_of,
    write,
)
from kvcore.checkpoint.config import GenerationConfig, load_config
from kvcore.checkpoint.dequantize import BLOCKS, KNOWN_TYPES, dequantize
from kvcore.checkpoint.gguf import GGUFFile, GGUFWeights, StringArray
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError
from kvcore.models.families import spec_from_config
from kvcore.models.rope_table import inv_freq
from kvcore.models.spec import check_weights, read_output, unused_tensors
from oracle import Oracle

REFERENCE = Path(__file__).parent / "data" / "reference"

HYPER = [
    entry("general.architecture", STRING, "llama"),
    entry("llama.block_count", U32, 1),
    entry("llama.context_length", U32, 64),
    entry("llama.embedding_length", U32, 8),
    entry("llama.feed_forward_length", U32, 4),
    entry("llama.attention.head_count", U32, 2),
    entry("llama.attention.head_count_kv", U32, 1),
    entry("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
]
TOKENS = [
    array_entry("tokenizer.ggml.tokens", STRING, ["a", "bc", "", "d\u20ac"]),
    array_entry("tokenizer.ggml.token_type", I32, [1, 1, 3, 1]),
    entry("tokenizer.ggml.eos_token_id", U32, 2),
]


def floats(rows: int, columns: int | None = None, seed: int = 0) -> np.ndarray:
    shape = (rows,) if columns is None else (rows, columns)
    return np.random.default_rng(seed + rows).standard_normal(shape).astype(np.float32)


LAYER = {
    "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_norm": (8,),
    "ffn_gate": (4, 8), "ffn_up": (4, 8), "ffn_down": (8, 4),
}  # fmt: skip
TENSORS = {
    "token_embd.weight": f32(floats(4, 8)),
    "output_norm.weight": f32(floats(8)),
    **{f"blk.0.{name}.weight": f32(floats(*shape)) for name, shape in LAYER.items()},
}
SMALL = file_of([*HYPER, *TOKENS, entry("llama.some.flag", BOOL, 1)], TENSORS)


def opened(tmp_path: Path, data: bytes) -> GGUFFile:
    return GGUFFile(write(tmp_path / "x.gguf", data))


# Reading


def test_metadata(tmp_path: Path) -> None:
    file = opened(tmp_path, SMALL)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 1
    assert file.metadata["llama.some.flag"] is True
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert list(tokens) == tokens[:] == ["a", "bc", "", "d€"]
    assert (tokens[-1], len(tokens), tokens.index("bc"), "x" in tokens) == ("d€", 4, 1, False)
    assert repr(tokens) == "<4 strings of tokenizer.ggml.tokens>"
    with pytest.raises(IndexError):
        tokens[4]
    types = file.metadata["tokenizer.ggml.token_type"]
    assert types.dtype == np.int32
    assert types.tolist() == [1, 1, 3, 1]


def test_every_value_type(tmp_path: Path) -> None:
    values = {U8: 255, I8: -1, U16: 65535, I16: -2, U32: 2**32 - 1, I32: -3, F32: 0.5, BOOL: 1, U64: 2**64 - 1,
              I64: -4, F64: 0.1, STRING: "x"}  # fmt: skip
    entries = [entry(f"one.{kind}", kind, content) for kind, content in values.items()]
    entries += [array_entry(f"many.{kind}", kind, [content] * 3) for kind, content in values.items()]
    entries.append(array_entry("none", STRING, []))
    metadata = opened(tmp_path, build(entries, [], b"")).metadata
    for kind, content in values.items():
        assert metadata[f"one.{kind}"] == content
        assert type(metadata[f"one.{kind}"]) in (int, float, bool, str)
        assert list(metadata[f"many.{kind}"]) == [content] * 3
    assert list(metadata["none"]) == []


def test_agrees_with_the_package(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", SMALL)
    theirs = package.GGUFReader(path)
    ours = GGUFFile(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            got = ours.metadata[name]
            assert (got if isinstance(got, (str, int, float)) else list(got)) == field.contents()
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        assert np.array_equal(ours.get(tensor.name), tensor.data)


def test_version_2_and_other_alignments(tmp_path: Path) -> None:
    assert opened(tmp_path, SMALL[:4] + struct.pack("<I", 2) + SMALL[8:]).tensors
    for alignment in (1, 8, 64, 4096):
        data = file_of(
            [entry("general.alignment", U32, alignment)], {"a": f32(floats(3)), "b": f32(floats(5))}, alignment
        )
        file = opened(tmp_path, data)
        assert np.array_equal(file.get("b"), floats(5))
        assert file.get("b").flags.aligned


@pytest.mark.parametrize("kind", BLOCKS)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_dequantisation_is_bitwise_that_of_the_package(kind: str, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32))
    blocks = np.random.default_rng(seed).integers(0, 256, (data.draw(st.integers(1, 40)), BLOCKS[kind][1]), np.uint8)
    with np.errstate(all="ignore"):
        want = package.quants.dequantize(blocks, package.GGMLQuantizationType[kind]).reshape(-1)
    got = dequantize(kind, blocks.reshape(-1))
    assert got.dtype == np.float32
    finite = np.isfinite(want)
    assert np.array_equal(got.view(np.uint32)[finite], want.view(np.uint32)[finite])
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True)


@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantisation_of_more_than_one_piece(kind: str) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (3000, BLOCKS[kind][1]), np.uint8)
    whole = dequantize(kind, blocks.reshape(-1)).reshape(3000, -1)
    one_by_one = np.stack([dequantize(kind, block) for block in blocks[-100:]])
    assert np.array_equal(whole[-100:].view(np.uint32), one_by_one.view(np.uint32))
    assert dequantize(kind, blocks[:0].reshape(-1)).size == 0


def test_sizes_of_the_types_are_those_of_the_package() -> None:
    for number, (name, per_block, block_bytes) in KNOWN_TYPES.items():
        if number in set(package.GGMLQuantizationType):  # newer packages know more types
            kind = package.GGMLQuantizationType(number)
            assert (kind.name, package.GGML_QUANT_SIZES[kind]) == (name, (per_block, block_bytes))


def test_half_precision_stays_and_other_types_are_refused_by_name(tmp_path: Path) -> None:
    half = np.arange(6, dtype=np.float16).reshape(2, 3)
    brain = np.arange(4).astype(ml_dtypes.bfloat16)
    tensors = {
        "half": (1, (3, 2), half.tobytes()),
        "brain": (30, (4,), brain.tobytes()),
        "q2": (10, (256, 1), bytes(84)),
        "double": (28, (2,), bytes(16)),
    }
    file = opened(tmp_path, file_of([], tensors))
    assert np.array_equal(file.get("half"), half)
    assert file.get("half").dtype == file.dtype("half") == np.float16
    assert file.get("brain").tobytes() == brain.tobytes()
    assert file.get("brain").dtype == ml_dtypes.bfloat16
    assert file.raw("q2").shape == (1, 84)
    with pytest.raises(CheckpointError, match=r"x\.gguf: tensor 'q2': expected one of F32, .*Q6_K, MXFP4, got Q2_K"):
        file.get("q2")
    with pytest.raises(CheckpointError, match=r"tensor 'double': .*got F64"):
        file.dtype("double")
    with pytest.raises(CheckpointError, match="tensor 'nothing': expected, got no such tensor"):
        file.get("nothing")


# Hostile files


def odd(*numbers: int, form: str, tail: bytes = b"") -> bytes:
    """A file with one entry "k" that goes on with these numbers."""
    return build([string("k") + struct.pack(form, *numbers) + tail], [], b"")


def one(dimensions: Sequence[int] = (8,), kind: int = 0, offset: int = 0, data: bytes = bytes(32)) -> bytes:
    return build([], [info("t", dimensions, kind, offset)], data)


def two(first: int, second: int, data: bytes = bytes(96)) -> bytes:
    return build([], [info("t", (8,), 0, first), info("u", (16,), 0, second)], data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a file that starts with b'GGUF', got b''"),
        (b"GGUF", "version: expected 4 bytes from 4 on, got 0: cut short"),
        (b"GGML" + bytes(100), "expected a file that starts with b'GGUF', got b'GGML'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer stands in place of the file"),
        (build([], [], b"", version=1), "version: expected one of 2, 3, got 1"),
        (build([], [], b"", version=4), "version: expected one of 2, 3, got 4"),
        (build([], [], b"", version=3 << 24), "got 50331648: a big-endian file"),
        (build([], [], b"", tensor_count=2**64 - 1), "tensor count: expected at most"),
        (build([], [], b"", tensor_count=5), "tensor '': expected"),
        (build([], [], b"", entry_count=2**64 - 1), "entry count: expected at most"),
        (build([], [], b"", entry_count=60_000), "entry 0: expected a key that is new and not empty"),
        (build([entry("k", U8, 1)] * 2, [], b""), "entry 1: expected a key that is new and not empty, got 'k'"),
        (build([entry("", U8, 1)], [], b""), "entry 0: expected a key that is new and not empty, got ''"),
        (build([struct.pack("<Q", 2**63) + b"key"], [], b""), "key of entry 0: expected at most 65535 bytes"),
        (build([string(b"\xff\xfe") + bytes(5)], [], b""), "key of entry 0: expected UTF-8"),
        (odd(13, form="<I"), "k: expected a value type from 0 to 12, got 13"),
        (odd(STRING, 2**64 - 1, form="<IQ"), "k: expected 18446744073709551615 bytes"),
        (build([entry("k", BOOL, 2)], [], b""), "k: expected booleans of 0 or 1, got 2"),
        (odd(ARRAY, ARRAY, 1, form="<IIQ"), "k: .*got an array of arrays"),
        (odd(ARRAY, 99, 1, form="<IIQ"), "k: expected an array of a value type"),
        (odd(ARRAY, F64, 2**61, form="<IIQ"), "k: expected 18446744073709551616 bytes"),
        (odd(ARRAY, STRING, 2**62, form="<IIQ"), "k: expected at most 16777216 strings"),
        (odd(ARRAY, STRING, 1, 2**63, form="<IIQQ"), "k: .*reaches past its end"),
        (odd(ARRAY, STRING, 2, 99, form="<IIQQ", tail=bytes(20)), "k: expected 2 strings, got 1"),
        (build([entry("general.alignment", U32, 24)], [], b""), "general.alignment: expected a power of two"),
        (build([entry("general.alignment", U32, 0)], [], b""), "general.alignment: expected a power of two"),
        (build([entry("general.alignment", STRING, "32")], [], b""), "general.alignment: expected a power of two"),
        (build([entry("general.alignment", U64, 2**40)], [], b""), "general.alignment: expected a power of two"),
        (one(()), "tensor 't': expected 1 to 4 dimensions, got 0"),
        (one((1,) * 5), "tensor 't': expected 1 to 4 dimensions, got 5"),
        (build([], [string("t") + struct.pack("<I", 2**32 - 1)], b""), "expected 1 to 4 dimensions, got 4294967295"),
        (one((0,)), "tensor 't': expected dimensions of at least 1"),
        (one((8, 0)), "tensor 't': expected dimensions of at least 1"),
        (one((2**63, 2**63)), "tensor 't': expected dimensions of at least 1 that fit the file"),
        (one((2**32, 2**32)), "tensor 't': expected dimensions of at least 1 that fit the file"),
        (one((2**50,)), "tensor 't': expected 4503599627370496 bytes"),
        (one((8,), kind=4), "tensor 't': expected a tensor type that is known, got 4"),
        (one((8,), kind=2**32 - 1), "tensor 't': expected a tensor type that is known"),
        (one((33, 1), kind=3), "tensor 't': expected rows of a multiple of 32 for Q4_1, got 33"),
        (one((8,), offset=4), "tensor 't': expected an offset that is a multiple of 32, got 4"),
        (one((8,), offset=32), "tensor 't': expected 32 bytes from .* on, got a file of"),
        (one((8,), offset=2**64 - 32), "tensor 't': expected 32 bytes from"),
        (two(0, 0), "tensor 'u': expected data of its own|tensor 't': expected data of its own"),
        (two(32, 0), "tensor 't': expected data of its own, got data that overlaps 'u'"),
        (build([], [info("t", (8,), 0, i) for i in (0, 32)], bytes(64)), "tensor 't': expected a name that is new"),
        (build([], [info("", (8,), 0, 0)], bytes(32)), "tensor '': expected a name that is new and not empty"),
    ],
)  # fmt: skip
def test_hostile_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = write(tmp_path / "x.gguf", data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as error:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(error.value).startswith(str(path))


def test_cut_at_any_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", SMALL)
    for size in reversed(range(len(SMALL))):
        os.truncate(path, size)
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            GGUFFile(path)


def test_strings_that_are_not_utf8_are_named_when_read(tmp_path: Path) -> None:
    tokens = opened(tmp_path, build([array_entry("k", STRING, ["a", b"\xff", "c"])], [], b"")).metadata["k"]
    assert tokens[2] == "c"
    with pytest.raises(CheckpointError, match=r"x\.gguf: k\[1\]: expected UTF-8"):
        list(tokens)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a file, got no such file"):
        GGUFFile(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="expected a file, got a folder"):
        GGUFFile(tmp_path)


_EDIT = st.tuples(
    st.integers(0, len(SMALL) - 1),
    st.integers(0, 255).map(lambda b: bytes([b])) | st.sampled_from([b"\xff" * 8, bytes(8), b"\0\0\0\0\0\0\0\x80"]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_EDIT, max_size=4), st.integers(0, len(SMALL)) | st.just(len(SMALL)))
@example([], len(SMALL))
def test_damage_gives_an_error_or_a_model(tmp_path: Path, edits: list[tuple[int, bytes]], size: int) -> None:
    data = bytearray(SMALL)
    for position, content in edits:
        data[position : position + len(content)] = content
    path = write(tmp_path / "x.gguf", bytes(data[:size]))
    tracemalloc.start()
    try:
        weights = GGUFWeights.open(path)
        for content in weights.file.metadata.values():
            if isinstance(content, StringArray):
                list(content)
        spec = spec_from_config(weights.to_config())
        check_weights(spec, weights)
        for name in weights.names():
            weights.get(name)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


# As a Hugging Face model


def converted(name: str) -> tuple[list[bytes], dict[str, tuple[int, Sequence[int], bytes]]]:
    """A reference folder as llama.cpp's converter would write it."""
    config = load_config(REFERENCE / name)
    return entries_of(config), tensors_of(config, SafetensorsWeights.open(REFERENCE / name))


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied_bias_headdim", "llama_rope_linear", "llama_rope_yarn"])
def test_a_converted_model_is_the_model(tmp_path: Path, name: str) -> None:
    entries, tensors = converted(name)
    weights = GGUFWeights.open(write(tmp_path / "x.gguf", file_of(entries, tensors)))
    original = SafetensorsWeights.open(REFERENCE / name)
    assert weights.names() == original.names()
    for tensor in weights.names():
        assert weights.shape(tensor) == original.shape(tensor)
        got = weights.get(tensor)
        assert got.dtype == weights.dtype(tensor)
        assert np.array_equal(got.astype(np.float32), original.get(tensor).astype(np.float32))
    spec = spec_from_config(weights.to_config())
    want = spec_from_config(load_config(REFERENCE / name))
    assert spec.ropes == want.ropes
    assert spec.tie_word_embeddings == want.tie_word_embeddings
    assert unused_tensors(spec, weights) == []
    logits = Oracle(want, original).logits([1, 5, 9, 200])
    np.testing.assert_allclose(Oracle(spec, weights).logits([1, 5, 9, 200]), logits, rtol=0, atol=1e-5)


def test_rope_factors_are_those_of_llama3(tmp_path: Path) -> None:
    entries, tensors = converted("llama_rope_llama3")
    want = spec_from_config(load_config(REFERENCE / "llama_rope_llama3")).ropes[0]
    plain, _ = inv_freq(spec_from_config(load_config(REFERENCE / "llama_gqa")).ropes[0])
    theta_only = np.array([want.theta ** (-i / 16) for i in range(16)])
    factors = (theta_only / inv_freq(want)[0]).astype(np.float32)
    tensors["rope_freqs.weight"] = f32(factors)
    weights = GGUFWeights.open(write(tmp_path / "x.gguf", file_of(entries, tensors)))
    spec = spec_from_config(weights.to_config())
    assert spec.ropes[0].kind == "factors"
    np.testing.assert_allclose(inv_freq(*spec.ropes)[0], inv_freq(want)[0], rtol=3e-7)
    assert len(plain) == 8
    assert "rope_freqs.weight" not in weights.unused()
    tensors["rope_freqs.weight"] = f32(factors[:4])
    with pytest.raises(CheckpointError, match=r"tensor 'rope_freqs\.weight': expected shape \[16\], got \[4\]"):
        GGUFWeights.open(write(tmp_path / "y.gguf", file_of(entries, tensors)))


def test_small_file_as_a_model(tmp_path: Path) -> None:
    weights = GGUFWeights.open(write(tmp_path / "x.gguf", SMALL))
    config = weights.to_config()
    assert config["vocab_size"] == 4
    assert config["head_dim"] == 4
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert GenerationConfig.merge(config).eos_token_ids == (2,)
    spec = spec_from_config(config)
    check_weights(spec, weights)
    assert read_output(spec, weights) is None
    assert "nothing" not in weights
    with pytest.raises(CheckpointError, match="tensor 'nothing': expected, got no such tensor"):
        weights.get("nothing")


def test_every_end_of_text_counts(tmp_path: Path) -> None:
    entries = [
        *HYPER,
        *TOKENS,
        entry("tokenizer.ggml.eot_token_id", U32, 3),
        entry("tokenizer.ggml.bos_token_id", U32, 1),
    ]
    config = GGUFWeights.open(write(tmp_path / "x.gguf", file_of(entries, TENSORS))).to_config()
    assert GenerationConfig.merge(config).eos_token_ids == (2, 3)
    assert config["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([entry("llama.expert_count", U32, 8)], "llama: expert_used_count: expected an integer of at least 1, got no"),
        ([entry("llama.attention.key_length", U32, 3)], "attention.value_length|rope.dimension_count|head_dim"),
        ([entry("llama.attention.value_length", U32, 6)], r"attention.value_length: .*head's key \(4\), got 6"),
        ([entry("llama.rope.dimension_count", U32, 2)], r"rope.dimension_count: .*head's key \(4\), got 2"),
        ([entry("llama.rope.scaling.type", STRING, "longrope")], "rope.scaling.type: expected one of none"),
        ([entry("llama.rope.scaling.type", STRING, "linear"), entry("llama.rope.scaling.factor", F32, 0.0)],
         "rope.scaling.factor: expected a number"),
        ([entry("llama.rope.scaling.type", STRING, "yarn"), entry("llama.rope.scaling.factor", F32, 4.0),
          entry("llama.rope.scaling.yarn_log_multiplier", F32, 0.1)], "yarn_log_multiplier: expected no such key"),
        ([entry("llama.rope.freq_base", F32, float("nan"))], "rope.freq_base: expected a number"),
        ([array_entry("llama.rope.freq_base", F32, [])], "rope.freq_base: expected a number"),
        ([entry("tokenizer.ggml.eos_token_id", STRING, "2")], "tokenizer.ggml: eos_token_id: expected a token id"),
    ],
)  # fmt: skip
def test_hyperparameters_that_are_not_supported(tmp_path: Path, extra: list[bytes], message: str) -> None:
    path = write(tmp_path / "x.gguf", file_of([*HYPER, *extra], TENSORS))
    with pytest.raises(CheckpointError, match=message) as error:
        spec_from_config(GGUFWeights.open(path).to_config())
    assert str(error.value).startswith(str(path))


def test_missing_hyperparameters_and_unknown_architectures(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"llama: block_count: expected an integer of at least 1, got no such key"
    ):
        GGUFWeights.open(write(tmp_path / "x.gguf", file_of([HYPER[0], *HYPER[2:]], TENSORS)))
    for entries, came in ([], "None"), ([entry("general.architecture", STRING, "warp")], "'warp'"):
        with pytest.raises(CheckpointError, match=rf"supported architecture \(cohere2, .*, t5\), got {came}"):
            GGUFWeights.open(write(tmp_path / "x.gguf", file_of(entries, TENSORS)))


def test_per_layer_arrays_of_one_value_are_that_value(tmp_path: Path) -> None:
    entries = [e for e in HYPER if b"head_count_kv" not in e]
    key = "llama.attention.head_count_kv"
    path = write(tmp_path / "x.gguf", file_of([*entries, array_entry(key, U32, [1, 1])], TENSORS))
    assert GGUFWeights.open(path).to_config()["num_key_value_heads"] == 1
    write(path, file_of([*entries, array_entry(key, U32, [1, 2])], TENSORS))
    with pytest.raises(CheckpointError, match="head_count_kv: expected an integer"):
        GGUFWeights.open(path)


def test_linear_scaling_under_its_old_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", file_of([*HYPER, entry("llama.rope.scale_linear", F32, 2.0)], TENSORS))
    assert spec_from_config(GGUFWeights.open(path).to_config()).ropes[0].factor == 2.0


def test_yarn_attention_factor_is_the_product(tmp_path: Path) -> None:
    extra = [
        entry("llama.rope.scaling.type", STRING, "yarn"),
        entry("llama.rope.scaling.factor", F32, 4.0),
        entry("llama.rope.scaling.attn_factor", F32, 0.5),
        entry("llama.rope.scaling.yarn_beta_fast", F32, 16.0),
    ]
    rope = spec_from_config(
        GGUFWeights.open(write(tmp_path / "x.gguf", file_of([*HYPER, *extra], TENSORS))).to_config()
    ).ropes[0]
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
    assert rope.beta_fast == 16.0


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    tensors = {**TENSORS, "model.norm.weight": f32(floats(8))}
    with pytest.raises(CheckpointError, match=r"expected one tensor for 'model\.norm\.weight', got two"):
        GGUFWeights.open(write(tmp_path / "x.gguf", file_of(HYPER, tensors)))


# The real file


@pytest.mark.model
def test_smollm2(smollm2_path: Path) -> None:
    start = time.perf_counter()
    weights = GGUFWeights.open(smollm2_path)
    seconds = time.perf_counter() - start
    metadata = weights.file.metadata
    assert (len(metadata["tokenizer.ggml.tokens"]), len(metadata["tokenizer.ggml.merges"])) == (49152, 48900)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    spec = spec_from_config(weights.to_config())
    check_weights(spec, weights)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert spec.tie_word_embeddings
    assert spec.ropes[0].theta == 100000.0
    assert seconds < 0.3
    by_name = {t.name: t for t in package.GGUFReader(smollm2_path).tensors}
    for name in ("blk.7.ffn_down.weight", "blk.29.attn_q.weight", "output_norm.weight"):
        want = package.quants.dequantize(by_name[name].data, by_name[name].tensor_type)
        assert np.array_equal(weights.file.get(name), want)
