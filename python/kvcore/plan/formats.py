"""The formats of a cache and what they take, in one table.

row of a head = values + scales       K and V of a token have one row each, for every KV head and layer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvcore.errors import InvalidArgument

STATIC: Final = "static"
PER_TOKEN_HEAD: Final = "per_token_head"


@dataclass(frozen=True)
class CacheFormat:
    """How values are stored.

    Attributes:
        name: as ``kv_cache_dtype`` has it.
        bits: of a value.
        scale_modes: what may be chosen, the default first. With ``"static"`` scales are part of the cache, not of a
            token; with ``"per_token_head"`` each row carries its own.
        k_group, v_group: dimensions of K and of V that share a scale if rows carry their own; None is the whole row.
        scale_bytes: of each such scale, with its offset where there is one.
    """

    name: str
    bits: int
    scale_modes: tuple[str, ...] = (STATIC,)
    k_group: int | None = None
    v_group: int | None = None
    scale_bytes: int = 4

    def k_bytes(self, dims: int, scale_mode: str) -> int:
        """Bytes of K of one head and token, with its scales."""
        return self._row_bytes(dims, scale_mode, self.k_group)

    def v_bytes(self, dims: int, scale_mode: str) -> int:
        """Bytes of V of one head and token, with its scales."""
        return self._row_bytes(dims, scale_mode, self.v_group)

    def _row_bytes(self, dims: int, scale_mode: str, group: int | None) -> int:
        values = -(-dims * self.bits // 8)
        if dims == 0 or scale_mode == STATIC:
            return values
        return values + self.scale_bytes * (1 if group is None else -(-dims // group))


FORMATS: Final[Mapping[str, CacheFormat]] = MappingProxyType(
    {
        format_.name: format_
        for format_ in (
            CacheFormat("float32", 32),
            CacheFormat("float16", 16),
            CacheFormat("bfloat16", 16),
            CacheFormat("fp8_e4m3", 8, (STATIC, PER_TOKEN_HEAD)),
            CacheFormat("fp8_e5m2", 8, (STATIC, PER_TOKEN_HEAD)),
            CacheFormat("int8", 8, (PER_TOKEN_HEAD,)),
            CacheFormat("int4", 4, (PER_TOKEN_HEAD,), k_group=8, v_group=32),
        )
    }
)
"""Formats of the cache by name."""

WEIGHT_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""What weights are held in, and the bytes of one."""

QUANTIZATIONS: Final = ("auto", "none", "int8", "int4")
"""What matrices may be held in beside a type of ``WEIGHT_BYTES``, as ``LLM`` has it."""

SHORT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8": "fp8_e4m3"}
)


def cache_format(name: str, weight_dtype: str) -> CacheFormat:
    """A format by its name. ``"auto"`` is float32 beside float32 weights, and bfloat16 beside all others.

    Raises:
        InvalidArgument: there is no such format.
    """
    name = SHORT_NAMES.get(name, name)
    if name == "auto":
        name = "float32" if weight_dtype == "float32" else "bfloat16"
    if name not in FORMATS:
        raise InvalidArgument(f"kv_cache_dtype: expected auto or one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def scale_mode(format_: CacheFormat, mode: str | None) -> str:
    """The mode, or the format's default for None.

    Raises:
        InvalidArgument: the format does not have this mode.
    """
    if mode is None:
        return format_.scale_modes[0]
    if mode not in format_.scale_modes:
        raise InvalidArgument(
            f"scale_mode: expected {' or '.join(format_.scale_modes)} with {format_.name}, got {mode!r}"
        )
    return mode


def weight_dtype(name: str, saved: str | None) -> str:
    """What weights are held in: ``"auto"`` is the type they were saved in, bfloat16 if that is none of ours.

    Raises:
        InvalidArgument: there is no such type.
    """
    name = SHORT_NAMES.get(name, name)
    if name == "auto":
        return "bfloat16" if saved is None or saved not in WEIGHT_BYTES else saved
    if name not in WEIGHT_BYTES:
        raise InvalidArgument(f"dtype: expected auto or one of {', '.join(WEIGHT_BYTES)}, got {name!r}")
    return name
