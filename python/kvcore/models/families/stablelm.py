"""StableLM 2 and 3B: Llama with LayerNorms, rope in the first quarter of each head, and more if flags say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcore.models.families.draft import Draft, Mlp, layer_norm
from kvcore.models.families.layout import LAYER, NORMS, norm
from kvcore.models.rope import rope_from_config
from kvcore.models.spec import DecoderSpec
from kvcore.models.tensors import TensorSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``StableLmConfig``. Raises ``CheckpointError``."""
    draft = Draft(config)
    read, heads, mlp = draft.read, draft.heads, draft.mlp()
    parallel = read.boolean("use_parallel_residual", False)  # then one norm serves both
    qk_norm = read.boolean("qk_layernorm", False)
    norms = {"input_norm": NORMS["input_norm"]} if parallel else NORMS

    def tensors(_: Mlp) -> Iterable[TensorSpec]:
        yield from draft.norm_tensors(norms, bias=True)
        yield from draft.attention_tensors(qkv_bias=read.boolean("use_qkv_bias", False))
        for name, count in (("q", heads.queries), ("k", heads.kv)) if qk_norm else ():
            for head in range(count):
                yield from norm(f"{name}_norm.{head}", f"{LAYER}self_attn.{name}_layernorm.norms.{head}", heads.k_dim)
        yield from draft.mlp_tensors(mlp.inner)

    rope = rope_from_config(config, heads.k_dim, draft.positions, partial=0.25)
    attention = draft.attention(rope, qk_norm="head" if qk_norm else None)
    layers = draft.layers(attention, mlp, tensors, parallel=parallel)
    return draft.spec(layers, layer_norm(read), norm_bias=True)
