"""gpt-oss: attention sinks, alternating windows, and experts with biases that are stored as one tensor.

gate and up alternate in the columns of ``gate_up_proj``; the activation clamps both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.checkpoint.config import Config
from kvcore.models.families.draft import Draft, Mlp, expert_counts, rms
from kvcore.models.families.layout import LAYER, linear
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import ActivationSpec, DecoderSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import Part, TensorSpec

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rope scaling of a configuration that says nothing."""


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``GptOssConfig``. Raises ``CheckpointError``."""
    if not {"rope_parameters", "rope_scaling"} & set(config):
        config = Config({**config, "rope_scaling": YARN}, getattr(config, "source", "config"))
    draft = Draft(config)
    read, hidden, heads = draft.read, draft.hidden, draft.heads
    experts, chosen = expert_counts(read, "num_local_experts", default=(128, 4))
    inner = read.integer("intermediate_size", 2880)
    limits = (read.number("swiglu_alpha", 1.702), read.number("swiglu_limit", 7.0))
    activation = ActivationSpec("clamped_swiglu", *limits)
    moe = MoeSpec(experts, inner, activation, RouterSpec(chosen, renormalize=True))
    bias = read.boolean("attention_bias", True)

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors()
        yield from draft.attention_tensors(qkv_bias=bias, o_bias=bias)
        yield TensorSpec("sinks", LAYER + "self_attn.sinks", (heads.queries,))
        yield from linear("router", LAYER + "mlp.router", experts, hidden, True)
        for e in range(experts):
            for start, role in enumerate(("gate_proj", "up_proj")):
                yield from stored(e, role, "gate_up_proj", inner, hidden, (2 * inner, inner, start))
            yield from stored(e, "down_proj", "down_proj", hidden, inner, (hidden, 1, 0))

    def stored(
        e: int, role: str, name: str, rows: int, columns: int, place: tuple[int, int, int]
    ) -> Iterable[TensorSpec]:
        """A matrix of expert e and its bias: where they are in the tensors of all experts."""
        total, groups, start = place
        stop = start + rows // groups
        name = f"{LAYER}mlp.experts.{name}"
        part = Part((experts, columns, total), index=e, transposed=True, groups=groups, start=start, stop=stop)
        yield TensorSpec(f"experts.{e}.{role}.weight", name, (rows, columns), part=part)
        part = Part((experts, total), index=e, groups=groups, start=start, stop=stop)
        yield TensorSpec(f"experts.{e}.{role}.bias", f"{name}_bias", (rows,), part=part)

    rope = rope_from_config(config, heads.k_dim, draft.positions, theta=150000.0)
    attention = draft.attention(rope, sinks=True)
    return draft.spec(draft.layers(attention, moe, tensors), rms(read, 1e-5))
