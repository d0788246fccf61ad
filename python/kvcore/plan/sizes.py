"""Sizes as people write them: ``"24GiB"`` to bytes and back, ``"128K"`` to tokens."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from kvcore.errors import InvalidArgument

UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50,
}  # fmt: skip
"""Bytes of each unit, in upper case."""

MAX_BYTES: Final = 2**63 - 1
MAX_TOKENS: Final = 2**31 - 1

_SIZE: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)")
_TOKENS: Final = re.compile(r"([0-9]{1,12})([Kk]?)")


def parse_size(text: str | int, field: str = "size") -> int:
    """Bytes from ``"24GiB"``, ``"24GB"``, ``"1.5 TiB"``, ``"512MiB"`` or plain bytes.

    KiB, MiB, ... are powers of 1024, KB, MB, ... powers of 1000, in upper or lower case. A fraction of a byte is
    dropped.

    Args:
        text: the size; an int is bytes.
        field: what to call it in errors.

    Raises:
        InvalidArgument: not a size, or one that is not from 1 to 2**63 - 1 bytes.
    """
    expected = f"{field}: expected a size such as 24GiB, 24GB, 512MiB or 1073741824 (bytes)"
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool):
        raise InvalidArgument(f"{expected}, got {_short(text)}")
    number, unit = match.groups()
    if unit.upper() not in UNITS:
        raise InvalidArgument(f"{expected}, got {_short(text)}: no unit {_short(unit)}")
    size = int(Fraction(number) * UNITS[unit.upper()])
    if not 1 <= size <= MAX_BYTES:
        raise InvalidArgument(f"{field}: expected from 1 to {MAX_BYTES} bytes, got {_short(text)}")
    return size


def parse_tokens(text: str | int, field: str) -> int:
    """Tokens from ``"8192"`` or ``"8K"``, where K is 1024.

    Raises:
        InvalidArgument: not a number of tokens, or one that is not from 1 to 2**31 - 1.
    """
    match = _TOKENS.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool):
        raise InvalidArgument(f"{field}: expected a number of tokens such as 8192 or 8K, got {_short(text)}")
    tokens = int(match[1]) * (1024 if match[2] else 1)
    if not 1 <= tokens <= MAX_TOKENS:
        raise InvalidArgument(f"{field}: expected from 1 to {MAX_TOKENS} tokens, got {_short(text)}")
    return tokens


def format_size(count: int) -> str:
    """Bytes in the largest fitting unit of 1024: ``"128 KiB"``, ``"68.6 KiB"``, ``"1.13 KiB"``, ``"14.96 GiB"``.

    Without a point the number is exact, else it is rounded; no size is too large.
    """
    unit, divisor = "bytes", 1
    for name in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if count >= divisor << 10:
            unit, divisor = name, divisor << 10
    if count % divisor == 0:
        return f"{count // divisor:,} {unit if count != 1 else 'byte'}"
    digits = 2 if divisor >= 1 << 30 or count < 10 * divisor else 1
    scaled = (count * 10**digits * 2 + divisor) // (2 * divisor)
    whole, rest = divmod(scaled, 10**digits)
    return f"{whole:,}.{rest:0{digits}} {unit}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
