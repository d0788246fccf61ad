"""Gemma 1 to 3: norms multiply by 1 + w, embeddings are multiplied by the root of their width, tanh gelu.

Gemma 2 adds norms behind attention and MLP, soft caps and alternating windows; Gemma 3 norms of each head of q and k,
and another rope base in sliding layers, but has no caps (transformers reads them and does not use them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcore.checkpoint.config import Config
from kvcore.models.families.draft import Draft, refuse, rms
from kvcore.models.families.layout import NORMS
from kvcore.models.rope import RopeSpec, rope_from_config
from kvcore.models.spec import ActivationSpec, AttentionSpec, DecoderSpec, MlpSpec

FOUR_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def gemma(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GemmaConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    key = "hidden_activation" if draft.read.has("hidden_activation") else "hidden_act"
    activation = draft.activation(key, "gelu_pytorch_tanh")
    if activation.name == "gelu":  # old files say so and mean the other
        activation = ActivationSpec("gelu_tanh")
    return _spec(draft, draft.attention(rope), draft.mlp(activation), NORMS)


def gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Gemma2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    rope = rope_from_config(config, draft.heads.k_dim, draft.positions)
    softcap = _cap(draft, "attn_logit_softcapping", 50.0)
    attention = draft.attention(rope, scale=_scale(draft), softcap=softcap)
    mlp = draft.mlp(draft.activation("hidden_activation", "gelu_pytorch_tanh"))
    return _spec(draft, attention, mlp, FOUR_NORMS, logit_softcap=_cap(draft, "final_logit_softcapping", 30.0))


def gemma3(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Gemma3TextConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    ropes = [_gemma3_rope(draft, window is not None) for window in draft.windows]
    mlp = MlpSpec(
        draft.read.integer("intermediate_size", 9216), draft.activation("hidden_activation", "gelu_pytorch_tanh")
    )
    attention = draft.attention(ropes, scale=_scale(draft), qk_norm="head")
    cap = _cap(draft, "final_logit_softcapping", None)
    return _spec(draft, attention, mlp, FOUR_NORMS, vocab=262208, logit_softcap=cap)


def _spec(
    draft: Draft, attention: list[AttentionSpec], mlp: MlpSpec, norms: Mapping[str, str], **values: Any
) -> DecoderSpec:
    refuse(draft.read, "use_bidirectional_attention")
    bias = draft.read.boolean("attention_bias", False)
    layers = draft.llama_layers(attention, mlp, norms=norms, qkv_bias=bias, o_bias=bias)
    scale = draft.hidden**0.5
    return draft.spec(layers, rms(draft.read, offset=1.0), tied=True, embedding_scale=scale, **values)


def _scale(draft: Draft) -> float:
    return 1 / math.sqrt(draft.read.number("query_pre_attn_scalar", 256.0))


def _cap(draft: Draft, key: str, default: float | None) -> float | None:
    """A soft cap: the default if the key is missing, none if it is null."""
    return draft.read.number(key, None if key in draft.config else default)


def _gemma3_rope(draft: Draft, slides: bool) -> RopeSpec:
    if not slides:
        return rope_from_config(
            draft.config, draft.heads.k_dim, draft.positions, theta=1000000.0, layer_type="full_attention"
        )
    config = draft.config
    if draft.read.child("rope_parameters") is None:  # transformers 4: sliding layers are never stretched
        config = Config({**config, "rope_scaling": None}, draft.read.source)
    return rope_from_config(
        config, draft.heads.k_dim, draft.positions, theta_key="rope_local_base_freq", layer_type="sliding_attention"
    )
