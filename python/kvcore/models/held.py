"""What a model's weights take once they are held, known before any is read.

    the model is built as ever, by a reader whose arrays have a shape and a type but no memory of their own, and whose
    packed matrices are nothing but their sizes

So the sum follows whatever the parts of a model ask of their reader, and cannot fall behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import Linear
from kvcore.checkpoint.dequantize import BLOCKS
from kvcore.models.decoder import Decoder
from kvcore.models.encoder_decoder import EncoderDecoder
from kvcore.models.reader import Reader

if TYPE_CHECKING:
    from kvcore.checkpoint.weights import Weights
    from kvcore.models.spec import DecoderSpec


def held_nbytes(spec: DecoderSpec, weights: Weights | None, *, dtype: str, quantization: str | None) -> int:
    """Bytes that ``Decoder.nbytes`` will be.

    Args:
        spec: what the model is.
        weights: its tensors, of which shapes and types are asked; None: those that such a model cannot do without,
            none of them quantised.
        dtype, quantization: as ``Decoder`` has them.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type than the spec says.
    """
    kind = Decoder if spec.encoder is None else EncoderDecoder
    shapes: Any = _Required(spec) if weights is None else _Shapes(weights)
    cache: Any = SimpleNamespace(threads=None)  # layers keep it, and use it when they run
    return kind(spec, shapes, cache, dtype=dtype, quantization=quantization, reader=_Sizes).nbytes


def held_quantization(option: str, dtype: str) -> str | None:
    """What the option ``quantization`` of ``LLM`` is for ``Decoder``, beside this dtype.

    Whoever asks for float32 asks for its arithmetic, so "auto" is none there.
    """
    return None if option == "none" or (option == "auto" and dtype == "float32") else option


@dataclass(frozen=True)
class _Packed:
    """A matrix's size once it is packed."""

    out_features: int
    in_features: int
    dtype: str
    nbytes: int


class _Sizes(Reader):
    """Adds up and reads nothing."""

    def _array(self, stored: npt.NDArray[Any], dtype: Any) -> npt.NDArray[Any]:
        return _empty(stored.shape, dtype)

    def _stack(self, parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return _empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)

    def _linear(self, weight: Any, bias: Any, dtype: str, blocks: str | None = None) -> Linear:
        outputs, inputs = weight.shape
        if blocks is not None:
            per_block, block_bytes, _ = BLOCKS[blocks]
            inputs = inputs // block_bytes * per_block
        nbytes = Linear.packed_nbytes(outputs, inputs, dtype=dtype, bias=bias is not None)
        return cast("Linear", _Packed(outputs, inputs, dtype, nbytes))

    def _has_own_output(self) -> bool:
        # Where a file has a copy of what is tied, only its values could tell that it is none.
        return not self.spec.tie_word_embeddings and self.has("lm_head.weight")

    def warn_of_unused(self) -> None:
        """Whoever reads them says so."""


class _Shapes:
    """Tensors without their values."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.source = weights.source
        self.shape = weights.shape
        self.dtype = weights.dtype

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def get(self, name: str) -> npt.NDArray[Any]:
        return _empty(self.shape(name), self.dtype(name))

    def blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        kind = self._weights.block_kind(name)
        if kind is None:
            return None
        rows, width = self.shape(name)
        per_block, block_bytes, _ = BLOCKS[kind]
        return kind, _empty((rows, width // per_block * block_bytes), np.uint8)


class _Required:
    """The tensors that a model cannot do without, as float32."""

    source = "the configuration"

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = spec.required_shapes()

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def get(self, name: str) -> npt.NDArray[Any]:
        return _empty(self._shapes[name], np.float32)

    def blocks(self, name: str) -> None:
        return None


def _empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array that repeats one zero."""
    return np.broadcast_to(np.zeros((), dtype), shape)
