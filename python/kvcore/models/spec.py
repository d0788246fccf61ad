"""What a decoder is, as data: sizes, what each layer does, and which tensors it is made of.

A family file turns config.json into a ``DecoderSpec``; whatever runs or checks a model reads the spec alone and knows
no family.

    x = embedding_norm(embed_tokens[ids] * embedding_scale (+ position_embedding[positions]))
    for each layer:
        a = attention(input_norm(x)) @ o_proj;    x = after_attention_norm(x + residual_scale * post_attention_norm(a))
        c = cross(cross_norm(x)) @ cross_o_proj;  x = after_cross_norm(x + c)             behind an encoder
        m = mlp(mlp_norm(x));                     x = after_mlp_norm(x + residual_scale * post_mlp_norm(m))
    logits = softcap(norm(x) @ lm_head * logit_scale)

A norm is there if its tensor is. In a parallel layer attention and MLP both read the x from before the layer, and the
MLP reads ``input_norm``'s output if there is no ``mlp_norm``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from kvcore.errors import InvalidArgument
from kvcore.models.shape import LayerCache
from kvcore.models.tensors import TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcore.checkpoint.weights import Weights
    from kvcore.models.rope import RopeSpec


@dataclass(frozen=True)
class NormSpec:
    """How activations are normalised.

    Attributes:
        kind: ``"rms"`` or ``"layer"``, which takes off the mean first.
        eps: what is added to the mean square.
        offset: what is added to stored weights: 1 for Gemma.
    """

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: K and V are made of one compressed row for each token (DeepSeek-V2, 2024).

    Attributes:
        q_rank: width of the compressed query; None: queries are not compressed.
        rank: width of the compressed part of a row.
        nope_dim: width of a head of q and k without positions.
        rope_dim: width of the part with positions, in k shared by all heads.
        v_dim: width of a head of v.
        norm_eps: of the norms of what is compressed.
        absorbed: whether the cache holds compressed rows, to which queries are projected, or each head's K and V.
    """

    q_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float = 1e-6
    absorbed: bool = True


@dataclass(frozen=True)
class RelativeSpec:
    """A bias of scores by the distance from token to query, in buckets that widen with it (T5, Raffel et al., 2020).

    Attributes:
        buckets: values that each head has.
        max_distance: tokens from here on share the last bucket.
        both_sides: whether tokens ahead of the query have half of the buckets: in encoders.
    """

    buckets: int
    max_distance: int
    both_sides: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    Attributes:
        scale: what scores are multiplied by; None: 1 / sqrt(head_dim).
        rope: the rotary embedding; None: positions do not count here.
        window: tokens that a query sees, itself included; None: all.
        softcap: bounds scores by ``softcap * tanh(score / softcap)``.
        sinks: whether each head has a score of its own in the softmax, without a value.
        qk_norm: queries and keys are normalised before rope: each head alone, all heads of a token together, or not.
        latent: multi-head latent attention, if it is that.
        relative: a bias by distance, if it has one.
    """

    scale: float | None = None
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    qk_norm: Literal["head", "all"] | None = None
    latent: LatentSpec | None = None
    relative: RelativeSpec | None = None


@dataclass(frozen=True)
class ActivationSpec:
    """An activation by the native core's name; ``alpha`` and ``limit`` are of ``clamped_swiglu``."""

    name: str
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class MlpSpec:
    """A dense MLP.

    Attributes:
        inner: its width.
        activation: its function.
        gated: whether it is ``f(gate) * up``, or ``f(up)``.
    """

    inner: int
    activation: ActivationSpec
    gated: bool = True


@dataclass(frozen=True)
class RouterSpec:
    """How experts are chosen, see ``kvcore._kvcore.route``.

    Attributes:
        top_k: experts of a token.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        groups: groups of experts.
        top_groups: groups that a token's experts may be in.
        group_best: how many of its best experts make a group's merit.
        renormalize: whether the weights of a token's experts are made to sum to 1.
        scale: what the weights are multiplied by then.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalize: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts, each a gated MLP.

    Attributes:
        num_experts: how many there are.
        inner: the width of each.
        activation: their function.
        router: how they are chosen.
        shared_inner: width of an MLP that all tokens go through; None: there is none.
        shared_gate: whether its output is multiplied by the sigmoid of a gate.
    """

    num_experts: int
    inner: int
    activation: ActivationSpec
    router: RouterSpec
    shared_inner: int | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer.

    Attributes:
        attention: how it attends.
        mlp: what follows.
        tensors: its tensors by role; ``{layer}`` in names stands for its index, so layers that are alike share this.
        parallel: whether attention and MLP read the same x.
        cross: how it attends to an encoder's output, if there is one.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    tensors: Mapping[str, TensorSpec] = field(repr=False, hash=False)
    parallel: bool = False
    cross: AttentionSpec | None = None


