"""Qwen 1.5 MoE, Qwen 2 MoE (with an expert that all tokens share, behind a gate) and Qwen 3 MoE.

Some layers have experts, the others are dense: every ``decoder_sparse_step``-th but those of ``mlp_only_layers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, expert_counts, rms
from kvcore.models.families.layout import LAYER, gated_mlp, linear
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import TensorSpec


def qwen2_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen2MoeConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    shared = draft.read.integer("shared_expert_intermediate_size", 5632)
    bias = draft.read.boolean("qkv_bias", True)
    return _spec(draft, (60, 4), 1408, shared=shared, qk_norm=False, qkv_bias=bias, o_bias=False)


def qwen3_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen3MoeConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    bias = draft.read.boolean("attention_bias", False)
    return _spec(draft, (128, 8), 768, shared=None, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _spec(
    draft: Draft, counts: tuple[int, int], width: int, *, shared: int | None, qk_norm: bool, qkv_bias: bool,
    o_bias: bool,
) -> DecoderSpec:  # fmt: skip
    read, hidden = draft.read, draft.hidden
    experts, chosen = expert_counts(read, "num_experts", "num_local_experts", default=counts)
    inner = read.integer("moe_intermediate_size", width)
    router = RouterSpec(chosen, renormalize=read.boolean("norm_topk_prob", False))
    moe = MoeSpec(experts, inner, draft.activation(), router, shared, shared_gate=shared is not None)

    def tensors(mlp: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors()
        yield from draft.attention_tensors(qkv_bias=qkv_bias, o_bias=o_bias)
        if qk_norm:
            yield from draft.qk_norm_tensors()
        if isinstance(mlp, MoeSpec):
            prefix = LAYER + "mlp."
            yield from linear("router", prefix + "gate", experts, hidden)
            for e in range(experts):
                yield from gated_mlp(f"experts.{e}.", f"{prefix}experts.{e}.", hidden, inner)
            if shared is not None:
                yield from gated_mlp("shared.", prefix + "shared_expert.", hidden, shared)
                yield from linear("shared_gate", prefix + "shared_expert_gate", 1, hidden)
        else:
            yield from draft.mlp_tensors(mlp.inner)

    sparse = _sparse_layers(draft)
    mlps = [moe] * draft.num_layers if all(sparse) else [moe if s else draft.mlp() for s in sparse]
    rope = rope_from_config(draft.config, draft.heads.k_dim, draft.positions)
    attention = draft.attention(rope, qk_norm="head" if qk_norm else None)
    return draft.spec(draft.layers(attention, mlps, tensors), rms(read))


def _sparse_layers(draft: Draft) -> list[bool]:
    """Which layers have experts."""
    step = draft.read.integer("decoder_sparse_step", 1)
    named = draft.config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, (list, tuple)) or not all(isinstance(layer, int) for layer in named):
        raise draft.read.error("mlp_only_layers", "a list of layers", named)
    return [(layer + 1) % step == 0 and layer not in named for layer in range(draft.num_layers)]
