"""GPT-2 and GPT-NeoX: fused queries, keys and values, and layer norms with biases."""

from __future__ import annotations

from kvcore.checkpoint.gguf import keys
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.keys import boolean, integer, number
from kvcore.checkpoint.gguf.layouts import FUSED_QKV, TRANSPOSED

GPT2 = Architecture(
    model_type="gpt2",
    config={
        "vocab_size": keys.vocab_size,
        "n_embd": integer("embedding_length"),
        "n_inner": integer("feed_forward_length"),
        "n_layer": keys.layers,
        "n_head": keys.heads,
        "n_positions": integer("context_length"),
        "layer_norm_epsilon": number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": keys.tied,
    },
    tensors={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    prefix="transformer.h.{layer}.",
    layer={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), TRANSPOSED),
)
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    config={
        "vocab_size": keys.vocab_size,
        "hidden_size": integer("embedding_length"),
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": keys.heads,
        "max_position_embeddings": integer("context_length"),
        "layer_norm_eps": number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "rope_parameters": keys.partial_rope,
        "use_parallel_residual": boolean("use_parallel_residual", True),
        "tie_word_embeddings": keys.tied,
    },
    tensors={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    prefix="gpt_neox.layers.{layer}.",
    layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    layouts={"attn_qkv": FUSED_QKV},
)
