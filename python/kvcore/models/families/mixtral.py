"""Mixtral: Mistral with a mixture of experts in place of each MLP; their weights are made to sum to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.common import LAYER, Mlp, Parts, expert_counts, gated_mlp, linear, rms
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import TensorSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``MixtralConfig``. Raises ``CheckpointError``."""
    parts = Parts(config)
    experts, chosen = expert_counts(parts.read, "num_local_experts", default=(8, 2))
    inner, prefix = parts.read.integer("intermediate_size"), LAYER + "block_sparse_moe."
    moe = MoeSpec(experts, inner, parts.activation(), RouterSpec(chosen, renormalize=True))

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from parts.norm_tensors()
        yield from parts.attention_tensors()
        yield from linear("router", prefix + "gate", experts, parts.hidden)
        for e in range(experts):
            names = ("w1", "w3", "w2")
            yield from gated_mlp(f"experts.{e}.", f"{prefix}experts.{e}.", parts.hidden, inner, names=names)

    rope = rope_from_config(config, parts.heads.k_dim, parts.positions, theta=1e6)
    return parts.spec(parts.layers(parts.attention(rope), moe, tensors), rms(parts.read, 1e-5))
