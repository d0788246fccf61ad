"""Gemma 1 to 3: norms multiply by 1 + w, embeddings are multiplied by the root of their width, tanh gelu.

Gemma 2 adds norms behind attention and MLP, soft caps and alternating windows; Gemma 3 norms of each head of q and k,
and another rope base in sliding layers, but has no caps (transformers reads them and does not use them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcore.checkpoint.config import Config
from kvcore.models.families.common import NORMS, Parts, refuse, rms
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
    parts = Parts(config)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    key = "hidden_activation" if parts.read.has("hidden_activation") else "hidden_act"
    activation = parts.activation(key, "gelu_pytorch_tanh")
    if activation.name == "gelu":  # old files say so and mean the other
        activation = ActivationSpec("gelu_tanh")
    return _spec(parts, parts.attention(rope), parts.mlp(activation), NORMS)


def gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Gemma2Config``. Raises ``CheckpointError``."""
    parts = Parts(config)
    rope = rope_from_config(config, parts.heads.k_dim, parts.positions)
    softcap = _cap(parts, "attn_logit_softcapping", 50.0)
    attention = parts.attention(rope, scale=_scale(parts), softcap=softcap)
    mlp = parts.mlp(parts.activation("hidden_activation", "gelu_pytorch_tanh"))
    return _spec(parts, attention, mlp, FOUR_NORMS, logit_softcap=_cap(parts, "final_logit_softcapping", 30.0))


def gemma3(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Gemma3TextConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    ropes = [_gemma3_rope(parts, window is not None) for window in parts.windows]
    mlp = MlpSpec(
        parts.read.integer("intermediate_size", 9216), parts.activation("hidden_activation", "gelu_pytorch_tanh")
    )
    attention = parts.attention(ropes, scale=_scale(parts), qk_norm="head")
    cap = _cap(parts, "final_logit_softcapping", None)
    return _spec(parts, attention, mlp, FOUR_NORMS, vocab=262208, logit_softcap=cap)


def _spec(
    parts: Parts, attention: list[AttentionSpec], mlp: MlpSpec, norms: Mapping[str, str], **values: Any
) -> DecoderSpec:
    refuse(parts.read, "use_bidirectional_attention")
    bias = parts.read.boolean("attention_bias", False)
    layers = parts.llama_layers(attention, mlp, norms=norms, qkv_bias=bias, o_bias=bias)
    scale = parts.hidden**0.5
    return parts.spec(layers, rms(parts.read, offset=1.0), tied=True, embedding_scale=scale, **values)


def _scale(parts: Parts) -> float:
    return 1 / math.sqrt(parts.read.number("query_pre_attn_scalar", 256.0))


def _cap(parts: Parts, key: str, default: float | None) -> float | None:
    """A soft cap: the default if the key is missing, none if it is null."""
    return parts.read.number(key, None if key in parts.config else default)


def _gemma3_rope(parts: Parts, slides: bool) -> RopeSpec:
    if not slides:
        return rope_from_config(
            parts.config, parts.heads.k_dim, parts.positions, theta=1000000.0, layer_type="full_attention"
        )
    config = parts.config
    if parts.read.child("rope_parameters") is None:  # transformers 4: sliding layers are never stretched
        config = Config({**config, "rope_scaling": None}, parts.read.source)
    return rope_from_config(
        config, parts.heads.k_dim, parts.positions, theta_key="rope_local_base_freq", layer_type="sliding_attention"
    )
