"""What the engine counts and times: per request, and over its life."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.perf_counter()``, None for what has not happened yet.

    Attributes:
        arrival_time: when it was submitted.
        first_scheduled_time: when its first tokens were put in a batch.
        first_token_time: when its first token had been sampled.
        last_token_time: when its latest token had been sampled.
        finished_time: when it ended.
        num_generation_tokens: tokens sampled so far.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0

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
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.num_generation_tokens += 1


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
        num_cached_tokens: token positions whose keys and values were found in the prefix cache instead.
        num_preemptions: requests that had to give their blocks back before their end.
    """

    num_requests: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def snapshot(self) -> dict[str, Any]:
        """All counts as a dict of copies."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
