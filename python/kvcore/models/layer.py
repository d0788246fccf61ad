"""One layer: attention, cross-attention if there is any, and an MLP, each added to the residual stream.

x = after_attention_norm(x + post_attention_norm(attended @ Wo))
x = after_cross_norm(x + cross(x))
x = after_mlp_norm(x + post_mlp_norm(mlp(x)))            the norms that there are
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcore.models.attention import Attention
from kvcore.models.cross import CrossAttention
from kvcore.models.mla import LatentAttention
from kvcore.models.mlp import Mlp
from kvcore.models.moe import Moe
from kvcore.models.norm import Residual
from kvcore.models.spec import MoeSpec

if TYPE_CHECKING:
    from kvcore._kvcore import KVCache
    from kvcore.models.attention import Step
    from kvcore.models.norm import Norm
    from kvcore.models.reader import Reader

FloatArray = npt.NDArray[np.float32]

_ROWS = 256
"""Rows that go through an MLP together: what is between its products stays in a core's cache."""


class Layer:
    """One layer's packed weights.

    Attributes:
        attention: its self-attention, up to its heads.
        cross: its attention to an encoder's output, if it has one.
    """

    def __init__(self, read: Reader, layer: int, cache: KVCache) -> None:
        """Read and pack its tensors; ``cache`` keeps its K and V."""
        spec = read.spec.layers[layer]
        scale = read.spec.residual_scale
        latent = spec.attention.latent
        self.attention: Attention | LatentAttention
        if latent is None:
            self.attention = Attention(read, layer, cache)
        else:
            self.attention = LatentAttention(read, layer, latent, cache)
        self._output = read.adapted(("o_proj",), layer)
        self._residual = Residual(read.optional_norm("post_attention_norm", layer), scale)
        self._after_attention = read.optional_norm("after_attention_norm", layer)
        self.cross = None if spec.cross is None else CrossAttention(read, layer, spec.cross, cache)
        self._after_cross = read.optional_norm("after_cross_norm", layer)
        norm = read.optional_norm("mlp_norm", layer)
        if norm is None and spec.parallel:
            norm = read.optional_norm("input_norm", layer)
        residual = Residual(read.optional_norm("post_mlp_norm", layer), scale)
        self._mlp: Mlp | Moe
        if isinstance(spec.mlp, MoeSpec):
            self._mlp = Moe(read, layer, spec.mlp, norm, residual)
        else:
            self._mlp = Mlp(read, layer, spec.mlp, norm, residual)
        self._after_mlp = read.optional_norm("after_mlp_norm", layer)
        self._parallel = spec.parallel
        self._adapters = read.adapters

    def idle_nbytes(self, num_tokens: int) -> int:
        """Bytes of what a step of so many tokens does not read."""
        of_experts = self._mlp.idle_nbytes(num_tokens) if isinstance(self._mlp, Moe) else 0
        return of_experts + (self.cross.idle_nbytes if self.cross is not None else 0)

    def finish(self, x: FloatArray, attended: FloatArray, step: Step) -> None:
        """Add attention's output, cross-attention and the MLP to x, in place. With cross-attention x has all rows."""
        if self.cross is not None:
            self._add_attended(x, attended)
            self.cross.add(x, step)
            _normalise(x, self._after_cross)
        if len(x) <= _ROWS:
            self._finish(x, attended)
            return
        for rows in self._adapters.pieces(len(x), _ROWS):
            self._finish(x[rows], attended[rows])

    def _finish(self, x: FloatArray, attended: FloatArray) -> None:
        inner = self._mlp.open(x) if self._parallel else None
        if self.cross is None:
            self._add_attended(x, attended)
        self._mlp.close(self._mlp.open(x) if inner is None else inner, x)
        _normalise(x, self._after_mlp)

    def _add_attended(self, x: FloatArray, attended: FloatArray) -> None:
        if self._residual.plain:
            self._output.add_forward(attended, x)
        else:
            self._residual.add(self._output(attended), x)
        _normalise(x, self._after_attention)


def _normalise(x: FloatArray, norm: Norm | None) -> None:
    if norm is not None:
        x[:] = norm(x)
