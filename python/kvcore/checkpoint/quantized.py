"""Safetensors whose weights are quantised: what is stored, and what it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.weights import SafetensorsWeights

_IGNORED: Final = (".input_scale", ".activation_scale")
"""Scales of activations, which stay float32 here."""


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made.

    Attributes:
        stored: the tensors that hold its codes and scales.
        shape: its shape.
        make: makes it, float32.
    """

    stored: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[np.float32]]


class QuantizedWeights:
    """Tensors of a folder, those that are quantised as the float32 values that they stand for."""

    def __init__(self, weights: SafetensorsWeights, recipes: Mapping[str, Recipe]) -> None:
        """What no recipe is for, and no recipe uses, is read as it is stored."""
        self._weights = weights
        self._recipes = recipes
        self._latest: tuple[str, npt.NDArray[np.float32]] | None = None
        self._made: set[str] = set()
        inner = {name for recipe in recipes.values() for name in recipe.stored}
        plain = {name for name in weights.names() if name not in inner and not name.endswith(_IGNORED)}
        self._names = plain | recipes.keys()

    @property
    def source(self) -> str:
        """The file or folder, for messages."""
        return self._weights.source

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name."""
        return name in self._names

    def names(self) -> list[str]:
        """All names, sorted; codes and scales are none."""
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape. Raises ``CheckpointError`` if there is no such tensor."""
        recipe = self._recipes.get(name)
        return self._weights.shape(name) if recipe is None else recipe.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns. Raises ``CheckpointError`` as ``SafetensorsWeights`` does."""
        return np.dtype(np.float32) if name in self._recipes else self._weights.dtype(name)

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor. Raises as ``dtype``."""
        recipe = self._recipes.get(name)
        if recipe is None:
            return self._weights.get(name)
        self._made.add(name)
        if self._latest is not None and self._latest[0] == name:
            return self._latest[1]
        array = recipe.make()
        # all experts of a layer in one tensor are asked for one by one: make them once
        self._latest = (name, array) if array.ndim == 3 else None
        return array

    def blocks(self, name: str) -> None:
        """None: these files have no blocks of integers."""

    def block_kind(self, name: str) -> None:
        """None, too."""

    def unused(self) -> list[str]:
        """Names that ``get`` was never called for, sorted."""
        plain = self._names & {*self._weights.unused()}
        return sorted((plain - self._recipes.keys()) | (self._recipes.keys() - self._made))
