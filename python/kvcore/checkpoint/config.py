"""config.json and generation_config.json: read with care, and asked key by key.

Configurations come from strangers, so every value passes through a ``ConfigReader``, which knows the file's name and
answers a missing, wrongly typed or nonsensical value with a ``CheckpointError`` that names file and key, what was
expected and what came.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, overload

from kvcore.errors import CheckpointError

_T = TypeVar("_T")

MAX_JSON_BYTES: Final = 64 << 20
"""No configuration or shard index comes near this size; larger files are refused before they are read."""

MAX_INTEGER: Final = 2**31 - 1
"""The largest size or count that a configuration may give: token ids and block tables are 32 bits wide."""

_REQUIRED: Final = object()


class Config(dict[str, Any]):
    """A configuration as the file has it, key for key, that remembers which file it came from.

    ``source`` is the name that error messages give: a path, or ``"config"`` for a dict made in memory.
    """

    source: str

    def __init__(self, values: Mapping[str, Any] | None = None, source: str = "config") -> None:
        super().__init__(values or {})
        self.source = source


class ConfigReader:
    """Asks a configuration for typed values.

    Each method takes a key, and a default for when the key is missing or null; without a default the key must be
    there. All raise ``CheckpointError``.
    """

    def __init__(self, config: Mapping[str, Any], source: str | None = None) -> None:
        if not isinstance(config, Mapping):
            raise CheckpointError(f"{source or 'config'}: expected a JSON object, got {describe(config)}")
        self._config = config
        self.source = source if source is not None else str(getattr(config, "source", "config"))

    def error(self, key: str, expected: str, got: object) -> CheckpointError:
        """The error that says that ``key`` should have been something else."""
        return CheckpointError(f"{self.source}: {key}: expected {expected}, got {describe(got)}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._config.get(key) is not None

    def keys(self) -> list[str]:
        """All keys."""
        return list(self._config)

    @overload
    def integer(self, key: str, *, minimum: int = ..., maximum: int = ...) -> int: ...
    @overload
    def integer(self, key: str, default: _T, *, minimum: int = ..., maximum: int = ...) -> int | _T: ...
    def integer(self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> Any:
        """An integer from ``minimum`` to ``maximum``; neither a boolean nor a number with a fraction."""
        expected = f"an integer of at least {minimum}"
        value = self._get(key, default, expected)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, expected, value)
        if value > maximum:
            raise self.error(key, f"an integer of at most {maximum}", value)
        return value

    @overload
    def number(self, key: str, *, minimum: float = ..., maximum: float = ...) -> float: ...
    @overload
    def number(self, key: str, default: _T, *, minimum: float = ..., maximum: float = ...) -> float | _T: ...
    def number(self, key: str, default: Any = _REQUIRED, *, minimum: float = 1e-30, maximum: float = 1e30) -> Any:
        """A number from ``minimum`` to ``maximum``.

        By default it is positive and so far from the ends of float32 that formulas can use it without care.
        """
        expected = f"a number from {minimum:g} to {maximum:g}"
        value = self._get(key, default, expected)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
            raise self.error(key, expected, value)
        return float(value)

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: bool) -> bool: ...
    def boolean(self, key: str, default: Any = _REQUIRED) -> Any:
        """``true`` or ``false``."""
        value = self._get(key, default, "true or false")
        if value is default:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    @overload
    def string(self, key: str) -> str: ...
    @overload
    def string(self, key: str, default: _T) -> str | _T: ...
    def string(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string that is not empty."""
        value = self._get(key, default, "a string")
        if value is default:
            return default
        if not isinstance(value, str) or not value:
            raise self.error(key, "a string that is not empty", value)
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers, each as ``number`` takes them."""
        value = self._get(key, _REQUIRED, "a list of numbers")
        if not isinstance(value, (list, tuple)):
            raise self.error(key, "a list of numbers", value)
        items = ConfigReader({f"{key}[{i}]": item for i, item in enumerate(value)}, self.source)
        return tuple(items.number(f"{key}[{i}]") for i in range(len(value)))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty if the key is missing or null."""
        value = self._config.get(key)
        if value is None:
            return ()
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INTEGER:
                raise self.error(key, "a token id (an integer of at least 0) or a list of token ids", value)
        return tuple(items)

    def child(self, key: str) -> ConfigReader | None:
        """The object under ``key``, or None if it is missing or null."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return ConfigReader(value, f"{self.source}: {key}")

    def _get(self, key: str, default: Any, expected: str) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            came = "null" if key in self._config else "no such key"
            raise CheckpointError(f"{self.source}: {key}: expected {expected}, got {came}")
        return default


_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")


@dataclass(frozen=True)
class GenerationConfig:
    """How a model wants to be sampled.

    Attributes:
        eos_token_ids: every id that ends a text. config.json and generation_config.json may each name one or
            several; all of them count, those of generation_config.json first.
        bos_token_id: the id that starts a text, if there is one.
        pad_token_id: the id that fills up, if there is one.
        suppress_tokens: ids that are never said (Whisper).
        begin_suppress_tokens: ids that are not said first.
        defaults: all other keys of generation_config.json as found (``temperature``, ``top_p``, ``do_sample``, ...).
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def merge(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> GenerationConfig:
        """Join config.json with generation_config.json, whose values go first.

        Raises:
            CheckpointError: a token id is not an integer of at least 0.
        """
        readers = [ConfigReader(config)] if generation is None else [ConfigReader(generation), ConfigReader(config)]
        eos: dict[int, None] = {}
        for reader in readers:
            eos.update(dict.fromkeys(reader.token_ids("eos_token_id")))
        single = {}
        for key in ("bos_token_id", "pad_token_id"):
            ids = [ids[0] for reader in readers if (ids := reader.token_ids(key))]
            single[key] = ids[0] if ids else None
        never, not_first = (
            next((ids for reader in readers if (ids := reader.token_ids(key))), ()) for key in _SUPPRESSED
        )
        known = {"eos_token_id", *single, *_SUPPRESSED}
        defaults = {k: v for k, v in (generation or {}).items() if k not in known and not k.startswith("_")}
        return cls(
            tuple(eos), single["bos_token_id"], single["pad_token_id"], never, not_first, MappingProxyType(defaults)
        )


def load_config(path: str | Path) -> Config:
    """Read config.json, given the file or its folder.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    return Config(read_json(path), str(path))


def load_generation_config(folder: str | Path, config: Mapping[str, Any]) -> GenerationConfig:
    """Join the folder's generation_config.json, if there is one, with ``config``.

    Raises:
        CheckpointError: the file is unreadable, not JSON, not an object, or a token id is none.
    """
    path = Path(folder) / "generation_config.json"
    return GenerationConfig.merge(config, Config(read_json(path), str(path)) if path.exists() else None)


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """The type the weights were saved in, such as ``"bfloat16"``, or None if the configuration does not say.

    transformers 5 calls it ``dtype``, transformers 4 ``torch_dtype``.

    Raises:
        CheckpointError: the value is not a string.
    """
    reader = ConfigReader(config)
    name = reader.string("dtype", None) or reader.string("torch_dtype", None)
    return None if name is None else name.removeprefix("torch.")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable, larger than ``MAX_JSON_BYTES``, not JSON or not an object.
    """
    try:
        text = read_file(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a JSON file, got no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return parse_json(text, str(path))


def read_file(path: Path, limit: int) -> bytes:
    """Read a whole regular file. Devices and pipes, which may have no end or never begin, are not even opened.

    Raises:
        CheckpointError: it is no regular file, or has more than ``limit`` bytes.
        OSError: it is missing or cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: cannot be read: expected a regular file, got a folder, device or pipe")
    with path.open("rb") as file:
        data = file.read(limit + 1) if status.st_size <= limit else b""
    if max(len(data), status.st_size) > limit:
        raise CheckpointError(f"{path}: expected a JSON file of at most {limit} bytes, got {status.st_size}")
    return data


def parse_json(text: bytes, source: str, *, unique: bool = False) -> dict[str, Any]:
    """Parse one JSON object; ``source`` names it in errors. ``unique`` refuses a key that occurs twice in an object.

    Raises:
        CheckpointError: anything else.
    """
    if text.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{source}: expected JSON, got a Git LFS pointer; run `git lfs pull` in its folder")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError, JSONDecodeError and the limit on digits are ValueErrors
        raise CheckpointError(f"{source}: expected JSON, got something else: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, got {describe(value)}")
    return value


def describe(value: object) -> str:
    """A value in few words, for an error message."""
    try:
        plain = isinstance(value, (str, int, float, bool, type(None)))
        text = json.dumps(value) if plain else repr(value)
    except (ValueError, RecursionError):  # more digits, or a deeper nesting, than Python turns into text
        text = "something huge"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result
