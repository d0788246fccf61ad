"""One sequence: a prompt, what was generated after it, and how far the cache has got with it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from kvcore.engine.interfaces import Handle
from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampler import Logprob
from kvcore.engine.sampling_params import SamplingParams


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's tokens and state.

    Attributes:
        request_id: its name, unique among unfinished requests.
        token_ids: the prompt and what was generated after it.
        prompt_len: how many of ``token_ids`` are the prompt.
        max_new_tokens: it ends with "length" when this many tokens were generated: ``max_tokens``, or less where the
            model's length or the cache's capacity comes first.
        use_cache: False computes every token again for each new one.
        handles: the sequence in the cache, if it is there: none or one. (A list, so that the cache's answer can be
            stored without a gap that an interrupt could fall into; see ``Scheduler``.)
        num_stored: how many of ``token_ids`` have keys and values in the cache now.
        num_cached_tokens: how many prompt tokens came from the prefix cache.
        num_computed_tokens: token positions that went through the model, over all rounds.
        finish_reason: "stop", "length" or "abort" once finished, None if an error ended it.
        stop_reason: the token id or the string that stopped it; None for the end-of-sequence token.
        error: the exception that ended it.
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    max_new_tokens: int
    use_cache: bool
    generator: np.random.Generator | None
    metrics: RequestMetrics
    state: State = State.WAITING
    handles: list[Handle] = field(default_factory=list)
    num_stored: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_missing(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.num_stored

    @property
    def decoding(self) -> bool:
        """Whether the latest generated token is all that is missing."""
        return self.num_generated > 0 and self.num_missing == 1

    @property
    def finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state is State.FINISHED

    def max_stored(self) -> int:
        """The most tokens that it will ever have in the cache: the last one generated is never stored."""
        return self.prompt_len + self.max_new_tokens - 1
