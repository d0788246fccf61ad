"""Llama and what is built like it: the tables that others start from."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.keys import Hyperparameters, has_tensor, integer, number
from kvcore.checkpoint.gguf.layouts import INTERLEAVED_K, INTERLEAVED_Q

CONFIG = {
    "vocab_size": keys.vocab_size,
    "hidden_size": integer("embedding_length"),
    "intermediate_size": integer("feed_forward_length"),
    "num_hidden_layers": keys.layers,
    "num_attention_heads": keys.heads,
    "num_key_value_heads": integer("attention.head_count_kv", keys.heads),
    "head_dim": keys.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
    "max_position_embeddings": integer("context_length"),
    "rope_parameters": keys.rope,
    "tie_word_embeddings": keys.tied,
}
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
INTERLEAVED = {"attn_q": INTERLEAVED_Q, "attn_k": INTERLEAVED_K}

_BIASES = {
    "attention_bias": has_tensor("blk.{layer}.attn_q.bias"),
    "mlp_bias": has_tensor("blk.{layer}.ffn_up.bias"),
}

MIXTRAL = Architecture(
    model_type="mixtral",
    config={
        **CONFIG,
        "num_local_experts": integer("expert_count"),
        "num_experts_per_tok": integer("expert_used_count"),
        "sliding_window": keys.window,
    },
    tensors=TENSORS,
    layer={
        **ATTENTION,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    },
    layouts=INTERLEAVED,
)
MISTRAL = Architecture(
    model_type="mistral",
    config={**CONFIG, "sliding_window": keys.window},
    tensors=TENSORS,
    layer={**ATTENTION, **MLP},
    layouts=INTERLEAVED,
)


def _variant(read: Hyperparameters) -> Architecture | None:
    if read.integer("expert_count", 0, minimum=0):
        return MIXTRAL
    return MISTRAL if keys.window(read) else None


LLAMA = Architecture(
    model_type="llama",
    config={**CONFIG, **_BIASES},
    tensors=TENSORS,
    layer={**ATTENTION, **MLP},
    layouts=INTERLEAVED,
    variant=_variant,
)
SMOLLM3 = Architecture(
    model_type="smollm3",
    config={
        **CONFIG,
        **_BIASES,
        # no key says it: llama.cpp takes every fourth layer without rope, as all SmolLM3 are
        "no_rope_layers": lambda read: [int((layer + 1) % 4 != 0) for layer in range(keys.layers(read))],
    },
    tensors=TENSORS,
    layer={**ATTENTION, **MLP},
    layouts=INTERLEAVED,
)
GRANITE = Architecture(
    model_type="granite",
    config={
        **CONFIG,
        **_BIASES,
        "attention_multiplier": number("attention.scale", lambda read: keys.head_dim(read) ** -0.5),
        "embedding_multiplier": number("embedding_scale", 1.0),
        "residual_multiplier": number("residual_scale", 1.0),
        "logits_scaling": number("logit_scale", 1.0),
    },
    tensors=TENSORS,
    layer={**ATTENTION, **MLP},
    layouts=INTERLEAVED,
)
OLMO2 = Architecture(
    model_type="olmo2",
    config={**CONFIG, "attention_bias": False},
    tensors=TENSORS,
    layer={
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        **HEAD_NORMS,
        **MLP,
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
