"""How many blocks tokens take, in caches with one group of layers or with several.

    full, latent    ceil(tokens / block size) blocks
    sliding window  the same, but no more than a window and a step's tokens need: what is before goes back to the pool
    cross           blocks of the encoder's tokens, all at once when a request is let in

These are the numbers by which requests are let in and refused. Whether a batch really has its blocks is for
``Cache.plan`` to say, which knows of shared blocks and copies as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore.engine.interfaces import Cache, EncoderInput

_PAGED = ("full", "latent", "sliding_window")


@dataclass(frozen=True, slots=True)
class _Pool:
    """A group's pool: its blocks, and the most of them that one sequence ever holds."""

    total: int
    most: int


class Space:
    """The pools of a cache.

    Attributes:
        block_size: tokens of a block.
        capacity: the most tokens that one sequence can have in the cache.
        cross: blocks for what encoders give; None without an encoder.
        max_chunk: the most tokens of one sequence in a step: a window's pool must hold them beside the window.
    """

    def __init__(self, cache: Cache, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self.block_size = size = cache.block_size
        groups: list[Any] = list(getattr(cache, "groups", ()))
        self._single = len(groups) < 2
        kept: list[tuple[int, int | None]] = [
            (group.num_blocks or cache.num_blocks, group.window) for group in groups if group.kind in _PAGED
        ] or [(cache.num_blocks, None)]
        self.cross: int | None = next((group.num_blocks for group in groups if group.kind == "cross"), None)
        # a window never fills up; all layers may have one
        self.capacity = min((total for total, window in kept if window is None), default=1 << 30) * size
        beside = [total - -(-window // size) - 1 for total, window in kept if window is not None]
        self.max_chunk = min(max_num_batched_tokens, max(1, min(beside, default=max_num_batched_tokens)) * size)
        self._pools = [
            _Pool(total, total if window is None else min(total, -(-(window + self.max_chunk) // size) + 1))
            for total, window in kept
        ]

    def blocks(self, num_tokens: int) -> int:
        """Blocks of ``num_tokens`` tokens where all are kept."""
        return -(-num_tokens // self.block_size)

    def free(self) -> list[int]:
        """Blocks that can be had, of each group."""
        if self._single:
            return [self._cache.num_free_blocks]
        groups = self._cache.stats()["groups"]
        return [g["free"] + g["cached"] - g["pinned"] for g in groups if g["kind"] in (*_PAGED, "cross")]

    def to_come(self, stored: int, copies: int, num_tokens: int, encoder: EncoderInput | None = None) -> list[int]:
        """Blocks that a sequence with ``stored`` tokens still takes until it has ``num_tokens``, of each group.

        ``encoder``: what is still to be encoded for it.
        """
        size = self.block_size
        held, wanted = -(-stored // size), -(-num_tokens // size)
        needed = [max(0, min(wanted, pool.most) - min(held, pool.most)) + copies for pool in self._pools]
        if self.cross is not None:  # the cache counts this group last
            needed.append(0 if encoder is None else self.blocks(encoder.num_tokens))
        return needed

    def lacking(self, stored: list[int], num_tokens: int) -> list[tuple[int, int, int]]:
        """What sequences with so many tokens each in the cache need until all have ``num_tokens``, of each group.

        Returns:
            Blocks that they need in all, blocks that they hold or can have, and blocks of the pool.
        """
        whole, pools = self.to_come(0, 0, num_tokens), [pool.total for pool in self._pools]
        if self.cross is not None:
            pools.append(self.cross)
        left = [sum(blocks) for blocks in zip(*(self.to_come(n, 0, num_tokens) for n in stored), strict=True)]
        each = zip(whole, left, self.free(), pools, strict=True)
        return [(len(stored) * need, free + len(stored) * need - rest, total) for need, rest, free, total in each]

    def has_room(self, left: list[int], headroom: int) -> bool:
        """Whether nothing lacks, and so many blocks stay for sequences to grow into."""
        grows = left if self.cross is None else left[:-1]
        return min(grows) >= headroom and min(left) >= 0
