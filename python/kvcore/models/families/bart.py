"""BART and Marian: LayerNorms behind each block, absolute positions, and a bias of the logits.

BART learns its positions, and begins with two rows that it does not use; it normalises embeddings. Marian's are sines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.families.layout import norm
from kvcore.models.families.seq2seq import BASE, EMBEDDINGS, POST_NORM, Side, bart_heads, bart_layers, of_base, stack
from kvcore.models.shape import hidden_size
from kvcore.models.spec import DecoderSpec, EncoderSpec, NormSpec
from kvcore.models.tensors import Part, TensorSpec

OFFSET = 2
"""Rows of BART's positions before the first."""

IGNORED = (*EMBEDDINGS, "*encoder.version", "*decoder.version")


def bart(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``BartConfig``. Raises ``CheckpointError``."""

    def front(side: Side, rows: int, hidden: int) -> Iterable[TensorSpec]:
        part = Part((rows + OFFSET, hidden), start=OFFSET)
        name = f"{BASE}{side}.embed_positions.weight"
        yield TensorSpec("position_embedding.weight", name, (rows, hidden), part=part)
        yield from norm("embedding_norm", f"{BASE}{side}.layernorm_embedding", hidden, bias=True)

    return _spec(config, front, start=2)


def marian(config: Mapping[str, Any]) -> DecoderSpec:
    """Defaults are those of transformers' ``MarianConfig``. Raises ``CheckpointError``."""

    def front(side: Side, rows: int, hidden: int) -> Iterable[TensorSpec]:
        name = f"{BASE}{side}.embed_positions.weight"
        yield TensorSpec("position_embedding.weight", name, (rows, hidden), required=False)

    pad = ConfigReader(config).integer("pad_token_id", 58100, minimum=0)
    return _spec(config, front, start=pad, sinusoidal=True)


def _spec(config: Mapping[str, Any], front: Any, *, start: int, sinusoidal: bool = False) -> DecoderSpec:
    read, hidden = ConfigReader(config), hidden_size(config)
    vocab, rows = read.integer("vocab_size", 50265), read.integer("max_position_embeddings", 1024)
    shared = read.boolean("share_encoder_decoder_embeddings", True)
    sizes = {"encoder": vocab, "decoder": vocab if shared else read.integer("decoder_vocab_size", vocab)}
    tied = read.boolean("tie_word_embeddings", True)

    def side(name: Side, more: Iterable[TensorSpec] = ()) -> DecoderSpec:
        heads, head_dim = bart_heads(read, name, hidden)
        embedding = "shared" if shared else f"{name}.embed_tokens"
        tensors = [
            TensorSpec("embed_tokens.weight", f"{BASE}{embedding}.weight", (sizes[name], hidden)),
            *front(name, rows, hidden),
            *more,
        ]
        return stack(
            read, bart_layers(read, name, hidden, norms=POST_NORM), of_base(tensors), vocab=sizes[name],
            hidden=hidden, heads=heads, head_dim=head_dim, norm_spec=NormSpec("layer", 1e-5), positions=rows, tied=tied,
            embedding_scale=hidden**0.5 if read.boolean("scale_embedding", False) else 1.0, sinusoidal=sinusoidal,
            ignored=IGNORED,
        )  # fmt: skip

    outputs = sizes["decoder"]
    decoder = side(
        "decoder",
        [
            TensorSpec("lm_head.weight", "lm_head.weight", (outputs, hidden), required=not tied),
            TensorSpec("lm_head.bias", "final_logits_bias", (1, outputs), required=False),
        ],
    )
    start = read.integer("decoder_start_token_id", start, minimum=0)
    return replace(decoder, encoder=EncoderSpec(side("encoder"), start, max_rows=rows))
