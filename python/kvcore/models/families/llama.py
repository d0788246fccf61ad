"""Llama 1, 2 and 3, and the many models with their shape (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``LlamaConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    bias = parts.read.boolean("attention_bias", False)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    layers = parts.llama_layers(
        parts.attention(rope),
        parts.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=parts.read.boolean("mlp_bias", False),
    )
    return parts.spec(layers, rms(parts.read))
