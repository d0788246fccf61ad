"""Qwen 3: Llama with a norm on each head of q and k, before rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen3Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    bias = draft.read.boolean("attention_bias", False)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    layers = draft.llama_layers(draft.attention(rope, qk_norm="head"), draft.mlp(), qkv_bias=bias, o_bias=bias)
    return draft.spec(layers, rms(draft.read))
