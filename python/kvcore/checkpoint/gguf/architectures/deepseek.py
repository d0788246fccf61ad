"""DeepSeek V2 and V3: latent attention and shared experts.

One name stands for both. V3 chooses experts by sigmoid scores with a correction, V2 by a softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture, Joined
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, EXPERTS, MLP, TENSORS
from kvcore.checkpoint.gguf.keys import Hyperparameters, Value, boolean, integer, length_of, number
from kvcore.checkpoint.gguf.layouts import KEY_VALUE, SAME

_SOFTMAX, _SIGMOID = 1, 2


def _head(part: str) -> Value:
    """Width of a head's key or value. Newer files store the rows of the latent under the plain keys."""
    return integer(f"attention.{part}_length_mla", integer(f"attention.{part}_length"))


def _nope(read: Hyperparameters) -> int:
    width, rope = _head("key")(read), read.integer("rope.dimension_count")
    if width <= rope:
        raise read.error("rope.dimension_count", f"less than the length of a head's key ({width})", rope)
    return int(width) - rope


def _shared(read: Hyperparameters) -> int | None:
    return read.integer("expert_shared_count", 0, minimum=0) or None


def _method(read: Hyperparameters) -> str:
    return "group_limited_greedy" if read.integer("expert_group_count", 1) > 1 else "greedy"


_WITHOUT = ("head_dim", "rope_parameters", "num_key_value_heads")
_CONFIG: dict[str, Any] = {
    **{key: value for key, value in CONFIG.items() if key not in _WITHOUT},
    "num_key_value_heads": keys.heads,
    "rope_parameters": keys.mla_rope,
    "q_lora_rank": integer("attention.q_lora_rank", None),
    "kv_lora_rank": integer("attention.kv_lora_rank"),
    "qk_nope_head_dim": _nope,
    "qk_rope_head_dim": integer("rope.dimension_count"),
    "v_head_dim": _head("value"),
    "first_k_dense_replace": lambda read: read.integer("leading_dense_block_count", 0, minimum=0),
    "n_routed_experts": integer("expert_count", None),
    "num_experts_per_tok": integer("expert_used_count", None),
    "n_shared_experts": _shared,
    "moe_intermediate_size": integer("expert_feed_forward_length", length_of("blk.{layer}.ffn_gate_exps.weight", 1)),
    "n_group": integer("expert_group_count", 1),
    "topk_group": integer("expert_group_used_count", 1),
    "topk_method": _method,
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "norm_topk_prob": boolean("expert_weights_norm", False),
}


def _is_v3(read: Hyperparameters) -> bool:
    names = (f"blk.{layer}.exp_probs_b.bias" for layer in range(keys.layers(read)))
    gating = read.integer("expert_gating_func", _SOFTMAX)
    return gating == _SIGMOID or any(name in read.file.tensors for name in names)


_V3 = Architecture(
    model_type="deepseek_v3",
    config=_CONFIG,
    tensors=TENSORS,
    layer={
        "attn_norm": ATTENTION["attn_norm"],
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": ATTENTION["ffn_norm"],
        **MLP,
        **EXPERTS,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    joined={
        "self_attn.kv_b_proj.weight": Joined(("attn_k_b.weight", "attn_v_b.weight"), KEY_VALUE),
        "mlp.gate.e_score_correction_bias": Joined(("exp_probs_b.bias",), SAME),
    },
)
DEEPSEEK2 = replace(_V3, model_type="deepseek_v2", variant=lambda read: _V3 if _is_v3(read) else None)
