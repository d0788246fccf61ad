"""How much of the KV memory holds tokens, and how many requests run at once, by the way in which memory is given.

    python benches/utilisation.py [--quick] [--json] [--svg FILE] [--table FILE]

Requests with the lengths of real conversations (see lengths.py) are replayed on the same memory, first come first
served (replay.py), given in these ways (memories.py, allocators.py):

    max           the longest length that the server allows, in one span
    pow2-reply    the prompt and the next power of two of the reply, in one span of a buddy allocator (which rounds the
                  sum up again)
    pow2          the next power of two of the final length, in one span of a buddy allocator
    oracle        the final length, as if it were known, in one span, first fit
    paged         blocks of a kvcore.KVCache, taken as tokens come
    shared        the same, and requests share the front that they have in common

max, pow2-reply and pow2 are Orca (Max), Orca (Pow2) and Orca (Oracle) of the PagedAttention paper, all of which have a
buddy allocator there.

The default memory has 16,384 slots, 2 GiB for Llama 3 8B in 16 bits. All counts are exact and equal for equal seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from allocators import Buddy, FirstFit
from kvcore import __version__
from lengths import WORKLOADS, Request, Workload
from memories import Memory, Paged, Reserved
from replay import Result, TooFewRequestsError, replay

WAYS = {
    "max": "maximum length",
    "pow2-reply": "reply to a power of two",
    "pow2": "whole to a power of two",
    "oracle": "known length",
    "paged": "paged",
    "shared": "paged, shared",
}
FULL = {"sharegpt": 1700, "alpaca": 20_000, "turns": 1000, "chat": 1000}
QUICK = {"sharegpt": 400, "alpaca": 4000, "turns": 150, "chat": 150}
"""Conversations of each workload."""

Results = dict[str, dict[str, Result]]
"""By workload and way."""


@dataclass(frozen=True)
class Server:
    """What all ways have in common: slots, tokens of a block, most tokens of a request, headroom of Paged."""

    slots: int
    block_size: int
    max_length: int
    headroom: float


def memory(way: str, server: Server) -> Memory:
    """A memory that is given in this way."""
    slots, block_size, headroom = server.slots, server.block_size, server.headroom

    def power_of_two(n: int) -> int:
        return 1 << (n - 1).bit_length()

    makers: dict[str, Callable[[], Memory]] = {
        "max": lambda: Reserved(FirstFit(slots), lambda _: server.max_length),
        "pow2-reply": lambda: Reserved(Buddy(slots), lambda request: request.prompt + power_of_two(request.reply)),
        "pow2": lambda: Reserved(Buddy(slots), lambda request: power_of_two(request.total)),
        "oracle": lambda: Reserved(FirstFit(slots), lambda request: request.total),
        "paged": lambda: Paged(slots, block_size, sharing=False, headroom=headroom),
        "shared": lambda: Paged(slots, block_size, sharing=True, headroom=headroom),
    }
    return makers[way]()


def measure(
    workloads: list[Workload], server: Server, progress: Callable[[str, str, int, int], None] | None = None
) -> Results:
    """Replay every workload in every way; "shared" only where there is something to share.

    Args:
        progress: called with workload, way, ended requests and all of them, now and then.
    """
    results: Results = {}
    for workload in workloads:
        results[workload.name] = {}
        for way in WAYS:
            if way == "shared" and not workload.shares:
                continue
            room = memory(way, server)

            def report(ended: int, total: int, name: str = workload.name, way: str = way) -> None:
                if progress is not None:
                    progress(name, way, ended, total)

            try:
                results[workload.name][way] = replay(workload, room, report)
            finally:
                room.close()
    return results


COLUMNS: list[tuple[str, Callable[[Result], str]]] = [
    ("tokens", lambda r: f"{r.tokens:.1%}"),
    ("reserved", lambda r: f"{r.reserved:.1%}"),
    ("internal", lambda r: f"{r.internal:.1%}"),
    ("external", lambda r: f"{r.external:.1%}"),
    ("cached", lambda r: f"{r.cached:.1%}"),
    ("tail", lambda r: f"{r.tail:.1%}"),
    ("tokens of allocated", lambda r: f"{r.of_allocated:.1%}"),
    ("at once", lambda r: f"{r.running:.1f}"),
    ("prompt found", lambda r: f"{r.found:.1%}"),
    ("preempted", lambda r: f"{r.preempted:,}"),
    ("stored again", lambda r: f"{r.stored_again:.1%}"),
    ("steps", lambda r: f"{r.steps:,}"),
]


def rows(results: dict[str, Result]) -> list[list[str]]:
    """A table with its head: one row for each way."""
    head = ["way", *(name for name, _ in COLUMNS)]
    return [head, *([WAYS[way], *(cell(result) for _, cell in COLUMNS)] for way, result in results.items())]


def plain(table: list[list[str]]) -> str:
    """Columns that line up."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    return "\n".join(lines)


