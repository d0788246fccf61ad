"""SmolLM3: Llama, every fourth layer without rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.shape import rope_layers
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``SmolLM3Config``. Raises ``CheckpointError``."""
    parts = Parts(config)
    bias = parts.read.boolean("attention_bias", False)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions, theta=2000000.0)
    ropes = [rope if turns else None for turns in rope_layers(config, parts.num_layers)]
    layers = parts.llama_layers(
        parts.attention(ropes),
        parts.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=parts.read.boolean("mlp_bias", False),
    )
    return parts.spec(layers, rms(parts.read), tied=True)
