"""From a checkpoint's tensors to packed weights, one at a time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import Arena, Linear
from kvcore.models.lora import AdaptedLinear, Adapters
from kvcore.models.norm import Norm
from kvcore.models.spec import check_weights, has_own_output, unused_tensors
from kvcore.models.table import NUMPY_DTYPES, Table

if TYPE_CHECKING:
    from kvcore._kvcore import Threads
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.spec import DecoderSpec
    from kvcore.models.tensors import TensorSpec

FloatArray = npt.NDArray[np.float32]

_T = TypeVar("_T", bound="Linear | npt.NDArray[Any]")

_HELD = {"Q4_0": "int4", "Q4_1": "int4", "Q4_K": "int4", "Q5_0": "int8", "Q8_0": "int8"}
"""Kinds of blocks that packed weights take as they are, and in what."""

_EXACT = _HELD.keys() - {"Q4_K"}
"""Those whose packed rows are the file's to the bit: scales of Q4_K's groups are rounded."""

_Blocks = tuple[str, npt.NDArray[np.uint8]]


class Reader:
    """Reads a spec's tensors by role and packs them.

    Attributes:
        spec: whose tensors.
        threads: the pool that packs, and runs the products.
        adapters: where adapters can be applied to what was read.
        nbytes: bytes of all that was read, as it is held.
        formats: weights of the matrices of products by what they are held in.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type than the spec says.
    """

    def __init__(
        self, spec: DecoderSpec, weights: Weights, threads: Threads, *, dtype: str, quantization: str | None
    ) -> None:
        """``dtype`` and ``quantization`` as ``Decoder`` has them. All tensors are checked, and none is read."""
        check_weights(spec, weights)
        self.spec = spec
        self.threads = threads
        self.nbytes = 0
        self.formats = Counter[str]()
        self.adapters = Adapters(threads)
        self._weights = weights
        self._dtype = dtype
        self._quantization = quantization
        self._whole = lru_cache(maxsize=4)(weights.get)  # read in parts: all experts' gate and up, say
        self._arena = Arena()

    def has(self, role: str, layer: int | None = None) -> bool:
        """Whether the model and the checkpoint have such a tensor."""
        tensors = self.spec.tensors if layer is None else self.spec.layers[layer].tensors
        return role in tensors and self.spec.tensor(role, layer).find(self._weights) is not None

    def vector(self, role: str, layer: int | None = None) -> FloatArray:
        """A tensor as float32; a copy, as a view would keep the whole file mapped."""
        return self._count(self._array(self._read(role, layer), np.float32))

    def table(self, role: str) -> Table:
        """A tensor for its rows to be looked up: its blocks where they can be held exactly, else rows in ``dtype``."""
        blocks = None if self._quantization is None else self.spec.tensor(role).read_blocks(self._weights)
        if blocks is None or blocks[0] not in _EXACT:
            return Table(self._count(self._array(self._read(role, None), NUMPY_DTYPES[self._dtype])), self._dtype)
        linear = self._of_blocks(*blocks)
        self.nbytes += linear.nbytes  # no product is made with it
        return Table(linear, self._dtype)

    def norm(self, role: str, layer: int | None = None, *, eps: float | None = None) -> Norm:
        """A norm of the spec's kind; with ``eps`` a root-mean-square norm of its own."""
        spec = self.spec.norm
        weight = self.vector(f"{role}.weight", layer)
        if eps is not None:
            return Norm("rms", weight, None, eps, self.threads)
        if spec.offset:
            weight = weight + np.float32(spec.offset)
        bias = self.vector(f"{role}.bias", layer) if self.has(f"{role}.bias", layer) else None
        return Norm(spec.kind, weight, bias, spec.eps, self.threads)

    def optional_norm(self, role: str, layer: int | None = None) -> Norm | None:
        """The same, or None if the model has no such norm."""
        return self.norm(role, layer) if self.has(f"{role}.weight", layer) else None

    def output(self) -> tuple[Linear, Table | None]:
        """The output matrix: the embedding, or one of its own.

        Returns:
            The matrix; and the embedding's rows, if it is the embedding and nothing was rounded to hold it so.
        """
        own = self._has_own_output()
        bias = self.vector("lm_head.bias").reshape(-1) if self.has("lm_head.bias") else None
        tensor = self.spec.tensor("lm_head.weight" if own else "embed_tokens.weight")
        blocks = None if self._quantization is None else tensor.read_blocks(self._weights)
        if self._quantization in (None, "auto"):
            dtype = self._dtype_of([blocks])
        else:
            four_bits = blocks is not None and _HELD.get(blocks[0]) == "int4"
            dtype = "int4" if four_bits and self._quantization == "int4" else "int8"
        if blocks is not None and _HELD.get(blocks[0]) == dtype:
            output, exact = self._count(self._of_blocks(*blocks, bias)), blocks[0] in _EXACT
        else:
            output, exact = self.pack(tensor.read(self._weights), bias, dtype=dtype), dtype == self._dtype
        return output, Table(output, self._dtype, is_output=True) if exact and not own else None

    def adapted(self, names: Sequence[str], layer: int) -> AdaptedLinear:
        """The same as ``linear``, for adapters to add to."""
        tensors = [self.spec.tensor(f"{name}.weight", layer) for name in names]
        return self.adapters.wrap(self.linear(names, layer), tensors)

    def linear(self, names: Sequence[str], layer: int, *, dtype: str | None = None) -> Linear:
        """Matrices with the same input as one layer, the outputs below each other; biases where there are any."""
        tensors = [self.spec.tensor(f"{name}.weight", layer) for name in names]
        bias = self._biases(names, tensors, layer)
        if dtype is None and self._quantization is not None:
            blocks = [tensor.read_blocks(self._weights) for tensor in tensors]
            dtype = self._dtype_of(blocks)
            joint = self._joint(blocks, dtype)
            if joint is not None:
                return self._count(self._of_blocks(*joint, bias))
        matrices = [self._read(tensor.role, layer) for tensor in tensors]
        return self.pack(self._stack(matrices), bias, dtype=dtype)

    def heads(self, name: str, layer: int, count: int, *, transposed: bool = False) -> list[Linear]:
        """A matrix whose rows are those of so many heads, as a layer for each head."""
        weight = self._read(f"{name}.weight", layer)
        heads = weight.reshape(count, -1, weight.shape[1])
        return [self.pack(np.ascontiguousarray(head.T) if transposed else head) for head in heads]

    def pack(self, weight: Any, bias: FloatArray | None = None, *, dtype: str | None = None) -> Linear:
        """Pack a matrix ``[out, in]``."""
        if dtype is None:
            dtype = self._dtype if self._quantization in (None, "auto") else self._quantization
        return self._count(self._linear(weight, bias, dtype))

    def warn_of_unused(self) -> None:
        """Warn of tensors that were never read."""
        left = unused_tensors(self.spec, self._weights)
        if left:
            names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            number = "1 tensor is" if len(left) == 1 else f"{len(left)} tensors are"
            warnings.warn(f"{self._weights.source}: {number} not used: {names}", stacklevel=3)

    def _read(self, role: str, layer: int | None) -> npt.NDArray[Any]:
        spec = self.spec.tensor(role, layer)
        name = spec.find(self._weights)
        assert name is not None, role  # check_weights has seen it
        return self._weights.get(name) if spec.part is None else spec.part.take(self._whole(name))

    def _biases(self, names: Sequence[str], weights: Sequence[TensorSpec], layer: int) -> FloatArray | None:
        has = [self.has(f"{name}.bias", layer) for name in names]
        if not any(has):
            return None
        parts = zip(names, weights, has, strict=True)
        return np.concatenate(
            [
                self._read(f"{name}.bias", layer).astype(np.float32) if there else np.zeros(weight.shape[0], np.float32)
                for name, weight, there in parts
            ]
        )

    def _of_blocks(self, kind: str, rows: npt.NDArray[np.uint8], bias: FloatArray | None = None) -> Linear:
        return self._linear(rows, bias, _HELD[kind], kind)

    def _linear(self, weight: Any, bias: FloatArray | None, dtype: str, blocks: str | None = None) -> Linear:
        return Linear(weight, bias, dtype=dtype, blocks=blocks, threads=self.threads, arena=self._arena)

    def _array(self, stored: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        return np.array(stored, dtype, order="C")

    def _stack(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _has_own_output(self) -> bool:
        return has_own_output(self.spec, self._weights)

    def _dtype_of(self, blocks: Sequence[_Blocks | None]) -> str:
        """What matrices are held in that are stored like this, in blocks or (None) not."""
        if self._quantization != "auto":
            return self._quantization or self._dtype
        if None in blocks:
            return self._dtype
        kinds = {kind for kind, _ in filter(None, blocks)}
        return "int4" if all(_HELD.get(kind) == "int4" for kind in kinds) else "int8"

    def _count(self, held: _T) -> _T:
        self.nbytes += held.nbytes
        if not isinstance(held, np.ndarray):
            self.formats[held.dtype] += held.in_features * held.out_features
        return held

    def _joint(self, blocks: Sequence[_Blocks | None], dtype: str) -> _Blocks | None:
        """The blocks below each other, if all are of one kind that this dtype takes as it is."""
        parts = [part for part in blocks if part is not None]
        kinds = {kind for kind, _ in parts}
        if len(parts) < len(blocks) or len(kinds) != 1 or _HELD.get(parts[0][0]) != dtype:
            return None
        return kinds.pop(), self._stack([rows for _, rows in parts])
