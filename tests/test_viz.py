"""kvcore.viz: the picture says what the snapshot says, whatever the snapshot, and stays small."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InvalidArgument
from kvcore.viz import BlockMap, block_map
from kvcore.viz.block_map import LONGEST_RUN, cells_of

DATA = Path(__file__).parent / "data" / "viz"
SVG = "{http://www.w3.org/2000/svg}"

SMALL: dict[str, Any] = json.loads((DATA / "small.json").read_text(encoding="utf-8"))
"""Four sequences (one borrows a part of a block), a window, a cross group, a copy, pins, a vacant run."""


def parse(picture: BlockMap) -> ET.Element:
    root = ET.fromstring(picture.svg)
    assert root.tag == SVG + "svg"
    return root


def titles(picture: BlockMap) -> list[str]:
    return [element.text or "" for element in parse(picture).iter(SVG + "title")]


def words(picture: BlockMap) -> list[str]:
    return [element.text or "" for element in parse(picture).iter(SVG + "text")]


def pool(state: list[int], **changes: Any) -> dict[str, Any]:
    """A snapshot of one full group without sequences."""
    group = {"kind": "full", "layers": [0], "num_blocks": len(state), "window": None}
    group |= {"refs": [0] * len(state), "filled": [16 if s else 0 for s in state], "state": state}
    return {"block_size": 16, "groups": [group | changes], "sequences": []}


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    """The small snapshot with one value replaced."""
    snapshot = copy.deepcopy(SMALL)
    place: Any = snapshot
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return snapshot


def test_the_small_picture_is_as_it_was() -> None:
    """After a change on purpose: python tests/test_viz.py."""
    assert block_map(SMALL).svg == (DATA / "small.svg").read_text(encoding="utf-8")


def test_every_block_sequence_and_state_is_there() -> None:
    told = titles(block_map(SMALL))
    by_group: list[list[str]] = [[], [], []]
    group = -1
    for title in told:
        if title.startswith("Block 0:"):
            group += 1
        if re.match(r"Blocks? \d+(?: to \d+)?:", title):
            by_group[group].append(title)
    full, window, cross = by_group
    assert full == [
        "Block 0: used; 16 of 16 slots filled; shared by 3; s1: tokens 0 to 15; s2: tokens 0 to 15; s3: tokens 0 to 15",
        "Block 1: used, pinned; 16 of 16 slots filled; s1: tokens 16 to 31",
        "Block 2: used; 8 of 16 slots filled; s1: tokens 32 to 39",
        "Block 3: used; 5 of 16 slots filled; shared by 2; s2: tokens 16 to 20; s3: tokens 16 to 18; "
        "copied from block 1",
        "Block 4: cached; 16 of 16 slots filled",
        "Block 5: cached, pinned; 12 of 16 slots filled",
        "Block 6: used; 0 of 16 slots filled; s9: no token yet",
        "Blocks 7 to 47: 41 vacant",
    ]
    assert window[:4] == [
        "Block 0: used; 16 of 16 slots filled; s1: tokens 16 to 31",
        "Block 1: used; 8 of 16 slots filled; s1: tokens 32 to 39",
        "Block 2: vacant",
        "Block 3: used; 16 of 16 slots filled; shared by 2; s2: tokens 0 to 15; s3: tokens 0 to 15",
    ]
    assert cross[0] == "Block 0: used; 10 of 16 slots filled; shared by 2; s1: tokens 0 to 9; s2: tokens 0 to 9"
    for name, tokens in (
        ("s1", "40 tokens"),
        ("s2", "21 tokens, 20 found"),
        ("s3", "20 tokens, 1 to compute, 19 found"),
        ("s9", "3 tokens, 3 to compute"),
    ):
        assert sum(title.startswith(f"Sequence {name}: {tokens}. Blocks:") for title in told) == 3
    assert "Sequence s1: 40 tokens. Blocks: 1 returned, 0, 1" in told
    assert "Block 3 is a copy of block 1" in told
    texts = words(block_map(SMALL))
    for shown in ("s1", "s2", "s9", "×3", "×2", "←1", "cached", "vacant", "41 vacant", "7–47", "no storage"):
        assert shown in texts, shown
    description = parse(block_map(SMALL)).find(SVG + "desc")
    assert description is not None
    assert "Group 0: full, layers 0, 2: 48 blocks: 5 used, 2 cached, 41 vacant; 2 shared, 2 pinned" in (
        description.text or ""
    )


def fills(element: ET.Element) -> set[str]:
    return {part.get("fill", "") for part in element.iter()} - {"none", ""}


def test_shared_slots_have_the_colours_of_all_readers() -> None:
    root = parse(block_map(SMALL, group=0))
    groups = {(g.find(SVG + "title").text or ""): g for g in root.iter(SVG + "g")}  # type: ignore[union-attr]
    chips = {title.split(":")[0].removeprefix("Sequence "): g.find(SVG + "rect") for title, g in groups.items()
             if title.startswith("Sequence")}  # fmt: skip
    color = {name: chip.get("fill", "") for name, chip in chips.items() if chip is not None}
    assert len(set(color.values())) == 4
    blocks = {title.split(":")[0]: fills(g) for title, g in groups.items() if title.startswith("Block")}
    assert blocks["Block 0"] >= {color["s1"], color["s2"], color["s3"]}
    assert blocks["Block 2"] & set(color.values()) == {color["s1"]}
    assert blocks["Block 3"] & set(color.values()) == {color["s2"], color["s3"]}
    assert not blocks["Block 4"] & set(color.values())


def test_one_group_only() -> None:
    texts = words(block_map(SMALL, group=1))
    assert any(text.startswith("Group 1: sliding window of 32") for text in texts)
    assert not any(text.startswith("Group 0") for text in texts)


def test_numpy_arrays_and_lists_are_the_same() -> None:
    snapshot = copy.deepcopy(SMALL)
    for group in snapshot["groups"]:
        if group["kind"] != "none":
            for key, dtype in (("refs", np.int32), ("filled", np.int32), ("state", np.uint8)):
                group[key] = np.array(group[key], dtype)
    for sequence in snapshot["sequences"]:
        sequence["tables"] = [np.array(table, np.int32) for table in sequence["tables"]]
    assert block_map(snapshot).svg == block_map(SMALL).svg


def test_a_cache_is_asked_for_its_snapshot() -> None:
    class Cache:
        def snapshot(self) -> dict[str, Any]:
            return SMALL

    assert block_map(Cache()).svg == block_map(SMALL).svg


def test_a_notebook_shows_it_and_save_writes_it(tmp_path: Path) -> None:
    picture = block_map(SMALL)
    assert picture._repr_svg_() == picture.svg
    assert picture.svg in picture._repr_html_()
    assert len(repr(picture)) < 100
    picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == picture.svg
    for name in ("a.png", "a", "a.svg.gz", ".svg"):
        with pytest.raises(InvalidArgument, match=r"path: expected a name that ends with \.svg, got"):
            picture.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_several_in_one_page_do_not_touch_each_other() -> None:
    """No ids, no style sheets, no scripts, nothing from elsewhere."""
    for element in parse(block_map(SMALL)).iter():
        assert not {"id", "class", "style", "href"} & set(element.attrib)
        assert element.tag.removeprefix(SVG) in {"svg", "title", "desc", "g", "rect", "path", "text"}


HOSTILE = ["</title><script>alert(1)</script>", "\x00\x1b[0m\ud800\ufffe", '" onload="x', "]]>&amp;", "\u202e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_tokens_and_names_is_only_text(text: str) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return text

    snapshot = changed(["sequences", 0, "name"], text)
    snapshot["groups"][0]["kind"] = text
    snapshot["sequences"][0]["token_ids"] = list(range(40))
    picture = block_map(snapshot, tokenizer=Tokenizer())
    assert picture.svg.encode("utf-8")
    for element in parse(picture).iter():
        assert element.tag.removeprefix(SVG) in {"svg", "title", "desc", "g", "rect", "path", "text"}
        assert not [key for key in element.attrib if key.startswith("on")]
    assert "<script" not in picture.svg
    assert sum("token 3:" in title for title in titles(picture)) >= 1


def test_a_tokenizer_shows_the_text_of_each_slot() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            (number,) = ids
            if number == 7:
                raise InvalidArgument("no such token")
            return f" word{number}"

    snapshot = changed(["sequences", 0, "token_ids"], np.arange(40))
    told = titles(block_map(snapshot, group=0, tokenizer=Tokenizer()))
    assert [title for title in told if title.startswith("token ")] == [
        f"token {i}: “ word{i}” ({i})" if i != 7 else "token 7: (7)" for i in range(40)
    ]


def test_a_long_run_is_one_cell() -> None:
    few = [1, *[0] * LONGEST_RUN, 1]
    many = [1, *[0] * (LONGEST_RUN + 1), 1]
    assert len(cells_of(few, 256)[0]) == len(few)
    assert [(c.first, c.last) for c in cells_of(many, 256)[0]] == [(0, 0), (1, len(many) - 2), (len(many) - 1,) * 2]


@given(state=st.lists(st.integers(0, 3), max_size=300), most=st.integers(1, 40))
def test_cells_cover_the_pool(state: list[int], most: int) -> None:
    cells, alone = cells_of(state, most)
    assert len(cells) <= most
    assert [block for cell in cells for block in range(cell.first, cell.last + 1)] == list(range(len(state)))
    assert alone == sum(cell.first == cell.last and not cell.counts for cell in cells)
    for cell in cells:
        inside = state[cell.first : cell.last + 1]
        assert not cell.counts or dict(cell.counts) == {value: inside.count(value) for value in set(inside)}


@pytest.mark.parametrize("kind", ["vacant", "all used", "all cached", "alternating"])
def test_a_huge_pool_gives_a_small_picture(kind: str) -> None:
    n = 50_000
    state = {"vacant": [0] * n, "all used": [1] * n, "all cached": [2] * n, "alternating": [1, 0] * (n // 2)}[kind]
    snapshot = pool(state)
    snapshot["sequences"] = [
        {"id": i, "num_tokens": 16 * n, "num_computed": 16 * n, "num_cached": 0, "cross": [],
         "tables": [list(range(i, n, 100))]}
        for i in range(100)
    ]  # fmt: skip
    picture = block_map(snapshot)
    assert len(picture.svg) < 400_000
    text = " ".join(titles(picture))
    assert {"vacant": f"Blocks 0 to {n - 1}" if kind == "vacant" else "", "all used": f"{n - 255:,} used"}.get(
        kind, ""
    ) in text
    assert "and 60 sequences more" in words(picture)


def test_a_snapshot_without_anything() -> None:
    assert "no sequences" in words(block_map(pool([])))
    assert "no groups" in words(block_map({"block_size": 16, "groups": [], "sequences": []}))


@st.composite
def snapshots(draw: st.DrawFn) -> dict[str, Any]:
    """Anything that has the form of a snapshot, also what no cache would ever say."""
    size = draw(st.sampled_from([1, 5, 16, 48, 1024]))
    kinds = draw(st.lists(st.sampled_from(["full", "sliding_window", "latent", "cross", "none"]), max_size=4))
    groups: list[dict[str, Any]] = []
    for kind in kinds:
        n = draw(st.integers(0, 40))
        numbers = st.lists(st.integers(-1, 2000), min_size=n, max_size=n)
        groups.append({
            "kind": kind, "layers": draw(st.lists(st.integers(0, 99), max_size=5)), "num_blocks": n,
            "window": draw(st.sampled_from([None, 32])), "refs": draw(numbers), "filled": draw(numbers),
            "state": draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
        })  # fmt: skip
    counts = st.integers(0, 2000)

    def table(group: dict[str, Any]) -> list[int]:
        return draw(st.lists(st.integers(-1, group["num_blocks"] - 1), max_size=60))

    sequences = []
    for _ in range(draw(st.integers(0, 6))):
        sequences.append({
            "id": draw(st.integers(0, 2**64)), "num_tokens": draw(counts), "num_computed": draw(counts),
            "num_cached": draw(counts), "tables": [table(g) for g in groups], "cross": [],
            "token_ids": draw(st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=80)),
            "name": draw(st.none() | st.text(max_size=20)),
        })  # fmt: skip
    pools = [i for i, g in enumerate(groups) if g["num_blocks"] and g["kind"] != "none"]
    copies = []
    if pools:
        for _ in range(draw(st.integers(0, 5))):
            i = draw(st.sampled_from(pools))
            block = st.integers(0, groups[i]["num_blocks"] - 1)
            copies.append([i, draw(block), draw(block)])
    return {"block_size": size, "groups": groups, "sequences": sequences, "copies": copies}


class Words:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i % 0x110000) for i in ids)


@given(snapshot=snapshots(), most=st.integers(1, 50), with_text=st.booleans())
def test_any_snapshot_gives_a_picture(snapshot: dict[str, Any], most: int, with_text: bool) -> None:
    picture = block_map(snapshot, tokenizer=Words() if with_text else None, max_blocks=most)
    parse(picture)
    assert picture.svg == block_map(copy.deepcopy(snapshot), tokenizer=Words() if with_text else None,
                                    max_blocks=most).svg  # fmt: skip
    panels = len(snapshot["groups"])
    assert len(picture.svg) < 8_000 + panels * (6 * 8_000 + most * (9_000 if with_text else 3_000))


# Errors


@pytest.mark.parametrize("other", [None, 3, "snapshot", [SMALL], object()])
def test_what_is_no_cache(other: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a KVCache or its snapshot\(\).*got"):
        block_map(other)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["block_size"], 0, "block_size.*at least 1, got 0"),
        (["block_size"], 1.5, "block_size.*an integer, got float"),
        (["block_size"], True, "block_size.*an integer, got bool"),
        (["groups"], 3, "groups.*a list, got int"),
        (["groups", 0], 3, "groups.0.*a dict, got int"),
        (["groups", 0, "refs"], [1], "refs.*48 values.*got 1"),
        (["groups", 0, "state"], [9] * 48, r"state.*got 9"),
        (["groups", 0, "state"], "x" * 48, "state.*a list, got str"),
        (["groups", 0, "filled"], [None] * 48, "filled.*an integer, got NoneType"),
        (["groups", 0, "pins"], 1, "pins.*a list, got int"),
        (["groups", 0, "pins"], [1], "pins.*48 values.*got 1"),
        (["groups", 0, "window"], 0, "window.*at least 1, got 0"),
        (["sequences", 0], [], "sequences.0.*a dict, got list"),
        (["sequences", 0, "num_tokens"], -1, "num_tokens.*at least 0, got -1"),
        (["sequences", 0, "tables"], [[0]], "tables.*4, one for each group, got 1"),
        (["sequences", 0, "tables", 0], [48], "group 0.*-1 to 47, got 48"),
        (["sequences", 0, "tables", 0], [-2], "group 0.*-1 to 47, got -2"),
        (["sequences", 0, "name"], 5, "name.*a str, got int"),
        (["copies"], [[7, 0, 1]], "copies.*below 4"),
        (["copies"], [[0, 0]], "copies"),
        (["copies"], [[0, 0, 48]], "copies.*0 to 47, got 48"),
        (["copies"], [[0, -1, 4]], "copies.*0 to 47, got -1"),
    ],
)
def test_what_is_no_snapshot(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        block_map(changed(path, value))


@pytest.mark.parametrize("key", ["block_size", "groups", "sequences"])
def test_what_a_snapshot_must_have(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"expected a key '{key}'"):
        block_map({name: value for name, value in SMALL.items() if name != key})


@pytest.mark.parametrize("group", [-1, 4, 99])
def test_a_group_that_is_not_there(group: int) -> None:
    with pytest.raises(InvalidArgument, match=f"group: expected 0 to 3, got {group}"):
        block_map(SMALL, group=group)


def test_other_arguments_that_make_no_sense() -> None:
    with pytest.raises(InvalidArgument, match="max_blocks: expected at least 1, got 0"):
        block_map(SMALL, max_blocks=0)
    for options in ({"max_blocks": 2.5}, {"max_blocks": True}, {"group": "0"}, {"tokenizer": 3}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}: expected"):
            block_map(SMALL, **options)  # type: ignore[arg-type]


def test_importing_kvcore_does_not_load_it() -> None:
    code = "import kvcore, sys; assert 'kvcore.viz' not in sys.modules; print(kvcore.viz.block_map.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "block_map\n"


if __name__ == "__main__":
    block_map(SMALL).save(DATA / "small.svg")
