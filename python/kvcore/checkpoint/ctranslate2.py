"""CTranslate2's ``model.bin`` of a Whisper model, mapped and checked: tensors and config.json in Hugging Face's words.

    file      = version (u32), spec (string), revision (u32), count (u32), variables, count (u32), aliases
    variable  = name (string), rank (u8), dimensions (u32 each), type (u8), bytes (u32), data
    string    = length (u16), text that ends with a null

Queries, keys and values are one matrix there (of the cross-attention keys and values), taken apart here.
Source: https://github.com/OpenNMT/CTranslate2 (python/ctranslate2/specs/model_spec.py)
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore.checkpoint.config import MAX_INTEGER, Config, ConfigReader, read_json
from kvcore.checkpoint.weights import map_file
from kvcore.errors import CheckpointError

_VERSIONS: Final = (4, 5, 6)
_SPEC: Final = "WhisperSpec"
_MAX_DIMENSIONS: Final = 4
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype(np.float32), 1: np.dtype(np.int8), 2: np.dtype(np.int16), 3: np.dtype(np.int32),
    4: np.dtype(np.float16), 5: np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
_FLOATS: Final = (0, 4, 5)

_OUTER: Final = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
}
_LAYER: Final = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_SUFFIXES: Final = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_NAME: Final = re.compile(r"(encoder|decoder)/layer_(\d{1,4})/(\w+/\w+)/(\w+)")
_GELU: Final = 3


@dataclass(frozen=True)
class _Variable:
    kind: int
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Part:
    """One of equal parts of a variable's rows."""

    variable: str
    index: int
    count: int


