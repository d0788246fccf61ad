"""What a model takes, and how many requests fit.

    a token    = sum over layers of KV heads x (row of K + row of V)
    a request  = tokens that each layer keeps x bytes of a token
                 full, latent: all of them; sliding: the window; cross: those of the encoder
    requests   = (memory - weights) / a request
    the three ways to set memory aside for one:
      paged           blocks of 16 tokens, taken as tokens arrive
      power of two    the next power of two above the request's length
      max length      as if it would become as long as it may

All numbers are whole bytes, exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore.checkpoint.config import Config, ConfigReader, config_dtype
from kvcore.errors import InvalidArgument
from kvcore.models.shape import (
    CacheGroup,
    LayerCache,
    cache_groups,
    cache_layers,
    max_length,
    source_length,
    text_config,
)
from kvcore.plan import formats
from kvcore.plan.formats import CacheFormat
from kvcore.plan.model import Model, StoredWeights
from kvcore.plan.parameters import Parameters, count_parameters

BLOCK_SIZE = 16
"""Tokens of a block."""

LANES = 16
"""kvcore pads rows of V to whole vectors of this many dimensions."""

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class GroupCost:
    """What the layers of one group take. Bytes are of all its layers unless said otherwise.

    Attributes:
        group: the layers and what they keep.
        layer_bytes: of a token in one layer.
        padding: bytes that kvcore adds to a token to fill vectors.
        tokens: that the planned request keeps here.
        blocks: that it holds here at most.
    """

    group: CacheGroup
    layer_bytes: int
    padding: int
    tokens: int
    blocks: int

    @property
    def bytes_per_token(self) -> int:
        """Values and scales, without padding."""
        return self.layer_bytes * len(self.group.layers)

    @property
    def bytes(self) -> int:
        """Of the request's tokens, without padding."""
        return self.tokens * self.bytes_per_token

    @property
    def paged_bytes(self) -> int:
        """Of the blocks that hold them, with padding."""
        return self.blocks * BLOCK_SIZE * (self.bytes_per_token + self.padding)


@dataclass(frozen=True)
class Reservation:
    """One way to set memory aside for a request.

    Attributes:
        way: "paged", "power_of_two" or "max_length".
        tokens: slots that it gives a layer which keeps all tokens.
        bytes: in all layers, with padding.
        used: of these, bytes that hold tokens.
        requests: how many fit at once; None if no memory was given.
    """

    way: str
    tokens: int
    bytes: int
    used: int
    requests: int | None


@dataclass(frozen=True)
class Plan:
    """What a model takes.

    Attributes:
        model: the model.
        model_type: its family.
        format: of the cache.
        scale_mode: of the format.
        dtype: what weights are held in.
        quantization: what matrices are held in beside it; None: parameters are counted, not what is held.
        held_bytes: of the weights as they are held; None without ``quantization``.
        context: tokens of the planned request.
        source_tokens: that its encoder gives; None without one.
        max_length: the most tokens of a request; None if there is no limit.
        memory: bytes for weights and cache; None if not given.
        groups: the kinds of layers.
        all_heads_bytes_per_token: of a token if every query head had its own K and V, uncompressed.
        parameters: of the model.
        reservations: the ways to set memory aside.
        notes: what a user should know.
    """

    model: Model
    model_type: str
    format: CacheFormat
    scale_mode: str
    dtype: str
    quantization: str | None
    held_bytes: int | None
    context: int
    source_tokens: int | None
    max_length: int | None
    memory: int | None
    groups: tuple[GroupCost, ...]
    all_heads_bytes_per_token: int
    parameters: Parameters
    reservations: tuple[Reservation, ...]
    notes: tuple[str, ...]

    @property
    def stored_weights(self) -> StoredWeights | None:
        """What the model's files hold, if it has any."""
        return self.model.weights

    @property
    def weight_bytes(self) -> int:
        """Of the weights as they are held if ``quantization`` says how, else of all parameters in ``dtype``."""
        if self.held_bytes is not None:
            return self.held_bytes
        return self.parameters.total * formats.WEIGHT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Of a new token in all layers of the decoder, without padding and without cross-attention."""
        return _sum(self.groups, lambda cost: cost.bytes_per_token, cross=False)

    @property
    def padding_per_token(self) -> int:
        """What kvcore adds to it to fill vectors."""
        return _sum(self.groups, lambda cost: cost.padding, cross=False)

    @property
    def growth_per_token(self) -> int:
        """Of a new token once all windows are full: what a long text adds."""
        return _sum(self.groups, lambda c: 0 if c.group.cache.window else c.bytes_per_token, cross=False)

    @property
    def cross_bytes_per_token(self) -> int:
        """Of a token of the encoder in all layers."""
        return _sum(self.groups, lambda cost: cost.bytes_per_token, cross=True)

    @property
    def request_bytes(self) -> int:
        """Of the planned request's tokens, without padding."""
        return sum(cost.bytes for cost in self.groups)

    @property
    def cache_memory(self) -> int | None:
        """What the weights leave for the cache; negative if they do not fit. None if no memory was given."""
        return None if self.memory is None else self.memory - self.weight_bytes


