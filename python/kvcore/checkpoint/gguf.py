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

from kvcore.checkpoint.config import Config, ConfigReader
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
            other arrays read-only numpy arrays.
        tensors: its tensors by name.
    """

    def __init__(self, path: str | Path) -> None:
        """Map the file and check its header. No tensor is read.

        Raises:
            CheckpointError: it is missing, no GGUF file, of another version, cut short or damaged; the message names
                the file and what about it is wrong.
        """
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
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

    def get(self, name: str) -> npt.NDArray[Any]:
        """A tensor; a quantised one as the float32 values that its blocks stand for, exactly.

        Raises:
            CheckpointError: as ``dtype``.
        """
        dtype = self.dtype(name)
        tensor = self.tensors[name]
        if tensor.type in BLOCKS:
            return dequantize(tensor.type, self._bytes[tensor.begin : tensor.end]).reshape(tensor.shape)
        array = self._bytes[tensor.begin : tensor.end].view(dtype).reshape(tensor.shape)
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


@dataclass(frozen=True)
class Architecture:
    """How an architecture of GGUF maps to Hugging Face.

    Attributes:
        model_type: of config.json.
        tensors: names outside the layers, GGUF's to Hugging Face's, without ``.weight`` and ``.bias``.
        layer_tensors: the same within ``blk.N.`` and ``model.layers.N.``.
        interleaved: layer tensors whose rows llama.cpp keeps in the order of its rope, mapped to the configuration's
            key for the number of heads.
    """

    model_type: str
    tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    interleaved: Mapping[str, str]


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(
        model_type="llama",
        tensors={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
        layer_tensors={
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
    ),
}
"""By ``general.architecture``."""

_ROPE_FACTORS: Final = "rope_freqs.weight"


class GGUFWeights:
    """The tensors of a GGUF file under Hugging Face's names, in Hugging Face's order."""

    def __init__(self, file: GGUFFile) -> None:
        """Map the names.

        Raises:
            CheckpointError: the architecture, or something it asks for, is not supported.
        """
        self.file = file
        self._architecture = _architecture(file)
        self._config = to_config(file)
        self._names: dict[str, str] = {}
        self._heads: dict[str, int] = {}
        self._used: set[str] = set()
        for name in file.tensors:
            target, heads = self._translate(name)
            if target in self._names:
                raise CheckpointError(f"{file.path}: tensor {name!r}: expected one tensor for {target!r}, got two")
            self._names[target] = name
            if heads:
                self._heads[target] = heads
        if _ROPE_FACTORS in self._names:
            self._used.add(_ROPE_FACTORS)  # it is read into the configuration

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
        return name in self._names

    def names(self) -> list[str]:
        """All names, sorted. A tensor that the architecture does not know keeps its own."""
        return sorted(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, outermost dimension first. Raises ``CheckpointError`` if there is no such tensor."""
        return self.file.tensors[self._stored(name)].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns. Raises ``CheckpointError`` as it does."""
        return self.file.dtype(self._stored(name))

    def get(self, name: str) -> npt.NDArray[Any]:
        """A tensor: float16 and bfloat16 as they are, all else as float32, to which blocks are expanded exactly.

        Raises:
            CheckpointError: there is no such tensor, its format is not supported, or its rows are no whole heads.
        """
        return self._in_order(name, self.file.get(self._stored(name)))

    def blocks(self, name: str) -> tuple[str, npt.NDArray[np.uint8]] | None:
        """A tensor's blocks ``[rows, bytes of a row]``, if they are Q4_0, Q4_1 or Q8_0. Raises as ``get``."""
        stored = self._stored(name)
        kind = self.file.tensors[stored].type
        if kind not in ("Q4_0", "Q4_1", "Q8_0") or len(self.shape(name)) != 2:
            return None
        return kind, self._in_order(name, self.file.raw(stored))

    def _in_order(self, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows in Hugging Face's order."""
        heads = self._heads.get(name)
        if heads is not None:
            rows = len(array)
            if rows % (2 * heads):
                stored = self._stored(name)
                raise CheckpointError(
                    f"{self.source}: tensor {stored!r}: expected rows for {heads} heads of an even size, got {rows}"
                )
            # llama.cpp turns neighbours (2k, 2k+1), Hugging Face turns (k, k + half): [head, k, half] back to
            # [head, half, k]
            array = array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
        self._used.add(name)
        return array

    def unused(self) -> list[str]:
        """Names that neither ``get`` nor ``blocks`` gave, sorted."""
        return sorted(self._names.keys() - self._used)

    def _stored(self, name: str) -> str:
        try:
            return self._names[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: tensor {name!r}: expected, got no such tensor") from None

    def _translate(self, name: str) -> tuple[str, int]:
        """Hugging Face's name, and the number of heads if the rows are to be put back in order."""
        parts = name.split(".")
        base, suffix = ".".join(parts[:-1]), parts[-1]
        if suffix in ("weight", "bias"):
            if base in self._architecture.tensors:
                return f"{self._architecture.tensors[base]}.{suffix}", 0
            if len(parts) == 4 and parts[0] == "blk" and parts[2] in self._architecture.layer_tensors:
                heads = self._architecture.interleaved.get(parts[2])
                target = f"model.layers.{parts[1]}.{self._architecture.layer_tensors[parts[2]]}.{suffix}"
                return target, self._config[heads] if heads else 0
        return name, 0


def to_config(file: GGUFFile) -> Config:
    """A file's hyperparameters as config.json would have them.

    Raises:
        CheckpointError: the architecture or a feature is not supported, or a value is missing or nonsensical.
    """
    architecture = _architecture(file)
    name = file.metadata["general.architecture"]
    own = {key[len(name) + 1 :]: _plain(value) for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    read = ConfigReader(own, f"{file.path}: {name}")
    for key in ("expert_count", "attention.sliding_window"):
        if own.get(key):
            raise read.error(key, "no such key, as it is not supported with this architecture", own[key])
    hidden = read.integer("embedding_length")
    heads = read.integer("attention.head_count")
    if not read.has("attention.key_length") and hidden % heads:
        raise read.error("attention.head_count", f"a divisor of embedding_length ({hidden})", heads)
    head_dim = read.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if read.integer(key, head_dim) != head_dim:
            raise read.error(key, f"the length of a head's key ({head_dim})", own[key])
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding else len(tokens) if isinstance(tokens, Sequence) else None
    config = {
        "model_type": architecture.model_type,
        "vocab_size": read.integer("vocab_size", vocab) if vocab else read.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.integer("context_length"),
        "rope_parameters": {"rope_theta": read.number("rope.freq_base", 10000.0), **_rope(file, read, head_dim)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    tokenizer = ConfigReader(
        {k.removeprefix("tokenizer.ggml."): v for k, v in file.metadata.items() if k.startswith("tokenizer.ggml.")},
        f"{file.path}: tokenizer.ggml",
    )
    ends = [id_ for kind in ("eos", "eot", "eom") for id_ in tokenizer.token_ids(f"{kind}_token_id")]
    config["eos_token_id"] = list(dict.fromkeys(ends))
    for key, stored in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        config[key] = next(iter(tokenizer.token_ids(stored)), None)
    return Config(config, str(file.path))


def _rope(file: GGUFFile, read: ConfigReader, head_dim: int) -> dict[str, Any]:
    """The rope scaling in config.json's words."""
    kind = read.string("rope.scaling.type", "linear" if read.has("rope.scale_linear") else "none")
    factors = file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        # one divisor for each frequency: this is how the scaling of Llama 3 is stored
        if factors.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{file.path}: tensor {_ROPE_FACTORS!r}: expected shape {[head_dim // 2]}, got {list(factors.shape)}"
            )
        if kind != "none":
            raise read.error("rope.scaling.type", f'"none" beside a tensor {_ROPE_FACTORS!r}', kind)
        return {"rope_type": "factors", "factors": file.get(_ROPE_FACTORS).astype(np.float64).tolist()}
    if kind == "none":
        return {"rope_type": "default"}
    key = "rope.scaling.factor" if read.has("rope.scaling.factor") else "rope.scale_linear"
    if kind == "linear":
        return {"rope_type": "linear", "factor": read.number(key, 1.0)}
    if kind == "yarn":
        for other in ("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"):
            if read.has(other):
                raise read.error(other, "no such key, as it is not supported", read.number(other, minimum=-1e30))
        factor = read.number(key)
        rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if read.has("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if read.has(f"rope.scaling.{theirs}"):
                rope[ours] = read.number(f"rope.scaling.{theirs}")
        if read.has("rope.scaling.attn_factor"):
            # llama.cpp multiplies it with YaRN's own factor, where config.json gives the product
            own = 0.1 * float(np.log(factor)) + 1.0 if factor > 1 else 1.0
            rope["attention_factor"] = own * read.number("rope.scaling.attn_factor")
        return rope
    raise read.error("rope.scaling.type", "one of none, linear, yarn", kind)


def _architecture(file: GGUFFile) -> Architecture:
    name = file.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file.path}: general.architecture: expected a supported architecture ({supported}), got {name!r}"
        )
    return architecture


def _plain(value: Any) -> Any:
    """An array with one value for every layer as that value if all are equal, else as it is."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value
