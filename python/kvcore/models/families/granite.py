"""Granite 3: Llama with multipliers for embeddings, attention scores and residuals, and logits that are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GraniteConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    read = parts.read
    bias = read.boolean("attention_bias", False)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    layers = parts.llama_layers(
        parts.attention(rope, scale=read.number("attention_multiplier", 1.0)),
        parts.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.boolean("mlp_bias", False),
    )
    return parts.spec(
        layers,
        rms(read),
        embedding_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )
