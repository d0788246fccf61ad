"""DeepSeek-V2 and V3: multi-head latent attention, and experts in groups beside shared ones.

V2 chooses groups by their best expert and never renormalises; V3 scores by sigmoid with a correction that counts for
the choice alone, and groups by their two best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, expert_counts, rms
from kvcore.models.families.layout import IGNORED, LAYER, gated_mlp, linear, norm
from kvcore.models.rope import rope_from_config
from kvcore.models.shape import latent_dims
from kvcore.models.spec import DecoderSpec, LatentSpec, MoeSpec, RouterSpec
from kvcore.models.tensors import Part, TensorSpec

ATTENTION = LAYER + "self_attn."


def deepseek_v2(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``DeepseekV2Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read = draft.read
    experts, chosen = _counts(draft, (64, 6))
    router = RouterSpec(chosen, scale=read.number("routed_scaling_factor", 1.0))
    method = read.string("topk_method", "greedy")
    if method == "group_limited_greedy":
        router = _grouped(draft, router, experts, best=1)
    elif method != "greedy":
        raise read.error("topk_method", "greedy or group_limited_greedy", method)
    return _spec(draft, router, experts, correction=False)


def deepseek_v3(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``DeepseekV3Config``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read = draft.read
    experts, chosen = _counts(draft, (256, 8))
    scale, renormalize = read.number("routed_scaling_factor", 2.5), read.boolean("norm_topk_prob", True)
    router = RouterSpec(chosen, "sigmoid", renormalize=renormalize, scale=scale)
    if experts:
        router = _grouped(draft, router, experts, best=2)
    return _spec(draft, router, experts, correction=True)


def _counts(draft: Draft, default: tuple[int, int]) -> tuple[int, int]:
    """Experts and how many a token uses; none where the configuration says null."""
    if "n_routed_experts" in draft.config and not draft.read.has("n_routed_experts"):
        return 0, 0
    return expert_counts(draft.read, "n_routed_experts", default=default)


def _grouped(draft: Draft, router: RouterSpec, experts: int, *, best: int) -> RouterSpec:
    read = draft.read
    groups = read.integer("n_group", 1)
    if experts % groups:
        raise read.error("n_group", f"a divisor of n_routed_experts ({experts})", groups)
    top = read.integer("topk_group", 1, maximum=groups)
    size = experts // groups
    if router.top_k > top * size:
        raise read.error("num_experts_per_tok", f"at most {top * size} (experts of topk_group groups)", router.top_k)
    return replace(router, groups=groups, top_groups=top, group_best=min(best, size))


def _spec(draft: Draft, router: RouterSpec, experts: int, *, correction: bool) -> DecoderSpec:
    read, hidden = draft.read, draft.hidden
    latent = _latent(draft)
    dense, activation = draft.mlp(), draft.activation()
    inner = read.integer("moe_intermediate_size", dense.inner)
    shared = read.integer("n_shared_experts", 0, minimum=0) * inner or None
    moe = MoeSpec(experts, inner, activation, router, shared)
    first, step = read.integer("first_k_dense_replace", 0, minimum=0), read.integer("moe_layer_freq", 1)
    sparse = [experts > 0 and layer >= first and layer % step == 0 for layer in range(draft.num_layers)]

    def tensors(mlp: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors()
        yield from _attention_tensors(draft, latent)
        if not isinstance(mlp, MoeSpec):
            yield from draft.mlp_tensors(mlp.inner)
            return
        prefix = LAYER + "mlp."
        yield from linear("router", prefix + "gate", experts, hidden)
        if correction:
            yield TensorSpec("router.correction", prefix + "gate.e_score_correction_bias", (experts,))
        for e in range(experts):
            yield from gated_mlp(f"experts.{e}.", f"{prefix}experts.{e}.", hidden, inner)
        if shared is not None:
            yield from gated_mlp("shared.", prefix + "shared_experts.", hidden, shared)

    interleaved = read.boolean("rope_interleave", True)
    rope = rope_from_config(draft.config, latent.rope_dim, draft.positions, interleaved=interleaved)
    scale = draft.heads.k_dim**-0.5 * rope.score_factor
    attention = [replace(a, latent=latent) for a in draft.attention(rope, scale=scale)]
    layers = draft.layers(attention, [moe if s else dense for s in sparse], tensors)
    count = draft.num_layers  # behind the layers stand those that predict several tokens at once
    extra = range(count, count + read.integer("num_nextn_predict_layers", 0, minimum=0, maximum=100))
    return draft.spec(layers, rms(read), ignored=(*IGNORED, *(f"model.layers.{layer}.*" for layer in extra)))


def _latent(draft: Draft) -> LatentSpec:
    read = draft.read
    rank, rope_dim = latent_dims(read)
    q_rank = read.integer("q_lora_rank", None if "q_lora_rank" in draft.config else 1536)
    return LatentSpec(q_rank, rank, draft.heads.k_dim - rope_dim, rope_dim, draft.heads.v_dim)


def _attention_tensors(draft: Draft, latent: LatentSpec) -> Iterable[TensorSpec]:
    hidden, heads = draft.hidden, draft.heads.queries
    bias = draft.read.boolean("attention_bias", False)
    q = heads * draft.heads.k_dim
    if latent.q_rank is None:
        yield from linear("q_proj", ATTENTION + "q_proj", q, hidden)
    else:
        yield from linear("q_a_proj", ATTENTION + "q_a_proj", latent.q_rank, hidden, bias)
        yield from norm("q_a_norm", ATTENTION + "q_a_layernorm", latent.q_rank)
        yield from linear("q_b_proj", ATTENTION + "q_b_proj", q, latent.q_rank)
    yield from linear("kv_a_proj", ATTENTION + "kv_a_proj_with_mqa", latent.rank + latent.rope_dim, hidden, bias)
    yield from norm("kv_a_norm", ATTENTION + "kv_a_layernorm", latent.rank)
    both = latent.nope_dim + latent.v_dim
    for role, start, stop in (("k_b_proj", 0, latent.nope_dim), ("v_b_proj", latent.nope_dim, both)):
        part = Part((heads * both, latent.rank), groups=heads, start=start, stop=stop)
        shape = (heads * (stop - start), latent.rank)
        yield TensorSpec(f"{role}.weight", ATTENTION + "kv_b_proj.weight", shape, part=part)
    yield from linear("o_proj", ATTENTION + "o_proj", hidden, heads * latent.v_dim, bias)
