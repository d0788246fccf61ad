"""What a model does on this machine, beside what the machine could do: the code of ``kvcore bench``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvcore.bench.report import as_dict, as_text
from kvcore.bench.rounds import Run, Settings, measure, num_pieces, open_run
from kvcore.progress import progress_bar

__all__ = ["Run", "Settings", "as_dict", "as_text", "run_bench"]


def run_bench(settings: Settings, show: Callable[[dict[str, Any]], None]) -> None:
    """Measure, with progress on stderr where it is a terminal, and hand the figures to ``show``.

    After Ctrl-C those of the complete rounds are shown, if there are any, before KeyboardInterrupt goes on.

    Raises:
        InvalidArgument, CheckpointError, OutOfMemory: as ``LLM``.
    """
    terminal = sys.stderr.isatty()
    if terminal:
        print(f"loading {settings.model or settings.random} ...", file=sys.stderr, flush=True)
    run = open_run(settings)
    with run.llm:
        try:
            with progress_bar(num_pieces(settings), terminal, of="measurements") as advance:
                for done, _ in enumerate(measure(run), 1):
                    advance(done)
        except KeyboardInterrupt:
            if run.rounds:
                show(as_dict(run))
            raise
        show(as_dict(run))
