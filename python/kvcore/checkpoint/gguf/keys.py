"""How values of config.json are read from the metadata of a GGUF file.

A table of an architecture maps config.json's keys to constants and to the functions that are made here. Each takes the
file's ``Hyperparameters`` and returns the value, or None for one that config.json would not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.checkpoint.config import ConfigReader
from kvcore.checkpoint.gguf.file import GGUFFile
from kvcore.errors import CheckpointError

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors that are read into the configuration."""

_PER_LAYER_MAXIMUM = 10_000


class Hyperparameters(ConfigReader):
    """The entries of one architecture, without its prefix; an array of equal values is that value.

    Attributes:
        file: where they come from.
    """

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        prefix = f"{architecture}."
        own = {k.removeprefix(prefix): _plain(v) for k, v in file.metadata.items() if k.startswith(prefix)}
        super().__init__(own, f"{file.path}: {architecture}")
        self.file = file

    def sliding(self, count: int, every: int) -> list[bool]:
        """Which of ``count`` layers slide: as an array says, else all but every n-th, n being stored or ``every``."""
        key = "attention.sliding_window_pattern"
        value = self._config.get(key)
        if isinstance(value, bool):  # an array of equal values
            return [value] * count
        if isinstance(value, np.ndarray):
            if value.dtype != np.bool_ or len(value) != count:
                raise self.error(key, f"a number, or {count} booleans", value)
            return [bool(flag) for flag in value]
        period = self.integer(key, every)
        return [(layer + 1) % period != 0 for layer in range(count)]


Value = Callable[[Hyperparameters], Any]


def integer(key: str, default: Any = ...) -> Value:
    """An integer of at least 1. ``default`` is a value, or the function that gives it; without one it must be there."""
    return lambda read: read.integer(key) if default is ... else read.integer(key, _resolve(default, read))


def number(key: str, default: Any = ...) -> Value:
    """A positive number; ``default`` as with ``integer``."""
    return lambda read: read.number(key) if default is ... else read.number(key, _resolve(default, read))


def boolean(key: str, default: bool) -> Value:
    """``true`` or ``false``."""
    return lambda read: read.boolean(key, default)


def has_tensor(name: str) -> Value:
    """Whether the file has a tensor; ``{layer}`` in its name stands for any layer."""

    def found(read: Hyperparameters) -> bool:
        if "{layer}" not in name:
            return name in read.file.tensors
        return any(name.replace("{layer}", str(layer)) in read.file.tensors for layer in range(layers(read)))

    return found


def length_of(name: str, axis: int) -> Value:
    """A dimension of a tensor of some layer (outermost first); None if no layer has the tensor."""

    def length(read: Hyperparameters) -> int | None:
        for layer in range(layers(read)):
            tensor = read.file.tensors.get(name.replace("{layer}", str(layer)))
            if tensor is not None:
                return tensor.shape[axis] if axis < len(tensor.shape) else None
        return None

    return length


def layers(read: Hyperparameters) -> int:
    """Decoder layers, without those that only predict further tokens."""
    count = read.integer("block_count", maximum=_PER_LAYER_MAXIMUM)
    extra = read.integer("nextn_predict_layers", 0, minimum=0)
    if extra >= count:
        raise read.error("nextn_predict_layers", f"an integer below block_count ({count})", extra)
    return count - extra


def heads(read: Hyperparameters) -> int:
    """Query heads."""
    return read.integer("attention.head_count")


def head_dim(read: Hyperparameters) -> int:
    """Width of a head's key, which its value must share."""
    hidden, count = read.integer("embedding_length"), heads(read)
    if not read.has("attention.key_length") and hidden % count:
        raise read.error("attention.head_count", f"a divisor of embedding_length ({hidden})", count)
    width = read.integer("attention.key_length", hidden // count)
    value = read.integer("attention.value_length", width)
    if value != width:
        raise read.error("attention.value_length", f"the length of a head's key ({width})", value)
    return width


def vocab_size(read: Hyperparameters) -> int:
    """Rows of the embedding, else what the metadata say."""
    embedding = read.file.tensors.get("token_embd.weight")
    if embedding is not None:
        return read.integer("vocab_size", embedding.shape[0])
    tokens = read.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens):
        return read.integer("vocab_size", len(tokens))
    return read.integer("vocab_size")


def tied(read: Hyperparameters) -> bool:
    """Whether there is no output matrix, so that it is the embedding."""
    return "output.weight" not in read.file.tensors


def window(read: Hyperparameters) -> int | None:
    """The sliding window; 0 means none."""
    return read.integer("attention.sliding_window", 0, minimum=0) or None


def layer_types(every: int) -> Value:
    """Sliding and full layers: as the file says, else every so many-th layer is full."""

    def types(read: Hyperparameters) -> list[str]:
        sliding = read.sliding(layers(read), every)
        return ["sliding_attention" if flag else "full_attention" for flag in sliding]

    return types


