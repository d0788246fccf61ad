"""Whisper: an encoder of sound, whose features go through two convolutions; LayerNorms before each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.families.layout import norm
from kvcore.models.families.seq2seq import BASE, PRE_NORM, Side, bart_heads, bart_layers, of_base, stack
from kvcore.models.shape import hidden_size
from kvcore.models.spec import DecoderSpec, EncoderSpec, NormSpec
from kvcore.models.tensors import TensorSpec


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``WhisperConfig``. Raises ``CheckpointError``."""
    read, hidden = ConfigReader(config), hidden_size(config)
    vocab, bins = read.integer("vocab_size", 51865), read.integer("num_mel_bins", 80)
    rows = read.integer("max_source_positions", 1500)
    tied = read.boolean("tie_word_embeddings", True)

    def side(name: Side, positions: int, tensors: Iterable[TensorSpec]) -> DecoderSpec:
        heads, head_dim = bart_heads(read, name, hidden)
        prefix = f"{BASE}{name}."
        both = [
            *tensors,
            TensorSpec("position_embedding.weight", prefix + "embed_positions.weight", (positions, hidden)),
            *norm("norm", prefix + "layer_norm", hidden, bias=True),
        ]
        return stack(
            read, bart_layers(read, name, hidden, norms=PRE_NORM, k_bias=False), of_base(both), vocab=vocab,
            hidden=hidden, heads=heads, head_dim=head_dim, norm_spec=NormSpec("layer", 1e-5), positions=positions,
            tied=tied, ignored=(),
        )  # fmt: skip

    convolutions = [
        TensorSpec(f"{name}.{part}", f"{BASE}encoder.{name}.{part}", shape)
        for name, inputs in (("conv1", bins), ("conv2", hidden))
        for part, shape in (("weight", (hidden, inputs, 3)), ("bias", (hidden,)))
    ]
    outputs = [
        TensorSpec("embed_tokens.weight", f"{BASE}decoder.embed_tokens.weight", (vocab, hidden)),
        TensorSpec("lm_head.weight", "proj_out.weight", (vocab, hidden), required=not tied),
    ]
    decoder = side("decoder", read.integer("max_target_positions", 448), outputs)
    start = read.integer("decoder_start_token_id", 50257, minimum=0)
    encoder = EncoderSpec(side("encoder", rows, convolutions), start, bins, rows)
    return replace(decoder, encoder=encoder)