def is_ctranslate2(path: Path) -> bool:
    """Whether a file begins like CTranslate2's. One that cannot be read does not."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return len(head) > 8 and int.from_bytes(head[:4], "little") < 100 and b"Spec\0" in head[6:]


class CTranslate2Weights:
    """The tensors of a ``model.bin`` under Hugging Face's names."""

    def __init__(self, path: str | Path) -> None:
        """Map the file and check all of it but the data. No tensor is read.

        Raises:
            CheckpointError: it is missing, damaged, or no Whisper model in floating point.
        """
        self.path = Path(path)
        self._bytes = map_file(self.path)
        self._position = 0
        self._variables: dict[str, _Variable] = {}
        self._parts: dict[str, _Part] = {}
        self._used: set[str] = set()
        self._parse()
        for name in self._variables:
            self._translate(name)

    @property
    def source(self) -> str:
        """The file."""
        return str(self.path)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor with this name."""
        return name in self._parts

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape, outermost dimension first. Raises ``CheckpointError`` if there is no such tensor."""
        part = self._part(name)
        first, *rest = self._variables[part.variable].shape
        return (first // part.count, *rest)

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type that ``get`` returns. Raises ``CheckpointError`` as it does."""
        variable = self._variables[self._part(name).variable]
        if variable.kind not in _FLOATS:
            raise self._error(f"{name}: expected float32, float16 or bfloat16, got {_DTYPES[variable.kind].name}")
        dtype: np.dtype[Any] = _DTYPES[variable.kind]
        return dtype

    def get(self, name: str) -> npt.NDArray[Any]:
        """The tensor. Raises ``CheckpointError``: there is none, or its type is not read."""
        dtype, part = self.dtype(name), self._part(name)
        variable = self._variables[part.variable]
        self._used.add(name)
        size = (variable.end - variable.begin) // part.count
        begin = variable.begin + part.index * size
        array = self._bytes[begin : begin + size].view(dtype).reshape(self.shape(name))
        return array if array.flags.aligned else array.copy()

    def blocks(self, name: str) -> None:
        """None: these files have no blocks."""

    def block_kind(self, name: str) -> None:
        """None, too."""

    def unused(self) -> list[str]:
        """Names that ``get`` was never called for, sorted."""
        return sorted(self._parts.keys() - self._used)

    def to_config(self) -> Config:
        """What config.json of Hugging Face would say. The file's own config.json beside it has the suppressed tokens.

        Raises:
            CheckpointError: a tensor that tells a size is missing, or the model is built in another way.
        """
        for name, expected in (("decoder/pre_norm", 1), ("decoder/activation", _GELU), ("decoder/scale_embeddings", 0)):
            if self._scalar(name, expected) != expected:
                raise self._error(f"{name}: expected {expected}, got {self._scalar(name)}")
        vocab, width = self._sizes("model.decoder.embed_tokens.weight", 2)
        end = 50257 if vocab >= 51865 else 50256  # multilingual models have one token more before the special ones
        config: dict[str, Any] = {
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "vocab_size": vocab,
            "d_model": width,
            "num_mel_bins": self._sizes("model.encoder.conv1.weight", 3)[1],
            "max_source_positions": self._sizes("model.encoder.embed_positions.weight", 2)[0],
            "max_target_positions": self._sizes("model.decoder.embed_positions.weight", 2)[0],
            "activation_function": "gelu",
            "scale_embedding": False,
            "tie_word_embeddings": True,
            "decoder_start_token_id": end + 1,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
        }
        for side in ("encoder", "decoder"):
            config[f"{side}_layers"] = self._num_layers(side)
            config[f"{side}_attention_heads"] = self._scalar(f"{side}/num_heads")
            config[f"{side}_ffn_dim"] = self._sizes(f"model.{side}.layers.0.fc1.weight", 2)[0]
        beside = self.path.with_name("config.json")
        if beside.exists():
            read = ConfigReader(read_json(beside), str(beside))
            for ours, theirs in (("suppress_tokens", "suppress_ids"), ("begin_suppress_tokens", "suppress_ids_begin")):
                config[ours] = list(read.token_ids(theirs))
        return Config(config, str(self.path))

    def _sizes(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self.shape(name)
        if len(shape) != rank:
            raise self._error(f"tensor {name!r}: expected {rank} dimensions, got shape {list(shape)}")
        return shape

    def _num_layers(self, side: str) -> int:
        names = (re.match(rf"model\.{side}\.layers\.(\d+)\.", name) for name in self._parts)
        return 1 + max((int(match[1]) for match in names if match is not None), default=-1)

    def _scalar(self, name: str, default: int | None = None) -> int:
        variable = self._variables.get(name)
        if variable is None and default is not None:
            return default
        if variable is None or variable.kind in _FLOATS or variable.shape not in ((), (1,)):
            raise self._error(f"{name}: expected an integer, got {'none' if variable is None else 'something else'}")
        value = self._bytes[variable.begin : variable.end].view(_DTYPES[variable.kind])[0].item()
        if not 0 <= value <= MAX_INTEGER:
            raise self._error(f"{name}: expected an integer of at least 0, got {value}")
        return int(value)

    def _part(self, name: str) -> _Part:
        try:
            return self._parts[name]
        except KeyError:
            raise self._error(f"tensor {name!r}: expected, got no such tensor") from None

    def _translate(self, name: str) -> None:
        """Note which of Hugging Face's tensors a variable holds."""
        module, _, suffix = name.rpartition("/")
        match = _NAME.fullmatch(name)
        if suffix == "encodings":
            side = module.partition("/")[0]
            self._parts[f"model.{side}.embed_positions.weight"] = _Part(name, 0, 1)
        elif module in _OUTER and suffix in _SUFFIXES:
            self._parts[f"{_OUTER[module]}.{_SUFFIXES[suffix]}"] = _Part(name, 0, 1)
        elif match is not None and match[3] in _LAYER and match[4] in _SUFFIXES:
            targets, (side, layer) = _LAYER[match[3]], match.group(1, 2)
            shape = self._variables[name].shape
            if not shape or shape[0] % len(targets):
                raise self._error(f"{name}: expected {len(targets)} matrices in one, got shape {list(shape)}")
            for index, target in enumerate(targets):
                if not (target.endswith("k_proj") and match[4] == "bias"):  # zeros: keys have no bias
                    self._parts[f"model.{side}.layers.{layer}.{target}.{_SUFFIXES[match[4]]}"] = _Part(
                        name, index, len(targets)
                    )

    # The walk over the file. Every step checks that the bytes are there before it looks at them.

    def _parse(self) -> None:
        version = self._number("I", "version")
        if version not in _VERSIONS:
            raise self._error(f"version: expected one of {', '.join(map(str, _VERSIONS))}, got {version}")
        spec = self._string("spec")
        if spec != _SPEC:
            raise self._error(f"spec: expected {_SPEC}, as no other is supported, got {spec!r}")
        self._number("I", "revision")
        for _ in range(self._number("I", "count of variables")):
            name = self._string("name of a variable")
            shape = tuple(self._number("I", name) for _ in range(self._rank(name)))
            kind, size = self._number("B", name), self._number("I", name)
            if kind not in _DTYPES or name in self._variables:
                raise self._error(f"{name}: expected a new name and a type from 0 to 5, got type {kind}")
            elements = 1
            for dimension in shape:
                elements *= dimension
            if elements * _DTYPES[kind].itemsize != size or not elements:
                raise self._error(f"{name}: expected bytes for {_DTYPES[kind].name} {list(shape)}, got {size}")
            begin = self._take(size, name)
            self._variables[name] = _Variable(kind, shape, begin, begin + size)
        for _ in range(self._number("I", "count of aliases")):
            alias, name = self._string("alias"), self._string("alias")
            if name not in self._variables:
                raise self._error(f"alias {alias!r}: expected the name of a variable, got {name!r}")
        if self._position != len(self._bytes):
            raise self._error(f"expected the end of the file, got {len(self._bytes) - self._position} more bytes")

    def _rank(self, name: str) -> int:
        rank = self._number("B", name)
        if rank > _MAX_DIMENSIONS:
            raise self._error(f"{name}: expected at most {_MAX_DIMENSIONS} dimensions, got {rank}")
        return rank

    def _take(self, count: int, what: str) -> int:
        begin = self._position
        if count > len(self._bytes) - begin:
            raise self._error(f"{what}: expected {count} bytes from {begin} on, got {len(self._bytes) - begin}")
        self._position = begin + count
        return begin

    def _number(self, form: str, what: str) -> int:
        kind = struct.Struct(f"<{form}")
        value: int = kind.unpack_from(self._bytes.data, self._take(kind.size, what))[0]
        return value

    def _string(self, what: str) -> str:
        length = self._number("H", what)
        begin = self._take(length, what)
        try:
            return self._bytes[begin : begin + length].tobytes().rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: expected UTF-8, got {error}") from error

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")
