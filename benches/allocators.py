"""Contiguous allocators over a range of slots: what a server without block tables serves its requests from.

    FirstFit   keeps the holes in the order of their places
        allocate(n)   the first hole of n slots or more; its front is taken
        free(span)    the span becomes a hole and melts with the holes on its two sides
    Buddy      keeps free pieces of 2^k slots that begin at multiples of 2^k
        allocate(n)   round n up to 2^k; of the smallest free pieces of at least 2^k slots the lowest;
                      halve it and keep the upper half free until it has 2^k slots
        free(span)    while the buddy (the other half of the piece that both came from) is free: melt with it

Neither moves what it has given away: holes between spans that are in use stay (external fragmentation).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """Slots start, start + 1, ... start + size - 1."""

    start: int
    size: int


class Allocator(Protocol):
    """Gives away spans of ``total`` slots, of which ``allocated`` are given away now."""

    total: int
    allocated: int

    def allocate(self, size: int) -> Span | None:
        """A span of at least ``size`` slots, or None if no hole is large enough. ValueError: a size below 1."""

    def free(self, span: Span) -> None:
        """Take a span back. ValueError: it is not given away."""

    def holes(self) -> list[Span]:
        """The free pieces in the order of their places."""


class _Given:
    """What is given away."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total: expected at least 1 slot, got {total}")
        self.total = total
        self.allocated = 0
        self._sizes: dict[int, int] = {}

    def _give(self, span: Span) -> Span:
        self._sizes[span.start] = span.size
        self.allocated += span.size
        return span

    def _take_back(self, span: Span) -> None:
        if self._sizes.get(span.start) != span.size:
            raise ValueError(f"expected a span that is given away, got {span}")
        del self._sizes[span.start]
        self.allocated -= span.size


class FirstFit(_Given):
    """Spans of exactly the size that was asked for."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._holes = [Span(0, total)]

    def allocate(self, size: int) -> Span | None:
        """See Allocator."""
        _check_size(size)
        for i, hole in enumerate(self._holes):
            if hole.size >= size:
                rest = Span(hole.start + size, hole.size - size)
                self._holes[i : i + 1] = [rest] if rest.size else []
                return self._give(Span(hole.start, size))
        return None

    def free(self, span: Span) -> None:
        """See Allocator."""
        self._take_back(span)
        i = bisect_left(self._holes, span)
        first, last, (start, size) = i, i, span
        if i > 0 and sum(self._holes[i - 1]) == start:
            first, start, size = i - 1, self._holes[i - 1].start, size + self._holes[i - 1].size
        if i < len(self._holes) and self._holes[i].start == sum(span):
            last, size = i + 1, size + self._holes[i].size
        self._holes[first:last] = [Span(start, size)]

    def holes(self) -> list[Span]:
        """See Allocator."""
        return list(self._holes)


class Buddy(_Given):
    """Spans of 2^k slots at multiples of 2^k.

    A total that is no power of two begins as several pieces, the largest first.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._free: list[list[int]] = [[] for _ in range(total.bit_length())]
        start = 0
        for order in reversed(range(total.bit_length())):
            if total >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, size: int) -> Span | None:
        """See Allocator."""
        _check_size(size)
        order = (size - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        for k in reversed(range(order, found)):
            insort(self._free[k], start + (1 << k))
        return self._give(Span(start, 1 << order))

    def free(self, span: Span) -> None:
        """See Allocator."""
        self._take_back(span)
        start, order = span.start, span.size.bit_length() - 1
        while (i := _index(self._free[order], start ^ (1 << order))) is not None:
            start = min(start, self._free[order].pop(i))
            order += 1
        insort(self._free[order], start)

    def holes(self) -> list[Span]:
        """See Allocator."""
        return sorted(Span(start, 1 << order) for order, starts in enumerate(self._free) for start in starts)


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size: expected at least 1 slot, got {size}")


def _index(ordered: list[int], value: int) -> int | None:
    i = bisect_left(ordered, value)
    return i if i < len(ordered) and ordered[i] == value else None
