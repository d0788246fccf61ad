"""Cohere's Command R and R7B: attention and MLP side by side behind one norm, a LayerNorm without bias.

Rope turns neighbouring dimensions. Command R7B (cohere2) has it in its sliding layers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, layer_norm
from kvcore.models.families.layout import LAYER
from kvcore.models.rope import RopeSpec, rope_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.models.tensors import TensorSpec


def cohere(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``CohereConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    return _spec(draft, [_rope(draft)] * draft.num_layers, qk_norm=draft.read.boolean("use_qk_norm", False))


def cohere2(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Cohere2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    rope = _rope(draft)
    return _spec(draft, [None if window is None else rope for window in draft.windows], qk_norm=False)


def _rope(draft: Draft) -> RopeSpec:
    return rope_from_config(draft.config, draft.heads.k_dim, draft.positions, interleaved=True)


def _spec(draft: Draft, ropes: list[RopeSpec | None], *, qk_norm: bool) -> DecoderSpec:
    read, heads, mlp = draft.read, draft.heads, draft.mlp()
    bias = read.boolean("attention_bias", False)

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors({"input_norm": "input_layernorm"})
        yield from draft.attention_tensors(qkv_bias=bias, o_bias=bias)
        for name, count in (("q_norm", heads.queries), ("k_norm", heads.kv)) if qk_norm else ():
            yield TensorSpec(f"{name}.weight", f"{LAYER}self_attn.{name}.weight", (count, heads.k_dim))
        yield from draft.mlp_tensors(mlp.inner)

    attention = draft.attention(ropes, qk_norm="head" if qk_norm else None)
    return draft.spec(
        draft.layers(attention, mlp, tensors, parallel=True),
        layer_norm(read),
        tied=True,
        vocab=256000,
        logit_scale=read.number("logit_scale", 0.0625),
    )
