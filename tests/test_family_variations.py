"""Families in other configurations than those of the reference models: against the oracle, with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import LLM, CheckpointError, SamplingParams
from kvcore.checkpoint.config import Config
from kvcore.loading import Options, RandomWeights, make_decoder, model_length
from kvcore.models.families import FAMILIES, spec_from_config
from kvcore.models.rope import RopeSpec
from kvcore.models.spec import DecoderSpec, MlpSpec, MoeSpec
from kvcore.plan import cache_groups, cache_layers, count_parameters
from kvcore.plan.shapes import SHAPES
from models import EXACT, REFERENCE, assert_same_bits, recorded
from oracle import Oracle

FAMILY_FOLDERS = {
    json.loads((folder / "config.json").read_text())["model_type"]: folder.name
    for folder in sorted(REFERENCE.glob("*/"), reverse=True)
}


ENCODER_DECODERS = ["bart", "marian", "t5", "whisper"]
DECODERS = sorted(set(FAMILIES) - set(ENCODER_DECODERS))


def config_of(family: str, changes: dict[str, Any], old: bool = False) -> Config:
    """A reference configuration with changes; a value of None is null, ``...`` is left out."""
    folder = REFERENCE / FAMILY_FOLDERS[family]
    style = "config.v4.json" if old else "config.json"
    values = {**json.loads((folder / style).read_text()), **changes}
    return Config({key: value for key, value in values.items() if value is not ...}, "here/config.json")


class NoisyWeights(RandomWeights):
    """Random weights, biases and norms as well, and all that may be there is there."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__(spec, 3)
        tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
        self._shapes = {t.name: t.stored_shape for t in spec.all_tensors() if t.name not in tied}

    def get(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        values = np.random.default_rng([*name.encode()]).standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            return values / np.float32(np.sqrt(shape[-1]))
        return values / 4 + ("norm" in name or ".ln_" in name) * np.float32(not name.endswith("bias"))


def llm_of(spec: DecoderSpec, weights: Any, **options: Any) -> LLM:
    checked = Options(**{**EXACT, "num_kv_blocks": 16, **options})
    if checked.mla == "expanded":
        spec = spec.expanded()
    decoder = make_decoder(spec, weights, {}, checked, "noise")
    return LLM._from_parts(decoder, max_model_len=model_length(spec, checked), **{**EXACT, **options})


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one head, gelu": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama, head_dim null, heads not in file": ("llama", {"head_dim": None, "num_key_value_heads": ...}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral, window 1": ("mistral", {"sliding_window": 1}),
    "mistral, some layers slide": ("mistral", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
    "qwen2, last layers slide": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5,
                                           "layer_types": None}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    "phi3, more queries": ("phi3", {"num_attention_heads": 8, "head_dim": 12}),
    "phi3, partly rotated": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                          "partial_rotary_factor": 0.75}}),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 3.0}),
    "olmo2, other heads, yarn": ("olmo2", {"num_key_value_heads": 4, "rope_parameters": YARN}),
    "smollm3, other layers without rope": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
    "smollm3, every second without rope": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    "smollm3 that slides": ("smollm3", {"use_sliding_window": True, "sliding_window": 6, "layer_types": None}),
    "gemma, grouped, untied": ("gemma", {"num_attention_heads": 4, "num_key_value_heads": 2,
                                         "tie_word_embeddings": False}),
    "gemma says gelu": ("gemma", {"hidden_act": "gelu"}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, all layers full": ("gemma2", {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 7}),
    "gemma3, linear scaling": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}, "final_logit_softcapping": 3.0}),
    "gemma3, other pattern": ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 2}),
    "cohere, norms of heads": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    "cohere with biases": ("cohere", {"attention_bias": True, "logit_scale": 2.0}),
    "cohere2, other pattern": ("cohere2", {"layer_types": None, "sliding_window_pattern": 2}),
    "stablelm, parallel, norms of heads": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True,
                                                        "num_key_value_heads": 2}),
    "stablelm without biases": ("stablelm", {"use_qkv_bias": False}),
    "glm4 without biases, whole heads": ("glm4", {"attention_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40,
                                       "activation_function": "relu"}),
    "gpt2, scores not scaled": ("gpt2", {"scale_attn_weights": False, "n_head": 3}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False, "num_attention_heads": 2}),
    "gpt_neox without biases": ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_new"}),
    "mixtral, one expert, window": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 7}),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 4, "num_local_experts": 4}),
    "qwen2_moe, every second layer": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [],
                                                    "norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe, only dense": ("qwen2_moe", {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_moe, not renormalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 8}),
    "gpt_oss, other pattern": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
                                           "num_key_value_heads": 1, "num_experts_per_tok": 1, "swiglu_limit": 0.5}),
    "gpt_oss without biases": ("gpt_oss", {"attention_bias": False}),
    "deepseek_v2, plain queries, greedy": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy",
                                                           "n_group": None, "topk_group": None}),
    "deepseek_v2, no shared experts": ("deepseek_v2", {"n_shared_experts": None, "first_k_dense_replace": 0,
                                                       "moe_layer_freq": 2}),
    "deepseek_v3, half-split rope": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "deepseek_v3, one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek_v3, groups of one": ("deepseek_v3", {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIATIONS)
def test_against_the_oracle(name: str) -> None:
    family, changes = VARIATIONS[name]
    config = config_of(family, changes)
    spec = spec_from_config(config)
    weights = NoisyWeights(spec)
    assert spec.cache_layers() == cache_layers(config)
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, 41)
    want = Oracle(spec, weights, np.float64).logits(ids)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for mla in ("absorbed", "expanded") if spec.layers[0].attention.latent else ("absorbed",):
        rows = []
        for options in ({"num_threads": 1}, {"num_threads": 2, "max_num_batched_tokens": 6}):
            with llm_of(spec, weights, mla=mla, **options) as llm, recorded(llm) as logits:
                got = llm.logits(ids)
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * max(1.0, np.abs(want).max()))
                (cold,) = llm.generate(ids.tolist(), params)
                (warm, _) = llm.generate([ids.tolist(), ids[:19].tolist()], params)
                assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 40)
                rows += [got[-1:], logits(cold)[:1], logits(warm)[:1]]
        for row in rows:
            assert_same_bits(row, rows[0], name)