def rope(read: Hyperparameters) -> dict[str, Any]:
    """The rotary embedding of whole heads."""
    width = head_dim(read)
    rotary = read.integer("rope.dimension_count", width)
    if rotary != width:
        raise read.error("rope.dimension_count", f"the length of a head's key ({width})", rotary)
    return _rope(read, width)


def partial_rope(read: Hyperparameters) -> dict[str, Any]:
    """The rotary embedding of the first dimensions of each head."""
    width = head_dim(read)
    rotary = read.integer("rope.dimension_count", width)
    if rotary > width:
        raise read.error("rope.dimension_count", f"at most the length of a head's key ({width})", rotary)
    return {**_rope(read, rotary), "partial_rotary_factor": rotary / width}


def mla_rope(read: Hyperparameters) -> dict[str, Any]:
    """The rotary embedding of MLA: of the rope dimensions; the multiplier of the scores is there, the other is 1."""
    found = _rope(read, read.integer("rope.dimension_count"), multiplier=True)
    if found["rope_type"] == "yarn" and read.has("rope.scaling.yarn_log_multiplier"):
        # the converter stores a tenth of it, and llama.cpp takes both for the same, as they are in DeepSeek's files
        scale = 10 * read.number("rope.scaling.yarn_log_multiplier", minimum=0)
        found |= {"mscale": scale, "mscale_all_dim": scale}
    return found


def _rope(read: Hyperparameters, rotary: int, *, multiplier: bool = False) -> dict[str, Any]:
    theta = read.number("rope.freq_base", 10000.0)
    kind = read.string("rope.scaling.type", "linear" if read.has("rope.scale_linear") else "none")
    tensors = read.file.tensors
    if ROPE_FREQS in tensors:
        # one divisor for each frequency: this is how the scaling of Llama 3 is stored
        if kind != "none":
            raise read.error("rope.scaling.type", f'"none" beside a tensor {ROPE_FREQS!r}', kind)
        return {"rope_theta": theta, "rope_type": "factors", "factors": _factors(read, ROPE_FREQS, rotary)}
    if LONG_FACTORS in tensors and SHORT_FACTORS in tensors:
        return {"rope_theta": theta, **_longrope(read, rotary)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    key = "rope.scaling.factor" if read.has("rope.scaling.factor") else "rope.scale_linear"
    if kind == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": read.number(key, 1.0)}
    if kind == "yarn":
        return {"rope_theta": theta, **_yarn(read, read.number(key), multiplier)}
    raise read.error("rope.scaling.type", "one of none, linear, yarn", kind)


def _yarn(read: Hyperparameters, factor: float, multiplier: bool) -> dict[str, Any]:
    if read.has("rope.scaling.yarn_log_multiplier") and not multiplier:
        got = read.number("rope.scaling.yarn_log_multiplier", minimum=-1e30)
        raise read.error("rope.scaling.yarn_log_multiplier", "no such key, as it is not supported", got)
    extrapolation = read.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-1e30)
    if extrapolation != 1:
        raise read.error("rope.scaling.yarn_ext_factor", "1, as others are not supported", extrapolation)
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if read.has("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if read.has(f"rope.scaling.{theirs}"):
            rope[ours] = read.number(f"rope.scaling.{theirs}")
    if read.has("rope.scaling.yarn_attn_factor"):
        rope["attention_factor"] = read.number("rope.scaling.yarn_attn_factor")
    elif read.has("rope.scaling.attn_factor"):
        # llama.cpp multiplies it with YaRN's own factor, where config.json gives the product
        own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        rope["attention_factor"] = own * read.number("rope.scaling.attn_factor")
    return rope


def _longrope(read: Hyperparameters, rotary: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _factors(read, LONG_FACTORS, rotary),
        "short_factor": _factors(read, SHORT_FACTORS, rotary),
        "original_max_position_embeddings": read.integer("rope.scaling.original_context_length"),
    }
    if read.has("rope.scaling.attn_factor"):
        rope["attention_factor"] = read.number("rope.scaling.attn_factor")
    return rope


def _factors(read: Hyperparameters, name: str, rotary: int) -> list[float]:
    shape = read.file.tensors[name].shape
    if shape != (rotary // 2,):
        raise CheckpointError(f"{read.file.path}: tensor {name!r}: expected shape {[rotary // 2]}, got {list(shape)}")
    return [float(factor) for factor in read.file.get(name)]


def resolve(table: Mapping[str, Any], read: Hyperparameters) -> dict[str, Any]:
    """A table with every function replaced by its value."""
    return {key: _resolve(value, read) for key, value in table.items()}


def _resolve(value: Any, read: Hyperparameters) -> Any:
    return value(read) if callable(value) else value


def _plain(value: Any) -> Any:
    """An array with one value for every layer as that value if all are equal, else as it is."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value
