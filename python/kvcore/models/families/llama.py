"""Llama 1, 2 and 3, and the many models with their shape (SmolLM2, TinyLlama, Yi, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``LlamaConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    bias = draft.read.boolean("attention_bias", False)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    layers = draft.llama_layers(
        draft.attention(rope),
        draft.mlp(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=draft.read.boolean("mlp_bias", False),
    )
    return draft.spec(layers, rms(draft.read))
