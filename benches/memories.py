"""Ways of giving KV memory to requests: spans that are reserved when a request starts, or blocks as its tokens come.

Each has the same slots (a slot holds K and V of one token) and says at any time what they are used for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from allocators import Allocator
from kvcore import Batch, KVCache
from kvcore.errors import OutOfBlocks
from lengths import Request


@dataclass
class Running:
    """A request that is being answered, or that was and has to begin again.

    Attributes:
        stored: tokens whose K and V it has; when it has no memory, those that it must store first.
        again: whether it has lost its memory before.
        place: where they are, in the terms of the memory.
    """

    request: Request
    stored: int
    again: bool = False
    place: Any = None


class Usage(NamedTuple):
    """What slots are used for; the sum is the whole memory.

    Attributes:
        tokens: hold tokens of running requests, those that several requests share counted once.
        reserved: kept for tokens that will come.
        internal: kept for a running request that will never use them.
        cached: of blocks that no running request has and that a later one may find.
        free: nobody's.
    """

    tokens: int
    reserved: int
    internal: int
    cached: int
    free: int


class Memory(Protocol):
    """KV memory of ``total`` slots."""

    total: int

    def start(self, running: Running) -> bool:
        """Give memory for the stored tokens and store them; False if it cannot be had."""

    def grow(self, batch: list[Running]) -> list[Running]:
        """One more token for each request. Returns those that lost their memory to the others, the youngest first.

        Args:
            batch: all running requests, in the order in which they have started.
        """

    def end(self, running: Running) -> None:
        """Take its memory back."""

    def usage(self) -> Usage:
        """The state now."""

    def would_fit_joined(self, running: Running) -> bool:
        """Whether it could start if all free slots lay side by side."""

    def found(self) -> int:
        """Tokens of started requests that were there already."""

    def close(self) -> None:
        """Give the memory back to the system."""


class Reserved:
    """One span for each request, from its start to its end.

    Args:
        allocator: where spans come from.
        size: how many slots a request asks for, at least its total.
    """

    def __init__(self, allocator: Allocator, size: Callable[[Request], int]) -> None:
        self.total = allocator.total
        self._allocator = allocator
        self._size = size
        self._tokens = 0
        self._final = 0

    def start(self, running: Running) -> bool:
        """See Memory."""
        size = self._size(running.request)
        if size < running.request.total:
            raise ValueError(f"expected a reservation of at least {running.request.total} slots, got {size}")
        running.place = self._allocator.allocate(size)
        if running.place is None:
            return False
        self._tokens += running.stored
        self._final += running.request.total
        return True

    def grow(self, batch: list[Running]) -> list[Running]:
        """See Memory."""
        for running in batch:
            running.stored += 1
        self._tokens += len(batch)
        return []

    def end(self, running: Running) -> None:
        """See Memory."""
        self._allocator.free(running.place)
        self._tokens -= running.stored
        self._final -= running.request.total

    def usage(self) -> Usage:
        """See Memory."""
        allocated = self._allocator.allocated
        return Usage(self._tokens, self._final - self._tokens, allocated - self._final, 0, self.total - allocated)

    def would_fit_joined(self, running: Running) -> bool:
        """See Memory."""
        return self._size(running.request) <= self.total - self._allocator.allocated

    def found(self) -> int:
        """See Memory."""
        return 0

    def close(self) -> None:
        """See Memory."""


class Paged:
    """Blocks of a real KVCache, taken as tokens come.

    When they run out, the request that started last gives up its blocks and begins again later, with all its tokens.

    Args:
        total: slots, a multiple of block_size.
        sharing: whether requests share the front that they have in common.
        headroom: share of the blocks that must stay free when a request starts beside others.
    """

    DIM = 2

    def __init__(self, total: int, block_size: int, *, sharing: bool, headroom: float = 0.0) -> None:
        if total % block_size:
            raise ValueError(f"total: expected a multiple of the block size {block_size}, got {total}")
        self.total = total
        self._block_size = block_size
        self._headroom = headroom * (total // block_size)
        self._cache = KVCache(
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.DIM,
            num_blocks=total // block_size,
            block_size=block_size,
            num_threads=1,
            enable_prefix_caching=sharing,
        )
        self._zeros = np.zeros((total, 1, self.DIM), np.float32)
        self._running: dict[int, Running] = {}
        self._found = 0

    def start(self, running: Running) -> bool:
        """See Memory."""
        first = running.request.conversation * self.total
        seq = self._cache.add(np.arange(first, first + running.stored))
        try:
            batch = self._cache.plan([(seq, running.stored - seq.num_cached_tokens)])
        except OutOfBlocks:
            self._cache.free(seq)
            return False
        if self._running and self._cache.num_free_blocks < self._headroom:
            self._cache.free(seq)
            return False
        self._compute(batch)
        running.place = seq
        self._found += seq.num_cached_tokens
        self._running[id(running)] = running
        return True

    def grow(self, batch: list[Running]) -> list[Running]:
        """See Memory."""
        for running in batch:
            self._cache.append(running.place, [running.request.conversation * self.total + running.stored])
        stay, preempted = list(batch), []
        while stay:  # plan is all or nothing
            try:
                self._compute(self._cache.plan([(running.place, 1) for running in stay]))
                break
            except OutOfBlocks:
                preempted.append(stay.pop())
                self.end(preempted[-1])
        for running in stay:
            running.stored += 1
        return preempted

    def _compute(self, batch: Batch) -> None:
        zeros = self._zeros[: batch.num_tokens]
        self._cache.write(0, batch, zeros, zeros)
        self._cache.commit(batch)

    def end(self, running: Running) -> None:
        """See Memory."""
        self._cache.free(running.place)
        running.place = None
        del self._running[id(running)]

    def usage(self) -> Usage:
        """See Memory."""
        stats, size = self._cache.stats(), self._block_size
        tokens = stats["tokens"]
        # Only the last block of a request has open slots, and it is the request's own.
        reserved = sum(min(-r.stored % size, r.request.total - r.stored) for r in self._running.values())
        internal = stats["used"] * size - tokens - reserved
        return Usage(tokens, reserved, internal, stats["cached"] * size, stats["free"] * size)

    def would_fit_joined(self, running: Running) -> bool:
        """See Memory."""
        return False  # a block is as good as any other: whoever does not fit needs more than there is

    def found(self) -> int:
        """See Memory."""
        return self._found

    def close(self) -> None:
        """See Memory."""
        self._cache.close()
