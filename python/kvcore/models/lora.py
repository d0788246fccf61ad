"""LoRA adapters beside a decoder's packed weights, each for some of the rows of a step.

    y = x @ W.T                              all rows, whatever adapters they have: the bits of a row without one stay
    for each adapter that a row has:
        y[its rows] += (x[its rows] @ A.T) @ B.T          the scale is in B

Every row's sums are its own, so a row's bits depend neither on the other rows nor on their adapters.
Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import Linear, activate, layer_norm, rms_norm
from kvcore.errors import CheckpointError

if TYPE_CHECKING:
    from kvcore._kvcore import Threads
    from kvcore.checkpoint.lora import LoraWeights
    from kvcore.models.tensors import TensorSpec

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a decoder.

    Attributes:
        identity: of its files' content; what is computed with it is kept apart by this.
        deltas: what it adds to which of the decoder's layers: B (A x).
    """

    identity: str
    deltas: dict[int, tuple[Linear, Linear]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights as they are held."""
        return sum(a.nbytes + b.nbytes for a, b in self.deltas.values())


Rows = tuple[Adapter, IntArray]
"""An adapter and the rows of a step that have it, each once, in ascending order."""


class Adapters:
    """Where a decoder's adapters can be applied, and which rows of the running step have one."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.rows: Sequence[Rows] = ()
        """Set before a step; layers read it."""
        self._places: list[Sequence[TensorSpec]] = []

    def wrap(self, linear: Linear, tensors: Sequence[TensorSpec]) -> AdaptedLinear:
        """A packed layer that adapters may add to; ``tensors`` are its matrices, the outputs below each other."""
        self._places.append(tensors)
        return AdaptedLinear(linear, self, len(self._places) - 1)

    def keep(self, kept: IntArray) -> None:
        """From here on, the step's rows are those with these indices, in their order."""
        self.rows = [(adapter, np.flatnonzero(np.isin(kept, rows))) for adapter, rows in self.rows]

    def pieces(self, count: int, size: int) -> Iterator[slice]:
        """Cut ``count`` rows into pieces. While one is worked on, the step's rows are those of the piece alone."""
        whole = self.rows
        for start in range(0, count, size):
            stop = start + size
            if whole:
                self.rows = [(adapter, rows[(rows >= start) & (rows < stop)] - start) for adapter, rows in whole]
            yield slice(start, stop)
        self.rows = whole

    def fit(self, lora: LoraWeights) -> Adapter:
        """Pack an adapter's weights for this decoder.

        Raises:
            CheckpointError: a module is not the model's or cannot be adapted, or has another shape.
        """
        deltas: dict[int, tuple[Linear, Linear]] = {}
        used: set[str] = set()
        for place, tensors in enumerate(self._places):
            found = [tensor for tensor in tensors if _module(tensor, lora) is not None]
            if found:
                used.update(str(_module(tensor, lora)) for tensor in found)
                deltas[place] = self._delta(tensors, lora)
        if unknown := sorted(lora.modules.keys() - used):
            targets = sorted({_name(tensor).rpartition(".")[2] for tensors in self._places for tensor in tensors})
            raise CheckpointError(
                f"{lora.source}: module {unknown[0]!r}: expected one of this model's that can be adapted "
                f"({', '.join(targets)} of its layers), got another"
            )
        return Adapter(lora.identity, deltas)

    def _delta(self, tensors: Sequence[TensorSpec], lora: LoraWeights) -> tuple[Linear, Linear]:
        """A and B of all matrices of one layer: A below each other, B where its outputs and its A meet."""
        pairs = [_pair(tensor, lora) for tensor in tensors]
        a = np.concatenate([pair[0] for pair in pairs if pair is not None])
        b = np.zeros((sum(tensor.shape[0] for tensor in tensors), len(a)), np.float32)
        row = column = 0
        for tensor, pair in zip(tensors, pairs, strict=True):
            if pair is not None:
                rank = len(pair[0])
                b[row : row + tensor.shape[0], column : column + rank] = pair[1]
                column += rank
            row += tensor.shape[0]
        return Linear(a, threads=self.threads), Linear(b, threads=self.threads)


class AdaptedLinear:
    """A packed layer, plus what the adapters of some rows add. Its methods are those of ``Linear``."""

    def __init__(self, linear: Linear, adapters: Adapters, place: int) -> None:
        """Made by ``Adapters.wrap``."""
        self._linear = linear
        self._adapters = adapters
        self._place = place

    def __call__(self, x: FloatArray) -> FloatArray:
        """x @ W.T + b, and each row's delta."""
        y = self._linear(x)
        for rows, (a, b) in self._deltas():
            y[rows] += b(a(x[rows]))
        return y

    def norm_forward(
        self,
        x: FloatArray,
        norm_weight: FloatArray,
        eps: float,
        *,
        norm_bias: FloatArray | None = None,
        norm: str = "rms",
    ) -> FloatArray:
        """norm(x) @ W.T + b, and each row's delta."""
        y = self._linear.norm_forward(x, norm_weight, eps, norm_bias=norm_bias, norm=norm)
        threads = self._adapters.threads
        for rows, (a, b) in self._deltas():
            if norm == "rms":
                normed = rms_norm(x[rows], norm_weight, eps, threads=threads)
            else:
                normed = layer_norm(x[rows], norm_weight, norm_bias, eps, threads=threads)
            y[rows] += b(a(normed))
        return y

    def add_forward(self, x: FloatArray, residual: FloatArray) -> None:
        """residual += x @ W.T + b and each row's delta, in place."""
        self._linear.add_forward(x, residual)
        for rows, (a, b) in self._deltas():
            residual[rows] += b(a(x[rows]))

    def gated_add_forward(
        self,
        gate_up: FloatArray,
        residual: FloatArray,
        activation: str = "silu",
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        """residual += (f(gate) * up) @ W.T + b and each row's delta, in place."""
        self._linear.gated_add_forward(gate_up, residual, activation, alpha=alpha, limit=limit)
        threads = self._adapters.threads
        for rows, (a, b) in self._deltas():
            inner = activate(gate_up[rows], activation, gated=True, alpha=alpha, limit=limit, threads=threads)
            residual[rows] += b(a(inner))

    def activated_add_forward(self, x: FloatArray, residual: FloatArray, activation: str) -> None:
        """residual += f(x) @ W.T + b and each row's delta, in place."""
        self._linear.activated_add_forward(x, residual, activation)
        for rows, (a, b) in self._deltas():
            residual[rows] += b(a(activate(x[rows], activation, threads=self._adapters.threads)))

    def _deltas(self) -> Sequence[tuple[IntArray, tuple[Linear, Linear]]]:
        if not self._adapters.rows:
            return ()
        found = ((rows, adapter.deltas.get(self._place)) for adapter, rows in self._adapters.rows if len(rows))
        return [(rows, delta) for rows, delta in found if delta is not None]


def _name(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(".weight")


def _module(tensor: TensorSpec, lora: LoraWeights) -> str | None:
    """The adapter's name for the module that holds this tensor, if it changes it."""
    names = (_name(tensor), _name(tensor).removeprefix(tensor.base))
    return next((name for name in names if name in lora.modules), None)


def _pair(tensor: TensorSpec, lora: LoraWeights) -> tuple[FloatArray, FloatArray] | None:
    """A [rank, in] and B [out, rank] of one matrix; of a fused one, its rows of B."""
    module = _module(tensor, lora)
    if module is None:
        return None
    pair, part = lora.modules[module], tensor.part
    stored = tensor.stored_shape[::-1] if part is not None and part.transposed else tensor.stored_shape
    if (len(pair.b), pair.a.shape[1]) != stored:
        raise CheckpointError(
            f"{lora.source}: module {module!r}: expected lora_A [rank, {stored[1]}] and lora_B [{stored[0]}, rank], "
            f"got {list(pair.a.shape)} and {list(pair.b.shape)}"
        )
    return pair.a, pair.b if part is None else replace(part, transposed=False).take(pair.b)
