"""T5: positions as a bias by distance, RMS norms before each block, scores that are not scaled. T5 1.1: a gated MLP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.families.draft import ACTIVATIONS
from kvcore.models.families.layout import by_role, linear, norm
from kvcore.models.families.seq2seq import EMBEDDINGS, Side, stack
from kvcore.models.shape import MAX_LAYERS, attention_heads, hidden_size, num_layers
from kvcore.models.spec import (
    ActivationSpec,
    AttentionSpec,
    DecoderSpec,
    EncoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RelativeSpec,
)
from kvcore.models.tensors import TensorSpec

IGNORED = (*EMBEDDINGS, "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
MAX_DISTANCE = 1 << 16


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``T5Config``. Raises ``CheckpointError``."""
    read, hidden, heads = ConfigReader(config), hidden_size(config), attention_heads(config)
    vocab = read.integer("vocab_size", 32128)
    mlp, relative = mlp_spec(read), relative_spec(read)
    # transformers 5 always writes "tied", and tells by the scale whether it is
    tied = read.boolean("tie_word_embeddings", True)
    tied = tied and read.boolean("scale_decoder_outputs", True)

    def layers(side: Side, count: int) -> tuple[LayerSpec, ...]:
        attention = AttentionSpec(scale=1.0, relative=replace(relative, both_sides=side == "encoder"))
        tensors = by_role(layer_tensors(side, hidden, heads.queries, heads.k_dim, mlp, relative.buckets))
        cross = AttentionSpec(scale=1.0) if side == "decoder" else None
        return (LayerSpec(attention, mlp, tensors, cross=cross),) * count

    def side(name: Side, count: int, more: Iterable[TensorSpec] = (), logit_scale: float = 1.0) -> DecoderSpec:
        tensors = [
            TensorSpec("embed_tokens.weight", "shared.weight", (vocab, hidden)),
            *norm("norm", f"{name}.final_layer_norm", hidden),
            *more,
        ]
        return stack(
            read, layers(name, count), tensors, vocab=vocab, hidden=hidden, heads=heads.queries, head_dim=heads.k_dim,
            norm_spec=NormSpec("rms", read.number("layer_norm_epsilon", 1e-6)), tied=tied, logit_scale=logit_scale,
            positions=read.integer("n_positions", 512), ignored=IGNORED,
        )  # fmt: skip

    output = TensorSpec("lm_head.weight", "lm_head.weight", (vocab, hidden), required=not tied)
    decoder = side("decoder", num_layers(config), [output], hidden**-0.5 if tied else 1.0)
    encoder = side("encoder", read.integer("num_layers", 6, maximum=MAX_LAYERS))
    start = read.integer("decoder_start_token_id", read.integer("pad_token_id", 0, minimum=0), minimum=0)
    return replace(decoder, encoder=EncoderSpec(encoder, start))


def layer_tensors(side: Side, hidden: int, heads: int, width: int, mlp: MlpSpec, buckets: int) -> Iterable[TensorSpec]:
    """A layer's tensors. All layers share the first one's bias."""
    block, last = f"{side}.block.{{layer}}.layer.", 2 if side == "decoder" else 1
    blocks = [("", "0.SelfAttention.", "input_norm"), ("cross_", "1.EncDecAttention.", "cross_norm")]
    for index, (role, name, norm_role) in enumerate(blocks[:last]):
        for letter in "qkv":
            yield from linear(f"{role}{letter}_proj", block + name + letter, heads * width, hidden)
        yield from linear(f"{role}o_proj", block + name + "o", hidden, heads * width)
        yield from norm(norm_role, f"{block}{index}.layer_norm", hidden)
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield TensorSpec("relative_bias.weight", bias, (buckets, heads))
    dense = f"{block}{last}.DenseReluDense."
    if mlp.gated:
        yield from linear("gate_proj", dense + "wi_0", mlp.inner, hidden)
    yield from linear("up_proj", dense + ("wi_1" if mlp.gated else "wi"), mlp.inner, hidden)
    yield from linear("down_proj", dense + "wo", hidden, mlp.inner)
    yield from norm("mlp_norm", f"{block}{last}.layer_norm", hidden)


def mlp_spec(read: ConfigReader) -> MlpSpec:
    """The MLP that ``feed_forward_proj`` names. Raises ``CheckpointError``."""
    kind = read.string("feed_forward_proj", "relu")
    gated, name = kind.startswith("gated-"), kind.removeprefix("gated-")
    name = "gelu_new" if kind == "gated-gelu" else name
    if name not in ACTIVATIONS:
        raise read.error(
            "feed_forward_proj", f"one of {', '.join(ACTIVATIONS)}, with or without gated- before it", kind
        )
    return MlpSpec(read.integer("d_ff"), ActivationSpec(ACTIVATIONS[name]), gated)


def relative_spec(read: ConfigReader) -> RelativeSpec:
    """The decoder's bias by distance. Raises ``CheckpointError``."""
    buckets = read.integer("relative_attention_num_buckets", 32, minimum=4, maximum=MAX_DISTANCE)
    least = buckets // 2 + 1  # the first half of the decoder's buckets has a distance each
    return RelativeSpec(
        buckets, read.integer("relative_attention_max_distance", 128, minimum=least, maximum=MAX_DISTANCE)
    )
