"""config.json and generation_config.json, and the llama spec that comes of them (traps 20 and 23)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.checkpoint.config import (
    Config,
    ConfigReader,
    GenerationConfig,
    config_dtype,
    load_config,
    load_generation_config,
)
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError, InvalidArgument, KvcoreError
from kvcore.models.families import FAMILIES, spec_from_config
from kvcore.models.rope_table import RopeTable
from kvcore.models.spec import ActivationSpec, DecoderSpec, MlpSpec, NormSpec

REFERENCE = Path(__file__).parent / "data" / "reference"

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> DecoderSpec:
    return spec_from_config(Config({**LLAMA, **changes}, "here/config.json"))


def shape(spec: DecoderSpec, role: str) -> tuple[int, ...]:
    return spec.tensor(role, 0).shape


@pytest.mark.parametrize("folder", sorted(REFERENCE.glob("llama*")), ids=lambda f: f.name)
def test_both_styles_give_the_same_spec(folder: Path) -> None:
    spec = spec_from_config(load_config(folder))
    if (folder / "config.v4.json").exists():
        old = load_config(folder / "config.v4.json")
        assert spec_from_config(old) == spec
        assert config_dtype(old) == config_dtype(load_config(folder)) == "bfloat16"


def test_defaults_are_those_of_transformers() -> None:
    spec = llama(num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.norm) == (4, 6, NormSpec("rms", 1e-6))
    assert spec.layers[0].mlp == MlpSpec(40, ActivationSpec("silu"))
    (rope,) = spec.ropes
    assert (spec.max_position_embeddings, rope.theta, rope.kind) == (2048, 10000.0, "default")
    assert not spec.tie_word_embeddings


def test_head_dim_given_null_or_absent() -> None:
    assert shape(llama(head_dim=8), "q_proj.weight") == (32, 24)
    assert shape(llama(head_dim=8), "o_proj.weight") == (24, 32)
    assert shape(llama(head_dim=8), "k_proj.bias") == (16,)
    for spec in (llama(head_dim=None), llama()):
        assert spec.head_dim == 6
        assert shape(spec, "q_proj.weight") == (24, 24)
        assert shape(spec, "v_proj.weight") == (12, 24)


def test_hidden_sizes_may_be_odd_where_head_dim_is_given() -> None:
    spec = llama(hidden_size=23, head_dim=6)
    assert shape(spec, "q_proj.weight") == (24, 23)
    assert shape(llama(hidden_size=5, num_attention_heads=1, num_key_value_heads=1, head_dim=2), "o_proj.weight") == (
        5,
        2,
    )


def test_partial_rotary_factor() -> None:
    for changes in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        assert llama(head_dim=8, **changes).ropes[0].rotary_dim == 4


def test_biases_may_be_there_and_must_be_if_the_configuration_says_so() -> None:
    assert not llama().tensor("o_proj.bias", 0).required
    assert llama(attention_bias=True).tensor("o_proj.bias", 0).required
    assert not llama(attention_bias=True).tensor("down_proj.bias", 0).required
    assert llama(mlp_bias=True).tensor("down_proj.bias", 0).required


def test_tensor_names() -> None:
    spec = llama()
    assert spec.tensor("q_proj.weight", 1).name == "model.layers.1.self_attn.q_proj.weight"
    assert spec.tensor("lm_head.weight").required
    assert not llama(tie_word_embeddings=True).tensor("lm_head.weight").required
    names = [t.name for t in spec.all_tensors()]
    assert len(names) == len(set(names)) == 3 + 2 * 16
    with pytest.raises(InvalidArgument, match="layer"):
        spec.tensor("q_proj.weight", 2)
    with pytest.raises(InvalidArgument, match="no tensor 'router'"):
        spec.tensor("router", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, r"model_type: expected a supported model type \(.*llama.*\), got no such key"),
        ({"model_type": "mamba"}, r"model_type: expected a supported model type .*, got \"mamba\""),
        ({"model_type": 3}, "model_type: expected a string"),
        ({"vocab_size": None}, "vocab_size: expected an integer of at least 1, got null"),
        ({"vocab_size": "100"}, r'vocab_size: expected an integer of at least 1, got "100" \(str\)'),
        ({"vocab_size": True}, r"vocab_size: expected an integer of at least 1, got true \(bool\)"),
        ({"vocab_size": 2**31}, "vocab_size: expected an integer of at most 2147483647"),
        ({"hidden_size": -24}, "hidden_size: expected an integer of at least 1, got -24"),
        ({"hidden_size": 24.0}, r"hidden_size: expected an integer of at least 1, got 24.0 \(float\)"),
        ({"hidden_size": 26}, r"hidden_size: expected a multiple of num_attention_heads \(4\)"),
        ({"hidden_size": 12}, r"head_dim .*: expected an even number, got 3"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"head_dim": 258}, "head_dim: expected an integer of at most 256, got 258"),
        ({"hidden_size": 2048}, r"head_dim .*: expected an integer of at most 256, got 512"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0] * 3}}, "one of default, .*, got \"factors\""),
        ({"head_dim": 0}, "head_dim: expected an integer of at least 1, got 0"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: expected a divisor of num_attention_heads \(4\), got 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer of at most 10000"),
        ({"intermediate_size": []}, "intermediate_size: expected an integer"),
        ({"hidden_act": "mish"}, 'hidden_act: expected one of silu, swish, gelu, .*, got "mish"'),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps: expected a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({"attention_bias": 1}, "attention_bias: expected true or false"),
        ({"rope_theta": -1}, "rope_theta: expected a number"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: rope_type: expected a string, got no such key"),
        ({"rope_scaling": {"type": "warp"}}, 'rope_scaling: type: expected one of default, .*, got "warp"'),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor: expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "rope_scaling: factor: expected a number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 0.5}}, "factor: expected a number of at least 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim: expected at least 4"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 64}}, "high_freq_factor: expected a number greater"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32}}, "beta_fast: expected"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor: expected a share of head_dim"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor: expected a share of head_dim"),
    ],
)  # fmt: skip
def test_nonsense_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as info:
        llama(**changes)
    assert str(info.value).startswith("here/config.json: ")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "factors"])},
    optional={
        key: st.floats() | st.integers() | _JSON
        for key in ("factor", "rope_theta", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
                    "mscale_all_dim", "attention_factor", "original_max_position_embeddings", "truncate", "factors")
    },
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "hidden_act", "rope_theta", "rms_norm_eps"]), _JSON), _ROPE)
def test_any_configuration_gives_a_spec_or_an_error_that_names_its_key(changes: dict[str, Any], rope: Any) -> None:
    try:
        spec = llama(**changes, rope_parameters=rope)
    except CheckpointError as error:
        assert str(error).startswith("here/config.json: ")  # noqa: PT017
        return
    if spec.head_dim < 1000:
        RopeTable(*spec.ropes).cos_sin([0, 5, 100_000], 3)


def test_families_have_their_names() -> None:
    assert set(FAMILIES) >= {"llama"}


def test_generation_config_joins_all_ends() -> None:
    got = GenerationConfig.merge({"eos_token_id": 5, "bos_token_id": 1}, {"eos_token_id": [5, 7], "temperature": 0.6})
    assert got.eos_token_ids == (5, 7)
    assert (got.bos_token_id, got.pad_token_id) == (1, None)
    assert dict(got.defaults) == {"temperature": 0.6}
    assert GenerationConfig.merge({"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert GenerationConfig.merge({"eos_token_id": 9}, {"eos_token_id": 8}).eos_token_ids == (8, 9)
    assert GenerationConfig.merge({}).eos_token_ids == ()
    assert GenerationConfig.merge({"eos_token_id": None}, {}).eos_token_ids == ()


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [1, "x"], {"id": 2}])
def test_token_ids_that_are_none(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: expected a token id"):
        GenerationConfig.merge({}, Config({"eos_token_id": value}, "generation_config.json"))


def test_generation_config_file(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path, {"eos_token_id": 2}).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"_from_model_config": true, "top_p": 0.9, "eos_token_id": 3}')
    got = load_generation_config(tmp_path, {"eos_token_id": 2})
    assert got.eos_token_ids == (3, 2)
    assert dict(got.defaults) == {"top_p": 0.9}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON object, got"):
        load_generation_config(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100_000, b'{"a": ' + b"1" * 10_000 + b"}",
     b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
)  # fmt: skip
def test_files_that_are_not_a_configuration(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError) as info:
        load_config(tmp_path)
    assert str(info.value).startswith(str(path))


def test_missing_or_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file, got no such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_config(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no space
    with pytest.raises(CheckpointError, match=r"huge\.json: expected a JSON file of at most"):
        load_config(huge)


def test_load_config_knows_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 0}))
    with pytest.raises(CheckpointError) as info:
        spec_from_config(load_config(tmp_path))
    assert str(info.value).startswith(f"{tmp_path / 'config.json'}: vocab_size: ")


def test_config_dtype() -> None:
    assert config_dtype({"dtype": "float16", "torch_dtype": "float32"}) == "float16"
    assert config_dtype({"torch_dtype": "torch.bfloat16"}) == "bfloat16"
    assert config_dtype({}) is None
    with pytest.raises(CheckpointError, match="dtype: expected a string"):
        config_dtype({"dtype": 16})


def test_reader_takes_only_objects() -> None:
    with pytest.raises(CheckpointError, match="expected a JSON object, got 3"):
        ConfigReader(3)  # type: ignore[arg-type]


def test_checkpoint_error_is_a_kvcore_error() -> None:
    assert issubclass(CheckpointError, KvcoreError)


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_devices_and_pipes_are_refused(tmp_path: Path, kind: str) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        if kind == "device":
            (tmp_path / name).symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"/config\.json: .*expected a regular file"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*expected a regular file"):
        load_generation_config(tmp_path, {})
    with pytest.raises(CheckpointError, match=r"index\.json: .*expected a regular file"):
        SafetensorsWeights.open(tmp_path)
