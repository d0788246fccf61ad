"""A progress bar on stderr, where somebody can see it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PROGRESS_FROM = 8


@contextmanager
def progress_bar(total: int, wanted: bool | None, *, of: str = "prompts") -> Iterator[Any]:
    """Yields ``show(number finished)``. ``wanted=None``: on a terminal, from 8 on."""
    if wanted is None:
        wanted = total >= _PROGRESS_FROM and sys.stderr.isatty()
    if not wanted:
        yield lambda finished: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(of, total=total)
        yield lambda finished: bar.update(task, completed=finished)
