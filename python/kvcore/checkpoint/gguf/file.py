"""GGUF, mapped and checked: llama.cpp's one-file models.

    file     = "GGUF", version (u32), tensor count (u64), entry count (u64), entries, tensor infos, padding, data
    entry    = key (string), type (u32), value; a string is a length (u64) and UTF-8 bytes
    info     = name (string), dimension count (u32), dimensions (u64 each, innermost first), type (u32), offset (u64)
    reading  = walk the header once with every length checked against the file's size, note where things lie, and
               decode strings and tensors when they are asked for

A tokenizer's 100,000 strings are only walked over, so opening takes milliseconds. No count in the file decides how
much memory is allocated.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import Config
from kvcore.checkpoint.dequantize import BLOCKS, KNOWN_TYPES, dequantize
from kvcore.checkpoint.weights import map_file
from kvcore.errors import CheckpointError

VERSIONS: Final = (2, 3)
MAX_ENTRIES: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_STRINGS: Final = 1 << 24
MAX_KEY_BYTES: Final = 65535
MAX_DIMENSIONS: Final = 4

_SCALARS: Final[Mapping[int, np.dtype[Any]]] = {
    number: np.dtype(name)
    for number, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
_HALVES: Final[Mapping[str, np.dtype[Any]]] = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """The strings of an array in the file, decoded when asked for."""

    def __init__(self, data: memoryview, starts: array[int], key: str, source: str) -> None:
        """``starts`` are the offsets of the lengths in ``data``, every one of them checked."""
        self._data = data
        self._starts = starts
        self._key = key
        self._source = source

    def __len__(self) -> int:
        """How many strings there are."""
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One string, or a list of them. Raises ``CheckpointError`` if it is not UTF-8."""
        if isinstance(index, slice):
            return [self._decode(start) for start in self._starts[index]]
        return self._decode(self._starts[index])

    def __iter__(self) -> Iterator[str]:
        """The strings in order."""
        return map(self._decode, self._starts)

    def __repr__(self) -> str:
        return f"<{len(self)} strings of {self._key}>"

    def _decode(self, start: int) -> str:
        begin = start + 8
        text = self._data[begin : begin + _U64.unpack_from(self._data, start)[0]]
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            index = self._starts.index(start)
            raise CheckpointError(f"{self._source}: {self._key}[{index}]: expected UTF-8, got {error}") from error


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        type: the name of its format, such as ``"Q4_1"``.
        shape: outermost dimension first, as numpy has it (the file has it the other way round).
        begin: offset of its first byte in the file.
        end: offset behind its last byte.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


