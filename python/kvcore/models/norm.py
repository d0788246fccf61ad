"""Norms of activations, alone and in front of a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvcore._kvcore import layer_norm, rms_norm

if TYPE_CHECKING:
    from kvcore._kvcore import Linear, Threads
    from kvcore.models.lora import AdaptedLinear

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Norm:
    """A norm with its weights, float32 [width]; ``weight`` is what is multiplied by."""

    kind: Literal["rms", "layer"]
    weight: FloatArray
    bias: FloatArray | None
    eps: float
    threads: Threads

    def __call__(self, x: FloatArray) -> FloatArray:
        """Normalise rows [rows, width]."""
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps, threads=self.threads)
        return layer_norm(x, self.weight, self.bias, self.eps, threads=self.threads)


def projection(linear: Linear | AdaptedLinear, norm: Norm | None) -> Callable[[FloatArray], FloatArray]:
    """x to ``linear(norm(x))``, or without a norm to ``linear(x)``: one call, with all bound that is no activation.

    A decode step makes some hundred calls, and what Python does between them is read from memory anew, as a layer's
    weights push it out of the caches.
    """
    if norm is None:
        return linear
    weight, eps, bias, kind = norm.weight, norm.eps, norm.bias, norm.kind
    return lambda x: linear.norm_forward(x, weight, eps, norm_bias=bias, norm=kind)


@dataclass(frozen=True)
class Residual:
    """How a block's output goes back into the residual stream: ``x += scale * norm(y)``."""

    norm: Norm | None
    scale: float

    @cached_property
    def plain(self) -> bool:
        """Whether it is ``x += y``, which a product can do itself."""
        return self.norm is None and self.scale == 1

    def add(self, y: FloatArray, x: FloatArray) -> None:
        """Add rows to x in place; y may be changed."""
        if self.norm is not None:
            y = self.norm(y)
        if self.scale != 1:
            y *= np.float32(self.scale)
        x += y
