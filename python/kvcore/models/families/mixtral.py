"""Mixtral: Mistral with a mixture of experts in place of each MLP; their weights are made to sum to 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, expert_counts, rms
from kvcore.models.families.layout import LAYER, gated_mlp, linear
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import TensorSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``MixtralConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    experts, chosen = expert_counts(draft.read, "num_local_experts", default=(8, 2))
    inner, prefix = draft.read.integer("intermediate_size"), LAYER + "block_sparse_moe."
    moe = MoeSpec(experts, inner, draft.activation(), RouterSpec(chosen, renormalize=True))

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors()
        yield from draft.attention_tensors()
        yield from linear("router", prefix + "gate", experts, draft.hidden)
        for e in range(experts):
            names = ("w1", "w3", "w2")
            yield from gated_mlp(f"experts.{e}.", f"{prefix}experts.{e}.", draft.hidden, inner, names=names)

    rope = rope_from_config(config, draft.heads.k_dim, draft.positions, theta=1e6)
    return draft.spec(draft.layers(draft.attention(rope), moe, tensors), rms(draft.read, 1e-5))
