"""A mixture of experts in place of a layer's MLP.

    scores = norm(x) @ Wrouter                          float32, whatever the experts are held in
    ids, weights = route(scores)                        the top k of each row
    for each expert that any row has chosen, in order:
        out[its rows] += weights[its rows] * expert(norm(x)[its rows])
    out += shared expert of all rows (times the sigmoid of its gate)
    x += out

Only chosen experts run. A row's experts are added in the order of their ids, so its bits do not depend on which rows go
along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import activate, route
from kvcore.models.mlp import GatedMlp

if TYPE_CHECKING:
    from kvcore.models.norm import Norm, Residual
    from kvcore.models.reader import Reader
    from kvcore.models.spec import MoeSpec

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Moe:
    """A layer's experts and their router, with what is before and behind them."""

    def __init__(self, read: Reader, layer: int, spec: MoeSpec, norm: Norm | None, residual: Residual) -> None:
        """Read and pack its tensors."""
        self._norm = norm
        self._residual = residual
        self._threads = read.threads
        self._router = read.linear(("router",), layer, dtype="float32")
        self._correction = read.vector("router.correction", layer) if read.has("router.correction", layer) else None
        self._routing: dict[str, Any] = vars(spec.router)
        self._experts = [
            GatedMlp(read, layer, spec.activation, role=f"experts.{expert}.") for expert in range(spec.num_experts)
        ]
        shared = spec.shared_inner is not None
        self._shared = GatedMlp(read, layer, spec.activation, role="shared.") if shared else None
        self._shared_gate = read.linear(("shared_gate",), layer, dtype="float32") if spec.shared_gate else None

    def idle_nbytes(self, num_tokens: int) -> int:
        """Bytes of the experts that none of so many tokens chooses, on average, if all are as likely."""
        chosen = self._routing["top_k"] / len(self._experts)
        return int(sum(expert.nbytes for expert in self._experts) * (1 - chosen) ** num_tokens)

    def open(self, x: FloatArray) -> FloatArray:
        """What ``close`` needs of x [rows, hidden_size]."""
        return x.copy() if self._norm is None else self._norm(x)

    def close(self, normed: FloatArray, x: FloatArray) -> None:
        """Add its output to x, in place."""
        scores = self._router(normed)
        ids, weights = route(scores, self._correction, **self._routing, threads=self._threads)
        out = np.zeros_like(x)
        for expert, rows, weight in _by_expert(ids, weights):
            y = self._experts[expert](normed[rows])
            y *= weight
            out[rows] += y
        if self._shared is not None:
            y = self._shared(normed)
            if self._shared_gate is not None:
                y *= activate(self._shared_gate(normed), "sigmoid", threads=self._threads)
            out += y
        self._residual.add(out, x)


def _by_expert(ids: IntArray, weights: FloatArray) -> Iterator[tuple[int, IntArray, FloatArray]]:
    """Each chosen expert in ascending order, its rows and their weights [n, 1]."""
    order = ids.ravel().argsort(kind="stable")
    chosen, starts = np.unique(ids.ravel()[order], return_index=True)
    ends = [*starts[1:], len(order)]
    for expert, start, end in zip(chosen.tolist(), starts, ends, strict=False):
        places = order[start:end]
        yield expert, places // ids.shape[1], weights.ravel()[places, None]