@dataclass(frozen=True)
class EncoderSpec:
    """What a decoder attends to.

    Attributes:
        stack: its layers, and what comes before and behind them; it has no output matrix.
        start_token_id: the decoder's first token.
        mel_bins: rows of the sound's features that it takes; None: it takes token ids.
        max_rows: the most rows that it gives; None: any number.
    """

    stack: DecoderSpec
    start_token_id: int
    mel_bins: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder, alone or behind an encoder.

    Attributes:
        family: the ``model_type`` it was made from.
        vocab_size: rows of the embedding, and logits per position.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``.
        head_dim: width of one head of q and k; even.
        norm: how activations are normalised.
        layers: the layers, in order.
        max_position_embeddings: positions that the model was made for.
        tie_word_embeddings: whether the embedding is the output matrix, too, see ``has_own_output``.
        tensors: the tensors outside the layers, by role.
        ignored_tensors: patterns (``*``) of names that may be in a file and mean nothing.
        embedding_scale, residual_scale, logit_scale: what embeddings, a block's output and logits are multiplied by.
        logit_softcap: bounds logits by ``softcap * tanh(logit / softcap)``.
        sinusoidal: whether position embeddings are computed where the checkpoint has none (Marian).
        encoder: what its layers with cross-attention attend to.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    tensors: Mapping[str, TensorSpec] = field(repr=False, hash=False)
    ignored_tensors: tuple[str, ...] = field(default=(), repr=False)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    sinusoidal: bool = False
    encoder: EncoderSpec | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))

    def rope_of(self, layer: int) -> int:
        """Where in ``ropes`` a layer's is; -1 if it has none."""
        rope = self.layers[layer].attention.rope
        return -1 if rope is None else self.ropes.index(rope)

    @property
    def takes_any_length(self) -> bool:
        """Whether ``max_position_embeddings`` is no limit: positions are distances, or rope follows the length."""
        relative = any(layer.attention.relative is not None for layer in self.layers)
        return relative or any(rope.kind == "dynamic" for rope in self.ropes)

    def tensor(self, role: str, layer: int | None = None) -> TensorSpec:
        """The tensor with this role, of this layer if one is given, with its full name.

        Raises:
            InvalidArgument: there is no such role or layer.
        """
        if layer is not None and not 0 <= layer < self.num_layers:
            raise InvalidArgument(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")
        tensor = (self.tensors if layer is None else self.layers[layer].tensors).get(role)
        if tensor is None:
            raise InvalidArgument(f"role: a {self.family} model has no tensor {role!r}")
        return tensor if layer is None else tensor.of_layer(layer)

    def all_tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the model, its encoder's among them, with its full name."""
        if self.encoder is not None:
            yield from self.encoder.stack.all_tensors()
        yield from self.tensors.values()
        for index, layer in enumerate(self.layers):
            for tensor in layer.tensors.values():
                yield tensor.of_layer(index)

    def required_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and stored shapes of the tensors that it cannot do without: no biases that may be missing."""
        return {tensor.name: tensor.stored_shape for tensor in self.all_tensors() if tensor.required}

    def cache_layers(self) -> list[LayerCache]:
        """What each layer keeps in the cache; behind these what each layer's cross-attention keeps, if there is any."""
        layers = [self._cache_layer(index, layer.attention) for index, layer in enumerate(self.layers)]
        heads = (self.num_kv_heads, self.head_dim, self.head_dim)
        return layers + [LayerCache("cross", *heads, layer=i) for i, layer in enumerate(self.layers) if layer.cross]

    def _cache_layer(self, index: int, attention: AttentionSpec) -> LayerCache:
        latent = attention.latent
        if latent is not None and latent.absorbed:
            rank, rope_dim = latent.rank, latent.rope_dim
            return LayerCache("latent", 1, rank + rope_dim, rank, None, rank, rope_dim, index)
        kind: Literal["full", "sliding_window"] = "full" if attention.window is None else "sliding_window"
        v_dim = self.head_dim if latent is None else latent.v_dim
        return LayerCache(kind, self.num_kv_heads, self.head_dim, v_dim, attention.window, layer=index)

    def expanded(self) -> DecoderSpec:
        """The same model, each head's K and V in the cache even where latent attention could compress them."""
        layers = []
        for layer in self.layers:
            attention = layer.attention
            if attention.latent is not None:
                attention = replace(attention, latent=replace(attention.latent, absorbed=False))
            layers.append(replace(layer, attention=attention))
        return replace(self, layers=tuple(layers))


def check_weights(spec: DecoderSpec, weights: Weights) -> None:
    """Check that every tensor is there, in a shape and a type that can be read, without reading any.

    Raises:
        CheckpointError: names the tensor, what was expected and what came.
    """
    for tensor in spec.all_tensors():
        tensor.find(weights)


def read_tensor(spec: DecoderSpec, weights: Weights, role: str, layer: int | None = None) -> npt.NDArray[Any] | None:
    """The tensor with this role, see ``TensorSpec.read``.

    Raises:
        CheckpointError: as there. InvalidArgument: there is no such role or layer.
    """
    return spec.tensor(role, layer).read(weights)


def has_own_output(spec: DecoderSpec, weights: Weights) -> bool:
    """Whether the output matrix is a tensor of its own, not the embedding.

    Files of tied models may hold a second copy of the embedding as output matrix. Should the two differ then the file
    says more than the flag, and the stored matrix counts; transformers 5 does the same. Nothing else is read for it.

    Raises:
        CheckpointError: as ``read_tensor``.
    """
    if spec.tensor("lm_head.weight").find(weights) is None:
        return False
    if not spec.tie_word_embeddings:
        return True
    output, embedding = (read_tensor(spec, weights, role) for role in ("lm_head.weight", "embed_tokens.weight"))
    return output is None or embedding is None or not _same(output, embedding)


def read_output(spec: DecoderSpec, weights: Weights) -> npt.NDArray[Any] | None:
    """The output matrix ``[vocab_size, hidden_size]``, or None if it is the embedding. Raises as ``read_tensor``."""
    return read_tensor(spec, weights, "lm_head.weight") if has_own_output(spec, weights) else None


def unused_tensors(spec: DecoderSpec, weights: Weights) -> list[str]:
    """Names of tensors in the file that were never read and are not known to mean nothing, sorted."""
    return [n for n in weights.unused() if not any(fnmatchcase(n, pattern) for pattern in spec.ignored_tensors)]


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays of equal shape hold the same bytes, in pieces so that no large mask is made."""
    import numpy as np

    if a.dtype != b.dtype:
        return False
    pieces = ((a[i : i + 1024], b[i : i + 1024]) for i in range(0, len(a), 1024))
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pieces)
