"""GPT-2: learned positions, LayerNorms, and matrices stored [in, out], q, k and v as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, layer_norm, refuse
from kvcore.models.families.layout import QKV, fused, norm
from kvcore.models.spec import DecoderSpec, MlpSpec
from kvcore.models.tensors import TensorSpec

BASE = "transformer."
"""Files of OpenAI's own models leave it out."""

LAYER = BASE + "h.{layer}."
IGNORED = tuple(f"{base}h.*.attn.{name}" for base in (BASE, "") for name in ("bias", "masked_bias"))


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GPT2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read, hidden = draft.read, draft.hidden
    refuse(read, "add_cross_attention")
    mlp = MlpSpec(read.integer("n_inner", 4 * hidden), draft.activation("activation_function", "gelu_new"), gated=False)

    def matrices(roles: tuple[str, ...], name: str, rows: int, columns: int) -> Iterable[TensorSpec]:
        return fused(roles, LAYER + name, (rows,) * len(roles), columns, True, transposed=True)

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        for tensor in (
            *norm("input_norm", LAYER + "ln_1", hidden, bias=True),
            *matrices(QKV, "attn.c_attn", hidden, hidden),
            *matrices(("o_proj",), "attn.c_proj", hidden, hidden),
            *norm("mlp_norm", LAYER + "ln_2", hidden, bias=True),
            *matrices(("up_proj",), "mlp.c_fc", mlp.inner, hidden),
            *matrices(("down_proj",), "mlp.c_proj", hidden, mlp.inner),
        ):
            yield replace(tensor, base=BASE)

    scale = draft.heads.k_dim**-0.5 if read.boolean("scale_attn_weights", True) else 1.0
    attention = draft.attention(None, scale=scale)
    if read.boolean("scale_attn_by_inverse_layer_idx", False):
        attention = [replace(a, scale=scale / (layer + 1)) for layer, a in enumerate(attention)]
    spec = draft.spec(
        draft.layers(attention, mlp, tensors),
        layer_norm(read, "layer_norm_epsilon"),
        tied=True,
        vocab=50257,
        norm_bias=True,
        names=(BASE + "wte", BASE + "ln_f", "lm_head"),
        more=[TensorSpec("position_embedding.weight", BASE + "wpe.weight", (draft.positions, hidden))],
        ignored=IGNORED,
    )
    return replace(spec, tensors={role: replace(tensor, base=BASE) for role, tensor in spec.tensors.items()})
