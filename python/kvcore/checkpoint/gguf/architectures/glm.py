"""GLM-4: four norms a layer, a fused gate, and neighbours that turn in half of each head."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, TENSORS
from kvcore.checkpoint.gguf.keys import has_tensor

GLM4 = Architecture(
    model_type="glm4",
    config={
        **CONFIG,
        "rope_parameters": keys.partial_rope,
        "attention_bias": has_tensor("blk.{layer}.attn_q.bias"),
    },
    tensors=TENSORS,
    layer={
        **ATTENTION,
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
