"""Phi-3 and 4: fused projections, and rope factors for short and long texts."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, TENSORS
from kvcore.checkpoint.gguf.keys import integer

PHI3 = Architecture(
    model_type="phi3",
    config={
        **CONFIG,
        "rope_parameters": keys.partial_rope,
        "original_max_position_embeddings": integer("rope.scaling.original_context_length", integer("context_length")),
        "sliding_window": keys.window,
    },
    tensors=TENSORS,
    layer={**ATTENTION, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
)
