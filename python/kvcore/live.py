"""A view of a running LLM for terminals: blocks, requests, hit rate, times.

    from kvcore.live import live_view

    with live_view(llm):
        llm.generate(prompts, params)

It reads ``LLM.stats()`` and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 24


class Watched(Protocol):
    """What is looked at: an ``LLM``."""

    name: str

    def stats(self) -> dict[str, Any]:
        """As ``LLM.stats``."""
        ...


@contextmanager
def live_view(llm: Watched, *, refresh_per_second: float = 4.0) -> Iterator[None]:
    """Show what an LLM does on stderr, several times a second, until the block ends."""
    from rich.console import Console
    from rich.live import Live

    view = View(llm)
    with Live(
        get_renderable=view.table,
        console=Console(stderr=True),
        refresh_per_second=refresh_per_second,
        redirect_stdout=False,  # what is printed meanwhile goes where it was sent
        redirect_stderr=False,
    ):
        yield


class View:
    """Tables of an LLM's stats, with rates since the table before."""

    def __init__(self, llm: Watched) -> None:
        self._llm = llm
        self._last: tuple[float, dict[str, Any]] | None = None
        self._rates = (0.0, 0.0)

    def table(self) -> Table:
        """The stats of now."""
        from rich.table import Table

        now, stats = time.perf_counter(), self._llm.stats()
        if self._last is not None and now - self._last[0] > 0.1:
            seconds, before = now - self._last[0], self._last[1]
            computed, generated = (
                (stats[key] - before[key]) / seconds for key in ("num_computed_tokens", "num_generation_tokens")
            )
            self._rates = computed, generated
        if self._last is None or now - self._last[0] > 0.1:
            self._last = now, stats
        table = Table(title=self._llm.name, show_header=False, title_justify="left")
        for name, value in lines(stats, self._rates):
            table.add_row(name, value)
        return table


def lines(stats: dict[str, Any], rates: tuple[float, float]) -> list[tuple[str, str]]:
    """Name and text of each line.

    Args:
        stats: of ``LLM.stats``.
        rates: tokens computed and generated in a second.
    """
    cache, histograms = stats["cache"], stats["histograms"]
    total = max(cache["total"], 1)
    used, cached = (round(_WIDTH * cache[key] / total) for key in ("used", "cached"))
    bar = "█" * used + "▒" * min(cached, _WIDTH - used)
    queries = cache.get("query_tokens", 0)
    hits = f"{cache.get('hit_tokens', 0) / queries:.1%} of {queries:,} tokens" if queries else "-"
    ended = sum(stats["num_finished"].values())
    return [
        (
            "blocks",
            f"{bar.ljust(_WIDTH, '·')} {cache['used']:,} used, {cache['cached']:,} cached of {cache['total']:,}",
        ),
        ("requests", f"{stats['num_running']} running, {stats['num_waiting']} waiting, {ended:,} ended"),
        ("preemptions", f"{stats['num_preemptions']:,}"),
        ("prefix hits", hits),
        ("tokens/s", f"{rates[1]:,.1f} generated, {rates[0]:,.1f} computed"),
        ("TTFT", _mean(histograms["ttft"])),
        ("TPOT", _mean(histograms["tpot"])),
    ]


def _mean(histogram: dict[str, Any]) -> str:
    count = histogram["count"]
    return f"{1000 * histogram['sum'] / count:,.1f} ms (mean of {count:,})" if count else "-"
