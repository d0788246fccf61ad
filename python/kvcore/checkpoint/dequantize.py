"""The block formats of GGUF, expanded to float32 exactly.

A block holds 32 or 256 weights of a row as small integers q with float16 scales:

    Q4_0, Q5_0, Q8_0   d * (q - offset)                      one scale d
    Q4_1, Q5_1         d * q + m                             one scale d, one minimum m
    Q4_K, Q5_K         (d * sc) * q - (dmin * mn)            sc, mn: 6 bits for each 32 weights
    Q6_K               (d * sc) * (q - 32)                   sc: 8 bits for each 16 weights
    MXFP4              2^(e - 128) * code[q]                 e: 8 bits; codes are twice the values of fp4 e2m1

"Exactly" means: the very float32 operations of ggml's reference code, in its order, so that the result is bitwise that
of llama.cpp's own scalar dequantisation.
Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

KNOWN_TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's number of a type to its name, weights in a block, and bytes of a block.

Types that are not read are there, too, so that a file that holds one can be checked, and refused by the type's name.
"""

_CHUNK: Final = 1 << 16
"""Weights expanded in one go: the intermediates stay in a core's cache."""


def dequantize(kind: str, data: _Bytes) -> _Floats:
    """Expand blocks.

    Args:
        kind: a key of ``BLOCKS``.
        data: whole blocks, one after the other.

    Returns:
        float32, flat, in the order of the blocks.
    """
    per_block, block_bytes, expand = BLOCKS[kind]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), per_block), np.float32)
    step = _CHUNK // per_block
    # scales of a damaged file may be infinite or NaN; the result is then what arithmetic says, without a warning
    with np.errstate(all="ignore"):
        for begin in range(0, len(blocks), step):
            expand(blocks[begin : begin + step], out[begin : begin + step])
    return out.reshape(-1)


def _half(blocks: _Bytes, offset: int) -> _Floats:
    """The float16 at this byte of each block, as float32 ``[blocks, 1]``."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes, out: npt.NDArray[Any]) -> None:
    """The low halves of ``packed`` ``[..., n]``, then the high halves, into ``out`` ``[..., 2 n]``."""
    n = packed.shape[-1]
    np.bitwise_and(packed, 15, out=out[..., :n], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., n:], casting="unsafe")


def _q4_0(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(low: _Bytes, high: _Bytes, out: _Floats) -> None:
    q = np.empty(out.shape, np.uint8)
    _nibbles(low, q)
    q |= np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    out[...] = q


def _q5_0(blocks: _Bytes, out: _Floats) -> None:
    _five_bits(blocks[:, 6:], blocks[:, 2:6], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: _Bytes, out: _Floats) -> None:
    _five_bits(blocks[:, 8:], blocks[:, 4:8], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: _Bytes, out: _Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """The products ``d * sc`` and ``dmin * mn`` of Q4_K and Q5_K, each ``[blocks, 8, 1]``.

    Twelve bytes hold eight pairs of 6 bits: bytes 0 to 3 the first four scales, bytes 4 to 7 the first four minima;
    their upper two bits, above the nibbles of bytes 8 to 11, make the other four of each.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    d = _half(blocks, 0) * scales.astype(np.float32)
    m = _half(blocks, 2) * minima.astype(np.float32)
    return d[:, :, None], m[:, :, None]


def _q4_k(blocks: _Bytes, out: _Floats) -> None:
    d, m = _k_scales(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    weights = out.reshape(-1, 8, 32)
    weights *= d
    weights -= m


def _q5_k(blocks: _Bytes, out: _Floats) -> None:
    d, m = _k_scales(blocks)
    q = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), q)
    # bit i of the 32 high bytes is the fifth bit of the i-th group of 32 weights
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & np.uint8(1)
    weights = out.reshape(-1, 8, 32)
    weights[...] = q.reshape(-1, 8, 32) | (high << np.uint8(4))
    weights *= d
    weights -= m


def _q6_k(blocks: _Bytes, out: _Floats) -> None:
    q = np.empty((len(blocks), 2, 4, 32), np.uint8)
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    np.bitwise_and(low, 15, out=q[:, :, :2])
    np.right_shift(low, 4, out=q[:, :, 2:])
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    q |= (high & np.uint8(3)) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    weights = out.reshape(-1, 16, 16)
    weights[...] = q.reshape(-1, 16, 16)
    weights -= 32
    weights *= scales[:, :, None]


_FP4_CODES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: _Bytes, out: _Floats) -> None:
    q = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 1:], q)
    np.take(_FP4_CODES, q, out=out)
    out *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


BLOCKS: Final[Mapping[str, tuple[int, int, Callable[[_Bytes, _Floats], None]]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "MXFP4": (32, 17, _mxfp4),
}
"""The block formats that are read: weights in a block, bytes of a block, and what expands blocks into an array."""
