"""Rotary position embeddings: which angle each pair of dimensions turns by at each position.

    inv_freq[i] = 1 / theta ^ (2 i / d)               then stretched, as the kind of scaling says
    angle[p, i] = p * inv_freq[i]
    cos, sin    = cos(angle) * attention_factor, sin(angle) * attention_factor

inv_freq and angles are float32, as in transformers, because at large positions the rounding of the angle is part of
what a model was trained with. Cosine and sine are taken in float64 and rounded once.

A row of cosines depends on nothing but its position and its request. Vector code may round a value differently
according to its neighbours in the call, so every row is always computed in the same company: the table grows in fixed
steps, and what cannot be in a table is computed row by row.

Sources: as ``rope.py``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument
from kvcore.models.rope import RopeSpec

_Floats = npt.NDArray[np.float32]


def inv_freq(spec: RopeSpec, length: int = 0) -> tuple[_Floats, float]:
    """The frequencies and the factor of cosine and sine.

    Args:
        spec: the rotary embedding.
        length: the sequence length, for ``dynamic`` and ``longrope``; what it does not pass changes nothing.

    Returns:
        float32 ``[rotary_dim / 2]``, in radians per position, and the attention factor.
    """
    dim = spec.rotary_dim
    one = np.float32(1)
    # nonsensical parameters may overflow; the result is then what arithmetic says, without a warning
    with np.errstate(all="ignore"):
        base = spec.theta
        if spec.kind == "dynamic" and length > spec.max_position_embeddings:
            stretch = np.float64(spec.factor * length / spec.max_position_embeddings - (spec.factor - 1))
            base *= float(np.power(stretch, dim / (dim - 2)))
        exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        powers: _Floats = np.power(np.full(dim // 2, base), exponents.astype(np.float64)).astype(np.float32)
        frequencies: _Floats = one / powers
        if spec.kind == "linear":
            frequencies = frequencies / np.float32(spec.factor)
        elif spec.kind in ("factors", "longrope"):
            long = spec.kind == "longrope" and length > spec.original_max_position
            divisors: _Floats = np.asarray(spec.long_factors if long else spec.freq_factors, dtype=np.float32)
            # in the order of transformers, whose float32 rounding is part of what a model was trained with
            frequencies = one / (divisors * powers) if spec.kind == "longrope" else frequencies / divisors
        elif spec.kind == "llama3":
            frequencies = _llama3(spec, frequencies)
        elif spec.kind == "yarn":
            keep = one - _yarn_ramp(spec)
            frequencies = one / (np.float32(spec.factor) * powers) * (one - keep) + frequencies * keep
    return frequencies, spec.attention_factor


class RopeTable:
    """Cosines and sines of a rotary embedding, kept for the positions seen so far.

    Not for use by several threads at once.
    """

    STEP: Final = 256
    """Positions computed in one go. A constant, as it decides the company in which a row is computed."""

    MAX_PIECES: Final = 512
    """Pieces of ``STEP`` positions that are kept (64 MiB for 128 dimensions); the least recently used goes first."""

    def __init__(self, spec: RopeSpec) -> None:
        self.spec = spec
        self._pieces: OrderedDict[tuple[int, int], tuple[_Floats, _Floats]] = OrderedDict()

    def cos_sin(self, positions: npt.ArrayLike, context_lens: npt.ArrayLike) -> tuple[_Floats, _Floats]:
        """Cosines and sines for some tokens.

        Args:
            positions: integers ``[rows]``, each at least 0.
            context_lens: integers ``[rows]``, or one for all: what ``RopeSpec.context_len`` says of the request that
                the token belongs to. Only ``dynamic`` and ``longrope`` look at it.

        Returns:
            Two float32 arrays ``[rows, rotary_dim / 2]``.

        Raises:
            TypeError: not integers.
            InvalidArgument: a negative position, or shapes that do not fit.
        """
        positions = np.asarray(positions)
        context_lens = np.asarray(context_lens)
        for name, array in (("positions", positions), ("context_lens", context_lens)):
            if array.dtype.kind not in "iu" and array.size:
                raise TypeError(f"{name}: expected integers, got {array.dtype}")
        if positions.ndim != 1 or context_lens.shape not in ((), positions.shape):
            raise InvalidArgument(
                f"expected positions [rows] and context_lens [rows], got {positions.shape} and {context_lens.shape}"
            )
        if positions.size and int(positions.min()) < 0:
            raise InvalidArgument(f"positions: expected at least 0, got {int(positions.min())}")
        positions = positions.astype(np.int64)
        cos = np.empty((len(positions), self.spec.rotary_dim // 2), np.float32)
        sin = np.empty_like(cos)
        plain = np.ones(len(positions), np.bool_)
        if self.spec.kind == "dynamic":
            context_lens = np.broadcast_to(context_lens, positions.shape).astype(np.int64)
            in_prompt = positions < context_lens
            lengths = np.where(in_prompt, context_lens, positions + 1)
            plain = lengths <= self.spec.max_position_embeddings
            for length in np.unique(lengths[~plain & in_prompt]):
                self._gather(int(length), np.flatnonzero((lengths == length) & in_prompt), positions, cos, sin)
            for row in np.flatnonzero(~plain & ~in_prompt):
                angles = positions[row : row + 1]
                cos[row], sin[row] = (x[0] for x in self._compute(int(lengths[row]), angles))
        if self.spec.kind == "longrope":
            plain = np.broadcast_to(context_lens, positions.shape) <= self.spec.original_max_position
            length = self.spec.original_max_position + 1
            self._gather(length, np.flatnonzero(~plain), positions, cos, sin)
        self._gather(0, np.flatnonzero(plain), positions, cos, sin)
        return cos, sin

    def _gather(
        self, length: int, rows: npt.NDArray[np.intp], positions: npt.NDArray[np.int64], cos: _Floats, sin: _Floats
    ) -> None:
        """Fill these rows from the pieces of the table for this length."""
        wanted = positions[rows]
        pieces = wanted // self.STEP
        for piece in np.unique(pieces):
            here = pieces == piece
            table_cos, table_sin = self._piece(length, int(piece))
            offsets = wanted[here] - piece * self.STEP
            cos[rows[here]] = table_cos[offsets]
            sin[rows[here]] = table_sin[offsets]

    def _piece(self, length: int, piece: int) -> tuple[_Floats, _Floats]:
        key = (length, piece)
        table = self._pieces.get(key)
        if table is None:
            table = self._compute(length, np.arange(piece * self.STEP, (piece + 1) * self.STEP, dtype=np.int64))
            self._pieces[key] = table
            if len(self._pieces) > self.MAX_PIECES:
                self._pieces.popitem(last=False)
        else:
            self._pieces.move_to_end(key)
        return table

    def _compute(self, length: int, positions: npt.NDArray[np.int64]) -> tuple[_Floats, _Floats]:
        frequencies, factor = inv_freq(self.spec, length)
        # the product in float32 (see the top), the functions in float64
        with np.errstate(all="ignore"):
            angles = (positions.astype(np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
            scale = np.float32(factor)
            return np.cos(angles).astype(np.float32) * scale, np.sin(angles).astype(np.float32) * scale


def _yarn_ramp(spec: RopeSpec) -> _Floats:
    """How far each frequency is interpolated: 0 for those that turn often, 1 for those that turn little."""

    def dimension(rotations: float) -> float:
        """Where the frequency lies that turns this often within the original length."""
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, against a division by 0
    steps = np.arange(spec.rotary_dim // 2, dtype=np.float32)
    ramp: _Floats = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    return ramp


def _llama3(spec: RopeSpec, frequencies: _Floats) -> _Floats:
    """Long wavelengths are stretched by the factor, short ones kept, those between are blended."""
    original = np.float32(spec.original_max_position)
    low, high, factor = np.float32(spec.low_freq_factor), np.float32(spec.high_freq_factor), np.float32(spec.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    long, short = wavelengths > original / low, wavelengths < original / high
    smooth = (original / wavelengths - low) / (high - low)
    blended = (np.float32(1) - smooth) * frequencies / factor + smooth * frequencies
    result: _Floats = np.where(long, frequencies / factor, np.where(short, frequencies, blended)).astype(np.float32)
    return result
