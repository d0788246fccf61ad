"""Mistral: Llama with a sliding window in every layer, if the configuration names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``MistralConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    return draft.spec(draft.llama_layers(draft.attention(rope), draft.mlp()), rms(draft.read))
