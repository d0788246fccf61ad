"""Every architecture of GGUF that is read: a reference folder, converted, is the same model again."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufs import (
    ARCHITECTURE_OF,
    BOOL,
    F32,
    F64,
    I64,
    STRING,
    U32,
    U64,
    array_entry,
    convert,
    entries_of,
    entry,
    f32,
    file_of,
    tensors_of,
    write,
)
from kvcore import LLM
from kvcore.checkpoint.dequantize import dequantize
from kvcore.checkpoint.gguf import GGUFFile, GGUFWeights
from kvcore.checkpoint.gguf.architectures import ARCHITECTURES
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError
from kvcore.models.families import FAMILIES
from kvcore.plan import find_model, make_plan
from models import EXACT, expected

REFERENCE = Path(__file__).parent / "data" / "reference"

UNSAID: dict[str, dict[str, Any]] = {
    # what GGUF has no key for, as llama.cpp takes it
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
    "mistral_swa8": {"sliding_window": None},
    "t5": {"relative_attention_max_distance": 128},
}
NOT_IN_GGUF = ("llama_rope_llama3", "llama_rope_dynamic")
"""Rope that GGUF stores otherwise (tests/test_gguf.py) or not at all."""

DECODERS = [
    folder.name
    for folder in sorted(REFERENCE.iterdir())
    if (folder / "config.json").exists()
    and "is_encoder_decoder" not in (folder / "config.json").read_text()
    and folder.name not in NOT_IN_GGUF
]
FOLDERS = [*DECODERS, "t5", "t5_gated"]


def folder_of(name: str, tmp_path: Path, **changes: Any) -> Path:
    """A copy whose configuration says no more than GGUF can."""
    folder = tmp_path / name
    shutil.copytree(REFERENCE / name, folder)  # makes tmp_path, too
    config = json.loads((folder / "config.json").read_text()) | UNSAID.get(name, {}) | changes
    if name == "deepseek_v2":
        config["rope_parameters"]["mscale"] = config["rope_parameters"]["mscale_all_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_tensors_come_back(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    weights = GGUFWeights.open(convert(folder, tmp_path / "x.gguf"))
    original = SafetensorsWeights.open(folder)
    assert weights.names() == original.names()
    for tensor in weights.names():
        want = original.get(tensor).astype(np.float32)
        assert weights.shape(tensor) == want.shape
        got = weights.get(tensor)
        assert got.dtype == weights.dtype(tensor)
        assert got.flags.c_contiguous
        # of Gemma's norms 1 + w is stored, rounded to float32
        tolerance = 1e-7 if name.startswith("gemma") and tensor.endswith("norm.weight") else 0
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=0, atol=tolerance, err_msg=tensor)
    assert weights.unused() == []


@pytest.mark.parametrize("name", FOLDERS)
def test_the_configuration_comes_back(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    got = GGUFWeights.open(convert(folder, tmp_path / "x.gguf")).to_config()
    want = json.loads((folder / "config.json").read_text())
    if got["model_type"] == "llama":  # what a mistral without its window is
        want["model_type"] = "llama"
    if name == "t5_gated":  # as files of transformers 4 say that there is an output matrix
        want["tie_word_embeddings"] = False
    renamed = {"num_experts": "num_local_experts"} if name == "qwen3_moe" else {}
    compared = 0
    for key, value in got.items():
        theirs = want.get(renamed.get(key, key))
        if theirs is None or key.endswith("token_id") or key == "rope_parameters":
            continue
        if key == "sliding_window":
            assert (value or None) == (theirs or None)
            continue
        compared += 1
        assert value == (pytest.approx(theirs, rel=1e-6) if isinstance(theirs, float) else theirs), key
    assert compared >= 9
    rope = got.get("rope_parameters") or {"rope_theta": got.get("rope_theta", 0)} | (got.get("rope_scaling") or {})
    theirs = want.get("rope_parameters", {})
    for key, value in theirs.get("full_attention", theirs).items():
        # yarn without an interval rounds outwards, and a partial factor of 1 is none
        default = {"partial_rotary_factor": 1.0, "rope_type": "default"}.get(key)
        assert rope.get(key, default) == (pytest.approx(value, rel=1e-6) if isinstance(value, (float, list)) else value)


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
def test_encoder_decoders_of_gguf(name: str, tmp_path: Path) -> None:
    """One bias by distance, which only the first layer has, in the encoder and in the decoder."""
    folder, want = folder_of(name, tmp_path), expected(name)
    encoder = {"encoder_token_ids": want["input_ids"]}
    logits = []
    for model in (folder, convert(folder, tmp_path / "x.gguf")):
        with LLM(model, **{**EXACT, "num_kv_blocks": 16}) as llm:
            logits.append(llm.logits(want["decoder_input_ids"], encoder=encoder))
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    options: dict[str, Any] = {**EXACT, "num_kv_blocks": 16}
    ids = expected(name)["input_ids"].tolist()
    with LLM(folder, **options) as llm:
        want = llm.logits(ids)
    with LLM(convert(folder, tmp_path / "x.gguf"), **options) as llm:
        got = llm.logits(ids)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 if name.startswith("gemma") else 2e-5)


@pytest.mark.parametrize("name", FOLDERS)
def test_it_is_planned_like_the_folder(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    got, want = (make_plan(find_model(path)) for path in (convert(folder, tmp_path / "x.gguf"), folder))
    assert got.parameters == want.parameters
    assert got.bytes_per_token == want.bytes_per_token
    assert not [note for note in got.notes if "files hold" in note]


def test_every_architecture_is_tried() -> None:
    kinds = [json.loads((REFERENCE / name / "config.json").read_text())["model_type"] for name in FOLDERS]
    assert {ARCHITECTURE_OF.get(kind, kind) for kind in kinds} == set(ARCHITECTURES)


def opened(tmp_path: Path, name: str, *extra: bytes, without: str = "", **tensors: Any) -> GGUFWeights:
    """A converted folder with some entries left out and others added, and with other tensors."""
    folder = folder_of(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    entries = [e for e in entries_of(config) if not without or without.encode() not in e]
    changed = {**tensors_of(config, SafetensorsWeights.open(folder)), **tensors}
    return GGUFWeights.open(write(tmp_path / "x.gguf", file_of([*entries, *extra], changed)))


def test_blocks_of_experts_and_of_rows_that_change_places(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 64, 32), np.float32)
    data = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    exps = {"blk.0.ffn_up_exps.weight": (8, (32, 64, 4), data.tobytes())}
    fused = gguf.quants.quantize(rows.reshape(-1, 32)[:192], gguf.GGMLQuantizationType.Q4_0)
    weights = opened(tmp_path, "mixtral", **exps)
    for expert in range(4):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
        blocks = weights.blocks(name)
        assert blocks is not None
        assert (blocks[0], blocks[1].tobytes()) == ("Q8_0", data[expert].tobytes())
        assert np.array_equal(dequantize("Q8_0", blocks[1].reshape(-1)), weights.get(name).reshape(-1))
    weights = opened(tmp_path / "b", "gpt_neox", **{"blk.0.attn_qkv.weight": (2, (32, 192), fused.tobytes())})
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    blocks = weights.blocks(name)
    assert blocks is not None
    assert np.array_equal(dequantize("Q4_0", blocks[1].reshape(-1)), weights.get(name).reshape(-1))
    by_head = fused.reshape(3, 4, 16, -1).swapaxes(0, 1).reshape(192, -1)
    assert np.array_equal(blocks[1], by_head)
    assert opened(tmp_path / "c", "gpt2").blocks("transformer.h.0.attn.c_attn.weight") is None


def test_keys_that_decide_between_tables(tmp_path: Path) -> None:
    window = entry("llama.attention.sliding_window", U32, 8)
    config = opened(tmp_path / "a", "mistral_swa8", window).to_config()
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 8)
    assert opened(tmp_path / "b", "phi3", without="sliding_window").to_config()["sliding_window"] is None
    pattern = [True, False, False]
    key = "gemma2.attention.sliding_window_pattern"
    config = opened(tmp_path / "c", "gemma2", array_entry(key, BOOL, pattern)).to_config()
    assert config["layer_types"] == [f"{kind}_attention" for kind in ("sliding", "full", "full")]
    config = opened(tmp_path / "d", "gemma2", array_entry(key, BOOL, [True] * 3)).to_config()
    assert config["layer_types"] == ["sliding_attention"] * 3
    with pytest.raises(CheckpointError, match="sliding_window_pattern: expected a number, or 3 booleans"):
        opened(tmp_path / "e", "gemma2", array_entry(key, BOOL, [True, False]))
    config = opened(tmp_path / "f", "gemma3_text", entry("gemma3.rope.freq_base_swa", F32, 5e4)).to_config()
    assert config["rope_local_base_freq"] == 5e4
    assert opened(tmp_path / "g", "deepseek_v2").to_config()["model_type"] == "deepseek_v2"
    v3 = opened(tmp_path / "h", "deepseek_v3", without="gating").to_config()  # older files: by the correction
    assert v3["model_type"] == "deepseek_v3"


def test_older_deepseek_files_hold_one_up_projection(tmp_path: Path) -> None:
    folder = folder_of("deepseek_v2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    entries = [e for e in entries_of(config) if b"attention.key_length" not in e and b"attention.value_length" not in e]
    entries += [entry("deepseek2.attention.key_length", U32, 20), entry("deepseek2.attention.value_length", U32, 10)]
    original = SafetensorsWeights.open(folder)
    tensors = tensors_of(config, original)
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        del tensors[f"blk.{layer}.attn_k_b.weight"], tensors[f"blk.{layer}.attn_v_b.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = f32(original.get(name).astype(np.float32))
    weights = GGUFWeights.open(write(tmp_path / "x.gguf", file_of(entries, tensors)))
    assert weights.names() == original.names()
    assert (weights.to_config()["qk_nope_head_dim"], weights.to_config()["v_head_dim"]) == (12, 10)
    assert np.array_equal(weights.get(name), original.get(name).astype(np.float32))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    nextn = {"blk.1.nextn.eh_proj.weight": f32(np.zeros((4, 4)))}
    weights = opened(tmp_path, "glm4", entry("glm4.nextn_predict_layers", U32, 1), **nextn)
    assert weights.to_config()["num_hidden_layers"] == 1
    assert not [name for name in weights.names() if ".1." in name]


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("mixtral", {"blk.0.ffn_up_exps.weight": f32(np.zeros(64))}, "'blk.0.ffn_up_exps.weight': .*two dimensions"),
        ("mixtral", {"blk.0.ffn_up_exps.weight": f32(np.zeros((5000, 1)))}, "counts up to 4096, got shape"),
        ("gpt_neox", {"blk.0.attn_qkv.weight": f32(np.zeros((190, 64)))}, "keys and values of 4 heads, got 190"),
        ("deepseek_v3", {"blk.0.attn_k_b.weight": f32(np.zeros((4, 19, 12)))}, "expected shapes .heads, rank, k."),
        ("gpt_oss", {"blk.0.ffn_up_exps.weight": f32(np.zeros((4, 31, 64)))}, "expected gate and up of one shape"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:  # noqa: PT012
        weights = opened(tmp_path, name, **tensors)
        for tensor in weights.names():
            weights.shape(tensor)
    assert "x.gguf" in str(error.value)


_EDIT = st.tuples(
    st.integers(0, 2**32),
    st.integers(0, 255).map(lambda b: bytes([b])) | st.sampled_from([b"\xff" * 8, bytes(8), b"\0\0\0\0\0\0\0\x80"]),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(_EDIT, min_size=1, max_size=4))
@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_header_gives_an_error_or_a_model(name: str, edits: list[tuple[int, bytes]], tmp_path: Path) -> None:
    """Whatever the numbers in the header are: an error that names the file, and no large allocation."""
    path = tmp_path / "x.gguf"
    if not (tmp_path / name).exists():
        convert(folder_of(name, tmp_path), tmp_path / "whole.gguf")
    data = bytearray((tmp_path / "whole.gguf").read_bytes())
    header = min(tensor.begin for tensor in GGUFFile(tmp_path / "whole.gguf").tensors.values())
    for position, content in edits:
        data[position % header : position % header + len(content)] = content
    path.write_bytes(data)
    tracemalloc.start()
    try:
        weights = GGUFWeights.open(path)
        for tensor in weights.names():
            weights.shape(tensor)
            weights.dtype(tensor)
        FAMILIES.get(weights.to_config()["model_type"], dict)(weights.to_config())
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


VALUES = st.sampled_from(
    [
        (U32, 0), (U32, 1), (U32, 2**32 - 1), (U64, 2**64 - 1), (I64, -1), (F32, float("nan")), (F32, float("inf")),
        (F32, -1.0), (F64, 1e308), (BOOL, 0), (BOOL, 1), (STRING, ""), (STRING, "yarn"), (STRING, "linear"),
    ]
)  # fmt: skip


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", FOLDERS)
def test_any_value_under_any_key(name: str, data: st.DataObject, tmp_path: Path) -> None:
    config = json.loads((REFERENCE / name / "config.json").read_text())
    entries = entries_of(config)
    at = data.draw(st.integers(1, len(entries) - 1))
    length = int.from_bytes(entries[at][:8], "little")
    key = entries[at][8 : 8 + length].decode()
    kind, value = data.draw(VALUES)
    changed = data.draw(st.sampled_from(["one", "array", "missing"]))
    entries[at : at + 1] = {
        "one": [entry(key, kind, value)],
        "array": [array_entry(key, kind, [value] * data.draw(st.integers(0, 3)))],
        "missing": [],
    }[changed]
    extra = data.draw(st.sampled_from(["", "rope.scaling.type", "nextn_predict_layers", "expert_count",
                                       "attention.sliding_window_pattern", "attention.sliding_window"]))  # fmt: skip
    if extra:
        entries.append(entry(f"{ARCHITECTURE_OF.get(config['model_type'], config['model_type'])}.{extra}", kind, value))
    tensors = tensors_of(config, SafetensorsWeights.open(REFERENCE / name))
    path = write(tmp_path / "x.gguf", file_of(entries, tensors))
    try:
        weights = GGUFWeights.open(path)
        for tensor in weights.names():
            weights.get(tensor)
        FAMILIES.get(weights.to_config()["model_type"], dict)(weights.to_config())
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