@pytest.mark.parametrize("name", VARIATIONS)
def test_parameters_are_those_of_the_plan(name: str) -> None:
    """What ``kvcore plan`` counts from the configuration is what the tensors hold."""
    family, changes = VARIATIONS[name]
    config = config_of(family, changes)
    spec = spec_from_config(config)
    biases = {t.name for t in spec.all_tensors() if t.role.endswith(".bias") and not t.required}
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    shapes = {t.name: t.stored_shape for t in spec.all_tensors() if t.name not in biases | tied}
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == count_parameters(config).total


@pytest.mark.parametrize("name", [n for n, shape in SHAPES.items() if shape["model_type"] in FAMILIES])
def test_built_in_shapes(name: str) -> None:
    """Models of real sizes: nothing is allocated."""
    config = Config(SHAPES[name], name)
    spec = spec_from_config(config)
    assert spec.cache_layers() == cache_layers(config)
    tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    # files of BART and Marian have a bias of the logits, which may be missing
    there = [t for t in spec.all_tensors() if (t.required and t.name not in tied) or t.role == "lm_head.bias"]
    stored = {t.name: math.prod(t.stored_shape) for t in there}
    assert sum(stored.values()) == count_parameters(config).total


def test_sizes_that_are_known() -> None:
    llama, deepseek = (count_parameters(Config(SHAPES[name], name)) for name in ("llama-3-8b", "deepseek-v3"))
    assert (llama.layers[0].attention, llama.layers[0].mlp) == (41_943_040, 176_160_768)
    assert (llama.total, deepseek.total) == (8_030_261_248, 671_026_419_200)
    (group,) = cache_groups(spec_from_config(Config(SHAPES["deepseek-v3"], "x")).cache_layers())
    assert (group.cache.kind, group.cache.rank, group.cache.rope_dim, len(group.layers)) == ("latent", 512, 64, 61)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_random_weights_behind_an_encoder(family: str) -> None:
    config = config_of(family, {})
    source: dict[str, Any] = {"encoder_token_ids": range(20)}
    if family == "whisper":
        source = {"input_features": np.zeros((80, 60), np.float32)}
    with LLM.from_config(config, num_kv_blocks=8, dtype="bfloat16") as llm:
        assert np.isfinite(llm.logits(range(20), encoder=source)).all()
        assert len(llm.generate([source], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("family", DECODERS)
def test_random_weights(family: str) -> None:
    config = config_of(family, {})
    with LLM.from_config(config, num_kv_blocks=8, dtype="bfloat16") as llm:
        assert np.isfinite(llm.logits(range(20))).all()
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_both_forms_of_latent_attention_agree() -> None:
    for family in ("deepseek_v2", "deepseek_v3"):
        spec = spec_from_config(config_of(family, {}))
        weights = NoisyWeights(spec)
        ids = list(range(30))
        logits = {}
        for mla, kind in (("absorbed", "latent"), ("expanded", "full")):
            with llm_of(spec, weights, mla=mla) as llm:
                assert [group.kind for group in llm.cache.groups] == [kind]
                logits[mla] = llm.logits(ids)
        scale = np.abs(logits["absorbed"]).max()
        np.testing.assert_allclose(logits["absorbed"], logits["expanded"], rtol=0, atol=1e-5 * max(1, scale))


def test_trap_15_latent_attention_in_numbers() -> None:
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 16}
    config = config_of("deepseek_v3", {**sizes, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    spec = spec_from_config(config)
    assert all(layer.attention.scale == pytest.approx(1 / math.sqrt(12)) for layer in spec.layers)
    assert spec.tensor("o_proj.weight", 0).shape == (48, 4 * 6)
    weights, ids = NoisyWeights(spec), list(range(25))
    with llm_of(spec, weights) as absorbed, llm_of(spec, weights, mla="expanded") as expanded:
        (group,) = absorbed.cache.groups
        assert (group.kind, group.rank, group.rope_dim) == ("latent", 16, 4)
        assert absorbed.cache.bytes_per_token == 20 * 4 * spec.num_layers
        want = absorbed.logits(ids)
        np.testing.assert_allclose(expanded.logits(ids), want, rtol=0, atol=1e-5 * max(1, np.abs(want).max()))


def test_trap_21_a_bias_that_is_there_is_used(tmp_path: Path) -> None:
    """Also where the configuration does not speak of it, and in what is stored as one."""
    from safetensors.numpy import load_file, save_file

    for family, role in (("mistral", "self_attn.o_proj"), ("phi3", "self_attn.qkv_proj"), ("gemma2", "mlp.up_proj")):
        folder = REFERENCE / FAMILY_FOLDERS[family]
        tensors = load_file(folder / "model.safetensors")
        rows = tensors[f"model.layers.1.{role}.weight"].shape[0]
        tensors[f"model.layers.1.{role}.bias"] = np.full(rows, 0.5, np.float32)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with LLM(tmp_path, num_kv_blocks=8, **EXACT) as biased, LLM(folder, num_kv_blocks=8, **EXACT) as plain:
            assert np.abs(biased.logits(range(9)) - plain.logits(range(9))).max() > 0.01


def test_gpt2_files_without_the_prefix(tmp_path: Path) -> None:
    """OpenAI's own files leave "transformer." out, and hold masks."""
    from safetensors.numpy import load_file, save_file

    folder = REFERENCE / "gpt2"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    assert "wte.weight" in tensors
    tensors["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    want = load_file(folder / "expected.safetensors")
    with LLM(tmp_path, num_kv_blocks=16, **EXACT) as llm:
        np.testing.assert_allclose(llm.logits(want["input_ids"]), want["logits"], rtol=0, atol=3e-4)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_defaults_behind_an_encoder(family: str) -> None:
    sizes = ("d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "encoder_attention_heads",
             "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim")  # fmt: skip
    full = config_of(family, {})
    spec = spec_from_config(Config({key: full[key] for key in ("model_type", *sizes) if key in full}, "here"))
    assert spec.cache_layers() == cache_layers({key: full[key] for key in ("model_type", *sizes) if key in full})
    assert spec.tie_word_embeddings
    assert spec.encoder is not None
    assert spec.embedding_scale == 1
    wants = {"t5": (32128, 0, None), "bart": (50265, 2, 1024), "marian": (50265, 58100, 1024),
             "whisper": (51865, 50257, 1500)}  # fmt: skip
    assert (spec.vocab_size, spec.encoder.start_token_id, spec.encoder.max_rows) == wants[family]


@pytest.mark.parametrize("family", DECODERS)
def test_defaults(family: str) -> None:
    """A file may leave out what is the family's default: only sizes must be there."""
    needed = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
              "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "n_embd", "n_head", "n_layer",
              "moe_intermediate_size", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
              "v_head_dim")  # fmt: skip
    full = config_of(family, {"num_attention_heads": 2, "num_key_value_heads": 2} if family == "stablelm" else {})
    config = Config({key: full[key] for key in needed if key in full}, "here/config.json")
    spec = spec_from_config(config)
    assert spec.cache_layers() == cache_layers(config)
    tied = {"gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "smollm3", "gpt2"}
    assert spec.tie_word_embeddings == (family in tied)
    thetas = {"smollm3": 2e6, "mixtral": 1e6, "gpt_oss": 150000.0}
    if family not in ("gpt2", "gemma3_text"):
        assert {rope.theta for rope in spec.ropes} == {thetas.get(family, 10000.0)}
    partial = {"glm4": 0.5, "stablelm": 0.25, "gpt_neox": 0.25}
    widths = {rope.rotary_dim for rope in spec.ropes if not family.startswith("deepseek")}
    assert widths <= {int(spec.head_dim * partial.get(family, 1))}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers: expected a list of layers"),
        ("qwen2_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok: expected an integer of at most 6, got 7"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts: expected an integer of at least 1, got 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false"),
        ("mixtral", {"num_local_experts": None, "num_experts_per_tok": 9}, "num_experts_per_tok: .* at most 8, got 9"),
        ("gpt_oss", {"layer_types": ["full"] * 3}, r"layer_types\[0\]: expected .*full_attention"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types: expected a list with an element for each"),
        ("gpt_oss", {"swiglu_limit": -1}, "swiglu_limit: expected a number"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping: expected a number"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number"),
        ("gemma2", {"sliding_window": None}, "sliding_window: expected a window"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected false"),
        ("gemma", {"hidden_act": "tanh"}, "hidden_act: expected one of silu"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "warp"}}}, "expected one of default"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": 3}}, "sliding_attention: expected an object, got 3"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}}}, "sliding_attention: expected an object, got null"),
        ("smollm3", {"no_rope_layers": [1, 1, 2, 0]}, r"no_rope_layers\[2\]: expected 1 \(rope\) or 0"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected a list with an element for each"),
        ("cohere", {"logit_scale": "x"}, "logit_scale: expected a number"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier: expected a number"),
        ("stablelm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 3}},
         "partial_rotary_factor: expected a share of head_dim"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.01}, "rotary_pct: expected a share of head_dim"),
        ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 0}, "rotary_emb_base: expected a number"),
        ("gpt2", {"n_inner": 0}, "n_inner: expected an integer of at least 1"),
        ("gpt2", {"n_head": 5}, r"n_embd: expected a multiple of n_head \(5\)"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: expected one of"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor|short_factor"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method: expected greedy or group_limited_greedy"),
        ("deepseek_v2", {"n_group": 3}, r"n_group: expected a divisor of n_routed_experts \(8\)"),
        ("deepseek_v2", {"topk_group": 5}, "topk_group: expected an integer of at most 4"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok: expected at most 2"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank: expected an integer"),
        ("deepseek_v3", {"q_lora_rank": "big"}, "q_lora_rank: expected an integer"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: expected an even number"),
        ("deepseek_v3", {"qk_nope_head_dim": 300}, "at most 256, got 308"),
    ],
)  # fmt: skip
def test_nonsense_is_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as info:
        spec_from_config(config_of(family, changes))
    assert str(info.value).startswith("here/config.json: ")


def test_unsupported_models_are_told_what_is() -> None:
    with pytest.raises(CheckpointError) as info:
        spec_from_config({"model_type": "mamba"})
    assert all(family in str(info.value) for family in FAMILIES)


def test_layers_that_are_alike_share_their_tensors() -> None:
    """DeepSeek-V3 has 45,000 tensors, and a spec of a few hundred."""
    config = config_of("deepseek_v3", {"num_hidden_layers": 61, "n_routed_experts": 256, "first_k_dense_replace": 3})
    spec = spec_from_config(config)
    assert len({id(layer.tensors) for layer in spec.layers}) == 2
    assert len(list(spec.all_tensors())) > 45_000
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers] == [False] * 3 + [True] * 58


def test_what_qwen_names_and_does_not_use() -> None:
    """A window that is switched off, in both styles."""
    for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        for old in (False, True):
            spec = spec_from_config(config_of(family, {"sliding_window": 8, "use_sliding_window": False}, old))
            assert {layer.attention.window for layer in spec.layers} == {None}
    spec = spec_from_config(config_of("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, old=True))
    assert [layer.attention.window for layer in spec.layers] == [None, None, 8]


def test_gemma3_local_ropes_are_never_stretched() -> None:
    changes = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5000.0}
    spec = spec_from_config(config_of("gemma3_text", changes, old=True))
    local, wide = spec.ropes
    assert local == RopeSpec("default", 5000.0, 16, 256)
    assert (wide.kind, wide.factor, wide.theta) == ("linear", 8.0, 1e6)


def test_activations_by_their_names() -> None:
    for name, native in (("swish", "silu"), ("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh"), ("relu", "relu")):
        (mlp,) = {layer.mlp for layer in spec_from_config(config_of("llama", {"hidden_act": name})).layers}
        assert isinstance(mlp, MlpSpec)
        assert mlp.activation.name == native


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_any_configuration_gives_a_spec_or_an_error_that_names_its_key(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    has_old = (REFERENCE / FAMILY_FOLDERS[family] / "config.v4.json").exists()
    config = config_of(family, {}, old=data.draw(st.booleans()) and has_old)
    values = _JSON | st.sampled_from(list(config.values()))
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(set(config) - {"model_type"})), values, max_size=4))
    config.update(changes)
    try:
        spec = spec_from_config(config)
    except CheckpointError as error:
        assert str(error).startswith("here/config.json: ")  # noqa: PT017
        return
    assert spec.num_layers <= 10_000
    assert spec.num_heads % spec.num_kv_heads == 0
    assert spec.cache_layers() == cache_layers(config)
