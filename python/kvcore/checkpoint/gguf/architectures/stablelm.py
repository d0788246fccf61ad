"""StableLM 2: layer norms with biases, rope in a part of each head, and perhaps a norm of its own for each head."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.architectures.llama import ATTENTION, CONFIG, MLP, TENSORS
from kvcore.checkpoint.gguf.keys import boolean, has_tensor, number

STABLELM = Architecture(
    model_type="stablelm",
    config={
        **{key: value for key, value in CONFIG.items() if key != "rms_norm_eps"},
        "layer_norm_eps": number("attention.layer_norm_epsilon"),
        "rope_parameters": keys.partial_rope,
        "use_qkv_bias": has_tensor("blk.{layer}.attn_q.bias"),
        "qk_layernorm": has_tensor("blk.{layer}.attn_q_norm.weight"),
        "use_parallel_residual": boolean("use_parallel_residual", True),
    },
    tensors=TENSORS,
    layer={
        **ATTENTION,
        **MLP,
        "attn_q_norm": "self_attn.q_layernorm.norms.{expert}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{expert}",
    },
)
