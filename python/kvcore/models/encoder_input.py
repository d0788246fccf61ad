"""What an encoder is given, checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcore.models.spec import EncoderSpec

MAX_ROWS = 1 << 20


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """An encoder's input.

    Attributes:
        num_tokens: rows that the encoder makes of it.
        key: differs for inputs that differ in anything.
        token_ids: int64 [rows], or None.
        features: float32 [mel bins, frames], or None.
    """

    num_tokens: int
    key: bytes
    token_ids: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    features: npt.NDArray[np.float32] | None = field(default=None, repr=False)


def encoder_input(spec: EncoderSpec, given: Mapping[str, Any]) -> EncoderInput:
    """Check what a prompt has for the encoder: "encoder_token_ids" or "input_features".

    Raises:
        InvalidArgument: it is missing, or of a size or with values that the encoder does not take.
        TypeError: something else than integers or floats.
    """
    wanted, other = "encoder_token_ids", "input_features"
    if spec.mel_bins is not None:
        wanted, other = other, wanted
    if given.get(wanted) is None:
        kind = "a list of token ids" if spec.mel_bins is None else f"float32 [{spec.mel_bins}, frames]"
        got = f"{other!r}, which this {spec.stack.family} model does not take" if other in given else "none"
        raise InvalidArgument(f"prompt: expected {wanted!r} ({kind}) for the encoder, got {got}")
    return _of_tokens(spec, given[wanted]) if spec.mel_bins is None else _of_features(spec, given[wanted])


def _of_tokens(spec: EncoderSpec, value: Any) -> EncoderInput:
    name, size = "encoder_token_ids", spec.stack.vocab_size
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name}: expected a list of token ids, got {type(value).__name__}")
    if len(value) == 0:
        raise InvalidArgument(f"{name}: expected at least one token, got none")
    most = spec.max_rows or MAX_ROWS
    if len(value) > most:
        raise InvalidArgument(f"{name}: expected at most {most} tokens, got {len(value)}")
    try:
        ids = np.asarray(value)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected a list of token ids, got an array of {ids.dtype} with {ids.ndim} dimensions")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        got = low if low < 0 else high
        raise InvalidArgument(f"{name}: expected token ids from 0 to {size - 1} (the vocabulary), got {got}")
    ids = ids.astype(np.int64)
    return EncoderInput(len(ids), _key(ids), token_ids=ids)


def _of_features(spec: EncoderSpec, value: Any) -> EncoderInput:
    name, bins = "input_features", spec.mel_bins
    expected = f"{name}: expected float32 [{bins}, frames]"
    try:
        features = np.asarray(value)
    except ValueError:
        features = np.empty(0, object)
    if features.dtype.kind != "f":
        raise TypeError(f"{expected}, got an array of {features.dtype}")
    if features.ndim == 3 and len(features) == 1:  # a batch of one, as transformers gives it
        features = features[0]
    if features.ndim != 2 or features.shape[0] != bins or features.shape[1] == 0:
        raise InvalidArgument(f"{expected}, got shape {list(features.shape)}")
    rows = -(-features.shape[1] // 2)
    if spec.max_rows is not None and rows > spec.max_rows:
        raise InvalidArgument(f"{name}: expected at most {2 * spec.max_rows} frames, got {features.shape[1]}")
    with np.errstate(over="ignore"):
        features = np.ascontiguousarray(features, np.float32)
    if not np.isfinite(features).all():
        raise InvalidArgument(f"{name}: expected finite numbers, got infinities or NaN")
    return EncoderInput(rows, _key(features), features=features)


def _key(array: npt.NDArray[Any]) -> bytes:
    """A digest of an array's shape and bytes."""
    return hashlib.blake2b(repr(array.shape).encode() + array.tobytes(), digest_size=16).digest()
