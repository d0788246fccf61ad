"""Qwen 2 and 3, with and without experts. llama.cpp turns their heads in halves: nothing is interleaved."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, EXPERTS, HEAD_NORMS, MLP, TENSORS
from kvcore.checkpoint.gguf.keys import Hyperparameters, boolean, has_tensor, integer, length_of

_CONFIG = {**CONFIG, "use_sliding_window": False, "sliding_window": None}
_QWEN3 = {"attention_bias": has_tensor("blk.{layer}.attn_q.bias")}


def _dense_layers(read: Hyperparameters) -> list[int]:
    """No key says which layers have no experts, but their tensors do."""
    return [layer for layer in range(keys.layers(read)) if f"blk.{layer}.ffn_gate.weight" in read.file.tensors]


_MOE = {
    "num_experts": integer("expert_count"),
    "num_experts_per_tok": integer("expert_used_count"),
    "moe_intermediate_size": integer("expert_feed_forward_length", length_of("blk.{layer}.ffn_gate_exps.weight", 1)),
    "decoder_sparse_step": 1,
    "mlp_only_layers": _dense_layers,
}
_ROUTED = {"ffn_gate_inp": "mlp.gate", **EXPERTS}

QWEN2 = Architecture(model_type="qwen2", config=_CONFIG, tensors=TENSORS, layer={**ATTENTION, **MLP})
QWEN3 = Architecture(
    model_type="qwen3", config={**_CONFIG, **_QWEN3}, tensors=TENSORS, layer={**ATTENTION, **HEAD_NORMS, **MLP}
)
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    config={
        **_CONFIG,
        **_MOE,
        "shared_expert_intermediate_size": integer(
            "expert_shared_feed_forward_length", length_of("blk.{layer}.ffn_gate_shexp.weight", 0)
        ),
        "norm_topk_prob": boolean("expert_weights_norm", False),
    },
    tensors=TENSORS,
    layer={
        **ATTENTION,
        **MLP,
        **_ROUTED,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    config={**_CONFIG, **_QWEN3, **_MOE, "norm_topk_prob": boolean("expert_weights_norm", True)},
    tensors=TENSORS,
    layer={**ATTENTION, **HEAD_NORMS, **MLP, **_ROUTED},
)
