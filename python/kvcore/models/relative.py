"""T5's bias of scores by distance, as the table that the cache's attention takes.

    near distances have a bucket each, further ones share them, wider and wider, up to max_distance
    in encoders half of the buckets are for tokens ahead of the query

Source: Raffel et al., 2020, in the arithmetic (float32) of transformers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvcore.models.spec import RelativeSpec


def bias_options(spec: RelativeSpec, weight: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Arguments of ``KVCache.attend`` for a stored bias, float32 [buckets, heads]."""
    ahead = spec.max_distance if spec.both_sides else 0
    rows = buckets(spec, np.arange(-spec.max_distance, ahead + 1))
    table = np.ascontiguousarray(weight[rows].T)
    return {"position_bias": table, "bias_ahead": ahead}


def buckets(spec: RelativeSpec, distances: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The bucket of each distance (token - query)."""
    count, first = spec.buckets, np.zeros_like(distances)
    if spec.both_sides:
        count //= 2
        first = np.where(distances > 0, count, 0)
    far = np.abs(distances) if spec.both_sides else np.maximum(-distances, 0)
    exact = count // 2
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    share = ratio / np.float32(math.log(spec.max_distance / exact)) * np.float32(count - exact)
    wide = np.minimum(exact + share.astype(np.int64), count - 1)
    return first + np.where(far < exact, far, wide)
