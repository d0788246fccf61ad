"""The experiment of docs/utilisation.md: allocators against naive ones, sums, and what the article expects."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import chart  # noqa: E402
import utilisation  # noqa: E402
from allocators import Allocator, Buddy, FirstFit, Span  # noqa: E402
from lengths import WORKLOADS, Request, Workload  # noqa: E402
from memories import Paged, Reserved, Running  # noqa: E402
from replay import Result, TooFewRequestsError, replay  # noqa: E402

SHARES = ("tokens", "reserved", "internal", "external", "cached", "tail")
SERVER = utilisation.Server(slots=16_384, block_size=16, max_length=2048, headroom=0.0)

# -- allocators -------------------------------------------------------------------------------------------------------


class Slots:
    """The naive model: who has each slot."""

    def __init__(self, total: int) -> None:
        self.owners: list[int | None] = [None] * total

    def holes(self) -> list[Span]:
        """Maximal free runs."""
        runs, start = [], None
        for i, owner in enumerate([*self.owners, -1]):
            if owner is None and start is None:
                start = i
            elif owner is not None and start is not None:
                runs.append(Span(start, i - start))
                start = None
        return runs

    def set(self, span: Span, owner: int | None) -> None:
        self.owners[span.start : sum(span)] = [owner] * span.size

    def pieces(self, total: int) -> list[Span]:
        """Of a buddy allocator: the largest aligned pieces that are wholly free."""
        found, start = [], 0
        while start < total:
            for size in (1 << k for k in reversed(range(total.bit_length()))):
                if start % size == 0 and self.owners[start : start + size] == [None] * size:
                    found.append(Span(start, size))
                    break
            else:
                size = 1
            start += size
        return found


STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 10**6)), max_size=60)
"""(allocate, size, which of those that are there to free)"""


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
@given(total=st.integers(1, 100), steps=STEPS)
def test_allocator_agrees_with_a_list_of_slots(
    kind: type[FirstFit] | type[Buddy], total: int, steps: list[tuple[bool, int, int]]
) -> None:
    allocator: Allocator = kind(total)
    slots, live = Slots(total), list[Span]()
    for number, (allocate, size, which) in enumerate(steps):
        before = slots.holes() if kind is FirstFit else slots.pieces(total)
        if allocate:
            want = size if kind is FirstFit else 1 << (size - 1).bit_length()
            span = allocator.allocate(size)
            fitting = [hole for hole in before if hole.size >= want]
            if kind is Buddy:
                fitting.sort(key=lambda hole: (hole.size, hole.start))
            assert span == (Span(fitting[0].start, want) if fitting else None)
            if span is not None:
                assert slots.owners[span.start : sum(span)] == [None] * span.size, "overlap"
                slots.set(span, number)
                live.append(span)
        elif live:
            span = live.pop(which % len(live))
            allocator.free(span)
            slots.set(span, None)
        assert allocator.holes() == (slots.holes() if kind is FirstFit else slots.pieces(total))
        assert allocator.allocated == sum(owner is not None for owner in slots.owners)
    for span in live:
        allocator.free(span)
    assert allocator.allocated == 0
    assert allocator.holes() == kind(total).holes(), "not all pieces have melted"


def test_buddy_splits_and_melts() -> None:
    buddy = Buddy(16)
    first, second = buddy.allocate(3), buddy.allocate(2)
    assert (first, second) == (Span(0, 4), Span(4, 2))
    assert buddy.holes() == [Span(6, 2), Span(8, 8)]
    assert buddy.allocate(9) is None
    assert first
    assert second
    buddy.free(first)
    assert buddy.holes() == [Span(0, 4), Span(6, 2), Span(8, 8)]
    buddy.free(second)
    assert buddy.holes() == [Span(0, 16)]


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
def test_allocators_refuse_what_makes_no_sense(kind: type[FirstFit] | type[Buddy]) -> None:
    with pytest.raises(ValueError, match="total: expected at least 1"):
        kind(0)
    allocator = kind(8)
    with pytest.raises(ValueError, match="size: expected at least 1"):
        allocator.allocate(0)
    span = allocator.allocate(8)
    assert span == Span(0, 8)
    for wrong in (Span(0, 4), Span(4, 4)):
        with pytest.raises(ValueError, match="that is given away"):
            allocator.free(wrong)
    allocator.free(span)
    with pytest.raises(ValueError, match="that is given away"):
        allocator.free(span)


# -- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_seeded_and_fit(name: str) -> None:
    workload = WORKLOADS[name](3, 2048, 200)
    assert workload == WORKLOADS[name](3, 2048, 200)
    assert workload != WORKLOADS[name](4, 2048, 200)
    assert len(workload.conversations) == 200
    assert all(r.prompt > 0 and r.reply > 0 and r.total <= 2048 for r in workload.requests)
    for turns in workload.conversations:
        assert len({r.conversation for r in turns}) == 1
        assert all(a.total < b.prompt for a, b in pairwise(turns)), "a turn has its history in front"


def test_alpacas_means() -> None:
    requests = WORKLOADS["alpaca"](0, 2048, 20_000).requests
    assert sum(r.prompt for r in requests) / len(requests) == pytest.approx(19.3, rel=0.02)
    assert sum(r.reply for r in requests) / len(requests) == pytest.approx(58.5, rel=0.02)


# -- memories and the replay ------------------------------------------------------------------------------------------


def test_usage_of_a_reservation() -> None:
    memory = Reserved(Buddy(64), lambda request: request.total)
    running = Running(Request(0, 10, 8), 10)
    assert memory.start(running)
    memory.grow([running])
    assert memory.usage() == (11, 7, 14, 0, 32)
    assert memory.would_fit_joined(Running(Request(1, 20, 12), 20))
    assert not memory.start(Running(Request(1, 20, 20), 20))
    memory.end(running)
    assert memory.usage() == (0, 0, 0, 0, 64)
    with pytest.raises(ValueError, match="reservation of at least 18"):
        Reserved(FirstFit(64), lambda _: 17).start(running)


def test_usage_of_pages() -> None:
    memory = Paged(64, 16, sharing=False)
    first, second = Running(Request(0, 10, 4), 10), Running(Request(1, 30, 40), 30)
    assert memory.start(first)
    assert memory.start(second)
    assert memory.usage() == (40, 4 + 2, 2, 0, 16)
    assert not memory.start(Running(Request(2, 17, 1), 17))
    assert memory.grow([first, second]) == []
    assert memory.usage() == (42, 3 + 1, 2, 0, 16)
    for _ in range(17):
        assert memory.grow([second]) == []
    assert memory.usage()[-1] == 0
    fourth = Running(Request(0, 16, 10), 16)
    memory.end(first)
    assert memory.start(fourth)
    assert memory.grow([second, fourth]) == [fourth], "the youngest gives way"
    assert (fourth.stored, second.stored) == (16, 49)


def test_pages_are_shared() -> None:
    memory = Paged(96, 16, sharing=True)
    first, second = Running(Request(0, 33, 4), 33), Running(Request(0, 40, 4), 40)
    assert memory.start(first)
    assert memory.start(second)
    usage = memory.usage()
    assert memory.found() >= 32
    assert usage.tokens == 33 + 40 - 32, "what both have is held once, and a part of a block by each"
    assert sum(usage) == 96


def test_headroom_is_kept_beside_others_only() -> None:
    memory = Paged(64, 16, sharing=False, headroom=0.5)
    assert memory.start(Running(Request(0, 40, 1), 40))
    assert not memory.start(Running(Request(1, 1, 1), 1))
    with pytest.raises(ValueError, match="multiple of the block size"):
        Paged(65, 16, sharing=False)


def test_first_come_first_served_and_who_was_preempted_is_next() -> None:
    order: list[int] = []
    lost: list[Running] = []

    class Recorded(Paged):
        def start(self, running: Running) -> bool:
            started = super().start(running)
            if started:
                order.append(running.request.conversation)
                assert not lost or running is min(lost, key=lambda r: r.request.conversation)
                if lost:
                    lost.remove(running)
            return started

        def grow(self, batch: list[Running]) -> list[Running]:
            preempted = super().grow(batch)
            lost.extend(preempted)
            return preempted

    requests = [[Request(i, 15 + i % 2, 20)] for i in range(30)]
    result = replay(Workload("w", "w", requests), Recorded(64, 16, sharing=False))
    assert list(dict.fromkeys(order)) == list(range(30))
    assert result.preempted == len(order) - 30 > 0
    assert not lost


def test_chained_turns_wait_for_the_reply() -> None:
    turns = [[Request(i, 20, 10), Request(i, 40, 10)] for i in range(40)]
    running: set[int] = set()

    class Watched(Reserved):
        def start(self, item: Running) -> bool:
            started = super().start(item)
            assert not started or item.request.conversation not in running
            if started:
                running.add(item.request.conversation)
            return started

        def end(self, item: Running) -> None:
            super().end(item)
            running.remove(item.request.conversation)

    result = replay(Workload("w", "w", turns, chained=True), Watched(FirstFit(256), lambda r: r.total))
    assert result.requests == 80
    assert not running


def test_replay_refuses_what_it_cannot_measure() -> None:
    few = Workload("few", "few", [[Request(0, 5, 5)]])
    with pytest.raises(TooFewRequestsError, match="few: expected enough requests"):
        replay(few, Reserved(FirstFit(64), lambda r: r.total))
    with pytest.raises(ValueError, match="at most 8 tokens, the memory's slots, got 10"):
        replay(few, Reserved(FirstFit(8), lambda r: r.total))
    with pytest.raises(ValueError, match="does not fit in the empty memory"):
        replay(few, Reserved(FirstFit(64), lambda _: 65))


# -- the experiment ---------------------------------------------------------------------------------------------------


def quick(seed: int, *names: str) -> utilisation.Results:
    workloads = [WORKLOADS[name](seed, SERVER.max_length, utilisation.QUICK[name]) for name in names]
    return utilisation.measure(workloads, SERVER)


@pytest.fixture(scope="module")
def results() -> utilisation.Results:
    return quick(0, "sharegpt", "alpaca", "turns")


def test_shares_add_up(results: utilisation.Results) -> None:
    for by_way in results.values():
        for result in by_way.values():
            assert sum(getattr(result, share) for share in SHARES) == pytest.approx(1)
            assert min(getattr(result, share) for share in SHARES) >= 0


def test_what_the_article_says_holds(results: utilisation.Results) -> None:
    by_way = results["sharegpt"]
    assert 0.1 < by_way["max"].tokens < 0.45
    assert by_way["max"].tokens < by_way["pow2-reply"].tokens < by_way["pow2"].tokens < by_way["oracle"].tokens < 0.6
    assert by_way["paged"].of_allocated >= 0.96
    assert by_way["paged"].tokens >= 0.95
    assert by_way["paged"].running > 4 * by_way["max"].running
    assert by_way["paged"].running > 2 * by_way["pow2"].running
    assert by_way["max"].running == SERVER.slots / SERVER.max_length
    for result in (result for way, result in by_way.items() if way != "paged"):
        assert result.preempted == result.cached == 0


def test_short_requests_leave_half_a_block_each(results: utilisation.Results) -> None:
    """Why Alpaca's lengths do not reach 96% with blocks of 16."""
    paged = results["alpaca"]["paged"]
    opened = (paged.reserved + paged.internal) * SERVER.slots / paged.running
    assert opened == pytest.approx(7.5, abs=0.3)
    assert 0.88 < paged.of_allocated < 0.96


