"""Rotary position embeddings: which angle each pair of dimensions turns by at each position.

    inv_freq[i] = 1 / theta ^ (2 i / d)               then stretched, as the kind of scaling says
    angle[p, i] = p * inv_freq[i]
    cos, sin    = cos(angle) * attention_factor, sin(angle) * attention_factor

inv_freq and angles are float32, as in transformers, because at large positions the rounding of the angle is part of
what a model was trained with. Cosine and sine are taken in float64 and rounded once.

A row of cosines depends on nothing but its position and its request. Vector code may round a value differently
according to its neighbours in the call, so every row is always computed in the same company: the table grows in fixed
steps, and what cannot be in a table is computed row by row.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), transformers' ``modeling_rope_utils.py``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import ConfigReader
from kvcore.errors import InvalidArgument

_FACTORS: Final = "factors"  # no name of transformers: only the configuration made of a GGUF file has it
KINDS: Final = ("default", "linear", "dynamic", "llama3", "yarn")

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding.

    Attributes:
        kind: ``default``; ``linear``; ``dynamic`` (NTK); ``llama3``; ``yarn``; ``factors`` (one divisor for each
            frequency, as a GGUF file may have them).
        theta: the base.
        rotary_dim: how many dimensions of a head turn, from its first on; even.
        max_position_embeddings: the model's positions (``dynamic`` scales beyond them).
        factor: how far positions are stretched (``linear``, ``dynamic``, ``llama3``, ``yarn``).
        original_max_position: positions that the model was first trained on (``llama3``, ``yarn``).
        low_freq_factor: ``llama3``: wavelengths above original / this are scaled fully.
        high_freq_factor: ``llama3``: wavelengths below original / this are not scaled.
        attention_factor: ``yarn``: what cosine and sine are multiplied by.
        beta_fast: ``yarn``: frequencies with more rotations than this are not scaled.
        beta_slow: ``yarn``: frequencies with fewer rotations than this are scaled fully.
        truncate: ``yarn``: whether the range between the two is rounded outwards.
        freq_factors: ``factors``: ``rotary_dim / 2`` divisors.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int = 2048
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()

    def base_length(self, position: int, prompt_len: int) -> int:
        """The sequence length that decides the frequencies of a token; 0 if none does.

        Only ``dynamic`` depends on length. It is made a function of the request: the tokens of the prompt take the
        prompt's length, a later one at position p takes p + 1. Up to ``max_position_embeddings`` nothing is scaled.
        """
        if self.kind != "dynamic":
            return 0
        length = prompt_len if position < prompt_len else position + 1
        return length if length > self.max_position_embeddings else 0

    def cache_key(self, prompt_len: int) -> bytes | None:
        """What must be equal, beside the tokens, for two requests to share stored keys; None if nothing is.

        Two requests whose prompts both fit ``max_position_embeddings`` turn equal tokens by equal angles, also those
        generated beyond it.
        """
        length = self.base_length(0, prompt_len)
        return b"rope:%d" % length if length else None


def rope_from_config(config: Mapping[str, Any], head_dim: int, max_position_embeddings: int) -> RopeSpec:
    """Read the rotary embedding from a configuration.

    transformers 5 has ``rope_parameters`` {rope_type, rope_theta, ...}; transformers 4 has ``rope_theta`` and
    ``rope_scaling``, null or {rope_type, ...}, in older files {type, ...}.

    Raises:
        CheckpointError: names the file and key, what was expected and what came.
    """
    top = ConfigReader(config)
    read = top.child("rope_parameters") or top.child("rope_scaling")
    if read is None:
        read = ConfigReader({"rope_type": "default"}, top.source)
    type_key = "rope_type" if read.has("rope_type") or not read.has("type") else "type"
    kind = read.string(type_key)
    if kind not in KINDS and not (kind == _FACTORS and top.source.endswith(".gguf")):
        raise read.error(type_key, f"one of {', '.join(KINDS)}", kind)
    theta = (read if read.has("rope_theta") else top).number("rope_theta", 10000.0, minimum=1)
    partial = (read if read.has("partial_rotary_factor") else top).number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise top.error("partial_rotary_factor", f"a share of head_dim ({head_dim}) that is even and not 0", partial)

    values: dict[str, Any] = {}
    if kind in ("linear", "dynamic", "llama3"):
        values["factor"] = read.number("factor")
    if kind == "dynamic":
        if rotary_dim < 4:
            raise top.error("head_dim", "at least 4 rotating dimensions with dynamic rope scaling", rotary_dim)
        if values["factor"] < 1:
            raise read.error("factor", "a number of at least 1", values["factor"])
    if kind == "llama3":
        low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
        if high <= low:
            raise read.error("high_freq_factor", f"a number greater than low_freq_factor ({low:g})", high)
        values |= {
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position": read.integer("original_max_position_embeddings"),
        }
    if kind == "yarn":
        values |= _yarn_values(read, top, theta, max_position_embeddings)
    if kind == "factors":
        values["freq_factors"] = read.numbers("factors")
        if len(values["freq_factors"]) != rotary_dim // 2:
            raise read.error("factors", f"{rotary_dim // 2} numbers", f"{len(values['freq_factors'])} numbers")
    return RopeSpec(kind, theta, rotary_dim, max_position_embeddings, **values)


def inv_freq(spec: RopeSpec, length: int = 0) -> tuple[_Floats, float]:
    """The frequencies and the factor of cosine and sine.

    Args:
        spec: the rotary embedding.
        length: the sequence length, for ``dynamic``; what it does not pass changes nothing.

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
        elif spec.kind == "factors":
            divisors: _Floats = np.asarray(spec.freq_factors, dtype=np.float32)
            frequencies = frequencies / divisors
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

    def cache_key(self, prompt_len: int) -> bytes | None:
        """See ``RopeSpec.cache_key``."""
        return self.spec.cache_key(prompt_len)

    def cos_sin(self, positions: npt.ArrayLike, prompt_lens: npt.ArrayLike) -> tuple[_Floats, _Floats]:
        """Cosines and sines for some tokens.

        Args:
            positions: integers ``[rows]``, each at least 0.
            prompt_lens: integers ``[rows]``, or one for all: the length of the prompt of the request that the token
                belongs to. Only ``dynamic`` looks at it.

        Returns:
            Two float32 arrays ``[rows, rotary_dim / 2]``.

        Raises:
            TypeError: not integers.
            InvalidArgument: a negative position, or shapes that do not fit.
        """
        positions = np.asarray(positions)
        prompt_lens = np.asarray(prompt_lens)
        for name, array in (("positions", positions), ("prompt_lens", prompt_lens)):
            if array.dtype.kind not in "iu" and array.size:
                raise TypeError(f"{name}: expected integers, got {array.dtype}")
        if positions.ndim != 1 or prompt_lens.shape not in ((), positions.shape):
            raise InvalidArgument(
                f"expected positions [rows] and prompt_lens [rows], got {positions.shape} and {prompt_lens.shape}"
            )
        if positions.size and int(positions.min()) < 0:
            raise InvalidArgument(f"positions: expected at least 0, got {int(positions.min())}")
        positions = positions.astype(np.int64)
        cos = np.empty((len(positions), self.spec.rotary_dim // 2), np.float32)
        sin = np.empty_like(cos)
        plain = np.ones(len(positions), np.bool_)
        if self.spec.kind == "dynamic":
            prompt_lens = np.broadcast_to(prompt_lens, positions.shape).astype(np.int64)
            in_prompt = positions < prompt_lens
            lengths = np.where(in_prompt, prompt_lens, positions + 1)
            plain = lengths <= self.spec.max_position_embeddings
            for length in np.unique(lengths[~plain & in_prompt]):
                self._gather(int(length), np.flatnonzero((lengths == length) & in_prompt), positions, cos, sin)
            for row in np.flatnonzero(~plain & ~in_prompt):
                angles = positions[row : row + 1]
                cos[row], sin[row] = (x[0] for x in self._compute(int(lengths[row]), angles))
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


def _yarn_values(read: ConfigReader, top: ConfigReader, theta: float, max_positions: int) -> dict[str, Any]:
    original = read.integer("original_max_position_embeddings", max_positions)
    factor = read.number("factor", max_positions / original)
    mscale = read.number("mscale", 0.0, minimum=0)
    mscale_all_dim = read.number("mscale_all_dim", 0.0, minimum=0)
    if read.has("attention_factor"):
        attention = read.number("attention_factor")
    elif mscale and mscale_all_dim:
        attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    else:
        attention = _yarn_mscale(factor, 1.0)
    beta_fast, beta_slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise read.error("beta_fast", f"a number of at least beta_slow ({beta_slow:g})", beta_fast)
    if theta <= 1:
        raise top.error("rope_theta", "a number greater than 1 with yarn", theta)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": attention,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": read.boolean("truncate", True),
    }


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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
