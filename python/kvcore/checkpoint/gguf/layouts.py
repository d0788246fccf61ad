"""How a tensor that llama.cpp's converter changed is turned back into Hugging Face's.

    GGUF            Hugging Face     what the converter did
    INTERLEAVED     rows of a head   (k, k + half) became neighbours (2k, 2k + 1), which llama.cpp's rope turns
    FUSED_QKV       [head][q, k, v]  became [q, k, v][head]
    PLUS_ONE        w                became 1 + w, as Gemma's norms multiply by it
    TRANSPOSED      [in, out]        became [out, in]
    GATE_UP         gate and up columns alternate in one tensor [expert, in, 2 out]; became two [expert, out, in]
    KEY_VALUE       [head][k, v] of MLA's up-projection became k transposed, and v

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """A way back.

    Attributes:
        shape: the shapes of the stored tensors, and config.json, to Hugging Face's shape. Raises ``ValueError`` with
            what was expected if the stored ones cannot be turned back.
        make: the same for the tensors themselves.
        moves_rows: whether rows stay whole and only change places, so that rows of quantised blocks can be moved, too.
    """

    shape: Callable[[Sequence[Shape], Config], Shape]
    make: Callable[[Sequence[Array], Config], Array]
    moves_rows: bool = False


def _same(shapes: Sequence[Shape], config: Config) -> Shape:
    return shapes[0]


def interleaved(heads_key: str) -> Layout:
    """Rows of heads; ``heads_key`` is config.json's key for how many."""

    def shape(shapes: Sequence[Shape], config: Config) -> Shape:
        rows, heads = shapes[0][0], config[heads_key]
        if rows % (2 * heads):
            raise ValueError(f"rows for {heads} heads of an even size, got {rows}")
        return shapes[0]

    def make(arrays: Sequence[Array], config: Config) -> Array:
        array, heads = arrays[0], config[heads_key]
        halves: Array = array.reshape(heads, len(array) // heads // 2, 2, -1).swapaxes(1, 2)
        return halves.reshape(array.shape)

    return Layout(shape, make, moves_rows=True)


def _fused_shape(shapes: Sequence[Shape], config: Config) -> Shape:
    rows, heads = shapes[0][0], config["num_attention_heads"]
    if rows % (3 * heads):
        raise ValueError(f"rows for the queries, keys and values of {heads} heads, got {rows}")
    return shapes[0]


def _fused_make(arrays: Sequence[Array], config: Config) -> Array:
    array, heads = arrays[0], config["num_attention_heads"]
    by_head: Array = array.reshape(3, heads, len(array) // heads // 3, -1).swapaxes(0, 1)
    return by_head.reshape(array.shape)


def _transposed_shape(shapes: Sequence[Shape], config: Config) -> Shape:
    return shapes[0][::-1]


def _transposed_make(arrays: Sequence[Array], config: Config) -> Array:
    return np.ascontiguousarray(arrays[0].T)


def _minus_one(arrays: Sequence[Array], config: Config) -> Array:
    # exact for what is near 1: nothing is lost of what the file has
    weight: Array = arrays[0] - np.asarray(1, arrays[0].dtype)
    return weight


def _gate_up_shape(shapes: Sequence[Shape], config: Config) -> Shape:
    gate, up = shapes
    if gate != up or len(gate) not in (2, 3):
        raise ValueError(f"gate and up of one shape [experts, out, in] or [experts, out], got {list(gate)}, {list(up)}")
    return (gate[0], *gate[2:], 2 * gate[1])


def _gate_up_make(arrays: Sequence[Array], config: Config) -> Array:
    gate, up = arrays
    joined = np.stack([gate, up], axis=2)  # [experts, out, 2, in]
    joined = joined.reshape(gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
    return np.ascontiguousarray(joined.swapaxes(1, -1)) if joined.ndim == 3 else joined


def _experts_transposed_shape(shapes: Sequence[Shape], config: Config) -> Shape:
    experts, *rest = shapes[0]
    return (experts, *rest[::-1])


def _experts_transposed_make(arrays: Sequence[Array], config: Config) -> Array:
    return np.ascontiguousarray(arrays[0].swapaxes(1, -1))


def _key_value_shape(shapes: Sequence[Shape], config: Config) -> Shape:
    k, v = shapes
    if len(k) != 3 or len(v) != 3 or (k[0], k[1]) != (v[0], v[2]):
        raise ValueError(f"shapes [heads, rank, k] and [heads, v, rank], got {list(k)} and {list(v)}")
    return k[0] * (k[2] + v[1]), k[1]


def _key_value_make(arrays: Sequence[Array], config: Config) -> Array:
    k, v = arrays
    both = np.concatenate([k.swapaxes(1, 2), v], axis=1)
    return both.reshape(-1, both.shape[-1])


SAME: Final = Layout(_same, lambda arrays, config: arrays[0], moves_rows=True)
INTERLEAVED_Q: Final = interleaved("num_attention_heads")
INTERLEAVED_K: Final = interleaved("num_key_value_heads")
FUSED_QKV: Final = Layout(_fused_shape, _fused_make, moves_rows=True)
PLUS_ONE: Final = Layout(_same, _minus_one)
TRANSPOSED: Final = Layout(_transposed_shape, _transposed_make)
GATE_UP: Final = Layout(_gate_up_shape, _gate_up_make)
EXPERTS_TRANSPOSED: Final = Layout(_experts_transposed_shape, _experts_transposed_make)
KEY_VALUE: Final = Layout(_key_value_shape, _key_value_make)
