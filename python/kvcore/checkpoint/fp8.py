"""Float8 weights (e4m3) with scales beside them.

    weight = float8 codes * scale        a scale for the tensor, for each row, or for each block of rows x columns

DeepSeek's files hold ``weight`` with ``weight_scale_inv``, one for 128 x 128 (quant_method "fp8"); those of
compressed-tensors and fbgemm hold ``weight_scale``, one for a tensor or a row.
Source: DeepSeek-V3's ``inference/kernel.py`` (weight_dequant), and the compressed-tensors package.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.quantized import Recipe
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError

Block = tuple[int, int]

_SUFFIXES: Final = ("_scale_inv", "_scale")
_VALUES: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def fp8_recipes(weights: SafetensorsWeights, block: Block | None) -> dict[str, Recipe]:
    """A recipe for each float8 tensor.

    Args:
        weights: the tensors as they are stored.
        block: rows and columns that share a scale; None: a scale is that of a tensor, or of a row.

    Raises:
        CheckpointError: a float8 tensor has no scale, or one of another shape.
    """
    recipes = {}
    for name in weights.names():
        if weights.kind(name) == "F8_E4M3":
            scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in weights), None)
            if scale is None:
                missing = name + _SUFFIXES[0]
                raise CheckpointError(
                    f"{weights.source}: tensor {missing!r}: expected beside {name!r}, got no such tensor"
                )
            _check(weights, name, scale, block)
            make = partial(_expand, weights, name, scale, block)
            recipes[name] = Recipe((name, scale), weights.shape(name), make)
    return recipes


def _check(weights: SafetensorsWeights, name: str, scale: str, block: Block | None) -> None:
    shape, got = weights.shape(name), weights.shape(scale)
    weights.dtype(scale)  # raises for a type that cannot be read
    if len(shape) < 2:
        raise CheckpointError(f"{weights.source}: tensor {name!r}: expected a matrix in float8, got {list(shape)}")
    if block is None:
        allowed = [(), (1,), shape[:-1], (*shape[:-1], 1)]
    else:
        allowed = [(*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))]
    if got not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise CheckpointError(f"{weights.source}: tensor {scale!r}: expected shape {expected}, got {list(got)}")


def _expand(weights: SafetensorsWeights, name: str, scale_name: str, block: Block | None) -> npt.NDArray[np.float32]:
    codes = weights.raw(name)
    scale = weights.get(scale_name).astype(np.float32)
    out: npt.NDArray[np.float32] = _VALUES[codes]
    with np.errstate(all="ignore"):  # scales of a damaged file may be anything
        if block is None:
            out *= scale.reshape(() if scale.size == 1 else (*codes.shape[:-1], 1))
            return out
        rows, columns = block
        for i in range(scale.shape[-2]):
            wide = np.repeat(scale[..., i, :], columns, axis=-1)[..., : codes.shape[-1]]
            out[..., i * rows : (i + 1) * rows, :] *= wide[..., None, :]
    return out
