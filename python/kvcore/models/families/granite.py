"""Granite 3: Llama with multipliers for embeddings, attention scores and residuals, and logits that are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GraniteConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read = draft.read
    bias = read.boolean("attention_bias", False)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    layers = draft.llama_layers(
        draft.attention(rope, scale=read.number("attention_multiplier", 1.0)),
        draft.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.boolean("mlp_bias", False),
    )
    return draft.spec(
        layers,
        rms(read),
        embedding_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=read.number("residual_multiplier", 1.0),
        logit_scale=1 / read.number("logits_scaling", 1.0),
    )
