"""GLM-4: Llama with four norms a layer, neighbouring dimensions that turn in half of each head, gate and up as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, rms
from kvcore.models.families.layout import LAYER, fused, linear
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.models.tensors import TensorSpec

NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Glm4Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    hidden, mlp = draft.hidden, draft.mlp()

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors(NORMS)
        yield from draft.attention_tensors(qkv_bias=draft.read.boolean("attention_bias", False))
        yield from fused(("gate_proj", "up_proj"), LAYER + "mlp.gate_up_proj", (mlp.inner, mlp.inner), hidden, False)
        yield from linear("down_proj", LAYER + "mlp.down_proj", hidden, mlp.inner, False)

    rope = rope_from_config(config, draft.heads.k_dim, draft.positions, partial=0.5, interleaved=True)
    return draft.spec(draft.layers(draft.attention(rope), mlp, tensors), rms(draft.read, 1.5625e-07))
