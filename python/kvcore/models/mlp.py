"""The dense MLP of a layer, in two steps, between which x may change: parallel layers open it before they attend.

open:   inner = norm(x) @ Wgate_up                 one joint product
close:  x += (f(gate) * up) @ Wdown                or f(up) @ Wdown without a gate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore.models.norm import projection

if TYPE_CHECKING:
    from kvcore._kvcore import Linear
    from kvcore.models.lora import AdaptedLinear
    from kvcore.models.norm import Norm, Residual
    from kvcore.models.reader import Reader
    from kvcore.models.spec import ActivationSpec, MlpSpec

FloatArray = npt.NDArray[np.float32]


class GatedMlp:
    """An MLP's packed weights, ``nbytes`` of them, without a norm: a layer's, or an expert's."""

    def __init__(self, read: Reader, layer: int, activation: ActivationSpec, *, role: str = "", gated: bool = True):
        """``role`` goes before the roles of its tensors."""
        before = read.nbytes
        pack = read.linear if role else read.adapted  # experts take no adapters
        self._up = pack((f"{role}gate_proj", f"{role}up_proj") if gated else (f"{role}up_proj",), layer)
        self._down = pack((f"{role}down_proj",), layer)
        self.nbytes = read.nbytes - before
        self._gated = gated
        self._activation = activation

    @property
    def up(self) -> Linear | AdaptedLinear:
        """The first product."""
        return self._up

    def add(self, inner: FloatArray, x: FloatArray) -> None:
        """x += the second product of what the first gave."""
        f = self._activation
        if self._gated:
            self._down.gated_add_forward(inner, x, f.name, alpha=f.alpha, limit=f.limit)
        else:
            self._down.activated_add_forward(inner, x, f.name)

    def __call__(self, x: FloatArray) -> FloatArray:
        """The whole of it: x [rows, hidden_size]."""
        out = np.zeros_like(x)
        self.add(self._up(x), out)
        return out


class Mlp:
    """A layer's dense MLP, with what is before and behind it."""

    def __init__(self, read: Reader, layer: int, spec: MlpSpec, norm: Norm | None, residual: Residual) -> None:
        """Read and pack its tensors."""
        self._mlp = GatedMlp(read, layer, spec.activation, gated=spec.gated)
        self._residual = residual
        self.open = projection(self._mlp.up, norm)
        """x [rows, hidden_size] to what ``close`` needs of it."""

    def close(self, inner: FloatArray, x: FloatArray) -> None:
        """Add its output to x, in place."""
        if self._residual.plain:
            self._mlp.add(inner, x)
            return
        out = np.zeros_like(x)
        self._mlp.add(inner, out)
        self._residual.add(out, x)
