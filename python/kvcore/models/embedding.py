"""From token ids to the residual stream.

x = embedding_norm(embed_tokens[ids] * scale + position_embedding[positions])            what of it there is
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvcore.models.reader import Reader

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Embedding:
    """A stack's embeddings.

    Attributes:
        table: rows for token ids, in the type that weights are held in.
    """

    def __init__(self, read: Reader, table: npt.NDArray[Any] | None = None) -> None:
        """Read its tensors; ``table`` if another stack has it already."""
        self.table = read.matrix("embed_tokens.weight") if table is None else table
        self._scale = np.float32(read.spec.embedding_scale)
        self._positions = read_positions(read)
        self._norm = read.optional_norm("embedding_norm")

    @property
    def tables(self) -> list[npt.NDArray[Any]]:
        """What rows are looked up in."""
        return [self.table] if self._positions is None else [self.table, self._positions]

    def __call__(self, token_ids: IntArray, positions: IntArray) -> FloatArray:
        """[rows, hidden_size] for int64 [rows]."""
        x: FloatArray = self.table[token_ids].astype(np.float32)
        if self._scale != 1:
            x *= self._scale
        if self._positions is not None:
            x += self._positions[positions]
        return x if self._norm is None else self._norm(x)


def read_positions(read: Reader) -> FloatArray | None:
    """Embeddings of positions, as they are stored or, if the model says so, computed."""
    if read.has("position_embedding.weight"):
        return read.vector("position_embedding.weight")
    spec = read.spec
    return sinusoids(spec.max_position_embeddings, spec.hidden_size) if spec.sinusoidal else None


def sinusoids(rows: int, width: int) -> FloatArray:
    """Sines in a row's first half, cosines in its second, of position / 10000^(2 i / width) (Vaswani et al., 2017)."""
    angles = np.arange(rows)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    table: FloatArray = np.concatenate([np.sin(angles), np.cos(angles[:, : width // 2])], axis=1).astype(np.float32)
    return table
