"""What every driver does: open the peer, say so, then answer commands, one JSON object a line.

    started as   python run_PEER.py '{"model": ..., "num_threads": ..., ...}'
    says         {"version": ..., "load": seconds}
    is told      {"prompts": [[token ids], ...], "new_tokens": n}
    answers      {"seconds": wall time until all prompts have n new tokens}

Peers print what they like, so stdout is theirs no more: answers go to the descriptor that it was.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], None]
"""Generates so many tokens for each prompt: greedy, whatever ends a sequence is ignored, and nothing of it is kept."""


def serve(open_peer: Callable[..., tuple[str, Generate]]) -> None:
    """Run a peer; ``open_peer`` takes the options, and gives its version and what generates."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    start = time.perf_counter()
    version, generate = open_peer(**json.loads(sys.argv[1]))
    answer({"version": version, "load": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        generate(command["prompts"], command["new_tokens"])
        answer({"seconds": time.perf_counter() - start})
