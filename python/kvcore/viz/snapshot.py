"""What a snapshot says, checked: the blocks of each group, and the sequences with their tables.

    vacant   nobody holds it, nothing is in it
    used     in the table of one sequence or more
    cached   held by none, but a prompt may find it
    pinned   held by none, and kept until it is unpinned (one that is held, too, is used, and has pins)

The pool tells the state of a block; who holds it, and which of its tokens are whose, follows from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any

from kvcore.errors import InvalidArgument

VACANT, USED, CACHED, PINNED = range(4)
STATES = ("vacant", "used", "cached", "pinned")

GONE = -1
"""Stands in a block table where a window's block was returned to the pool."""


@dataclass(frozen=True)
class Holder:
    """A sequence that has a block in its table."""

    sequence: int
    """Its place in ``Snapshot.sequences``."""

    position: int
    """Position of the block's first token in the sequence."""

    filled: int
    """Tokens of the block that are the sequence's: computed ones, so none while they are planned only."""


@dataclass(frozen=True)
class Sequence:
    """A live sequence."""

    name: str
    id: int
    num_tokens: int
    num_computed: int
    num_cached: int
    token_ids: tuple[int, ...] | None


@dataclass
class Group:
    """The block pool of some layers, and the tables of all sequences in it."""

    index: int
    kind: str
    layers: tuple[int, ...]
    window: int | None
    refs: list[int]
    filled: list[int]
    state: list[int]
    pinned: set[int]
    """Blocks with a pin on them, held or not."""
    tables: list[list[int]]
    """Of each sequence; ``GONE`` where a block was returned."""
    copies: list[tuple[int, int]]
    holders: dict[int, list[Holder]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self.state)


@dataclass
class Snapshot:
    """A cache at one moment."""

    block_size: int
    groups: list[Group]
    sequences: list[Sequence]


def read_snapshot(source: Any) -> Snapshot:
    """A cache's snapshot, or one that was taken before, checked.

    Raises:
        TypeError: neither a cache nor a mapping. InvalidArgument: a snapshot that is not one.
    """
    take = getattr(source, "snapshot", None)
    data = take() if callable(take) else source
    if not isinstance(data, Mapping):
        raise TypeError(f"expected a KVCache or its snapshot(), a dict, got {type(source).__name__}")
    block_size = _integer(data, "block_size", "the snapshot", least=1)
    group_data = [_mapping(g, f"groups[{i}]") for i, g in enumerate(_sequence(data, "groups", "the snapshot"))]
    entries = [_mapping(s, f"sequences[{i}]") for i, s in enumerate(_sequence(data, "sequences", "the snapshot"))]
    sequences = [_read_sequence(entry, i) for i, entry in enumerate(entries)]
    copies = _read_copies(data.get("copies") or (), len(group_data))
    kinds = [str(g.get("kind", "full")) for g in group_data]
    tables = [_read_tables(entry, f"sequences[{i}]", kinds) for i, entry in enumerate(entries)]
    groups = []
    for index, (entry, kind) in enumerate(zip(group_data, kinds, strict=True)):
        group = _read_group(entry, index, kind, [t[index] for t in tables], copies[index])
        _find_holders(group, block_size, sequences, entries)
        groups.append(group)
    return Snapshot(block_size, groups, sequences)


def _read_group(
    entry: Mapping[str, Any], index: int, kind: str, tables: list[list[int]], copies: list[tuple[int, int]]
) -> Group:
    where = f"groups[{index}]"
    layers = tuple(_integers(entry.get("layers", ()), f"{where}['layers']"))
    window = entry.get("window")
    if window is not None:
        window = _integer(entry, "window", where, least=1)
    if kind == "none":  # layers without a cache: no pool
        return Group(index, kind, layers, window, [], [], [], set(), [], [])
    refs, filled, state = (
        _integers(_get(entry, key, where), f"{where}[{key!r}]") for key in ("refs", "filled", "state")
    )
    num_blocks = _integer(entry, "num_blocks", where, least=0)
    pins = [0] * num_blocks if entry.get("pins") is None else _integers(entry["pins"], f"{where}['pins']")
    for key, values in (("refs", refs), ("filled", filled), ("state", state), ("pins", pins)):
        if len(values) != num_blocks:
            raise InvalidArgument(
                f"{where}[{key!r}]: expected {num_blocks} values, one for each block, got {len(values)}"
            )
    pinned = {block for block, value in enumerate(state) if value == PINNED or pins[block]}
    for odd in sorted(set(state) - {VACANT, USED, CACHED, PINNED})[:1]:
        raise InvalidArgument(f"{where}['state']: expected 0 (vacant), 1 (used), 2 (cached) or 3 (pinned), got {odd}")
    for i, table in enumerate(tables):
        for block in table:
            _check_block(block, num_blocks, f"sequences[{i}]: a block of group {index}", least=GONE)
    for pair in copies:
        for block in pair:
            _check_block(block, num_blocks, f"copies: a block of group {index}", least=0)
    return Group(index, kind, layers, window, refs, filled, state, pinned, tables, copies)


