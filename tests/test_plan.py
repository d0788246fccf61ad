"""``kvcore plan``: what a model's weights and cache take, and how many requests fit."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore.cli as cli
from ggufs import convert
from kvcore import LLM, KVCache
from kvcore.checkpoint import pull
from kvcore.checkpoint.config import Config
from kvcore.errors import CheckpointError, InvalidArgument, KvcoreError
from kvcore.models.shape import FAMILIES, attention_heads, text_config
from kvcore.plan import (
    LayerCache,
    Model,
    Plan,
    as_dict,
    as_text,
    cache_groups,
    cache_layers,
    count_parameters,
    find_model,
    format_size,
    known_models,
    make_plan,
    parse_size,
    parse_tokens,
)
from kvcore.plan.budget import held_blocks, kept_tokens
from kvcore.plan.formats import FORMATS, QUANTIZATIONS
from kvcore.plan.shapes import SHAPES
from kvcore.plan.sizes import MAX_BYTES, UNITS

REFERENCE = Path(__file__).parent / "data" / "reference"
REAL = json.loads((REFERENCE.parent / "family_configs.json").read_text(encoding="utf-8"))
"""Small models of every family: configurations as transformers 5 (and 4) writes them, and shapes of their tensors."""

CONFIGS = {
    f"{name}-{style}": REAL[name][style] for name in REAL for style in ("config", "config_v4") if style in REAL[name]
}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def plan(name: str, **options: Any) -> Plan:
    return make_plan(Model(name, "built in", Config(SHAPES[name], name)), **options)


def plan_of(config: dict[str, Any], **options: Any) -> Plan:
    return make_plan(Model("test", "memory", Config(config)), **options)


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, **changes,
    }  # fmt: skip


# -- the numbers everybody knows -------------------------------------------------------------------------------------


def test_llama_3_8b_takes_128_kib_a_token() -> None:
    found = plan("llama-3-8b")
    assert found.format.name == "bfloat16"
    assert found.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * KIB
    assert plan("llama-3-8b", context=8 * 1024).request_bytes == GIB
    assert plan("llama-3-8b", context=128 * 1024).request_bytes == 16 * GIB
    assert abs(found.weight_bytes / (16 * GIB) - 1) < 0.07  # about as much as 128K tokens


def test_llama_3_70b_takes_two_and_a_half_times_that() -> None:
    found = plan("llama-3-70b").bytes_per_token
    assert found == 320 * KIB
    assert 2 * found == 5 * plan("llama-3-8b").bytes_per_token


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_halves(dtype: str) -> None:
    assert plan("llama-3-8b", kv_cache_dtype=dtype).bytes_per_token == 64 * KIB
    assert plan("llama-3-8b", kv_cache_dtype=dtype, scale_mode="static").bytes_per_token == 64 * KIB


def test_deepseek_v3_needs_less_than_llama_3_8b() -> None:
    found = plan("deepseek-v3")
    assert found.bytes_per_token == 61 * 576 * 2 == 70_272
    assert found.all_heads_bytes_per_token == 61 * 128 * (192 + 128) * 2
    assert found.bytes_per_token < plan("llama-3-8b").bytes_per_token
    (group,) = found.groups
    cache = group.group.cache
    assert (cache.kind, cache.num_kv_heads, cache.head_dim, cache.v_head_dim) == ("latent", 1, 576, 512)
    assert (cache.rank, cache.rope_dim, group.padding) == (512, 64, 0)


def test_grouped_heads_take_a_quarter() -> None:
    found = plan("llama-3-8b")
    assert found.all_heads_bytes_per_token == 4 * found.bytes_per_token


def test_a_layer_of_llama_3_8b() -> None:
    layers = plan("llama-3-8b").parameters.layers
    assert {(layer.attention, layer.mlp) for layer in layers} == {(41_943_040, 176_160_768)}
    assert [round(count / 1e6) for count in (layers[0].attention, layers[0].mlp)] == [42, 176]
    assert round(100 * 176_160_768 / (41_943_040 + 176_160_768)) == 81


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # the sizes of the published checkpoints
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("smollm2", 134_515_008),
        ("mistral-7b", 7_241_732_096),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("phi-3-mini-4k", 3_821_079_552),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-v2-lite", 15_706_484_224),
        ("gpt2", 124_439_808),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("whisper-base", 72_593_920),
        ("whisper-small", 241_734_912),
        ("whisper-large-v3", 1_543_490_560),
    ],
)
def test_parameters_of_published_models(name: str, total: int) -> None:
    assert count_parameters(SHAPES[name]).total == total


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral-8x7b", "46.7", "12.9"), ("deepseek-v3", "671.0", "37.6"), ("qwen3-30b-a3b", "30.5", "3.4")],
)
def test_active_parameters(name: str, total: str, active: str) -> None:
    found = count_parameters(SHAPES[name])
    assert (f"{found.total / 1e9:.1f}", f"{found.active / 1e9:.1f}") == (total, active)


def test_tied_embeddings_count_once() -> None:
    apart, tied = (plan_of(llama(tie_word_embeddings=tied)) for tied in (False, True))
    assert apart.parameters.total - tied.parameters.total == 100 * 64
    assert tied.parameters.output == 0
    assert apart.weight_bytes - tied.weight_bytes == 100 * 64 * 2


# -- families --------------------------------------------------------------------------------------------------------

FULL = {
    "llama_gqa": (3, 2, 16), "llama_tied_bias_headdim": (3, 4, 24), "llama_rope_llama3": (2, 2, 32),
    "llama_rope_linear": (2, 2, 16), "llama_rope_dynamic": (2, 2, 16), "llama_rope_yarn": (2, 2, 32),
    "qwen2": (3, 2, 16), "qwen3": (2, 2, 32), "gemma": (2, 1, 32), "phi3_longrope": (3, 4, 16), "olmo2": (3, 2, 16),
    "granite": (3, 2, 16), "smollm3": (4, 2, 12), "cohere": (2, 2, 16), "glm4": (2, 2, 16), "stablelm": (2, 4, 12),
    "gpt2": (2, 4, 12), "gpt_neox": (2, 4, 16), "mixtral": (2, 2, 12), "qwen2_moe": (3, 4, 12),
    "qwen3_moe": (2, 2, 16),
}  # fmt: skip
"""Layers, KV heads and head_dim of the models whose layers all keep everything, by hand."""

SLIDING = {
    "mistral_swa8": (2, 20, 8, "sss"), "phi3": (2, 16, 24, "sss"), "gemma2": (2, 16, 8, "sfs"),
    "gemma3_text": (1, 16, 8, "sssssf"), "cohere2": (2, 12, 8, "sssf"), "gpt_oss": (2, 16, 8, "sfs"),
}  # fmt: skip
"""KV heads, head_dim, window, and which layers slide."""

ENCODERS = {"t5": (2, 4, 12), "t5_gated": (2, 3, 12), "bart": (2, 2, 16), "marian": (2, 4, 10), "whisper": (2, 4, 12)}
"""Layers, heads and head_dim of the decoder."""


def expected_layers(name: str) -> list[LayerCache]:
    if name in FULL:
        layers, heads, dim = FULL[name]
        return [LayerCache("full", heads, dim, dim, layer=i) for i in range(layers)]
    if name in SLIDING:
        heads, dim, window, kinds = SLIDING[name]
        return [
            LayerCache("sliding_window", heads, dim, dim, window, layer=i)
            if kind == "s"
            else LayerCache("full", heads, dim, dim, layer=i)
            for i, kind in enumerate(kinds)
        ]
    if name in ENCODERS:
        layers, heads, dim = ENCODERS[name]
        kinds = [(kind, i) for kind in ("full", "cross") for i in range(layers)]
        return [LayerCache(kind, heads, dim, dim, layer=i) for kind, i in kinds]  # type: ignore[arg-type]
    assert name in ("deepseek_v2", "deepseek_v3")
    return [LayerCache("latent", 1, 28, 20, None, 20, 8, i) for i in range(3)]


@pytest.mark.parametrize("case", CONFIGS)
def test_what_every_family_keeps(case: str) -> None:
    assert cache_layers(CONFIGS[case]) == expected_layers(case.rsplit("-", 1)[0])


def part_of(name: str) -> str:
    """Which part of a model a tensor belongs to."""
    if not re.search(r"\.\d+\.", name):
        if re.search(r"(^|\.)(embed_tokens|wte|embed_in|shared)\.", name):
            return "embedding"
        return "output" if re.search(r"^(lm_head|embed_out)\.", name) else "other"
    if "relative_attention_bias" in name:
        return "other"
    if re.search(r"(attn|attention|SelfAttention|EncDecAttention)\.", name):
        return "attention"
    return "norms" if re.search(r"norm|ln_", name) else "mlp"


@pytest.mark.parametrize("case", CONFIGS)
def test_parameters_are_those_of_the_tensors(case: str) -> None:
    expected = dict.fromkeys(("embedding", "output", "attention", "mlp", "norms", "other"), 0)
    for name, shape in REAL[case.rsplit("-", 1)[0]]["tensors"].items():
        expected[part_of(name)] += math.prod(shape)
    found = count_parameters(CONFIGS[case])
    assert {part: getattr(found, part) for part in expected} == expected
    assert found.total == sum(expected.values())


def test_every_family_has_a_case() -> None:
    assert {text_config(config)["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def windows(config: dict[str, Any]) -> list[int | None]:
    return [cache.window for cache in cache_layers(config)]


def test_layer_types_win_over_patterns() -> None:
    for name, pattern in (
        ("gemma2", {}),
        ("gemma3_text", {"sliding_window_pattern": 2}),
        ("cohere2", {}),
        ("gpt_oss", {}),
    ):
        config = {**REAL[name]["config"], **pattern}
        config["layer_types"] = ["full_attention", "sliding_attention", *config["layer_types"][2:]]
        assert windows(config)[:2] == [None, 8]
    qwen = {**REAL["qwen2"]["config_v4"], "use_sliding_window": True, "max_window_layers": 0}
    assert windows({**qwen, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}) == [
        None,
        8,
        None,
    ]


def test_windows_that_nobody_uses() -> None:
    qwen = REAL["qwen2"]["config_v4"]
    assert (qwen["sliding_window"], qwen["use_sliding_window"]) == (8, False)
    assert windows(qwen) == [None] * 3
    assert windows({**qwen, "use_sliding_window": True}) == [None, None, 8]
    assert windows({**qwen, "use_sliding_window": True, "max_window_layers": 0}) == [8] * 3
    assert windows({**qwen, "use_sliding_window": True, "max_window_layers": 3}) == [None] * 3
    # not even looked at, as transformers writes 0 here
    assert windows({**REAL["qwen2_moe"]["config"], "sliding_window": 0}) == [None] * 3
    # a llama has no windows, whatever its file says
    assert windows(llama(sliding_window=8, layer_types=["sliding_attention"] * 2)) == [None] * 2


def test_patterns() -> None:
    gemma = {**REAL["gemma3_text"]["config_v4"], "num_hidden_layers": 13}
    assert [i for i, window in enumerate(windows(gemma)) if window is None] == [5, 11]
    del gemma["sliding_window_pattern"]
    assert [i for i, window in enumerate(windows(gemma)) if window is None] == [5, 11]
    assert [i for i, w in enumerate(windows({**gemma, "sliding_window_pattern": 4})) if w is None] == [3, 7, 11]
    assert [i for i, w in enumerate(windows({**gemma, "_sliding_window_pattern": 4})) if w is None] == [3, 7, 11]
    assert windows(REAL["gemma2"]["config_v4"]) == [8, None, 8]
    assert windows({**REAL["smollm3"]["config_v4"], "use_sliding_window": True, "sliding_window": 8}) == [
        None, None, None, 8,
    ]  # fmt: skip


def test_a_window_that_is_null_or_left_out() -> None:
    mistral = dict(REAL["mistral_swa8"]["config"])
    assert windows({**mistral, "sliding_window": None}) == [None] * 3
    del mistral["sliding_window"]
    assert windows(mistral) == [4096] * 3
    with pytest.raises(CheckpointError, match="sliding_window: expected a window"):
        cache_layers({**REAL["gemma2"]["config"], "sliding_window": None})


def test_head_dim_that_is_null_or_left_out() -> None:
    assert attention_heads(llama(head_dim=24)).k_dim == 24
    assert attention_heads(llama(head_dim=None)).k_dim == 16
    assert attention_heads(llama()).k_dim == 16
    qwen = dict(REAL["qwen3"]["config"])
    assert attention_heads({**qwen, "head_dim": None}).k_dim == 16
    del qwen["head_dim"]
    assert attention_heads(qwen).k_dim == 128


def test_a_model_that_reads_pictures_too() -> None:
    found = plan("gemma-3-4b")
    heads = attention_heads(SHAPES["gemma-3-4b"])
    assert (found.model_type, heads.queries, heads.kv, heads.k_dim) == ("gemma3_text", 8, 4, 256)
    assert found.dtype == "bfloat16"
    kinds = [cache.kind for cache in cache_layers(SHAPES["gemma-3-4b"])]
    assert [i for i, kind in enumerate(kinds) if kind == "full"] == [5, 11, 17, 23, 29]
    assert found.parameters.total == 3_880_263_168  # 4,300,079,472 with the vision tower
    assert any("not counted" in note for note in found.notes)


def test_groups_keep_the_order_of_layers() -> None:
    groups = cache_groups(cache_layers(REAL["gemma3_text"]["config"]))
    assert [(group.cache.kind, group.layers) for group in groups] == [
        ("sliding_window", (0, 1, 2, 3, 4)),
        ("full", (5,)),
    ]
    groups = cache_groups(cache_layers(REAL["whisper"]["config"]))
    assert [(group.cache.kind, group.layers) for group in groups] == [("full", (0, 1)), ("cross", (0, 1))]


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mode", "both"),
    [
        # bytes of K and V of one head of 128 dimensions
        ("float32", "static", 1024),
        ("float16", "static", 512),
        ("bfloat16", "static", 512),
        ("fp8_e4m3", "static", 256),
        ("fp8_e5m2", "static", 256),
        ("fp8_e4m3", "per_token_head", 256 + 8),
        ("fp8_e5m2", "per_token_head", 256 + 8),
        ("int8", "per_token_head", 256 + 8),
        ("int4", "per_token_head", 64 + 16 * 4 + 64 + 4 * 4),
    ],
)
def test_formats(dtype: str, mode: str, both: int) -> None:
    found = plan("llama-3-8b", kv_cache_dtype=dtype, scale_mode=mode)
    assert found.bytes_per_token == 32 * 8 * both
    assert FORMATS[dtype].k_bytes(0, mode) == FORMATS[dtype].v_bytes(0, mode) == 0


def test_a_group_of_int4_may_be_smaller() -> None:
    assert [FORMATS["int4"].v_bytes(dims, "per_token_head") for dims in (2, 32, 34, 80)] == [5, 20, 25, 52]
    assert [FORMATS["int4"].k_bytes(dims, "per_token_head") for dims in (2, 8, 10)] == [5, 8, 13]


def test_a_latent_row_has_one_scale_and_no_v() -> None:
    assert plan("deepseek-v3", kv_cache_dtype="int8").bytes_per_token == 61 * (576 + 4)
    assert plan("deepseek-v3", kv_cache_dtype="fp8").bytes_per_token == 61 * 576
    assert plan("deepseek-v3", kv_cache_dtype="int4").bytes_per_token == 61 * (288 + 72 * 4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("head_dim", [2, 16, 20, 64, 80])
def test_the_cache_takes_what_was_planned(dtype: str, head_dim: int) -> None:
    found = plan_of(llama(head_dim=head_dim, num_hidden_layers=3), kv_cache_dtype=dtype)
    cache = KVCache(num_layers=3, num_kv_heads=2, head_dim=head_dim, num_blocks=1, dtype=dtype)
    assert found.bytes_per_token == 2 * 3 * 2 * head_dim * FORMATS[dtype].bits // 8
    assert found.bytes_per_token + found.padding_per_token == cache.bytes_per_token
    assert (found.padding_per_token == 0) == (head_dim % 16 == 0)


def test_auto_goes_by_the_weights() -> None:
    assert plan_of(llama(torch_dtype="float32")).format.name == "float32"
    assert plan_of(llama(dtype="float16")).format.name == "bfloat16"
    assert plan_of(llama(dtype="float8_e4m3fn")).dtype == "bfloat16"
    assert plan_of(llama(torch_dtype="float32"), dtype="bf16").format.name == "bfloat16"
    assert plan_of(llama(), dtype="f32").weight_bytes == 2 * plan_of(llama()).weight_bytes


def test_windows_bound_a_request() -> None:
    found = plan("gemma-3-1b", context=32768)
    sliding, full = found.groups
    assert found.bytes_per_token == 26 * KIB
    assert found.growth_per_token == 4 * KIB
    assert (sliding.tokens, sliding.bytes) == (512, 512 * 22 * KIB)
    assert (full.tokens, full.bytes) == (32768, 32768 * 4 * KIB)
    assert found.request_bytes == (11 + 128) * MIB
    assert sliding.blocks == 33  # a window that begins within a block touches one more
    short = plan("gemma-3-1b", context=100)
    assert [cost.tokens for cost in short.groups] == [100, 100]
    assert [cost.blocks for cost in short.groups] == [7, 7]


@given(window=st.integers(1, 200), context=st.integers(1, 500))
def test_blocks_of_a_window(window: int, context: int) -> None:
    """Against decoding token by token."""
    cache = LayerCache("sliding_window", 1, 2, 2, window)
    most = 0
    for position in range(context):
        first = max(position - window + 1, 0)
        most = max(most, position // 16 - first // 16 + 1)
    assert most <= held_blocks(cache, context) <= most + 1
    assert context < 2 * window + 32 or held_blocks(cache, context) == most
    assert kept_tokens(cache, context) == min(window, context)
    assert held_blocks(LayerCache("full", 1, 2, 2), context) == -(-context // 16)
    assert held_blocks(LayerCache("none"), context) == 0


def test_cross_attention_is_written_once() -> None:
    found = plan("whisper-small", context=100, dtype="bf16")
    _, cross = found.groups
    assert (cross.group.cache.kind, cross.tokens) == ("cross", 1500)
    assert found.bytes_per_token == found.cross_bytes_per_token == 2 * 12 * 12 * 64 * 2
    assert found.request_bytes == 100 * found.bytes_per_token + 1500 * found.cross_bytes_per_token
    assert plan("whisper-small", context=100, source_tokens=10).groups[1].tokens == 10
    assert plan("t5-small").source_tokens == 512
    with pytest.raises(InvalidArgument, match="source_tokens: expected a model with an encoder"):
        plan("llama-3-8b", source_tokens=10)


# -- requests that fit -----------------------------------------------------------------------------------------------


def test_requests_that_fit() -> None:
    found = plan("llama-3-8b", memory=24 * GIB, context=1000)
    left = 24 * GIB - 2 * 8_030_261_248
    assert found.cache_memory == left
    paged, power, longest = found.reservations
    assert (paged.way, paged.tokens, paged.bytes) == ("paged", 1008, 1008 * 128 * KIB)
    assert (power.way, power.tokens, power.bytes) == ("power_of_two", 1024, 128 * MIB)
    assert (longest.way, longest.tokens, longest.bytes) == ("max_length", 8192, GIB)
    assert [item.requests for item in found.reservations] == [left // item.bytes for item in found.reservations]
    assert [item.requests for item in found.reservations] == [73, 72, 9]
    assert [item.used for item in found.reservations] == [1000 * 128 * KIB] * 3
    assert paged.used / paged.bytes > 0.96
    assert longest.used / longest.bytes < 0.20


def test_a_power_of_two_is_no_more_than_the_maximum() -> None:
    assert plan("qwen3-8b", context=40000).reservations[1].tokens == 40960
    assert plan("llama-3-8b", context=1024).reservations[1].tokens == 1024
    assert plan("llama-3-8b", context=1025).reservations[1].tokens == 2048


def test_weights_that_do_not_fit() -> None:
    found = plan("llama-3-70b", memory=24 * GIB)
    assert found.cache_memory is not None
    assert found.cache_memory < 0
    assert [item.requests for item in found.reservations] == [0, 0, 0]
    assert "the weights do not fit, they take 131.42 GiB" in as_text(found)
    exact = plan("llama-3-8b", memory=2 * 8_030_261_248)
    assert "the weights take all of it" in as_text(exact)


def test_more_than_the_model_was_made_for() -> None:
    found = plan("llama-3-8b", context=131072)
    assert found.reservations[2].tokens == 131072
    assert found.notes == ("the model was made for 8,192 tokens; a context of 131,072 is more",)


def test_no_longest_request() -> None:
    config = {key: value for key, value in REAL["t5"]["config"].items() if key != "n_positions"}
    found = plan_of(config)
    assert found.max_length is None
    assert [item.way for item in found.reservations] == ["paged", "power_of_two"]
    assert as_dict(found)["max_length"] is None
    as_text(found)


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30), ("24GB", 24 * 10**9), ("512MiB", 512 << 20), ("1.5 TiB", 3 << 39), ("7", 7), ("7B", 7),
        ("24gib", 24 << 30), (" 1KiB ", 1024), ("0.5kb", 500), ("1.0009KiB", 1024), (4096, 4096),
        (str(MAX_BYTES), MAX_BYTES),
    ],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "-1GiB", "1e3", "24XB", "24 G iB", "24G", "0", "0GiB", "0.4B", "1.GiB", ".5GiB", "1,5GiB",
     "nan", "inf", "٣GiB", "²", "9223372036854775808", "99999999999999999999PiB", "1" * 5000, "1GiB\n2", "24GiB;",
     True, "1_000"],
)  # fmt: skip
def test_no_sizes(text: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^memory: expected ") as caught:
        parse_size(text, "memory")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@given(number=st.integers(0, 2**70), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
@example(number=MAX_BYTES, unit="", space="")
def test_any_whole_size(number: int, unit: str, space: str) -> None:
    size = number * UNITS[unit]
    text = f"{number}{space}{unit}" if unit else str(number)
    if 1 <= size <= MAX_BYTES and number < 10**20:
        assert parse_size(text) == parse_size(text.lower()) == parse_size(f"{number}.0{unit}") == size
    else:
        with pytest.raises(InvalidArgument):
            parse_size(text)


@given(st.text(max_size=30) | st.from_regex(r"[0-9.]{0,25} ?[KMGTkmgt]?[i]?[Bb]?", fullmatch=True))
def test_any_text_is_a_size_or_an_error(text: str) -> None:
    try:
        size = parse_size(text)
    except InvalidArgument as error:
        message = str(error)
    else:
        message = ""
        assert 1 <= size <= MAX_BYTES
        assert parse_size(str(size)) == size
    assert "\n" not in message


@given(st.integers(1, 2**62))
def test_sizes_are_shown_as_they_are(size: int) -> None:
    text = format_size(size)
    shown = text.replace(",", "").replace("bytes", "B").replace("byte", "B")
    if "." in text:
        assert abs(parse_size(shown) - size) <= size / 100
    else:
        assert parse_size(shown) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (1023, "1,023 bytes"), (131072, "128 KiB"), (70272, "68.6 KiB"),
     (1152, "1.13 KiB"), (16_060_522_496, "14.96 GiB"), (1 << 30, "1 GiB")],
)  # fmt: skip
def test_sizes_are_short(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8K", 8192), ("128k", 131072), (5, 5)])
def test_tokens(text: str | int, tokens: int) -> None:
    assert parse_tokens(text, "context") == tokens


@pytest.mark.parametrize("text", ["", "0", "-1", "8M", "1.5", "1.5K", "x", "2147483648", "9999999K", "1" * 5000, True])
def test_no_tokens(text: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^context: expected "):
        parse_tokens(text, "context")


# -- hostile configurations ------------------------------------------------------------------------------------------

HOSTILE = [0, -1, 1, 3, 2**31, 2**100, -(2**70), 1.5, float("nan"), float("inf"), "8", "", True, False, [], [1], {},
           None, ["full_attention"], ["sliding_attention"] * 64, [None] * 64, {"model_type": "llama"}]  # fmt: skip

KEYS = sorted({key for config in CONFIGS.values() for key in config} | {"text_config", "quantization_config"})


@given(
    case=st.sampled_from(sorted(CONFIGS)),
    changes=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(HOSTILE), max_size=3),
    removed=st.sets(st.sampled_from(KEYS), max_size=2),
    dtype=st.sampled_from(sorted(FORMATS)),
)
@example(case="qwen2-config", changes={"text_config": {"model_type": "llama"}}, removed=set(), dtype="int4")
def test_any_configuration_gives_a_plan_or_an_error(
    case: str, changes: dict[str, Any], removed: set[str], dtype: str
) -> None:
    config = {key: value for key, value in {**CONFIGS[case], **changes}.items() if key not in removed}
    try:
        found = plan_of(config, memory=GIB, kv_cache_dtype=dtype)
    except CheckpointError as error:
        message = str(error)
    else:
        message = "config: "
        json.dumps(as_dict(found), allow_nan=False)
        assert "\n\n\n" not in as_text(found)
        assert found.request_bytes >= 0
        assert found.parameters.total >= found.parameters.active > 0
    assert message.startswith("config: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**100, "64", 64.0, True, [64], {}, "missing"])
def test_bad_sizes_name_their_key(key: str, value: Any) -> None:
    config = llama(**{key: value})
    if value == "missing":
        del config[key]
    with pytest.raises(CheckpointError, match=f"config: {key}: expected "):
        plan_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads (4), got 3"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"hidden_size": 66}, "hidden_size: expected a multiple of num_attention_heads (4), got 66"),
        ({"hidden_size": 60}, "head_dim (hidden_size / num_attention_heads): expected an even number"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers: expected an integer of at most 10000, got 10001"),
        ({"model_type": "nobody"}, 'model_type: expected a model type that is known (bart, cohere, '),
        ({"model_type": None}, "model_type: expected a model type that is known"),
        ({"text_config": 5}, "text_config: expected an object, got 5"),
        ({"dtype": 5}, "dtype: expected a string"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types: expected a list with an element"),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "other"]},
         'layer_types[1]: expected "full_attention" or "sliding_attention", got "other"'),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8},
         "num_experts_per_tok: expected an integer of at most 4, got 5"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers: expected a list of layers"),
        ({"model_type": "deepseek_v3"}, "qk_nope_head_dim: expected an integer"),
    ],
)  # fmt: skip
def test_messages(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_of(llama(**changes))
    assert message in str(caught.value)


def test_names_in_files_are_not_printed_blindly() -> None:
    found = plan_of(llama(quantization_config={"quant_method": "\x1b[2Jevil\n"}))
    assert found.notes == ("the published weights are quantised (an unnamed method); the bytes here are for bfloat16",)
    assert plan("gpt-oss-20b").notes[0].startswith("the published weights are quantised (mxfp4)")


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "fp9"}, {"scale_mode": "none"}, {"dtype": "int8"}, {"memory": 0}, {"context": 0},
     {"context": -1},
     {"kv_cache_dtype": "int8", "scale_mode": "static"}, {"kv_cache_dtype": "bf16", "scale_mode": "per_token_head"}],
)  # fmt: skip
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"^{'scale_mode' if 'scale_mode' in options else next(iter(options))}: "):
        plan("llama-3-8b", **options)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path / "home"))
    return tmp_path


def test_every_name_can_be_planned(empty_home: Path) -> None:
    assert set(SHAPES) | set(pull.known_names()) == set(known_models())
    for name in known_models():
        found = make_plan(find_model(name), memory=24 * GIB)
        assert (found.model.name, found.model.source) == (name, "built in")
        assert found.bytes_per_token > 0
        as_text(found)
    assert find_model("Llama-3-8B").name == "llama-3-8b"


def test_a_folder_shows_what_its_files_hold() -> None:
    folder = REFERENCE / "llama_gqa"
    found = make_plan(find_model(folder))
    stored = found.stored_weights
    assert stored is not None
    assert (stored.files, stored.tensors, stored.parameters) == (1, 30, 142_784)
    assert stored.types == {"BF16": 285_568}
    assert found.weight_bytes == stored.bytes
    assert found.notes == ()
    assert "On disk: 278.9 KiB (285,568 bytes) in 1 file: BF16 278.9 KiB." in as_text(found)


def test_a_configuration_alone(tmp_path: Path) -> None:
    file = REFERENCE / "llama_gqa" / "config.v4.json"
    found = make_plan(find_model(file))
    assert found.bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert found.stored_weights is None
    (tmp_path / "config.json").write_bytes(file.read_bytes())
    assert make_plan(find_model(tmp_path)).stored_weights is None
    assert make_plan(find_model(tmp_path / "config.json")).bytes_per_token == found.bytes_per_token


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_as_they_are_held(quantization: str, tmp_path: Path) -> None:
    gguf = convert(REFERENCE / "llama_tied_bias_headdim", tmp_path / "model.gguf", kinds={"token_embd.*": "Q8_0"})
    for model in (REFERENCE / "llama_gqa", REFERENCE / "whisper", gguf):
        held = make_plan(find_model(model), dtype="bf16", quantization=quantization, memory=GIB, context=16)
        with LLM(model, dtype="bfloat16", quantization=quantization, num_kv_blocks=4) as llm:
            assert held.weight_bytes == held.held_bytes == llm.weight_bytes
        assert held.cache_memory == GIB - held.weight_bytes
        assert held.reservations[0].requests == held.cache_memory // held.reservations[0].bytes


def test_shapes_as_they_are_held() -> None:
    llama = plan("llama-3-8b", quantization="int4")
    assert llama.weight_bytes / plan("llama-3-8b").weight_bytes == pytest.approx(0.38, abs=0.01)
    assert "Weights in bfloat16, quantization int4, as they are held: 5." in as_text(llama)
    assert plan("llama-3-8b", quantization="none").weight_bytes >= plan("llama-3-8b").weight_bytes
    assert plan("llama-3-8b").held_bytes is None
    with pytest.raises(InvalidArgument, match="quantization: expected one of auto, none, int8, int4, got 'q8'"):
        plan("llama-3-8b", quantization="q8")


def test_damaged_weights_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((REFERENCE / "llama_gqa" / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    found = make_plan(find_model(tmp_path))
    assert found.stored_weights is None
    assert found.notes[0].startswith("the weights are not shown: ")


def test_files_that_hold_more_than_the_configuration_says(tmp_path: Path) -> None:
    config = json.loads((REFERENCE / "llama_gqa" / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((REFERENCE / "llama_gqa" / "model.safetensors").read_bytes())
    (note,) = make_plan(find_model(tmp_path)).notes
    assert note == "the files hold 142,784 parameters, the configuration speaks of 122,304"


def test_shards(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps(llama()), encoding="utf-8")
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in files.items():
        save_file({name: np.zeros((3, 5), np.float32)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    stored = make_plan(find_model(tmp_path)).stored_weights
    assert stored is not None
    assert (stored.files, stored.tensors, stored.types) == (2, 2, {"F32": 120})
    index.write_text(json.dumps({"weight_map": {**files, "c": "../else.safetensors"}}), encoding="utf-8")
    assert find_model(tmp_path).notes


@pytest.mark.model
def test_a_gguf_file_shows_what_it_holds(smollm2_path: Path) -> None:
    for name in (smollm2_path, smollm2_path.parent, "smollm2"):
        found = make_plan(find_model(name))
        assert found.bytes_per_token == plan("smollm2").bytes_per_token == 23_040
        assert found.parameters.total == 134_515_008
        stored = found.stored_weights
        assert stored is not None
        assert stored.parameters == 134_515_008
        assert list(stored.types) == ["Q4_1", "Q8_0", "F32"]
        assert stored.bytes < found.weight_bytes
    assert found.model.name == "smollm2"


@pytest.mark.parametrize("name", ["no-such-model", "", "org/name", "x" * 5000, "a\0b", "~nobody-here/x", "\udcff"])
def test_unknown_models(name: str, empty_home: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        find_model(name)
    message = str(caught.value)
    assert "\n" not in message
    for known in known_models():
        assert known in message


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json or one \.gguf file"):
        find_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"expected a folder, a config\.json or a \.gguf file"):
        find_model(tmp_path / "model.bin")
    for file in ("bad.json", "bad.gguf"):
        (tmp_path / file).write_bytes(b"{")
        with pytest.raises(CheckpointError, match=re.escape(file)):
            find_model(tmp_path / file)


# -- the command -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "llama-3-8b", "--memory", "24GiB", "--context", "1000", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["bytes_per_token"] == 131072
    assert found["model"] == "llama-3-8b"
    assert found["parameters"]["total"] == 8_030_261_248
    assert found["parameters"]["layers"][31] == {
        "attention": 41_943_040, "mlp": 176_160_768, "mlp_active": 176_160_768, "norms": 8192,
    }  # fmt: skip
    assert found["weights"] == {"bytes": 16_060_522_496, "files": None}
    (group,) = found["groups"]
    assert (group["kind"], group["layers"], group["layer_bytes_per_token"]) == ("full", list(range(32)), 4096)
    assert found["request"] == {"tokens": 1000, "bytes": 131_072_000}
    assert {way: item["requests"] for way, item in found["reservations"].items()} == {
        "paged": 73, "power_of_two": 72, "max_length": 9,
    }  # fmt: skip
    assert found["reservations"]["paged"]["utilization"] == 1000 / 1008


def test_json_of_fp8_and_mla(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        json.loads(run(capsys, "llama-3-8b", "--kv-cache-dtype", "fp8_e4m3", "--json")[1])["bytes_per_token"] == 65536
    )
    found = json.loads(run(capsys, "deepseek-v3", "--json")[1])
    assert (found["bytes_per_token"], found["all_heads_bytes_per_token"]) == (70272, 4_997_120)
    assert found["memory"] is None
    assert found["reservations"]["paged"]["requests"] is None


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "llama-3-8b", "--memory", "24GiB", "--context", "128K")
    assert (code, err) == (0, "")
    for part in (
        "A token takes 128 KiB (131,072 bytes).",
        "16 GiB (17,179,869,184 bytes)",
        "8.03B parameters",
        "attention 41.9M, MLP 176M",
    ):
        assert part in out
    assert all(line == line.rstrip() for line in out.splitlines())
    code, out, _ = run(capsys, "gemma-3-1b", "--kv-cache-dtype", "int8")
    assert "sliding_window(512)" in out
    assert "Once the windows are full it adds" in out
    assert "Memory" not in out


def test_every_documented_name_of_the_json_is_there() -> None:
    """And the other way round."""
    page = (REFERENCE.parent.parent.parent / "docs" / "plan.md").read_text(encoding="utf-8")
    section = page.split("\n## JSON\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `([a-z_.\[\]]+)` \|", section, re.MULTILINE))
    found = as_dict(make_plan(find_model(REFERENCE / "llama_gqa"), memory=GIB))
    names = set(found) - {"groups", "request", "parameters", "weights", "reservations"}
    names |= {f"groups[].{name}" for name in found["groups"][0]}
    names |= {f"request.{name}" for name in found["request"]}
    names |= {f"parameters.{name}" for name in found["parameters"]}
    names |= {"weights.bytes"} | {f"weights.files.{name}" for name in found["weights"]["files"]}
    names |= {f"reservations.way.{name}" for name in found["reservations"]["paged"]}
    assert documented == names


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-model"], "the names are bart-base, "),
        (["llama-3-8b", "--memory", "24XB"], "memory: expected a size such as 24GiB, 24GB, 512MiB or 1073741824"),
        (["llama-3-8b", "--memory", "-1"], "memory: expected a size"),
        (["llama-3-8b", "--context", "0"], "context: expected from 1"),
        (["llama-3-8b", "--context", "many"], "context: expected a number of tokens such as 8192 or 8K"),
        (["llama-3-8b", "--kv-cache-dtype", "fp9"], "kv_cache_dtype: expected auto or one of float32, "),
        (["llama-3-8b", "--dtype", "int8"], "dtype: expected auto or one of float32, "),
        (["llama-3-8b", "--quantization", "int3"], "quantization: expected one of auto, none, int8, int4, got 'int3'"),
        (["llama-3-8b", "--scale-mode", "static"], ""),
        (["llama-3-8b", "--scale-mode", "x"], "scale_mode: expected static with bfloat16"),
        (["llama-3-8b", "--source-tokens", "5"], "source_tokens: expected a model with an encoder"),
    ],
)  # fmt: skip
def test_bad_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *argv)
    if not message:
        assert code == 0
        return
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvcore: ")
    assert message in err


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -1}', encoding="utf-8")
    code, out, err = run(capsys, str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "expected an integer of at least 1" in err


@pytest.mark.parametrize("argv", [[], ["llama-3-8b", "--no-such"], ["llama-3-8b", "more"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *argv)[0] == 2


def test_it_needs_no_numpy() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(numpy=None, ml_dtypes=None, jinja2=None, tokenizers=None, huggingface_hub=None)\n"
        "from kvcore.plan import as_dict, as_text, find_model, make_plan\n"
        f"plan = make_plan(find_model({str(REFERENCE / 'llama_gqa' / 'config.json')!r}))\n"
        "plan = make_plan(find_model('llama-3-8b'))\n"
        "as_text(plan), print(as_dict(plan)['bytes_per_token'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("131072\n", "")


def test_errors_are_kvcores() -> None:
    assert issubclass(CheckpointError, KvcoreError)
    assert issubclass(InvalidArgument, KvcoreError)
