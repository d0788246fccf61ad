"""GPT-OSS: sinks, alternating windows, and experts with biases whose gate and up columns alternate."""

from __future__ import annotations

from typing import Any

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture, Joined
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, TENSORS
from kvcore.checkpoint.gguf.keys import Hyperparameters, integer, length_of
from kvcore.checkpoint.gguf.layouts import EXPERTS_TRANSPOSED, GATE_UP, SAME


def _rope(read: Hyperparameters) -> dict[str, Any]:
    found = keys.rope(read)
    return {**found, "truncate": False} if found["rope_type"] == "yarn" else found


GPT_OSS = Architecture(
    model_type="gpt_oss",
    config={
        **CONFIG,
        "intermediate_size": integer("expert_feed_forward_length", length_of("blk.{layer}.ffn_gate_exps.weight", 1)),
        "num_local_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "rope_parameters": _rope,
        "attention_bias": True,
        "sliding_window": keys.window,
        "layer_types": keys.layer_types(2),
    },
    tensors=TENSORS,
    layer={
        **{key: value for key, value in ATTENTION.items() if key != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    joined={
        "self_attn.sinks": Joined(("attn_sinks.weight",), SAME),
        "mlp.experts.gate_up_proj": Joined(("ffn_gate_exps.weight", "ffn_up_exps.weight"), GATE_UP),
        "mlp.experts.gate_up_proj_bias": Joined(("ffn_gate_exps.bias", "ffn_up_exps.bias"), GATE_UP),
        "mlp.experts.down_proj": Joined(("ffn_down_exps.weight",), EXPERTS_TRANSPOSED),
        "mlp.experts.down_proj_bias": Joined(("ffn_down_exps.bias",), SAME),
    },
)
