"""GPT-NeoX and Pythia: attention and MLP side by side, each with a norm; q, k and v stored head by head as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, layer_norm
from kvcore.models.families.layout import QKV, fused, linear, norm
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.models.tensors import TensorSpec

LAYER = "gpt_neox.layers.{layer}."
IGNORED = tuple(f"gpt_neox.layers.*.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq"))


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GPTNeoXConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read, hidden, heads = draft.read, draft.hidden, draft.heads
    width = heads.queries * heads.k_dim
    mlp = draft.mlp(draft.activation(default="gelu"), gated=False)
    bias = read.boolean("attention_bias", True)

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from norm("input_norm", LAYER + "input_layernorm", hidden, bias=True)
        name = LAYER + "attention.query_key_value"
        yield from fused(QKV, name, (width, width, width), hidden, bias, groups=heads.queries)
        yield from linear("o_proj", LAYER + "attention.dense", hidden, width, bias)
        yield from norm("mlp_norm", LAYER + "post_attention_layernorm", hidden, bias=True)
        yield from linear("up_proj", LAYER + "mlp.dense_h_to_4h", mlp.inner, hidden, True)
        yield from linear("down_proj", LAYER + "mlp.dense_4h_to_h", hidden, mlp.inner, True)

    rope = rope_from_config(
        config, heads.k_dim, draft.positions, theta_key="rotary_emb_base", partial=0.25, partial_key="rotary_pct"
    )
    parallel = read.boolean("use_parallel_residual", True)
    return draft.spec(
        draft.layers(draft.attention(rope), mlp, tensors, parallel=parallel),
        layer_norm(read),
        norm_bias=True,
        names=("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        ignored=IGNORED,
    )
