"""Qwen 3: Llama with a norm on each head of q and k, before rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen3Config``. Raises ``CheckpointError``."""
    parts = Parts(config)
    bias = parts.read.boolean("attention_bias", False)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    layers = parts.llama_layers(parts.attention(rope, qk_norm="head"), parts.mlp(), qkv_bias=bias, o_bias=bias)
    return parts.spec(layers, rms(parts.read))
