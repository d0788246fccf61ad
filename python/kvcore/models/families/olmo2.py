"""OLMo 2: norms behind attention and MLP, none before; a norm over all heads of q, and of k, together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.models.families.draft import Draft, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec

NORMS = {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Olmo2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    bias = draft.read.boolean("attention_bias", False)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    attention = draft.attention(rope, qk_norm="all")
    layers = draft.llama_layers(attention, draft.mlp(), norms=NORMS, qkv_bias=bias, o_bias=bias)
    return draft.spec(layers, rms(draft.read, 1e-5))