def make_plan(
    model: Model,
    *,
    memory: int | None = None,
    context: int | None = None,
    source_tokens: int | None = None,
    kv_cache_dtype: str = "auto",
    scale_mode: str | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
) -> Plan:
    """Compute what a model takes.

    Args:
        model: from ``find_model``.
        memory: bytes for weights and cache.
        context: tokens of a request, prompt and answer; by default 8192, or the longest if that is less.
        source_tokens: tokens that the encoder gives; by default the most.
        kv_cache_dtype: a format of ``formats.FORMATS``, a short name, or "auto".
        scale_mode: "static" or "per_token_head"; None is the format's default.
        dtype: what weights are held in; "auto" is the type they were saved in.
        quantization: "auto", "none", "int8" or "int4", as ``LLM`` has it: counts the bytes that such an ``LLM`` holds.
            None: parameters times bytes of ``dtype``.

    Raises:
        InvalidArgument: a value out of range, or no such format.
        CheckpointError: the configuration is bad or its family is not known; with ``quantization``: or kvcore cannot
            run such a model.
    """
    config = text_config(model.config)
    held_in = formats.weight_dtype(dtype, config_dtype(config))
    format_ = formats.cache_format(kv_cache_dtype, held_in)
    mode = formats.scale_mode(format_, scale_mode)
    limit, source_limit = max_length(config), source_length(config)
    for name, value in (("memory", memory), ("context", context), ("source_tokens", source_tokens)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name}: expected at least 1, got {value}")
    if context is None:
        context = min(DEFAULT_CONTEXT, limit) if limit is not None else DEFAULT_CONTEXT
    if source_limit is None and source_tokens is not None:
        raise InvalidArgument("source_tokens: expected a model with an encoder, got one without")
    source = source_tokens if source_tokens is not None else source_limit

    groups = tuple(
        _cost(group, format_, mode, context, source or 0) for group in cache_groups(cache_layers(model.config))
    )
    expanded = [cache for cache in cache_layers(model.config, expanded=True) if cache.kind != "cross"]
    parameters = count_parameters(model.config)
    held = None if quantization is None else _held_bytes(model, held_in, quantization)
    available = None
    if memory is not None:
        weights = parameters.total * formats.WEIGHT_BYTES[held_in] if held is None else held
        available = max(memory - weights, 0)
    longest = None if limit is None else max(limit, context)
    source_longest = None if source is None else max(source_limit or 0, source)
    return Plan(
        model=model,
        model_type=str(config["model_type"]),
        format=format_,
        scale_mode=mode,
        dtype=held_in,
        quantization=quantization,
        held_bytes=held,
        context=context,
        source_tokens=source,
        max_length=limit,
        memory=memory,
        groups=groups,
        all_heads_bytes_per_token=sum(_layer_bytes(cache, format_, mode) for cache in expanded),
        parameters=parameters,
        reservations=tuple(_reservations(groups, (context, longest), (source or 0, source_longest), available)),
        notes=(*model.notes, *_notes(model, config, parameters, context, limit, held_in)),
    )


# -- weights -------------------------------------------------------------------------------------------------------


def _held_bytes(model: Model, dtype: str, quantization: str) -> int:
    """Of all weights as kvcore holds them: packed, with scales and padding. Of files only headers are read."""
    if quantization not in formats.QUANTIZATIONS:
        expected = ", ".join(formats.QUANTIZATIONS)
        raise InvalidArgument(f"quantization: expected one of {expected}, got {quantization!r}")
    from kvcore.checkpoint.source import open_checkpoint  # these two load the native module
    from kvcore.models.families import spec_from_config
    from kvcore.models.held import held_nbytes, held_quantization

    weights = None if model.path is None else open_checkpoint(model.path).weights
    spec = spec_from_config(model.config)
    return held_nbytes(spec, weights, dtype=dtype, quantization=held_quantization(quantization, dtype))


# -- bytes -----------------------------------------------------------------------------------------------------------


def _layer_bytes(cache: LayerCache, format_: CacheFormat, mode: str) -> int:
    """Of a token in one layer. A latent layer stores no V."""
    v_dim = 0 if cache.kind == "latent" else cache.v_head_dim
    return cache.num_kv_heads * (format_.k_bytes(cache.head_dim, mode) + format_.v_bytes(v_dim, mode))


