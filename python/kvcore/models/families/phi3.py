"""Phi-3 and Phi-4-mini: Llama with q, k and v stored as one matrix, gate and up as another; longrope."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, rms
from kvcore.models.families.layout import LAYER, QKV, fused, linear
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.models.tensors import TensorSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Phi3Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    hidden, heads, mlp = draft.hidden, draft.heads, draft.mlp()
    q, kv = heads.queries * heads.k_dim, heads.kv * heads.k_dim

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors()
        yield from fused(QKV, LAYER + "self_attn.qkv_proj", (q, kv, kv), hidden, False)
        yield from linear("o_proj", LAYER + "self_attn.o_proj", hidden, q, False)
        yield from fused(("gate_proj", "up_proj"), LAYER + "mlp.gate_up_proj", (mlp.inner, mlp.inner), hidden, False)
        yield from linear("down_proj", LAYER + "mlp.down_proj", hidden, mlp.inner, False)

    rope = rope_from_config(config, heads.k_dim, draft.positions)
    return draft.spec(draft.layers(draft.attention(rope), mlp, tensors), rms(draft.read, 1e-5))
