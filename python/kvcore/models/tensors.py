"""Which tensors a model is made of, and how each is found in a checkpoint.

Tensors are named by role ("q_proj.weight"), so that a checkpoint with other names differs only in data. What a file
stores as one (q, k and v; gate and up; all experts) is read in parts, each a ``TensorSpec`` with its ``Part``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcore.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvcore.checkpoint.weights import Weights


@dataclass(frozen=True)
class Part:
    """Which part of a stored tensor is meant: some of its rows, which lie in equal groups.

        rows = stored[index], transposed or not
        part = from start to stop of each group of rows, below each other

    Attributes:
        shape: of the stored tensor.
        index: along its first axis, if that counts experts.
        transposed: whether it is stored ``[in, out]``.
        groups: how many groups the rows are in: heads, if each has its q, k and v side by side; as many as the part
            has rows, if two parts alternate.
        start, stop: rows of each group; stop None is the group's end.
    """

    shape: tuple[int, ...]
    index: int | None = None
    transposed: bool = False
    groups: int = 1
    start: int = 0
    stop: int | None = None

    def take(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part of what is stored."""
        rows = stored if self.index is None else stored[self.index]
        rows = rows.T if self.transposed else rows
        rest = rows.shape[1:]
        return rows.reshape(self.groups, -1, *rest)[:, self.start : self.stop].reshape(-1, *rest)

    @property
    def has_whole_rows(self) -> bool:
        """Whether a row of the part is a row of the stored matrix."""
        return self.index is None and not self.transposed


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model reads.

    Attributes:
        role: what it is to the model, such as ``"q_proj.weight"``.
        name: its name in the checkpoint; ``{layer}`` stands for the layer's index.
        shape: ``[out, in]`` for matrices.
        required: whether the model cannot do without it. One that is not required is used where it is there.
        part: where it is in a stored tensor of that name; None: it is all of it.
        base: what files of the bare model, without an output matrix, leave out at the beginning of the name.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    required: bool = True
    part: Part | None = None
    base: str = ""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return self.shape if self.part is None else self.part.shape

    def of_layer(self, layer: int) -> TensorSpec:
        """The same of one layer, with its full name."""
        return replace(self, name=self.name.replace("{layer}", str(layer)))

    def find(self, weights: Weights) -> str | None:
        """The name under which the checkpoint has it; None if it may be missing, and is.

        Raises:
            CheckpointError: it is missing and required, or its shape or type is not what the model needs.
        """
        names = (self.name, self.name.removeprefix(self.base))
        name = next((name for name in names if name in weights), None)
        expected = f"tensor {self.name!r}: expected shape {list(self.stored_shape)}"
        if name is None:
            if self.required:
                raise CheckpointError(f"{weights.source}: {expected}, got no such tensor")
            return None
        shape = weights.shape(name)
        if shape != self.stored_shape:
            raise CheckpointError(f"{weights.source}: {expected}, got {list(shape)}")
        weights.dtype(name)  # raises for a type that cannot be read
        return name

    def read(self, weights: Weights) -> npt.NDArray[Any] | None:
        """The tensor as it is stored (float32, float16 or bfloat16), or None if it may be missing, and is.

        Raises:
            CheckpointError: as ``find``.
        """
        name = self.find(weights)
        if name is None:
            return None
        stored = weights.get(name)
        return stored if self.part is None else self.part.take(stored)

    def read_blocks(self, weights: Weights) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """Its quantised blocks, as ``Weights.blocks`` has them, if there are and if they can be taken apart so.

        Raises:
            CheckpointError: as ``find``.
        """
        name = self.find(weights)
        blocks = None if name is None else weights.blocks(name)
        if blocks is None or self.part is None:
            return blocks
        return (blocks[0], self.part.take(blocks[1])) if self.part.has_whole_rows else None
