"""Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v. Layers slide only if ``use_sliding_window`` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen2Config``. Raises ``CheckpointError``."""
    parts = Parts(config)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    layers = parts.llama_layers(parts.attention(rope), parts.mlp(), qkv_bias=True)
    return parts.spec(layers, rms(parts.read))
