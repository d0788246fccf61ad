"""Llama 1, 2 and 3, and the many models with their shape (SmolLM2, TinyLlama, Yi, ...).

x = embed_tokens[ids]
per layer:  x += o_proj(attention(rope(q_proj(n)), rope(k_proj(n)), v_proj(n)))   with n = rms_norm(x)
            x += down_proj(silu(gate_proj(n)) * up_proj(n))                       with n = rms_norm(x)
logits = lm_head(rms_norm(x))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec, TensorSpec

ACTIVATIONS: Final = {"silu": "silu", "swish": "silu"}
MAX_HEAD_DIM: Final = 256
"""The widest head that the native cache holds."""


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Turn a llama configuration into a spec. Defaults are those of transformers' ``LlamaConfig``.

    Raises:
        CheckpointError: names the file and key, what was expected and what came.
    """
    read = ConfigReader(config)
    hidden = read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    if not read.has("head_dim") and hidden % heads:
        raise read.error("hidden_size", f"a multiple of num_attention_heads ({heads}) as there is no head_dim", hidden)
    head_dim = read.integer("head_dim", hidden // heads, maximum=MAX_HEAD_DIM)
    where = "head_dim" if read.has("head_dim") else "head_dim (hidden_size / num_attention_heads)"
    if head_dim > MAX_HEAD_DIM:
        raise read.error(where, f"an integer of at most {MAX_HEAD_DIM}", head_dim)
    if head_dim % 2:
        raise read.error(where, "an even number", head_dim)
    act = read.string("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise read.error("hidden_act", f"one of {', '.join(ACTIVATIONS)}", act)

    vocab = read.integer("vocab_size")
    inner = read.integer("intermediate_size")
    tied = read.boolean("tie_word_embeddings", False)
    max_positions = read.integer("max_position_embeddings", 2048)
    attention_bias = read.boolean("attention_bias", False)
    mlp_bias = read.boolean("mlp_bias", False)
    layer_tensors = [TensorSpec("input_norm.weight", "model.layers.{layer}.input_layernorm.weight", (hidden,))]
    for name, rows, columns in (
        ("q_proj", heads * head_dim, hidden),
        ("k_proj", kv_heads * head_dim, hidden),
        ("v_proj", kv_heads * head_dim, hidden),
        ("o_proj", hidden, heads * head_dim),
    ):
        layer_tensors += _linear(name, f"model.layers.{{layer}}.self_attn.{name}", rows, columns, attention_bias)
    layer_tensors += [TensorSpec("mlp_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight", (hidden,))]
    for name, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        layer_tensors += _linear(name, f"model.layers.{{layer}}.mlp.{name}", rows, columns, mlp_bias)
    return DecoderSpec(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=read.integer("num_hidden_layers", maximum=10_000),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[act],
        rope=rope_from_config(config, head_dim, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        tensors=(
            TensorSpec("embed_tokens.weight", "model.embed_tokens.weight", (vocab, hidden)),
            TensorSpec("norm.weight", "model.norm.weight", (hidden,)),
            TensorSpec("lm_head.weight", "lm_head.weight", (vocab, hidden), required=not tied),
        ),
        layer_tensors=tuple(layer_tensors),
        ignored_tensors=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    )


def _linear(role: str, name: str, rows: int, columns: int, bias: bool) -> list[TensorSpec]:
    """A matrix and its bias, which is used where the file has it whatever the configuration says."""
    return [
        TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns)),
        TensorSpec(f"{role}.bias", f"{name}.bias", (rows,), required=bias),
    ]
