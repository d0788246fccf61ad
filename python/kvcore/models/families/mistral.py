"""Mistral: Llama with a sliding window in every layer, if the configuration names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.common import Parts, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``MistralConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    return parts.spec(parts.llama_layers(parts.attention(rope), parts.mlp()), rms(parts.read))
