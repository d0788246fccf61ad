"""MXFP4 weights, as gpt-oss has its experts.

    X_blocks  uint8 [experts, out, in / 32, 16]      two fp4 codes (e2m1) a byte, the low half first
    X_scales  uint8 [experts, out, in / 32]          e: codes are multiplied by 2^(e - 127)
    X         [experts, in, out]                     what transformers makes of them

Source: OCP Microscaling Formats (MX) v1.0; transformers' ``integrations/mxfp4.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.quantized import Recipe
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError

_BLOCKS, _SCALES = "_blocks", "_scales"
_CODES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mxfp4_recipes(weights: SafetensorsWeights) -> dict[str, Recipe]:
    """A recipe for each pair of blocks and scales.

    Raises:
        CheckpointError: one is missing, or they do not fit each other.
    """
    recipes = {}
    for blocks in weights.names():
        if blocks.endswith(_BLOCKS):
            name = blocks.removesuffix(_BLOCKS)
            scales = name + _SCALES
            shape = weights.shape(blocks)
            for stored, expected in ((blocks, (*shape[:2], *shape[2:3], 16)), (scales, shape[:3])):
                got = weights.shape(stored)
                if weights.kind(stored) != "U8" or got != expected or len(shape) != 4:
                    raise CheckpointError(
                        f"{weights.source}: tensor {stored!r}: expected U8 [experts, out, blocks"
                        f"{', 16' if stored == blocks else ''}], got {weights.kind(stored)} {list(got)}"
                    )
            experts, out, groups, _ = shape
            make = partial(_expand, weights, blocks, scales)
            recipes[name] = Recipe((blocks, scales), (experts, groups * 32, out), make)
    return recipes


def _expand(weights: SafetensorsWeights, blocks: str, scales: str) -> npt.NDArray[np.float32]:
    packed, exponents = weights.raw(blocks), weights.raw(scales)
    experts, rows, groups, _ = packed.shape
    out = np.empty((experts, groups * 32, rows), np.float32)
    for expert in range(experts):  # one at a time: what is between is as large as what comes of it
        codes = np.stack([packed[expert] & 15, packed[expert] >> 4], axis=-1).reshape(rows, groups, 32)
        values = np.ldexp(_CODES[codes], exponents[expert, :, :, None].astype(np.int32) - 127)
        out[expert] = values.reshape(rows, -1).T
    return out
