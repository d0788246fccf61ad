"""The tensors of a GGUF file as Hugging Face has them.

a name of Hugging Face  ->  the stored tensors it is made of, the expert's place in them, and the way back
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import Config
from kvcore.checkpoint.dequantize import BLOCKS
from kvcore.checkpoint.gguf.architecture import Architecture
from kvcore.checkpoint.gguf.config import architecture_of, to_config
from kvcore.checkpoint.gguf.file import GGUFFile
from kvcore.checkpoint.gguf.keys import ROPE_TENSORS, layers
from kvcore.checkpoint.gguf.layouts import SAME, Layout
from kvcore.errors import CheckpointError

_STORED: Final = re.compile(
    r"(?P<side>(?:enc|dec)\.)?(?:blk\.(?P<layer>0|[1-9][0-9]{0,4})\.)?(?P<base>[\w.]+)(?P<suffix>\.weight|\.bias)"
)
_MAX_EXPERTS: Final = 1 << 12


@dataclass(frozen=True)
class _Source:
    """What a tensor is made of: stored names, the index in their first dimension if they hold several, the layout."""

    stored: tuple[str, ...]
    index: int | None
    layout: Layout


class GGUFWeights:
    """The tensors of a GGUF file under Hugging Face's names, in Hugging Face's order."""

    def __init__(self, file: GGUFFile) -> None:
        """Map the names.

        Raises:
            CheckpointError: the architecture, or something it asks for, is not supported.
        """
        self.file = file
        self._config = to_config(file)
        self._sources: dict[str, _Source] = {}
        self._used: set[str] = set()
        self._latest: tuple[str, npt.NDArray[Any]] | None = None
        table, read = architecture_of(file)
        num_layers = max(layers(read), self._config.get("num_decoder_layers", 0))
        known = self._join(table, num_layers) | {*ROPE_TENSORS}  # those are in the configuration
        for name in file.tensors:
            match = _STORED.fullmatch(name)
            beyond = match is not None and match["layer"] is not None and int(match["layer"]) >= num_layers
            if name not in known and not beyond:  # layers beyond the last predict further tokens
                self._add_all(table, name, match)

    @classmethod
    def open(cls, path: str | Path) -> GGUFWeights:
        """Map a file. Raises ``CheckpointError`` as ``GGUFFile`` and the constructor do."""
        return cls(GGUFFile(path))

    @property
    def source(self) -> str:
        """The file."""
        return str(self.file.path)

    def to_config(self) -> Config:
        """The file's hyperparameters as config.json would have them."""
        return Config(self._config, self._config.source)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name."""
        return name in self._sources

    def names(self) -> list[str]:
        """All names, sorted. A tensor that the architecture does not know keeps its own."""
        return sorted(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, outermost dimension first.

        Raises:
            CheckpointError: there is no such tensor, or those it is made of do not fit each other.
        """
        source = self._source(name)
        begin = 0 if source.index is None else 1
        shapes = [self.file.tensors[stored].shape[begin:] for stored in source.stored]
        try:
            return source.layout.shape(shapes, self._config)
        except ValueError as error:
            stored = " and ".join(map(repr, source.stored))
            raise CheckpointError(f"{self.source}: tensor {stored}: expected {error}") from None

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns. Raises ``CheckpointError`` as it does."""
        kinds = {self.file.dtype(stored) for stored in self._source(name).stored}
        return kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)

    def get(self, name: str) -> npt.NDArray[Any]:
        """A tensor: float16 and bfloat16 as they are, all else as float32, to which blocks are expanded exactly.

        Raises:
            CheckpointError: there is no such tensor, its format is not supported, or its rows are no whole heads.
        """
        dtype = self.dtype(name)
        self.shape(name)  # raises if the layout cannot be turned back
        source = self._source(name)
        self._used.add(name)
        if self._latest is not None and self._latest[0] == name:
            return self._latest[1]
        arrays = [self.file.get(stored, source.index).astype(dtype, copy=False) for stored in source.stored]
        array = source.layout.make(arrays, self._config)
        # experts that are merged in Hugging Face, too, are asked for one by one: make them once
        self._latest = (name, array) if array.ndim == 3 else None
        return array

    def blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A tensor's blocks ``[rows, bytes of a row]``, if it is quantised. Raises as ``get``."""
        kind = self.block_kind(name)
        if kind is None:
            return None
        source = self._source(name)
        rows = self.file.raw(source.stored[0])
        self._used.add(name)
        return kind, source.layout.make([rows if source.index is None else rows[source.index]], self._config)

    def block_kind(self, name: str) -> str | None:
        """The kind of these blocks, and nothing read. Raises as ``get``."""
        source = self._source(name)
        kind = self.file.tensors[source.stored[0]].type
        return kind if kind in BLOCKS and source.layout.moves_rows and len(self.shape(name)) == 2 else None

    def unused(self) -> list[str]:
        """Names that neither ``get`` nor ``blocks`` gave, sorted."""
        return sorted(self._sources.keys() - self._used)

    def _source(self, name: str) -> _Source:
        try:
            return self._sources[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: tensor {name!r}: expected, got no such tensor") from None

    def _add(self, target: str, source: _Source) -> None:
        if target in self._sources:
            stored = source.stored[0]
            raise CheckpointError(f"{self.source}: tensor {stored!r}: expected one tensor for {target!r}, got two")
        self._sources[target] = source

    def _join(self, table: Architecture, num_layers: int) -> set[str]:
        """Add what is made of several tensors, where all of them are there, and return their names."""
        known: set[str] = set()
        for name, joined in table.joined.items():
            for layer in range(num_layers):
                stored = tuple(f"blk.{layer}.{part}" for part in joined.stored)
                if all(part in self.file.tensors for part in stored):
                    self._add(table.prefix.replace("{layer}", str(layer)) + name, _Source(stored, None, joined.layout))
                    known.update(stored)
        return known

    def _add_all(self, table: Architecture, name: str, match: re.Match[str] | None) -> None:
        """Add what one stored tensor holds: a tensor, or one for each expert."""
        names = {} if match is None else table.tensors if match["layer"] is None else table.layer
        base = "" if match is None else f"{match['side'] or ''}{match['base']}"
        if match is None or base not in names:
            self._add(name, _Source((name,), None, SAME))
            return
        target = f"{names[base]}{match['suffix']}"
        if match["layer"] is not None:
            target = (table.prefix + target).replace("{layer}", match["layer"])
        layout = table.layouts.get(base, SAME)
        if "{expert}" not in target:
            self._add(target, _Source((name,), None, layout))
            return
        shape = self.file.tensors[name].shape
        if len(shape) < 2 or shape[0] > _MAX_EXPERTS:
            expected = f"at least two dimensions, of which the first counts up to {_MAX_EXPERTS}"
            raise CheckpointError(f"{self.source}: tensor {name!r}: expected {expected}, got shape {list(shape)}")
        for expert in range(shape[0]):
            self._add(target.replace("{expert}", str(expert)), _Source((name,), expert, layout))
