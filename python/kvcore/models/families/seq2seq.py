"""What encoder-decoders have in common: stacks of layers by side, and the tensors of BART's layout.

stack(read, ...)           an encoder's or a decoder's sizes, layers and tensors
bart_layers(...)           layers as BART, Marian and Whisper name them, norms before or behind each block
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal

from kvcore.checkpoint.config import ConfigReader
from kvcore.models.families.draft import ACTIVATIONS, MAX_HEAD_DIM
from kvcore.models.families.layout import by_role, linear, norm
from kvcore.models.shape import MAX_HEADS, MAX_LAYERS
from kvcore.models.spec import ActivationSpec, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from kvcore.models.tensors import TensorSpec

Side = Literal["encoder", "decoder"]

BASE: Final = "model."
"""Files of the bare model leave it out."""

PRE_NORM: Final = {"self_attn": "input_norm", "encoder_attn": "cross_norm", "final": "mlp_norm"}
POST_NORM: Final = {"self_attn": "after_attention_norm", "encoder_attn": "after_cross_norm", "final": "after_mlp_norm"}
"""Roles of a layer's norms, by how their names begin."""

EMBEDDINGS: Final = tuple(f"{base}{side}.embed_tokens.weight" for base in (BASE, "") for side in ("encoder", "decoder"))
"""Second copies of the shared embedding, which old files have."""


def stack(
    read: ConfigReader,
    layers: tuple[LayerSpec, ...],
    tensors: Iterable[TensorSpec],
    *,
    vocab: int,
    hidden: int,
    heads: int,
    head_dim: int,
    norm_spec: NormSpec,
    positions: int,
    tied: bool = True,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    sinusoidal: bool = False,
    ignored: tuple[str, ...] = EMBEDDINGS,
) -> DecoderSpec:
    """An encoder or a decoder. Raises ``CheckpointError`` for heads that the cache cannot hold."""
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise read.error("width of a head", f"an even number of at most {MAX_HEAD_DIM}", head_dim)
    return DecoderSpec(
        family=read.string("model_type"),
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        norm=norm_spec,
        layers=layers,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        tensors=by_role(tensors),
        ignored_tensors=ignored,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        sinusoidal=sinusoidal,
    )


def bart_heads(read: ConfigReader, side: Side, hidden: int) -> tuple[int, int]:
    """Heads of a side and their width. Raises ``CheckpointError``."""
    key = f"{side}_attention_heads"
    heads = read.integer(key, maximum=MAX_HEADS)
    if hidden % heads:
        raise read.error(key, f"a divisor of d_model ({hidden})", heads)
    return heads, hidden // heads


def bart_layers(
    read: ConfigReader, side: Side, hidden: int, *, norms: Mapping[str, str], k_bias: bool = True
) -> tuple[LayerSpec, ...]:
    """A side's layers; ``norms`` is ``PRE_NORM`` or ``POST_NORM``. Raises ``CheckpointError``."""
    layer = f"{BASE}{side}.layers.{{layer}}."
    name = read.string("activation_function", "gelu")
    if name not in ACTIVATIONS:
        raise read.error("activation_function", f"one of {', '.join(ACTIVATIONS)}", name)
    mlp = MlpSpec(read.integer(f"{side}_ffn_dim"), ActivationSpec(ACTIVATIONS[name]), gated=False)
    attention = AttentionSpec()

    def tensors() -> Iterable[TensorSpec]:
        for prefix, role in (("self_attn", ""), ("encoder_attn", "cross_")):
            if prefix == "encoder_attn" and side == "encoder":
                continue
            for projection in ("q_proj", "k_proj", "v_proj"):
                bias = None if projection == "k_proj" and not k_bias else True
                yield from linear(f"{role}{projection}", f"{layer}{prefix}.{projection}", hidden, hidden, bias)
            yield from linear(f"{role}o_proj", f"{layer}{prefix}.out_proj", hidden, hidden, True)
            yield from norm(norms[prefix], f"{layer}{prefix}_layer_norm", hidden, bias=True)
        yield from linear("up_proj", layer + "fc1", mlp.inner, hidden, True)
        yield from linear("down_proj", layer + "fc2", hidden, mlp.inner, True)
        yield from norm(norms["final"], layer + "final_layer_norm", hidden, bias=True)

    spec = LayerSpec(attention, mlp, by_role(of_base(tensors())), cross=attention if side == "decoder" else None)
    return (spec,) * read.integer(f"{side}_layers", maximum=MAX_LAYERS)


def of_base(tensors: Iterable[TensorSpec]) -> Iterable[TensorSpec]:
    """The same, found in files of the bare model, too."""
    return [replace(tensor, base=BASE) for tensor in tensors]
