"""SmolLM3: Llama, every fourth layer without rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.shape import rope_layers
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``SmolLM3Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    bias = draft.read.boolean("attention_bias", False)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions, theta=2000000.0)
    ropes = [rope if turns else None for turns in rope_layers(config, draft.num_layers)]
    layers = draft.llama_layers(
        draft.attention(ropes),
        draft.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=draft.read.boolean("mlp_bias", False),
    )
    return draft.spec(layers, rms(draft.read), tied=True)
