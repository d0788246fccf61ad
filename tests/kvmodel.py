"""A naive model of the cache, for the state machines: what sequences hold, and what can be found.

K and V are made from everything that may decide about sharing: the key and all tokens so far (and a nonce for sequences
that must not share), so that a block that is shared wrongly, published too early, copied too late or written in place
shows as a wrong value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from kvcore import Batch, Sequence
from kvtools import Floats

Key = tuple[bytes | str | None, bytes | str | None, bytes | str | None]
"""salt, adapter, extra"""

NO_KEY: Key = (None, None, None)
KEYS: list[Key] = [NO_KEY] * 8 + [("", None, None), ("a", None, None), (None, "a", None), (None, None, b"a"),
                                 ("a", "b", None), ("ab", None, None)]  # fmt: skip


@lru_cache(maxsize=1 << 16)
def values(digest: bytes, layer: int, size: int) -> Floats:
    """``size`` values, about -4 to 4, that belong to a digest and a layer."""
    raw = hashlib.shake_128(digest + bytes([layer])).digest(2 * size)
    return np.frombuffer(raw, np.int16).astype(np.float32) / np.float32(8192)


def digests_of(key: Key, tokens: Iterable[int], before: bytes | None = None, nonce: int = 0) -> list[bytes]:
    """For each token a digest of it and all before it; ``before`` is that of the token before the first."""
    digests = []
    at = repr(key).encode() if before is None else before
    for token in tokens:
        at = hashlib.blake2b(at + nonce.to_bytes(8, "little") + token.to_bytes(4, "little"), digest_size=16).digest()
        digests.append(at)
    return digests


def common(a: Iterable[int], b: Iterable[int]) -> int:
    """How many leading tokens are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass
class Clock:
    """Seconds, as the test says."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Live:
    """One sequence."""

    handle: Sequence
    tokens: list[int]
    key: Key
    shares: bool
    """Whether it may share with strangers; else only with its forks."""
    family: int
    era: int
    """Resets before its first token was computed: what is older is not published any more."""
    ttl: float
    digests: list[bytes] = field(default_factory=list)
    computed: int = 0
    borrowed: bool = False
    """Whether its last block is only read up to its own tokens, and not its own."""
    open: Planned | None = None
    """Its latest plan, as long as nothing has outdated it."""
    freed: bool = False
    encoder: bytes = b""
    """Digest of its encoder's input, if it has any."""
    begun: int = 0
    """Tokens that it began with, from the cache or from a file."""
    reach: int = 0
    """Tokens that were computed when it was last planned: a rollback is counted from there."""

    def extend(self, tokens: Iterable[int], nonce: int) -> None:
        """More tokens; ``nonce`` makes those of a sequence that shares with nobody unlike all others."""
        tokens = list(tokens)
        before = self.digests[-1] if self.digests else None
        self.digests += digests_of(self.key, tokens, before, 0 if self.shares else nonce)
        self.tokens += tokens

    def branch(self, handle: Sequence) -> Live:
        """The model of a fork."""
        return Live(handle, [*self.tokens], self.key, self.shares, self.family, self.era, self.ttl, [*self.digests],
                    self.computed, self.borrowed, encoder=self.encoder, begun=self.begun, reach=self.reach)  # fmt: skip

    def cut(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:], self.digests[num_tokens:]
        self.computed = min(self.computed, num_tokens)
        self.open = None


@dataclass(eq=False)
class Planned:
    """A plan: its batch and, for each sequence, the first position and the number of tokens."""

    batch: Batch
    items: list[tuple[Live, int, int]]

    def is_stale(self) -> bool:
        return any(seq.freed or seq.open is not self for seq, _, _ in self.items)


@dataclass
class Entry:
    """A published block: the prefix that ends in it."""

    key: Key
    tokens: tuple[int, ...]
    ttl: float
    """It is kept at least so long after its last use."""
    released: float = 0.0
    """When its last holder was seen."""


class Index:
    """What can be found, by block, as told by the events of a cache with one group and one tier."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.entries: dict[int, Entry] = {}

    def start(self, block: int) -> int:
        """Position of the first token in a block."""
        size = self.block_size
        return (len(self.entries[block].tokens) - 1) // size * size

    def published(self, block: int) -> int:
        """Tokens in a block that can be found."""
        return len(self.entries[block].tokens) - self.start(block) if block in self.entries else 0

    def longest(self, key: Key, tokens: Iterable[int]) -> int:
        tokens = tuple(tokens)
        return max((common(e.tokens, tokens) for e in self.entries.values() if e.key == key), default=0)

    def ancestry(self, block: int) -> list[int]:
        """A block and all before it."""
        of = self.entries[block]
        chain = [b for b, e in self.entries.items() if e.key == of.key and len(e.tokens) < len(of.tokens)
                 and len(e.tokens) % self.block_size == 0 and of.tokens[: len(e.tokens)] == e.tokens]  # fmt: skip
        return [*chain, block]

    def path(self, key: Key, tokens: list[int], num_tokens: int, own: list[int]) -> list[int]:
        """The blocks of the first ``num_tokens`` of a published prefix.

        Its whole blocks, and of those that begin with the rest its own, or else the first in the order of tokens.
        """
        size, path = self.block_size, []
        for start in range(0, num_tokens, size):
            whole = start + size <= len(tokens)
            part = tuple(tokens[: start + size] if whole else tokens[:num_tokens])
            found = [(e.tokens, b) for b, e in self.entries.items()
                     if e.key == key and self.start(b) == start and e.tokens[: len(part)] == part]  # fmt: skip
            if not found:
                break
            mine = [] if whole else [b for _, b in found if b in own]
            path.append(mine[0] if mine else min(found)[1])
        return path

    def is_left_behind(self, block: int) -> bool:
        """Whether another block holds its tokens and more."""
        of, start = self.entries[block], self.start(block)
        return any(
            b != block and e.key == of.key and self.start(b) == start and e.tokens[: len(of.tokens)] == of.tokens
            for b, e in self.entries.items()
        )

    def check(self) -> None:
        size = self.block_size
        for block, entry in self.entries.items():
            assert len(self.ancestry(block)) == -(-len(entry.tokens) // size), "a prefix that cannot be reached"
        prefixes = [(e.key, e.tokens) for e in self.entries.values()]
        assert len(set(prefixes)) == len(prefixes), "a prefix is published twice"


@dataclass
class Pinned:
    """A pin, the prefix that it keeps, and its blocks."""

    pin: Any
    key: Key
    tokens: list[int]
    blocks: list[int]
