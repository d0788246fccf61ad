"""How many blocks tokens take, in caches with one group of layers or with several.

    full, latent    ceil(tokens / block size) blocks
    sliding window  the same, but no more than a window and a step's tokens need: what is before goes back to the pool

These are the numbers by which requests are let in and refused. Whether a batch really has its blocks is for
``Cache.plan`` to say, which knows of shared blocks and copies as well.
"""

from __future__ import annotations

from typing import Any

from kvcore.engine.interfaces import Cache

_PAGED = ("full", "latent", "sliding_window")


class Space:
    """The pools of a cache.

    Attributes:
        block_size: tokens of a block.
        capacity: the most tokens that one sequence can have in the cache.
    """

    def __init__(self, cache: Cache, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self.block_size = size = cache.block_size
        groups: list[Any] = [group for group in getattr(cache, "groups", ()) if group.kind in _PAGED]
        self._single = len(groups) < 2
        # of each group the blocks of its pool, and the most that one sequence ever holds there
        self._pools: list[tuple[int, int]] = []
        self.capacity = 0
        for group in groups or [None]:
            total = cache.num_blocks if self._single else group.num_blocks or cache.num_blocks
            window = getattr(group, "window", None)
            most = total if window is None else min(total, -(-(window + max_num_batched_tokens) // size) + 1)
            self._pools.append((total, most))
        unbounded = [total for group, (total, _) in zip(groups or [None], self._pools, strict=True) if _keeps(group)]
        # a window never fills up; all layers may have one
        self.capacity = min(unbounded, default=1 << 30) * size

    def blocks(self, num_tokens: int) -> int:
        """Blocks of ``num_tokens`` tokens where all are kept."""
        return -(-num_tokens // self.block_size)

    def free(self) -> list[int]:
        """Blocks that can be had, of each group."""
        if self._single:
            return [self._cache.num_free_blocks]
        groups = self._cache.stats()["groups"]
        return [g["free"] + g["cached"] - g["pinned"] for g in groups if g["kind"] in _PAGED]

    def to_come(self, stored: int, copies: int, num_tokens: int) -> list[int]:
        """Blocks that a sequence with ``stored`` tokens still takes until it has ``num_tokens``, of each group."""
        size = self.block_size
        held, wanted = -(-stored // size), -(-num_tokens // size)
        return [max(0, min(wanted, most) - min(held, most)) + copies for _, most in self._pools]


def _keeps(group: Any) -> bool:
    return group is None or group.window is None