def _find_holders(group: Group, block_size: int, sequences: list[Sequence], entries: list[Mapping[str, Any]]) -> None:
    for i, table in enumerate(group.tables):
        stored = sequences[i].num_computed
        if group.kind == "cross":  # the tokens of the encoder; where it is not told, the pool knows how full a block is
            told = entries[i].get("cross_tokens")
            stored = (
                len(table) * block_size if told is None else _integer(entries[i], "cross_tokens", f"sequences[{i}]")
            )
        for place, block in enumerate(table):
            if block != GONE:
                position = place * block_size
                filled = max(0, min(stored - position, block_size))
                if group.kind == "cross":
                    filled = min(filled, max(0, group.filled[block]))
                group.holders.setdefault(block, []).append(Holder(i, position, filled))


def _read_sequence(entry: Mapping[str, Any], i: int) -> Sequence:
    where = f"sequences[{i}]"
    number = _integer(entry, "id", where)
    name = entry.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"{where}['name']: expected a str, got {type(name).__name__}")
    token_ids = entry.get("token_ids")
    return Sequence(
        name=name or f"s{number}",
        id=number,
        num_tokens=_integer(entry, "num_tokens", where, least=0),
        num_computed=_integer(entry, "num_computed", where, least=0),
        num_cached=_integer(entry, "num_cached", where, least=0),
        token_ids=None if token_ids is None else tuple(_integers(token_ids, f"{where}['token_ids']")),
    )


def _read_tables(entry: Mapping[str, Any], where: str, kinds: list[str]) -> list[list[int]]:
    """A table for each group. Groups without a pool need none, and a cross group's may stand in "cross"."""
    given = [_integers(t, f"{where}['tables']") for t in _sequence(entry, "tables", where)]
    cross = _integers(entry.get("cross") or (), f"{where}['cross']")
    paged = [i for i, kind in enumerate(kinds) if kind not in ("cross", "none")]
    if len(given) == len(paged):
        places = paged
    elif len(given) == len(kinds):
        places = list(range(len(kinds)))
    else:
        raise InvalidArgument(f"{where}['tables']: expected {len(kinds)}, one for each group, got {len(given)}")
    tables: list[list[int]] = [[] for _ in kinds]
    for place, table in zip(places, given, strict=True):
        tables[place] = table
    for i, kind in enumerate(kinds):
        if kind == "cross" and not tables[i]:
            tables[i] = cross
    return tables


def _read_copies(entries: Any, num_groups: int) -> list[list[tuple[int, int]]]:
    copies: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
    for entry in _as_list(entries, "copies"):
        values = _integers(entry, "copies")
        if len(values) != 3 or not 0 <= values[0] < num_groups:
            raise InvalidArgument(
                f"copies: expected (group, from, to) with a group below {num_groups}, got {tuple(values)}"
            )
        pair = (values[1], values[2])
        if pair not in copies[values[0]]:
            copies[values[0]].append(pair)
    return copies


# -- values of the right kind -----------------------------------------------------------------------------------------


def _get(data: Mapping[str, Any], key: str, where: str) -> Any:
    try:
        return data[key]
    except KeyError:
        raise InvalidArgument(f"{where}: expected a key {key!r}, got {sorted(map(str, data))}") from None


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where}: expected a dict, got {type(value).__name__}")
    return value


def _sequence(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    return _as_list(_get(data, key, where), f"{where}[{key!r}]")


def _as_list(value: Any, where: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value  # arrays, without knowing numpy
    if not isinstance(value, SequenceABC) or isinstance(value, (str, bytes)):
        raise InvalidArgument(f"{where}: expected a list, got {type(value).__name__}")
    return list(value)


def _integers(value: Any, where: str) -> list[int]:
    values = _as_list(value, where)
    if set(map(type, values)) - {int}:
        values = [_as_int(v, where) for v in values]
    return values


def _integer(data: Mapping[str, Any], key: str, where: str, least: int | None = None) -> int:
    value = _as_int(_get(data, key, where), f"{where}[{key!r}]")
    if least is not None and value < least:
        raise InvalidArgument(f"{where}[{key!r}]: expected at least {least}, got {value}")
    return value


def _as_int(value: Any, where: str) -> int:
    try:
        if not isinstance(value, bool):
            return int(value.__index__())
    except (AttributeError, TypeError):
        pass
    raise InvalidArgument(f"{where}: expected an integer, got {type(value).__name__}")


def _check_block(block: int, num_blocks: int, where: str, least: int) -> None:
    if not least <= block < num_blocks:
        raise InvalidArgument(f"{where}: expected {least} to {num_blocks - 1}, got {block}")
