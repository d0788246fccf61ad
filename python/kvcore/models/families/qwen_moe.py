"""Qwen 1.5 MoE, Qwen 2 MoE (with an expert that all tokens share, behind a gate) and Qwen 3 MoE.

Some layers have experts, the others are dense: every ``decoder_sparse_step``-th but those of ``mlp_only_layers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.common import LAYER, Mlp, Parts, expert_counts, gated_mlp, linear, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import TensorSpec


def qwen2_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen2MoeConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    shared = parts.read.integer("shared_expert_intermediate_size", 5632)
    bias = parts.read.boolean("qkv_bias", True)
    return _spec(parts, (60, 4), 1408, shared=shared, qk_norm=False, qkv_bias=bias, o_bias=False)


def qwen3_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``Qwen3MoeConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    bias = parts.read.boolean("attention_bias", False)
    return _spec(parts, (128, 8), 768, shared=None, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _spec(
    parts: Parts, counts: tuple[int, int], width: int, *, shared: int | None, qk_norm: bool, qkv_bias: bool,
    o_bias: bool,
) -> DecoderSpec:  # fmt: skip
    read, hidden = parts.read, parts.hidden
    experts, chosen = expert_counts(read, "num_experts", "num_local_experts", default=counts)
    inner = read.integer("moe_intermediate_size", width)
    router = RouterSpec(chosen, renormalize=read.boolean("norm_topk_prob", False))
    moe = MoeSpec(experts, inner, parts.activation(), router, shared, shared_gate=shared is not None)

    def tensors(mlp: Mlp) -> Iterable[TensorSpec]:
        yield from parts.norm_tensors()
        yield from parts.attention_tensors(qkv_bias=qkv_bias, o_bias=o_bias)
        if qk_norm:
            yield from parts.qk_norm_tensors()
        if isinstance(mlp, MoeSpec):
            prefix = LAYER + "mlp."
            yield from linear("router", prefix + "gate", experts, hidden)
            for e in range(experts):
                yield from gated_mlp(f"experts.{e}.", f"{prefix}experts.{e}.", hidden, inner)
            if shared is not None:
                yield from gated_mlp("shared.", prefix + "shared_expert.", hidden, shared)
                yield from linear("shared_gate", prefix + "shared_expert_gate", 1, hidden)
        else:
            yield from parts.mlp_tensors(mlp.inner)

    sparse = parts.sparse_layers()
    mlps = [moe] * parts.num_layers if all(sparse) else [moe if s else parts.mlp() for s in sparse]
    rope = rope_from_config(parts.config, parts.heads.k_dim, parts.positions)
    attention = parts.attention(rope, qk_norm="head" if qk_norm else None)
    return parts.spec(parts.layers(attention, mlps, tensors), rms(read))
