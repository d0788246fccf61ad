"""What the engine counts and times: per request, and over its life."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.perf_counter()``, None for what has not happened yet.

    With several answers these are the times of the first answer, but for ``finished_time``, when all had ended.

    Attributes:
        arrival_time: when it was submitted.
        first_scheduled_time: when its first tokens were put in a batch.
        first_token_time: when its first token had been sampled.
        last_token_time: when its latest token had been sampled.
        finished_time: when it ended.
        num_generation_tokens: tokens sampled so far.
        inter_token_latencies: seconds between each token and the one before it.
        num_preemptions: how often it had to give its blocks back.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    inter_token_latencies: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until the first tokens were put in a batch."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival until the first token had been sampled."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds from one token to the next after the first; None below two tokens."""
        span = _between(self.first_token_time, self.last_token_time)
        return None if span is None or self.num_generation_tokens < 2 else span / (self.num_generation_tokens - 1)

    @property
    def e2e_time(self) -> float | None:
        """Seconds from arrival until the end."""
        return _between(self.arrival_time, self.finished_time)

    def token(self, now: float) -> None:
        """Note a sampled token."""
        if self.first_token_time is None or self.last_token_time is None:
            self.first_token_time = now
        else:
            self.inter_token_latencies.append(now - self.last_token_time)
        self.last_token_time = now
        self.num_generation_tokens += 1


_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclass(slots=True)
class Histogram:
    """How many values were at most each bound, as Prometheus counts them, but not cumulated.

    Attributes:
        bounds: upper bounds, ascending.
        counts: values at most ``bounds[i]`` and above the bound before; the last are those above all bounds.
        sum: of all values.
    """

    bounds: tuple[float, ...] = _TIMES
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float | None) -> None:
        """Count a value; None is none."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    @property
    def count(self) -> int:
        """Values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Of all values; None if there are none."""
        return self.sum / self.count if self.count else None

    def snapshot(self) -> dict[str, Any]:
        """``buckets`` (upper bound to number of values at most that), ``count`` and ``sum``."""
        total, buckets = 0, {}
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets[bound] = total
        return {"buckets": buckets, "count": total, "sum": self.sum}


@dataclass(slots=True)
class EngineMetrics:
    """Counts over the life of an engine.

    Attributes:
        num_requests: requests accepted.
        num_finished: ended requests by reason; ``"error"`` counts those that an exception ended.
        num_steps: forward passes.
        num_prompt_tokens: tokens of the prompts that got their first token.
        num_generation_tokens: tokens sampled.
        num_computed_tokens: token positions that went through the model.
        num_recomputed_tokens: those of them that had done so before their request was preempted.
        num_cached_tokens: token positions whose keys and values were found in the prefix cache instead.
        num_preemptions: how often a request had to give its blocks back before its end.
        spec_decode_num_drafts: drafts that were computed.
        spec_decode_num_draft_tokens: their tokens. Those that were rejected are in no other count.
        spec_decode_num_accepted_tokens: those of them that were what was sampled.
        histograms: by name, of ended requests: queue_time, ttft, tpot, e2e_time (seconds), prompt_tokens and
            generation_tokens; and inter_token_latency of their tokens.
    """

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    histograms: Mapping[str, Histogram] = field(
        default_factory=lambda: {
            "queue_time": Histogram(),
            "ttft": Histogram(),
            "tpot": Histogram(),
            "inter_token_latency": Histogram(),
            "e2e_time": Histogram(),
            "prompt_tokens": Histogram(_TOKENS),
            "generation_tokens": Histogram(_TOKENS),
        }
    )

    def end(
        self,
        metrics: RequestMetrics,
        reason: str,
        prompt_tokens: int,
        generation_tokens: int,
        inter_token_latencies: list[float],
    ) -> None:
        """Count a request that has ended."""
        self.num_finished[reason] += 1
        for name in ("queue_time", "ttft", "tpot", "e2e_time"):
            self.histograms[name].add(getattr(metrics, name))
        self.histograms["prompt_tokens"].add(prompt_tokens)
        self.histograms["generation_tokens"].add(generation_tokens)
        for latency in inter_token_latencies:
            self.histograms["inter_token_latency"].add(latency)

    def draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count a draft that was computed."""
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += num_tokens
        self.spec_decode_num_accepted_tokens += num_accepted

    def snapshot(self) -> dict[str, Any]:
        """All counts as a dict of copies."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["num_finished"] = dict(self.num_finished)
        values["histograms"] = {name: histogram.snapshot() for name, histogram in self.histograms.items()}
        return values


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