def test_sharing_makes_room(results: utilisation.Results) -> None:
    paged, shared = results["turns"]["paged"], results["turns"]["shared"]
    assert shared.running > 1.2 * paged.running
    assert shared.context > 1 > paged.context
    assert paged.found == 0 < shared.found
    assert "shared" not in results["sharegpt"]


def test_equal_seeds_give_equal_results(results: utilisation.Results) -> None:
    assert quick(0, "sharegpt") == {"sharegpt": results["sharegpt"]}
    assert quick(1, "sharegpt") != {"sharegpt": results["sharegpt"]}


# -- the command and the page -----------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benches" / "utilisation.py"), *arguments],
        capture_output=True,
        timeout=300,
        encoding="utf-8",
        check=False,
    )


def test_command(tmp_path: Path, results: utilisation.Results) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text("above\n<!-- table -->\nold\n<!-- end -->\nbelow\n", encoding="utf-8")
    done = run("--quick", "--workloads", "sharegpt", "--json", "--table", str(page), "--svg", str(picture))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["slots"] == SERVER.slots
    workload = document["workloads"]["sharegpt"]
    assert workload["ways"] == {way: asdict(result) for way, result in results["sharegpt"].items()}
    assert "sharegpt, paged" in done.stderr
    text = page.read_text(encoding="utf-8")
    assert re.fullmatch(r"above\n<!-- table -->\nShareGPT.*\|\n<!-- end -->\nbelow\n", text, re.DOTALL)
    assert "old" not in text
    titles = {"sharegpt": WORKLOADS["sharegpt"](0, 2048, 1).title}
    part: dict[str, dict[str, Result]] = {"sharegpt": results["sharegpt"]}
    assert picture.read_text(encoding="utf-8") == chart.draw(part, titles, utilisation.WAYS, SERVER.slots)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "1000"], "expected a multiple of 16 that is at least the longest request's 2048 tokens, got 1000"),
        (["--block-size", "24"], "expected a multiple of 16 up to 1024, got 24"),
        (["--max-length", "1"], "expected at least 2, got 1"),
        (["--headroom", "1"], "expected 0 or more and less than 1"),
        (["--table", "no such file"], "no file no such file"),
        (["--table", str(ROOT / "README.md")], "expected lines <!-- table --> and <!-- end -->"),
        (["--svg", "no such folder/a.svg"], "no folder no such folder"),
        (["--workloads", "other"], "invalid choice"),
    ],
)
def test_command_refuses_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        utilisation.main(arguments)
    assert message in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Paged, "start", interrupted)
    assert utilisation.main(["--quick", "--workloads", "sharegpt"]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_the_page_explains_every_column() -> None:
    text = (ROOT / "docs" / "utilisation.md").read_text(encoding="utf-8")
    table = text.split("<!-- table -->")[1].split("<!-- end -->")[0]
    heads = {line for line in table.splitlines() if line.startswith("| way")}
    assert heads == {"| way | " + " | ".join(name for name, _ in utilisation.COLUMNS) + " |"}
    assert set(SHARES) <= {field.name for field in fields(Result)}
    explained = set(re.findall(r"^\| (\w+) \|", text.split("| column |")[1], re.MULTILINE))
    assert set(SHARES) <= explained
    for way in utilisation.WAYS.values():
        assert f"| {way} |" in table


def test_the_picture_shows_what_the_table_says() -> None:
    text = (ROOT / "docs" / "utilisation.md").read_text(encoding="utf-8")
    table = text.split("<!-- table -->")[1].split("<!-- end -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| (?!way|---)", line)]
    at_once = [name for name, _ in utilisation.COLUMNS].index("at once") + 1
    picture = (ROOT / "docs" / "img" / "utilisation.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'font-size="14"[^>]*>([^<]+)<', picture)
    assert drawn == [cell for row in rows for cell in (row[1], row[at_once])]
