"""Which block holds whose tokens, as an SVG.

A panel for each group: on the left the sequences with their block tables, on the right the pool.

    a block      its number, its 16 slots, who holds it, how many of its tokens are stored
    a slot       the colour of its sequence; stripes of several colours if several sequences read it; hatched if a
                 prompt may find it and no sequence reads it; empty if nothing is in it
    a frame      thick: held by two or more sequences, with their number; dashed: vacant; a pin: pinned
    an arrow     from a block to its copy, for recent copies

    pool -> cells     long runs of vacant blocks become one cell; if that is too many still, runs of cached ones, too;
                      then what is beyond the limit is one cell that says what was left out
    cells -> SVG      in the order of their numbers, so that the same cache always gives the same picture
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from kvcore.errors import InvalidArgument
from kvcore.viz.picture import Picture
from kvcore.viz.snapshot import CACHED, GONE, PINNED, STATES, USED, VACANT, Group, Holder, Snapshot, read_snapshot
from kvcore.viz.svg import INK, LINE, PALE, PAPER, SOFT, Svg, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Paul Tol's light scheme: told apart with every kind of colour blindness, and black text reads on all of them.
COLORS = ("#77AADD", "#EE8866", "#EEDD88", "#99DDFF", "#FFAABB", "#44BB99", "#BBCC33", "#AAAA00")
HATCH, MARK = "#8b949e", "#a8340a"

WIDTH, MARGIN = 960, 24
TABLES_WIDTH, POOL_LEFT = 262, 306
COLUMNS, CELL_W, CELL_H, PITCH_X, PITCH_Y = 8, 73, 57, 79, 69
SLOTS, SLOT_PITCH, SLOT_W, SLOT_H = 16, 8, 7, 8

LONGEST_RUN = 16
"""Vacant blocks that are drawn one by one."""

MOST_SEQUENCES, MOST_STRIPES, MOST_ARROWS, MOST_LINES = 40, 4, 32, 3


class BlockMap(Picture):
    """A picture of a cache's blocks."""


def block_map(
    cache_or_snapshot: Any, *, group: int | None = None, tokenizer: Any = None, max_blocks: int = 256
) -> BlockMap:
    """Draw which block holds whose tokens.

    The picture is the same for the same state. Its size is bounded, however large the pool: about 1 KiB for each of the
    ``max_blocks`` and, with a tokenizer, 2 KiB more.

    Args:
        cache_or_snapshot: a ``KVCache``, or what its ``snapshot()`` returned.
        group: draw this group only; None: all.
        tokenizer: anything with ``decode([id]) -> str``, such as ``LLM.tokenizer``. Pointing at a slot then shows its
            text, where the snapshot's sequences have "token_ids".
        max_blocks: cells of a pool that are drawn, at least 1. Runs of vacant blocks take one cell.

    Raises:
        InvalidArgument: no such group, max_blocks below 1, or a snapshot that is not one. TypeError: a wrong type.
    """
    decode = getattr(tokenizer, "decode", None)
    if tokenizer is not None and not callable(decode):
        raise TypeError(f"tokenizer: expected an object with decode(ids), got {type(tokenizer).__name__}")
    max_blocks = _index(max_blocks, "max_blocks")
    if max_blocks < 1:
        raise InvalidArgument(f"max_blocks: expected at least 1, got {max_blocks}")
    snapshot = read_snapshot(cache_or_snapshot)
    groups = snapshot.groups
    if group is not None:
        group = _index(group, "group")
        if not 0 <= group < len(groups):
            raise InvalidArgument(f"group: expected 0 to {len(groups) - 1}, got {group}")
        groups = groups[group : group + 1]
    return BlockMap(_Drawing(snapshot, decode, max_blocks).draw(groups))


