"""Checkpoints whose matrices are float8 (e4m3) with scales beside them.

    weight = float8 codes * scale        a scale for the tensor, for each row, or for each block of rows x columns

DeepSeek's files hold ``weight`` with ``weight_scale_inv``, one for 128 x 128 (quant_method "fp8"); those of
compressed-tensors and fbgemm hold ``weight_scale``, one for a tensor or a row. The product is float32.
Source: DeepSeek-V3's ``inference/kernel.py`` (weight_dequant), and the compressed-tensors package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import ConfigReader, describe
from kvcore.checkpoint.weights import SafetensorsWeights
from kvcore.errors import CheckpointError

_SUFFIXES: Final = ("_scale_inv", "_scale")
_HIDDEN: Final = (".input_scale", ".activation_scale")
"""Scales of activations, which stay float32 here."""

_VALUES: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Fp8Scheme:
    """How float8 weights are scaled.

    Attributes:
        block: rows and columns that share a scale; None: a scale is that of a tensor, or of a row.
    """

    block: tuple[int, int] | None


def fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """What config.json says of quantisation; None if nothing is quantised.

    Raises:
        CheckpointError: weights are quantised by another method, which the message names.
    """
    top = ConfigReader(config)
    key = "quantization_config" if top.has("quantization_config") else "compression_config"
    if not top.has(key):
        return None
    read = top.child(key) if isinstance(config[key], Mapping) else None
    method = read.string("quant_method", None) if read is not None else None
    if read is None or method not in ("fp8", "fbgemm_fp8", "compressed-tensors"):
        raise _refusal(top, key, method or "an unnamed method")
    if method != "compressed-tensors":
        kind = read.string("fmt", "e4m3")
        if kind != "e4m3":
            raise _refusal(top, key, f"{method} in the format {kind}")
        return Fp8Scheme(_block(read, "weight_block_size"))
    groups = read.child("config_groups")
    schemes: set[Fp8Scheme] = set()
    for name in () if groups is None else config[key]["config_groups"]:
        group = None if groups is None else groups.child(name)
        weights = None if group is None else group.child("weights")
        if weights is not None:
            kind, bits = weights.string("type", "int"), weights.integer("num_bits", 8)
            if (kind, bits) != ("float", 8):
                raise _refusal(top, key, f"{method} as {kind} of {bits} bits")
            schemes.add(Fp8Scheme(_block(weights, "block_structure")))
    if len(schemes) != 1:
        raise _refusal(top, key, f"{method} in {len(schemes)} ways")
    return schemes.pop()


def _block(read: ConfigReader, key: str) -> tuple[int, int] | None:
    if not read.has(key):
        return None
    sizes = read.numbers(key)
    if len(sizes) != 2 or any(size != int(size) or size < 1 for size in sizes):
        raise read.error(key, "two sizes of at least 1", list(sizes))
    return int(sizes[0]), int(sizes[1])


def _refusal(read: ConfigReader, key: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{read.source}: {key}: expected weights in float32, float16 or bfloat16, or float8 by fp8, fbgemm_fp8 or "
        f"compressed-tensors, got weights quantised by {how}, which is not supported; use the unquantised checkpoint "
        f"or a .gguf file"
    )


class Fp8Weights:
    """Tensors of a folder, those in float8 multiplied by their scales: float32."""

    def __init__(self, weights: SafetensorsWeights, scheme: Fp8Scheme) -> None:
        """Find each tensor's scale.

        Args:
            weights: the tensors as they are stored.
            scheme: how they are scaled.

        Raises:
            CheckpointError: a float8 tensor has no scale, or one of another shape.
        """
        self._weights = weights
        self._block = scheme.block
        self._scales: dict[str, str] = {}
        for name in weights.names():
            if weights.kind(name) == "F8_E4M3":
                scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in weights), None)
                if scale is None:
                    missing = name + _SUFFIXES[0]
                    raise CheckpointError(
                        f"{weights.source}: tensor {missing!r}: expected beside {name!r}, got no such tensor"
                    )
                self._scales[name] = scale
                self._check(name, scale)
        self._names = [name for name in weights.names() if not self._is_scale(name)]

    @property
    def source(self) -> str:
        """The file or folder, for messages."""
        return self._weights.source

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name that is no scale."""
        return name in self._weights and not self._is_scale(str(name))

    def names(self) -> list[str]:
        """All names but those of scales, sorted."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape. Raises ``CheckpointError`` if there is no such tensor."""
        return self._weights.shape(name)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns. Raises ``CheckpointError`` as ``SafetensorsWeights`` does."""
        return np.dtype(np.float32) if name in self._scales else self._weights.dtype(name)

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor. Raises as ``dtype``."""
        if name not in self._scales:
            return self._weights.get(name)
        codes = self._weights.raw(name)
        scale = self._weights.get(self._scales[name]).astype(np.float32)
        out: npt.NDArray[Any] = _VALUES[codes]
        with np.errstate(all="ignore"):  # scales of a damaged file may be anything
            if self._block is None:
                out *= scale.reshape(() if scale.size == 1 else (*codes.shape[:-1], 1))
                return out
            rows, columns = self._block
            for i in range(scale.shape[-2]):
                wide = np.repeat(scale[..., i, :], columns, axis=-1)[..., : codes.shape[-1]]
                out[..., i * rows : (i + 1) * rows, :] *= wide[..., None, :]
        return out

    def blocks(self, name: str) -> None:
        """None: these files have no blocks of integers."""

    def unused(self) -> list[str]:
        """Names that ``get`` was never called for, sorted."""
        return [name for name in self._weights.unused() if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        if name.endswith(_HIDDEN):
            return True
        return any(name == scale for scale in (self._scales.get(name.removesuffix(s)) for s in _SUFFIXES))

    def _check(self, name: str, scale: str) -> None:
        shape, got = self.shape(name), self._weights.shape(scale)
        self._weights.dtype(scale)
        if len(shape) < 2:
            raise CheckpointError(f"{self.source}: tensor {name!r}: expected a matrix in float8, got {list(shape)}")
        if self._block is None:
            allowed = [(), (1,), shape[:-1], (*shape[:-1], 1)]
        else:
            rows, columns = self._block
            allowed = [(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))]
        if got not in allowed:
            expected = " or ".join(str(list(shape)) for shape in allowed)
            raise CheckpointError(f"{self.source}: tensor {scale!r}: expected shape {expected}, got {describe(got)}")