def _padding(cache: LayerCache, format_: CacheFormat) -> int:
    v_dim = 0 if cache.kind == "latent" else cache.v_head_dim
    padded = -(-v_dim // LANES) * LANES
    return cache.num_kv_heads * (-(-padded * format_.bits // 8) - -(-v_dim * format_.bits // 8))


def _cost(group: CacheGroup, format_: CacheFormat, mode: str, context: int, source: int) -> GroupCost:
    cache = group.cache
    return GroupCost(
        group,
        _layer_bytes(cache, format_, mode),
        _padding(cache, format_) * len(group.layers),
        kept_tokens(cache, context, source),
        held_blocks(cache, context, source),
    )


def kept_tokens(cache: LayerCache, context: int, source: int = 0) -> int:
    """Tokens that a layer keeps of a request with so many tokens, and so many of the encoder."""
    if cache.kind == "none":
        return 0
    if cache.kind == "cross":
        return source
    return context if cache.window is None else min(context, cache.window)


def held_blocks(cache: LayerCache, context: int, source: int = 0) -> int:
    """The most blocks that a layer's table holds while such a request decodes.

    A window of w tokens touches one block more than it fills, as it begins anywhere within a block.
    """
    blocks = -(-kept_tokens(cache, context, source) // BLOCK_SIZE)
    if cache.window is not None and context > cache.window:
        blocks = min(-(-context // BLOCK_SIZE), -(-(cache.window - 1) // BLOCK_SIZE) + 1)
    return blocks


# -- ways to set memory aside ----------------------------------------------------------------------------------------


def _reservations(
    groups: Sequence[GroupCost], length: tuple[int, int | None], source: tuple[int, int | None], available: int | None
) -> list[Reservation]:
    """The three ways, for a request of ``length`` (its tokens, the most) and ``source`` (the same of the encoder)."""
    used = sum(cost.tokens * (cost.bytes_per_token + cost.padding) for cost in groups)

    def reservation(way: str, tokens: int, size: int) -> Reservation:
        requests = None if available is None else available // size if size else 0
        return Reservation(way, tokens, size, used, requests)

    def reserved(tokens: int, source_tokens: int) -> int:
        return sum(
            kept_tokens(cost.group.cache, tokens, source_tokens) * (cost.bytes_per_token + cost.padding)
            for cost in groups
        )

    paged = -(-length[0] // BLOCK_SIZE) * BLOCK_SIZE
    power = _next_power_of_two(*length)
    result = [
        reservation("paged", paged, sum(cost.paged_bytes for cost in groups)),
        reservation("power_of_two", power, reserved(power, _next_power_of_two(*source))),
    ]
    if length[1] is not None:
        result.append(reservation("max_length", length[1], reserved(length[1], source[1] or 0)))
    return result


def _next_power_of_two(tokens: int, most: int | None) -> int:
    """The smallest power of two that is not less, but no more than the most."""
    power = 1 << (tokens - 1).bit_length() if tokens else 0
    return power if most is None else min(power, most)


# -- notes -----------------------------------------------------------------------------------------------------------


def _notes(
    model: Model, config: Config, parameters: Parameters, context: int, limit: int | None, dtype: str
) -> list[str]:
    """What the numbers do not say."""
    read = ConfigReader(config)
    notes = []
    if limit is not None and context > limit:
        notes.append(f"the model was made for {limit:,} tokens; a context of {context:,} is more")
    quantised = read.child("quantization_config") or ConfigReader(model.config).child("quantization_config")
    if quantised is not None:
        method = quantised.string("quant_method", "")
        method = method if method.isascii() and method.isprintable() and 0 < len(method) <= 40 else "an unnamed method"
        notes.append(f"the published weights are quantised ({method}); the bytes here are for {dtype}")
    if ConfigReader(model.config).has("text_config"):
        notes.append("the parts that read pictures or sound are not counted")
    if extra := read.integer("num_nextn_predict_layers", 0, minimum=0):
        layers = "layer that predicts" if extra == 1 else "layers that predict"
        notes.append(f"{extra} {layers} further tokens: not counted")
    stored = model.weights
    if stored is not None and quantised is None and stored.parameters != parameters.total:
        notes.append(
            f"the files hold {stored.parameters:,} parameters, the configuration speaks of {parameters.total:,}"
        )
    return notes


def _sum(groups: Sequence[GroupCost], value: Callable[[GroupCost], int], *, cross: bool) -> int:
    return sum(value(cost) for cost in groups if (cost.group.cache.kind == "cross") == cross)