class GGUFFile:
    """A mapped GGUF file whose header is completely checked.

    Attributes:
        path: the file.
        metadata: its entries. Numbers, booleans and strings are Python's; arrays of strings are ``StringArray``,
            other arrays read-only numpy arrays. Its ``source`` is the file.
        tensors: its tensors by name.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file and check its header. No tensor is read.

        Raises:
            CheckpointError: it is missing, no GGUF file, of another version, cut short or damaged; the message names
                the file and what about it is wrong.
        """
        self.path = Path(path)
        self.metadata = Config(source=str(self.path))
        self.tensors: dict[str, GGUFTensor] = {}
        self._bytes = map_file(self.path)
        self._data = self._bytes.data
        self._size = len(self._bytes)
        self._position = 0
        self._parse()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as they are stored, ``[outer dimensions..., bytes of a row]``: a view of the file.

        Raises:
            CheckpointError: there is no such tensor.
        """
        tensor = self._tensor(name)
        return self._bytes[tensor.begin : tensor.end].reshape(*tensor.shape[:-1], -1)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns: what the file has if it is float16 or bfloat16, else float32.

        Raises:
            CheckpointError: there is no such tensor, or its format is not supported, which the message names.
        """
        kind = self._tensor(name).type
        if kind not in BLOCKS and kind not in ("F32", "F16", "BF16"):
            supported = ", ".join(("F32", "F16", "BF16", *BLOCKS))
            raise CheckpointError(f"{self.path}: tensor {name!r}: expected one of {supported}, got {kind}")
        return _HALVES.get(kind, np.dtype(np.float32))

    def get(self, name: str, index: int | None = None) -> npt.NDArray[Any]:
        """A tensor; a quantised one as the float32 values that its blocks stand for, exactly.

        Args:
            name: the tensor.
            index: of the first of several dimensions; what lies there is read alone.

        Raises:
            CheckpointError: as ``dtype``.
        """
        dtype = self.dtype(name)
        tensor = self.tensors[name]
        data, shape = self._bytes[tensor.begin : tensor.end], tensor.shape
        if index is not None:
            data, shape = data.reshape(shape[0], -1)[index], shape[1:]
        if tensor.type in BLOCKS:
            return dequantize(tensor.type, data).reshape(shape)
        array = data.view(dtype).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: tensor {name!r}: expected, got no such tensor") from None

    # The walk over the header. Every step checks that the bytes are there before it looks at them.

    def _parse(self) -> None:
        magic = bytes(self._data[:4])
        if bytes(self._data[:23]) == b"version https://git-lfs":
            raise self._error("a Git LFS pointer stands in place of the file; run `git lfs pull` in its folder")
        if magic != b"GGUF":
            raise self._error(f"expected a file that starts with b'GGUF', got {magic!r}")
        self._position = 4
        version = self._u32("version")
        if version not in VERSIONS:
            hint = ": a big-endian file" if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS else ""
            raise self._error(f"version: expected one of {', '.join(map(str, VERSIONS))}, got {version}{hint}")
        num_tensors = self._u64("tensor count")
        num_entries = self._u64("entry count")
        if num_tensors > MAX_TENSORS:
            raise self._error(f"tensor count: expected at most {MAX_TENSORS}, got {num_tensors}")
        if num_entries > MAX_ENTRIES:
            raise self._error(f"entry count: expected at most {MAX_ENTRIES}, got {num_entries}")
        for index in range(num_entries):
            self._entry(index)
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._error(f"general.alignment: expected a power of two up to {1 << 20}, got {alignment!r}")
        infos = [self._info(index) for index in range(num_tensors)]
        self._place(infos, alignment)

    def _entry(self, index: int) -> None:
        key = self._string(f"key of entry {index}", MAX_KEY_BYTES)
        if not key or key in self.metadata:
            raise self._error(f"entry {index}: expected a key that is new and not empty, got {key!r}")
        kind = self._u32(key)
        if kind == _STRING:
            self.metadata[key] = self._string(key)
        elif kind == _ARRAY:
            self.metadata[key] = self._array(key)
        elif kind in _SCALARS:
            self.metadata[key] = self._numbers(key, kind, 1)[0].item()
        else:
            raise self._error(f"{key}: expected a value type from 0 to 12, got {kind}")

    def _array(self, key: str) -> StringArray | npt.NDArray[Any]:
        kind = self._u32(key)
        count = self._u64(key)
        if kind in _SCALARS:
            return self._numbers(key, kind, count)
        if kind == _ARRAY:
            raise self._error(f"{key}: expected an array of numbers or strings, got an array of arrays")
        if kind != _STRING:
            raise self._error(f"{key}: expected an array of a value type from 0 to 12, got {kind}")
        if count > min(MAX_STRINGS, (self._size - self._position) // 8):
            raise self._error(f"{key}: expected at most {MAX_STRINGS} strings that fit the file, got {count}")
        starts: array[int] = array("Q")
        data, size, position = self._data, self._size, self._position
        unpack, append = _U64.unpack_from, starts.append
        # the one hot loop of opening a file, so it keeps its state in locals
        for _ in range(count):
            if position + 8 > size:
                raise self._error(f"{key}: expected {count} strings, got {len(starts)} before the file ends")
            append(position)
            position += 8 + unpack(data, position)[0]
        if position > size:
            raise self._error(f"{key}: expected strings within the file, got one that reaches past its end")
        self._position = position
        return StringArray(data, starts, key, str(self.path))

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = _SCALARS[kind]
        begin = self._take(count * dtype.itemsize, key)
        values = self._bytes[begin : self._position]
        if kind == 7:  # a boolean must be 0 or 1, else numpy's is neither true nor false
            if values.size and int(values.max()) > 1:
                raise self._error(f"{key}: expected booleans of 0 or 1, got {int(values.max())}")
            return values.view(np.bool_)
        return values.view(dtype)

    def _info(self, index: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, size in bytes and offset of a tensor."""
        name = self._string(f"name of tensor {index}", MAX_KEY_BYTES)
        where = f"tensor {name!r}"
        count = self._u32(where)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"{where}: expected 1 to {MAX_DIMENSIONS} dimensions, got {count}")
        dimensions = [self._u64(where) for _ in range(count)]
        number = self._u32(where)
        offset = self._u64(where)
        if number not in KNOWN_TYPES:
            raise self._error(f"{where}: expected a tensor type that is known, got {number}")
        kind, per_block, block_bytes = KNOWN_TYPES[number]
        elements = 1
        for dimension in dimensions:
            elements *= dimension
            if not 0 < elements < 1 << 60:
                raise self._error(f"{where}: expected dimensions of at least 1 that fit the file, got {dimensions}")
        if dimensions[0] % per_block:
            raise self._error(f"{where}: expected rows of a multiple of {per_block} for {kind}, got {dimensions[0]}")
        return name, kind, tuple(reversed(dimensions)), elements // per_block * block_bytes, offset

    def _place(self, infos: list[tuple[str, str, tuple[int, ...], int, int]], alignment: int) -> None:
        """Check where the tensors lie: aligned, within the file, and none over another."""
        start = -(-self._position // alignment) * alignment
        for name, kind, shape, size, offset in infos:
            where = f"tensor {name!r}"
            if not name or name in self.tensors:
                raise self._error(f"{where}: expected a name that is new and not empty")
            if offset % alignment:
                raise self._error(f"{where}: expected an offset that is a multiple of {alignment}, got {offset}")
            # writers pad the last tensor, too, so a file without that padding was cut
            padded = -(-size // alignment) * alignment
            if start + offset + padded > self._size:
                raise self._error(
                    f"{where}: expected {padded} bytes from {start + offset} on, got a file of {self._size} bytes"
                )
            self.tensors[name] = GGUFTensor(kind, shape, start + offset, start + offset + size)
        end, last = 0, ""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._error(f"tensor {name!r}: expected data of its own, got data that overlaps {last!r}")
            end, last = tensor.end, name

    def _take(self, count: int, what: str) -> int:
        """Step over some bytes that must be there, and return where they begin."""
        begin = self._position
        if count > self._size - begin:
            raise self._error(f"{what}: expected {count} bytes from {begin} on, got {self._size - begin}: cut short")
        self._position = begin + count
        return begin

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._data, self._take(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._data, self._take(8, what))[0]
        return value

    def _string(self, what: str, maximum: int | None = None) -> str:
        length = self._u64(what)
        if maximum is not None and length > maximum:
            raise self._error(f"{what}: expected at most {maximum} bytes, got {length}")
        begin = self._take(length, what)
        try:
            return str(self._data[begin : self._position], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: expected UTF-8, got {error}") from error

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")
