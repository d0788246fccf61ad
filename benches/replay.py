"""Replay a workload on a memory and measure what the memory holds.

    step    every running request gets a token; if memory runs out, the youngest lose theirs and are next in the queue
            unless that happened: requests start with their prompts, first come first served, until one does not fit
            [what the memory holds is measured here]
            whoever has its whole reply leaves
    window  measured steps: from when twice as many requests have ended as started in the first step, so that none of
            the beginning is left to see, as long as requests wait

Steps are counted, not timed: a step is one pass of the model, and a prompt of any length is stored in one.
(Engines store a reply's last token only if the talk goes on; here it is stored.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lengths import Request, Workload
from memories import Memory, Running, Usage

BACKLOG = 8
"""Chained conversations that wait: one more begins when fewer requests do."""


class TooFewRequestsError(ValueError):
    """The requests ran out before the window began."""


@dataclass(frozen=True)
class Result:
    """Means over the window unless it says otherwise; shares are of all slots and add up to 1.

    Attributes:
        tokens, reserved, internal, cached: see Usage.
        external: free slots, enough for the next request, but in holes that are too small.
        tail: free slots, fewer than the next request needs.
        of_allocated: slots that hold tokens, of those that running requests have.
        running, most_running: requests at once, mean and maximum.
        context: tokens of running requests, of all slots; what requests share is counted for each of them.
        found: prompt tokens that were there already, of all of the whole run.
        preempted: how often a request lost its memory and had to begin again, in the whole run.
        stored_again: tokens that were stored for that reason, of the tokens of all requests.
        steps, window: of the whole run and of the window.
        requests: all of the run.
    """

    tokens: float
    reserved: float
    internal: float
    external: float
    tail: float
    cached: float
    of_allocated: float
    running: float
    most_running: int
    context: float
    found: float
    preempted: int
    stored_again: float
    steps: int
    window: int
    requests: int


class Queue:
    """Requests that wait, in the order in which they came."""

    def __init__(self, workload: Workload) -> None:
        self._waiting: deque[Running] = deque()
        self._chained = workload.chained
        self._to_come: Iterator[list[Request]] = iter(workload.conversations)
        self._next_turns: dict[int, deque[Request]] = {}
        self._backlog = BACKLOG if workload.chained else None

    def head(self) -> Running | None:
        """Who is next."""
        while self._backlog is None or len(self._waiting) < self._backlog:
            turns = next(self._to_come, None)
            if turns is None:
                break
            if self._chained:
                first, *others = turns
                self._next_turns[first.conversation] = deque(others)
                turns = [first]
            self._waiting.extend(Running(request, request.prompt) for request in turns)
        return self._waiting[0] if self._waiting else None

    def pop(self) -> None:
        """The head has started."""
        self._waiting.popleft()

    def come_back(self, preempted: list[Running]) -> None:
        """They are next; the first of them is the oldest, the last in the list."""
        for running in preempted:
            running.again = True
        self._waiting.extendleft(preempted)

    def answered(self, request: Request) -> None:
        """Its conversation's next request comes."""
        if turns := self._next_turns.get(request.conversation):
            request = turns.popleft()
            self._waiting.append(Running(request, request.prompt))


class Window:
    """Sums over measured steps."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.steps = 0
        self._running = 0
        self._most = 0
        self._context = 0
        self._external = 0
        self._sums = [0] * len(Usage._fields)

    def add(self, usage: Usage, batch: list[Running], *, external: bool) -> None:
        """One step. ``external``: the free slots would do for the next request if they lay side by side."""
        if sum(usage) != self._total or min(usage) < 0:
            raise AssertionError(f"{usage} does not add up to {self._total} slots")
        self.steps += 1
        self._sums = [a + b for a, b in zip(self._sums, usage, strict=True)]
        self._external += usage.free if external else 0
        self._running += len(batch)
        self._most = max(self._most, len(batch))
        self._context += sum(running.stored for running in batch)

    def result(self, *, found: float, preempted: int, stored_again: float, steps: int, requests: int) -> Result:
        """The means."""
        slots = self._total * self.steps
        tokens, reserved, internal, cached, free = self._sums
        return Result(
            tokens=tokens / slots,
            reserved=reserved / slots,
            internal=internal / slots,
            external=self._external / slots,
            tail=(free - self._external) / slots,
            cached=cached / slots,
            of_allocated=tokens / (tokens + reserved + internal),
            running=self._running / self.steps,
            most_running=self._most,
            context=self._context / slots,
            found=found,
            preempted=preempted,
            stored_again=stored_again,
            steps=steps,
            window=self.steps,
            requests=requests,
        )


def replay(workload: Workload, memory: Memory, progress: Callable[[int, int], None] | None = None) -> Result:
    """Run all requests.

    Args:
        progress: called with the number of ended requests and of all, now and then.

    Raises:
        TooFewRequestsError: there is nothing to measure.
        ValueError: a request is larger than the memory.
    """
    queue, window = Queue(workload), Window(memory.total)
    requests = workload.requests
    largest = max(request.total for request in requests)
    if largest > memory.total:
        raise ValueError(f"expected requests of at most {memory.total} tokens, the memory's slots, got {largest}")
    batch: list[Running] = []
    first_batch = None
    steps = ended = preemptions = prompts = found = stored_again = 0
    while batch or queue.head() is not None:
        steps += 1
        preempted = memory.grow(batch)
        preemptions += len(preempted)
        del batch[len(batch) - len(preempted) :]
        queue.come_back(preempted)
        before = memory.found()
        while (head := queue.head()) is not None and not preempted and memory.start(head):
            queue.pop()
            batch.append(head)
            if head.again:
                stored_again += head.stored - (memory.found() - before)
            else:
                prompts += head.stored
                found += memory.found() - before
            before = memory.found()
        if not batch:
            raise ValueError("a request does not fit in the empty memory")
        if first_batch is None:
            first_batch = len(batch)
        if head is not None and ended >= 2 * first_batch:
            window.add(memory.usage(), batch, external=memory.would_fit_joined(head))
        stay = []
        for running in batch:
            if running.stored < running.request.total:
                stay.append(running)
            else:
                memory.end(running)
                queue.answered(running.request)
                ended += 1
        batch = stay
        if progress is not None and steps % 64 == 0:
            progress(ended, len(requests))
    if not window.steps:
        raise TooFewRequestsError(
            f"{workload.name}: expected enough requests that some still wait when {2 * (first_batch or 0)} have ended, "
            f"got {len(requests)}"
        )
    return window.result(
        found=found / prompts,
        preempted=preemptions,
        stored_again=stored_again / sum(request.total for request in requests),
        steps=steps,
        requests=len(requests),
    )
