"""safetensors, mapped: one file, or shards with an index.

    file    = header length (u64, little endian), header (JSON), data
    header  = {tensor name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {...}}
    reading = map the file, check the whole header against the file's size, hand out views

The reader is our own because the ``safetensors`` package copies every tensor that numpy asks it for: a model would be
in memory twice while it is packed. What that package refuses is refused here, too (the tests compare the two).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import describe, parse_json, read_json
from kvcore.errors import CheckpointError

READABLE: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that weights are read in, by the format's names."""

BITS: Final[Mapping[str, int]] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Every type that the format knows, in bits per element: a file may hold tensors that nobody reads."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that the format sets, so that a hostile length costs nothing."""

MAX_DIMENSIONS: Final = 32
"""What every numpy can hold."""

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

PICKLE_ADVICE: Final = (
    "PyTorch's pickle files are not read because loading one runs whatever code its author put in. "
    "Look for a safetensors version of the model, or convert it where you trust the file: "
    "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)` with transformers writes safetensors"
)


class Weights(Protocol):
    """Tensors by their Hugging Face names, wherever they come from."""

    @property
    def source(self) -> str:
        """The file or folder, for messages."""
        ...

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name."""
        ...

    def names(self) -> list[str]:
        """All names, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, outermost dimension first. Raises ``CheckpointError`` if there is no such tensor."""
        ...

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns: float32, float16 or ml_dtypes.bfloat16.

        Raises ``CheckpointError`` if there is no such tensor, or if its type is another one.
        """
        ...

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor, C-contiguous and not to be written to. Raises as ``dtype`` does."""
        ...

    def blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """The tensor's quantised blocks as they are stored, if it has such: GGUF's name of their kind, and
        ``[rows, bytes of a row]``. Else None."""
        ...

    def block_kind(self, name: str) -> str | None:
        """The kind of these blocks, or None if ``blocks`` gives none; nothing is read. Raises as ``get``."""
        ...

    def unused(self) -> list[str]:
        """Names that neither ``get`` nor ``blocks`` gave, sorted."""
        ...


class SafetensorsFile:
    """One mapped and completely checked safetensors file.

    A file that another program shortens while it is mapped can still end the process, as with every mapped file.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file and check its header: no tensor is read, and nothing is allocated in proportion to the data.

        Raises:
            CheckpointError: names the file, and what about it is wrong.
        """
        self.path = Path(path)
        self.tensors: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        """Name to type, shape, and begin and end of its bytes in the file."""
        self.bytes = map_file(self.path)
        """All of the file, mapped."""
        self._parse()

    def get(self, name: str) -> npt.NDArray[Any]:
        """A view of a tensor's bytes in the file; a copy if the file does not align it."""
        dtype, shape, begin, end = self.tensors[name]
        array = self.bytes[begin:end].view(READABLE[dtype]).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def _parse(self) -> None:
        size = len(self.bytes)
        if bytes(self.bytes[:23]) == b"version https://git-lfs":
            raise self._error(
                "a Git LFS pointer stands in place of the file; run `git lfs pull` in its folder, or download it again"
            )
        if size < 8:
            raise self._error(f"expected a header length of 8 bytes, got a file of {size} bytes")
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if length > MAX_HEADER_BYTES:
            raise self._error(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
        if length > size - 8:
            raise self._error(f"expected a header of {length} bytes, got {size - 8} bytes after its length: cut short")
        header = parse_json(self.bytes[8 : 8 + length].tobytes(), f"{self.path}: header", unique=True)
        start = 8 + length
        available = size - start
        extents: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, begin, end = self._entry(name, entry, available)
            self.tensors[name] = (dtype, shape, start + begin, start + end)
            extents.append((begin, end, name))
        # the tensors must cover the data without overlap and without holes, as the format demands
        position = 0
        for begin, end, name in sorted(extents):
            if begin != position:
                raise self._error(
                    f"tensor {name!r}: expected data from offset {position}, got {begin}: overlap or hole"
                )
            position = end
        if position != available:
            raise self._error(f"expected {position} bytes of data, got {available}")

    def _entry(self, name: str, entry: object, available: int) -> tuple[str, tuple[int, ...], int, int]:
        where = f"tensor {name!r}"
        if not isinstance(entry, dict):
            raise self._error(f"{where}: expected an object, got {describe(entry)}")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in BITS:
            raise self._error(f"{where}: expected a dtype that safetensors knows, got {describe(dtype)}")
        if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
            raise self._error(f"{where}: expected a shape of at most {MAX_DIMENSIONS} sizes, got {describe(shape)}")
        if not _are_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= available:
            raise self._error(
                f"{where}: expected data_offsets [begin, end] within {available} bytes of data, got {describe(offsets)}"
            )
        bits = BITS[dtype]
        for dimension in shape:
            bits *= max(dimension, 1)  # so that a 0 does not hide a nonsensical dimension beside it
            if bits >= 1 << 62:
                raise self._error(f"{where}: expected a size that fits the file, got shape {describe(shape)}")
        bits = 0 if 0 in shape else bits
        if bits != 8 * (offsets[1] - offsets[0]):
            raise self._error(
                f"{where}: expected {bits / 8:g} bytes for {dtype} {shape}, got data_offsets {describe(offsets)}"
            )
        return dtype, tuple(shape), offsets[0], offsets[1]

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")


class SafetensorsWeights:
    """The tensors of a folder, from one safetensors file or from shards with an index."""

    def __init__(self, folder: str | Path, files: Mapping[str, SafetensorsFile]) -> None:
        """Made by ``open``: ``files`` maps each tensor's name to the file that has it."""
        self.folder = Path(folder)
        self._files = files
        self._used: set[str] = set()

    @classmethod
    def open(cls, folder: str | Path) -> SafetensorsWeights:
        """Map a folder's weights.

        They are ``model.safetensors``, else the shards that ``model.safetensors.index.json`` names.

        Raises:
            CheckpointError: there are none, a shard is missing, a file is damaged or is a Git LFS pointer, the index
                points outside the folder or names tensors that are not there, or there are only pickle files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a folder with a model, got {_kind(folder)}")
        single = folder / "model.safetensors"
        index = folder / "model.safetensors.index.json"
        if single.exists() or single.is_symlink():  # a dangling link is an error about this file
            shards = [single.name]
            expected: dict[str, str] = {}
        elif index.exists():
            expected = _read_index(index)
            shards = sorted(set(expected.values()))
            if missing := [name for name in shards if not (folder / name).exists()]:
                raise CheckpointError(
                    f"{index}: names {len(shards)} shards, of which are missing: {', '.join(missing)}"
                )
        else:
            raise _no_weights(folder)
        files: dict[str, SafetensorsFile] = {}
        for shard in shards:
            file = SafetensorsFile(folder / shard)
            for name in file.tensors:
                if name in files:
                    raise CheckpointError(f"{file.path}: tensor {name!r} is in {files[name].path.name}, too")
                files[name] = file
        for name, shard in expected.items():
            if name not in files or files[name].path.name != shard:
                raise CheckpointError(f"{folder / shard}: tensor {name!r}: expected here by {index.name}, got none")
        return cls(folder, files)

    @property
    def source(self) -> str:
        """The folder, or the file if there is but one."""
        paths = {file.path for file in self._files.values()}
        return str(next(iter(paths)) if len(paths) == 1 else self.folder)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name."""
        return name in self._files

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape. Raises ``CheckpointError`` if there is no such tensor."""
        return self._file(name).tensors[name][1]

    def dtype(self, name: str) -> np.dtype[Any]:
        """float32, float16 or bfloat16.

        Raises:
            CheckpointError: there is no such tensor, or its type is another one, which the message names.
        """
        file = self._file(name)
        dtype = file.tensors[name][0]
        if dtype not in READABLE:
            raise CheckpointError(f"{file.path}: tensor {name!r}: expected {', '.join(READABLE)}, got {dtype}")
        return READABLE[dtype]

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor: a read-only view of the mapped file, of which the system loads what is touched.

        Raises:
            CheckpointError: as ``dtype``.
        """
        self.dtype(name)
        self._used.add(name)
        return self._files[name].get(name)

    def kind(self, name: str) -> str:
        """The type as the format names it. Raises ``CheckpointError`` if there is no such tensor."""
        return self._file(name).tensors[name][0]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor of bytes, or of a type of one byte, as bytes in its shape. Raises as ``kind``."""
        _, shape, begin, end = self._file(name).tensors[name]
        self._used.add(name)
        return self._file(name).bytes[begin:end].reshape(shape)

    def blocks(self, name: str) -> None:
        """None: these files have no blocks."""

    def block_kind(self, name: str) -> None:
        """None, too."""

    def unused(self) -> list[str]:
        """Names that ``get`` was never called for, sorted."""
        return sorted(self._files.keys() - self._used)

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: tensor {name!r}: expected, got no such tensor") from None


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """A read-only view of a file's bytes, mapped, so that only what is touched is loaded.

    Raises:
        CheckpointError: it is missing, no regular file, or cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file, got {_kind(path)}")
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return np.empty(0, np.uint8)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return np.frombuffer(mapped, np.uint8)


def _read_index(path: Path) -> dict[str, str]:
    """The index's map from tensor to shard. Shards must be plain names: an index must not reach out of its folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: expected an object that names shards, got {describe(weight_map)}")
    for name, shard in weight_map.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                f"{path}: weight_map: {name!r}: expected the name of a .safetensors file in the same folder, "
                f"got {describe(shard)}"
            )
    return weight_map


def _is_plain_name(shard: object) -> bool:
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0"):
        return False
    try:
        return len(shard.encode()) <= 255
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _no_weights(folder: Path) -> CheckpointError:
    """The error that says what a folder without weights has instead."""
    names = sorted(entry.name for entry in folder.iterdir())
    if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
        return CheckpointError(f"{folder}: expected safetensors, got {_some(pickles)}. {PICKLE_ADVICE}")
    return CheckpointError(
        f"{folder}: expected model.safetensors or model.safetensors.index.json with its shards, "
        f"got {_some(names) or 'an empty folder'}"
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file or folder"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