def markdown(results: Results, titles: dict[str, str]) -> str:
    """A table for each workload."""
    parts = []
    for name, by_way in results.items():
        head, *others = rows(by_way)
        requests = next(iter(by_way.values())).requests
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *others]
        parts.append(
            "\n".join([f"{titles[name]} ({requests:,} requests):", "", *(f"| {' | '.join(line)} |" for line in lines)])
        )
    return "\n\n".join(parts)


TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)


def write_table(page: Path, text: str) -> None:
    """Put it between the marks of a page."""
    before = page.read_text(encoding="utf-8")
    page.write_text(TABLE.sub(lambda marks: f"{marks[1]}{text}\n{marks[2]}", before), encoding="utf-8")


class Progress:
    """A line on standard error: rewritten in a terminal, one for each replay elsewhere."""

    def __init__(self) -> None:
        self._replay = ("", "")
        self._last = 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, workload: str, way: str, ended: int, total: int) -> None:
        now = time.monotonic()
        if self._terminal and now - self._last > 0.1:
            self._last = now
            print(f"\r\x1b[K{workload}, {way}: {ended:,} of {total:,} requests", end="", file=sys.stderr, flush=True)
        elif not self._terminal and self._replay != (workload, way):
            self._replay = workload, way
            print(f"{workload}, {way} ...", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Clear it."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=list(WORKLOADS),
        default=["sharegpt", "alpaca", "turns"],
        metavar="NAME",
        help="sharegpt alpaca turns chat (all but the last)",
    )
    parser.add_argument("--slots", type=int, default=16_384, help="tokens that the memory can hold (16384)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (16)")
    parser.add_argument(
        "--max-length", type=int, default=2048, help="most tokens of a request; longer ones are left out"
    )
    parser.add_argument(
        "--headroom",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="paged: share of the blocks that stay free when a request starts (0): more make fewer start again",
    )
    parser.add_argument("--seed", type=int, default=0, help="of Alpaca's lengths and of the order of conversations (0)")
    parser.add_argument("--quick", action="store_true", help="fewer requests: seconds instead of a minute")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figure")
    parser.add_argument("--table", type=Path, metavar="FILE", help="replace the tables of a Markdown page")
    args = parser.parse_args(arguments)
    if args.block_size < 16 or args.block_size % 16 or args.block_size > 1024:
        parser.error(f"--block-size: expected a multiple of 16 up to 1024, got {args.block_size}")
    if args.max_length < 2:
        parser.error(f"--max-length: expected at least 2, got {args.max_length}")
    if args.slots < args.max_length or args.slots % args.block_size:
        parser.error(
            f"--slots: expected a multiple of {args.block_size} that is at least the longest request's "
            f"{args.max_length} tokens, got {args.slots}"
        )
    if not 0 <= args.headroom < 1:
        parser.error(f"--headroom: expected 0 or more and less than 1, got {args.headroom}")
    if args.svg is not None and not args.svg.parent.is_dir():
        parser.error(f"--svg: no folder {args.svg.parent}")
    if args.table is not None:
        if not args.table.is_file():
            parser.error(f"--table: no file {args.table}")
        if not TABLE.search(args.table.read_text(encoding="utf-8")):
            parser.error(f"--table: expected lines <!-- table --> and <!-- end --> in {args.table}")
    return args


def run(args: argparse.Namespace) -> None:
    limits = QUICK if args.quick else FULL
    workloads = [WORKLOADS[name](args.seed, args.max_length, limits[name]) for name in dict.fromkeys(args.workloads)]
    server = Server(args.slots, args.block_size, args.max_length, args.headroom)
    progress = Progress()
    try:
        results = measure(workloads, server, progress)
    finally:
        progress.done()
    titles = {workload.name: workload.title for workload in workloads}
    if args.svg is not None:
        from chart import draw

        args.svg.write_text(draw(results, titles, WAYS, args.slots), encoding="utf-8")
    if args.table is not None:
        write_table(args.table, markdown(results, titles))
    if args.json:
        document = {
            "version": __version__,
            **asdict(server),
            "seed": args.seed,
            "workloads": {
                workload.name: {
                    "requests": len(workload.requests),
                    "mean_prompt": _mean(workload, lambda request: request.prompt),
                    "mean_reply": _mean(workload, lambda request: request.reply),
                    "ways": {way: asdict(result) for way, result in results[workload.name].items()},
                }
                for workload in workloads
            },
        }
        print(json.dumps(document, indent=1))
        return
    print(f"{args.slots:,} slots, blocks of {args.block_size}, at most {args.max_length:,} tokens a request")
    for workload in workloads:
        prompt, reply = (_mean(workload, length) for length in (lambda r: r.prompt, lambda r: r.reply))
        requests = len(workload.requests)
        print(f"\n{workload.title}: {requests:,} requests, on average {prompt:.0f} tokens in, {reply:.0f} out")
        print(plain(rows(results[workload.name])))
    print(
        "\nshares are of all slots, at once is the mean; both while requests wait. docs/utilisation.md explains them."
    )


def _mean(workload: Workload, length: Callable[[Request], int]) -> float:
    return sum(map(length, workload.requests)) / len(workload.requests)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (TooFewRequestsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
