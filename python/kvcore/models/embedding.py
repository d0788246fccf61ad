"""From token ids to the residual stream.

x = embedding_norm(embed_tokens[ids] * scale + position_embedding[positions])            what of it there is
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvcore.models.reader import Reader
    from kvcore.models.table import Table

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Embedding:
    """A stack's embeddings.

    Attributes:
        table: rows for token ids.
    """

    def __init__(self, read: Reader, table: Table | None = None) -> None:
        """Read its tensors; ``table`` if something else has it already: another stack, or the output matrix."""
        self.table = read.table("embed_tokens.weight") if table is None else table
        self._scale = np.float32(read.spec.embedding_scale)
        self._positions = read_positions(read)
        self._norm = read.optional_norm("embedding_norm")

    def idle_nbytes(self, num_tokens: int) -> int:
        """Bytes that a step of so many tokens does not read, one of each request."""
        idle, positions = self.table.idle_nbytes(num_tokens), self._positions
        return idle if positions is None else idle + max(0, len(positions) - num_tokens) * positions[0].nbytes

    def __call__(self, token_ids: IntArray, positions: IntArray) -> FloatArray:
        """[rows, hidden_size] for int64 [rows]."""
        x = self.table(token_ids)
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
