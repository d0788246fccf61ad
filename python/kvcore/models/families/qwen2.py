"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v. Layers slide only if ``use_sliding_window`` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    layers = draft.llama_layers(draft.attention(rope), draft.mlp(), qkv_bias=True)
    return draft.spec(layers, rms(draft.read))