def _index(value: Any, what: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected an int, got {type(value).__name__}")
    return operator.index(value)


# -- which blocks get a cell ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One block, or several of which only the numbers are told."""

    first: int
    last: int
    counts: tuple[tuple[int, int], ...] = ()
    """(state, blocks) if it stands for several."""


def cells_of(state: Sequence[int], max_cells: int) -> tuple[list[Cell], int]:
    """The cells of a pool, at most ``max_cells``, and how many blocks of it have one of their own."""
    cells = _collapsed(state, {VACANT: LONGEST_RUN})
    if len(cells) > max_cells:
        cells = _collapsed(state, {VACANT: 1, CACHED: 1})
    if len(cells) > max_cells:
        first = cells[max_cells - 1].first
        counts = sorted(Counter(islice(state, first, None)).items())
        cells = [*cells[: max_cells - 1], Cell(first, len(state) - 1, tuple(counts))]
    return cells, sum(not cell.counts for cell in cells)


def _collapsed(state: Sequence[int], longest: dict[int, int]) -> list[Cell]:
    cells: list[Cell] = []
    start = 0
    for value, run in groupby(state):
        end = start + sum(1 for _ in run)
        if end - start > longest.get(value, end):
            cells.append(Cell(start, end - 1, ((value, end - start),)))
        else:
            cells += [Cell(block, block) for block in range(start, end)]
        start = end
    return cells


# -- the picture ------------------------------------------------------------------------------------------------------


class _Drawing:
    def __init__(self, snapshot: Snapshot, decode: Callable[[list[int]], str] | None, max_blocks: int) -> None:
        self.snapshot = snapshot
        self.decode = decode
        self.max_blocks = max_blocks
        self.svg = Svg()
        self.colors = _colors([sequence.id for sequence in snapshot.sequences])

    def draw(self, groups: list[Group]) -> str:
        sequences, size = self.snapshot.sequences, self.snapshot.block_size
        title = f"KV cache: {_count(len(sequences), 'sequence')}, {_count(len(self.snapshot.groups), 'group')}"
        self.svg.text(MARGIN, 34, title, 17, bold=True)
        self.svg.text(WIDTH - MARGIN, 34, f"a block has {_count(size, 'slot')}", 12, SOFT, "end")
        y = 48.0
        told = []
        for group in groups:
            told.append(self._headline(group) + ": " + self._summary(group))
            y = self._panel(group, y)
        if not groups:
            self.svg.text(MARGIN, y + 20, "no groups", 13, SOFT)
            y += 36
        y = self._legend(y + 8)
        return self.svg.finish(WIDTH, y + 12, title, ". ".join(told) or "no groups")

    def _headline(self, group: Group) -> str:
        kind = group.kind.replace("_", " ") + (f" of {group.window:,}" if group.window is not None else "")
        layers = _ranges(group.layers)
        many = "layers" if len(group.layers) != 1 else "layer"
        return f"Group {group.index}: {kind}" + (f", {many} {layers}" if layers else "")

    def _summary(self, group: Group) -> str:
        if group.kind == "none":
            return "no storage"
        counts = Counter(group.state)
        counts[CACHED] += counts.pop(PINNED, 0)
        parts = ", ".join(f"{counts[state]:,} {STATES[state]}" for state in (USED, CACHED, VACANT))
        shared = sum(len(holders) > 1 for holders in group.holders.values())
        more = [f"{n:,} {what}" for n, what in ((shared, "shared"), (len(group.pinned), "pinned")) if n]
        return f"{_count(group.num_blocks, 'block')}: {parts}" + (f"; {', '.join(more)}" if more else "")

    def _panel(self, group: Group, top: float) -> float:
        """Draw a group below ``top``; where it ends."""
        svg = self.svg
        mark = len(svg)
        svg.text(MARGIN, top + 22, shorten(self._headline(group), 100), 14, bold=True)
        svg.text(MARGIN, top + 39, self._summary(group), 12, SOFT)
        bottom = top + 46
        if group.kind != "none":
            bottom = max(self._tables(group, top + 54), self._pool(group, top + 54))
        svg.insert_rect(mark, 10, top, WIDTH - 20, bottom - top + 4, PALE, LINE, radius=6)
        return bottom + 14

    # The tables

    def _tables(self, group: Group, y: float) -> float:
        svg = self.svg
        if not self.snapshot.sequences:
            svg.text(MARGIN, y + 14, "no sequences", 12, SOFT)
            return y + 20
        width = max(22, 8 + 7 * len(str(max(group.num_blocks - 1, 0))))
        per_line = int(TABLES_WIDTH // (width + 3))
        for i, sequence in enumerate(self.snapshot.sequences[:MOST_SEQUENCES]):
            table, color = group.tables[i], self.colors[i]
            waiting = sequence.num_tokens - sequence.num_computed
            words = _count(sequence.num_tokens, "token") + (f", {waiting:,} to compute" if waiting > 0 else "")
            words += f", {sequence.num_cached:,} found" if sequence.num_cached else ""
            title = f"Sequence {sequence.name}: {words}. Blocks: {_table_words(table)}"
            with svg.group(title):
                svg.rect(MARGIN, y, 46, 18, color, INK, radius=4)
                svg.text(MARGIN + 23, y + 13, shorten(sequence.name, 7), 11, anchor="middle", bold=True)
                svg.text(MARGIN + 53, y + 13, words, 11, SOFT)
                y += 22
                entries = _table_entries(table, per_line * MOST_LINES)
                for place, (kind, value) in enumerate(entries):
                    x = MARGIN + (width + 3) * (place % per_line)
                    line = y + 19 * (place // per_line)
                    if kind == "block":
                        shared = len(group.holders[value]) > 1
                        svg.rect(x, line, width, 16, PAPER, INK, width=2 if shared else 1)
                        svg.text(x + width / 2, line + 12, str(value), 11, anchor="middle")
                    else:
                        words = f"{value}×" if kind == "gone" else f"+{value}"
                        svg.rect(x, line, width, 16, "none", LINE, dash="3 2")
                        svg.text(x + width / 2, line + 12, shorten(words, 6), 9, SOFT, "middle")
                y += 19 * -(-len(entries) // per_line) + 7
        left_out = len(self.snapshot.sequences) - MOST_SEQUENCES
        if left_out > 0:
            svg.text(MARGIN, y + 10, f"and {_count(left_out, 'sequence')} more", 12, SOFT)
            y += 18
        return y

    # The pool

    def _pool(self, group: Group, y: float) -> float:
        cells, _ = cells_of(group.state, self.max_blocks)
        if not cells:
            self.svg.text(POOL_LEFT, y + 14, "no blocks", 12, SOFT)
            return y + 20
        copied_from: dict[int, list[int]] = {}
        for source, copy in group.copies:
            copied_from.setdefault(copy, []).append(source)
        places: dict[int, tuple[float, float]] = {}
        for i, cell in enumerate(cells):
            at = (POOL_LEFT + PITCH_X * (i % COLUMNS), y + PITCH_Y * (i // COLUMNS))
            if cell.counts:
                self._many(cell, *at)
            else:
                places[cell.first] = at
                self._block(group, cell.first, copied_from.get(cell.first, []), *at)
        shown = [(a, b) for a, b in group.copies if a in places and b in places]
        for source, copy in shown[:MOST_ARROWS]:
            self._arrow(source, copy, places[source], places[copy])
        return y + PITCH_Y * -(-len(cells) // COLUMNS) - (PITCH_Y - CELL_H) + 4

    def _many(self, cell: Cell, x: float, y: float) -> None:
        told = [f"{count:,} {STATES[state]}" for state, count in cell.counts]
        with self.svg.group(f"Blocks {cell.first} to {cell.last}: {', '.join(told)}"):
            self.svg.rect(x, y, CELL_W, CELL_H, "none", SOFT, dash="4 3", radius=3)
            self.svg.text(x + CELL_W / 2, y + 12, f"{cell.first}–{cell.last}", 9, SOFT, "middle")
            for i, words in enumerate(told):
                self.svg.text(x + CELL_W / 2, y + 24 + 10 * i, words, 9, SOFT, "middle")

    def _block(self, group: Group, block: int, copied_from: list[int], x: float, y: float) -> None:
        svg = self.svg
        state, size = group.state[block], self.snapshot.block_size
        holders = group.holders.get(block, [])
        filled = max([min(max(group.filled[block], 0), size), *(h.filled for h in holders)])
        is_vacant = state == VACANT and not holders
        with svg.group(self._block_title(group, block, copied_from, holders, filled)):
            if is_vacant:
                svg.rect(x, y, CELL_W, CELL_H, "none", LINE, dash="4 3", radius=3)
            else:
                stroke = INK if holders or state == USED else SOFT
                svg.rect(x, y, CELL_W, CELL_H, PAPER, stroke, width=2.5 if len(holders) > 1 else 1, radius=3)
            svg.text(x + 5, y + 13, str(block), 11, SOFT if is_vacant else INK, bold=True)
            right = x + CELL_W - 5
            if block in group.pinned:
                self._pin(right - 4, y + 4)
                right -= 14
            if len(holders) > 1:
                svg.text(right, y + 13, f"×{len(holders)}", 11, INK, "end", bold=True)
            if copied_from:
                svg.text(x + 10 + 7 * len(str(block)), y + 13, f"←{copied_from[-1]}", 9, MARK)
            self._slots(holders, 0 if is_vacant else filled, x + 5, y + 19)
            if is_vacant:
                svg.text(x + 5, y + CELL_H - 6, "vacant", 9, SOFT)
                return
            names = [self.snapshot.sequences[h.sequence].name for h in holders]
            words = _few(names, 7) if names else ("held" if state == USED else "cached")
            svg.text(x + 5, y + CELL_H - 6, words, 9)
            svg.text(x + CELL_W - 5, y + CELL_H - 6, f"{filled}/{size}", 9, SOFT, "end")
            if self.decode is not None:
                self._slot_titles(holders, x + 5, y + 19)

    def _block_title(self, group: Group, block: int, copied_from: list[int], holders: list[Holder], filled: int) -> str:
        size, state = self.snapshot.block_size, group.state[block]
        if state == VACANT and not holders:
            return f"Block {block}: vacant"
        known = "cached" if state == PINNED else STATES[state]
        parts = [known + (", pinned" if block in group.pinned else ""), f"{filled} of {_count(size, 'slot')} filled"]
        if len(holders) > 1:
            parts.append(f"shared by {len(holders)}")
        for holder in holders[:MOST_STRIPES]:
            name = self.snapshot.sequences[holder.sequence].name
            last = holder.position + holder.filled - 1
            what = f"tokens {holder.position} to {last}" if holder.filled else "no token yet"
            parts.append(f"{shorten(name, 40)}: {what}")
        if len(holders) > MOST_STRIPES:
            parts.append(f"and {len(holders) - MOST_STRIPES} more")
        if not holders and group.refs[block] > 0:
            parts.append(_count(group.refs[block], "reference"))
        parts += [f"copied from block {source}" for source in copied_from[:MOST_STRIPES]]
        return f"Block {block}: " + "; ".join(parts)

    def _slots(self, holders: list[Holder], filled: int, x: float, y: float) -> None:
        """Boxes of one look are one element: a look is the colours of a slot's readers, from top to bottom."""
        looks: dict[tuple[int, ...] | None, list[int]] = {}
        for slot in range(self._num_slots()):
            start, _ = self._span(slot)
            readers = tuple(h.sequence for h in holders if h.filled > start)[:MOST_STRIPES]
            looks.setdefault(readers if readers else (() if filled > start else None), []).append(slot)
        for readers_or_none, slots in looks.items():
            corners = [(x + SLOT_PITCH * (slot % 8), y + 11 * (slot // 8)) for slot in slots]
            if readers_or_none:
                height = SLOT_H / len(readers_or_none)
                for i, reader in enumerate(readers_or_none):
                    boxes = [(left, top + height * i, SLOT_W, height) for left, top in corners]
                    self.svg.boxes(boxes, self.colors[reader])
            elif readers_or_none is not None:
                self.svg.boxes([(left, top, SLOT_W, SLOT_H) for left, top in corners], PALE)
                self.svg.strokes(_hatching(corners), HATCH)
            frame = LINE if readers_or_none is None else SOFT
            self.svg.boxes([(left, top, SLOT_W, SLOT_H) for left, top in corners], "none", frame)

    def _num_slots(self) -> int:
        return min(SLOTS, self.snapshot.block_size)

    def _span(self, slot: int) -> tuple[int, int]:
        """Of large blocks, a slot of the picture stands for several tokens."""
        size, slots = self.snapshot.block_size, self._num_slots()
        return slot * size // slots, (slot + 1) * size // slots

    def _slot_titles(self, holders: list[Holder], x: float, y: float) -> None:
        for slot in range(self._num_slots()):
            start, end = self._span(slot)
            for holder in holders:
                ids = self.snapshot.sequences[holder.sequence].token_ids
                first, last = holder.position + start, holder.position + min(end, holder.filled)
                if ids is not None and first < last <= len(ids):
                    which = f"token {first}" if last == first + 1 else f"tokens {first} to {last - 1}"
                    title = f"{which}: {self._text(ids[first:last])}"
                    left, top = x + SLOT_PITCH * (slot % 8), y + 11 * (slot // 8)
                    self.svg.rect(left, top, SLOT_W, SLOT_H, "transparent", title=title)
                    break

    def _text(self, ids: tuple[int, ...]) -> str:
        assert self.decode is not None
        try:
            words = self.decode(list(ids))
        except (LookupError, ValueError, OverflowError):  # an id that this tokenizer does not have
            words = ""
        if not isinstance(words, str):
            raise TypeError(f"tokenizer: expected decode(ids) to return a str, got {type(words).__name__}")
        few = " ".join(map(str, ids[:4])) + ("…" if len(ids) > 4 else "")
        return f"“{shorten(words, 40)}” ({few})" if words else f"({few})"

    def _pin(self, x: float, y: float) -> None:
        self.svg.path(f"M{x - 3} {y + 3}a3 3 0 1 1 6 0a3 3 0 1 1 -6 0z", fill=MARK)
        self.svg.path(f"M{x} {y + 6}v5", stroke=MARK, width=1.5)

    def _arrow(self, source: int, copy: int, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Over the cells of a row, or down (up) to another one."""
        x1, x2 = start[0] + CELL_W / 2, end[0] + CELL_W / 2
        if start[1] == end[1]:
            y1 = y2 = start[1]
            bend, head = f"{(x1 + x2) / 2:g} {y1 - 18:g}", -1
        else:
            down = start[1] < end[1]
            y1, y2 = (start[1] + CELL_H, end[1]) if down else (start[1], end[1] + CELL_H)
            bend, head = f"{x2:g} {(y1 + y2) / 2:g}", -1 if down else 1
        with self.svg.group(f"Block {copy} is a copy of block {source}"):
            self.svg.path(f"M{x1:g} {y1:g}Q{bend} {x2:g} {y2 + 3 * head:g}", stroke=MARK, width=1.5)
            self.svg.path(f"M{x2:g} {y2:g}l-4 {6 * head}h8z", fill=MARK)

    # The legend

    def _legend(self, y: float) -> float:
        svg = self.svg
        a, b = COLORS[0], COLORS[1]
        x: float = MARGIN
        for kind, words in (
            ("one", "a sequence's token"), ("two", "shared"), ("cached", "cached, read by none"),
            ("empty", "empty slot"), ("pin", "pinned"), ("copy", "copied from"), ("vacant", "vacant block"),
            ("gone", "returned (window)"),
        ):  # fmt: skip
            if kind == "one":
                svg.rect(x, y, 12, 12, a, SOFT)
            elif kind == "two":
                svg.boxes([(x, y, 12, 6)], a)
                svg.boxes([(x, y + 6, 12, 6)], b)
                svg.rect(x, y, 12, 12, "none", INK, width=2)
            elif kind == "cached":
                svg.rect(x, y, 12, 12, PALE, SOFT)
                svg.strokes([(x, y + 6, x + 6, y), (x, y + 12, x + 12, y), (x + 6, y + 12, x + 12, y + 6)], HATCH)
            elif kind == "pin":
                self._pin(x + 6, y)
            elif kind == "copy":
                svg.text(x, y + 10, "←", 12, MARK, bold=True)
            elif kind == "gone":
                svg.text(x - 2, y + 10, "n×", 11, SOFT)
            else:
                svg.rect(x, y, 12, 12, PAPER, LINE, dash="4 3" if kind == "vacant" else "")
            svg.text(x + 18, y + 10, words, 11, SOFT)
            x += 34 + 5.6 * len(words)
        return y + 14


def _colors(ids: list[int]) -> list[str]:
    """A colour for each sequence: by its id, so that it keeps it from picture to picture, unless that is taken."""
    chosen: dict[int, int] = {}
    free = set(range(len(COLORS)))
    for number in sorted(set(ids)):
        own = number % len(COLORS)
        color = own if own in free or not free else min(free, key=lambda c: (c - own) % len(COLORS))
        free.discard(color)
        chosen[number] = color
    return [COLORS[chosen[number]] for number in ids]


def _hatching(corners: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float, float, float]]:
    for x, y in corners:
        yield (x, y + SLOT_H / 2, x + SLOT_H / 2, y)
        yield (x, y + SLOT_H, x + SLOT_W, y + 1)
        yield (x + SLOT_W / 2, y + SLOT_H, x + SLOT_W, y + SLOT_H / 2)


def _table_entries(table: list[int], most: int) -> list[tuple[str, int]]:
    """("block", number), ("gone", how many were returned) or ("more", how many are left out)."""
    entries: list[tuple[str, int]] = []
    for is_gone, run in groupby(table, lambda block: block == GONE):
        blocks = list(run)
        entries += [("gone", len(blocks))] if is_gone else [("block", block) for block in blocks]
    if len(entries) > most:
        head = most // 2
        tail = most - head - 1
        left_out = sum(value if kind == "gone" else 1 for kind, value in entries[head : len(entries) - tail])
        entries = [*entries[:head], ("more", left_out), *entries[len(entries) - tail :]]
    return entries


def _table_words(table: list[int]) -> str:
    names = {"block": "{}", "gone": "{} returned", "more": "... {} more ..."}
    return ", ".join(names[kind].format(value) for kind, value in _table_entries(table, 24)) or "none"


def _few(names: list[str], most: int) -> str:
    """As many names as fit into so many characters, and how many others there are."""
    words = shorten(names[0], most)
    for i, name in enumerate(names[1:], 1):
        rest = f" +{len(names) - i}"
        longer = f"{words} {name}"
        if len(longer) + (len(rest) if i < len(names) - 1 else 0) > most:
            return words + rest
        words = longer
    return words


def _ranges(numbers: tuple[int, ...]) -> str:
    """0 to 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")
