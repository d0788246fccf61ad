"""One sequence: a prompt, what was generated after it, and how far the cache has got with it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcore.engine.interfaces import Adapter, EncoderInput, Handle
from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampler import Logprob
from kvcore.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvcore.engine.beams import BeamSearch
    from kvcore.engine.logits import Adjuster
    from kvcore.engine.next_tokens import StepOutput
    from kvcore.engine.speculation import Drafts


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer's tokens and state. A request has one, or ``n`` of them, or one for each beam.

    Attributes:
        request_id: the request's name, unique among unfinished requests.
        token_ids: the prompt and what was generated after it.
        prompt_len: how many of ``token_ids`` are the prompt.
        max_new_tokens: it ends with "length" when this many tokens were generated: ``max_tokens``, or less where the
            model's length or the cache's capacity comes first.
        use_cache: False computes every token again for each new one.
        use_prefix: False neither reads nor leaves prefixes.
        salt: whose it is: only sequences with equal salts share blocks.
        index: which of the request's answers.
        order: the policy's: smaller goes first.
        marks: (number of prompt tokens, seconds) that the cache is asked to keep.
        adjust: what changes its logits before sampling; None if nothing does.
        unit: the sequences that are let in and preempted together with this one, itself among them: the beams.
        siblings: the request's further answers, which begin when the prompt has been computed.
        seats: how many of ``max_num_seqs`` it counts for: also those of its siblings until they begin.
        search: the beam search that it is a beam of.
        adapter: the adapter that it asks for.
        drafts: makes its drafts; None if it does without.
        draft: tokens that this step computes behind ``token_ids``, because they may be the next ones. The cache knows
            them already.
        ahead: next tokens that were sampled from rows that are computed, and are not in ``token_ids`` yet: each step
            gives it one. More than one only behind an accepted draft.
        encoder: what the encoder is given, where there is one. All that are given the same share what it gives.
        keep: takes the handle when it ends without an error; None: it is freed.
        handles: the sequence in the cache, if it is there: none or one. (A list, so that the cache's answer can be
            stored without a gap that an interrupt could fall into; see ``Scheduler``.)
        context_len: the length that its stored keys follow, see ``Model.context_len``.
        num_stored: how many of ``token_ids`` have keys and values in the cache now.
        num_reached: how many of them have had so in this round, before it was preempted.
        num_cached_tokens: how many prompt tokens came from the prefix cache when it first started.
        num_computed_tokens: token positions that went through the model, over all rounds. Being preempted does not
            change this number: it counts what a run that nobody disturbs would compute.
        num_recomputed_tokens: token positions that did so again because it had been preempted.
        cumulative_logprob: the sum of its tokens' log probabilities, where somebody wants to know.
        finish_reason: "stop", "length" or "abort" once finished, None if an error ended it.
        stop_reason: the token id or the string that stopped it; None for the end-of-sequence token.
        last_is_text: whether the token with which it ended ("stop") is a part of the answer: a grammar's last one.
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
    use_prefix: bool = True
    salt: str | None = None
    index: int = 0
    order: tuple[int, ...] = (0,)
    marks: tuple[tuple[int, float | None], ...] = ()
    adjust: Adjuster | None = None
    unit: list[Sequence] = field(default_factory=list)
    siblings: list[Sequence] = field(default_factory=list)
    seats: int = 1
    search: BeamSearch | None = None
    adapter: Adapter | None = None
    drafts: Drafts | None = None
    draft: list[int] = field(default_factory=list)
    ahead: list[StepOutput] = field(default_factory=list)
    encoder: EncoderInput | None = None
    keep: list[Handle] | None = None
    state: State = State.WAITING
    handles: list[Handle] = field(default_factory=list)
    context_len: int = 0
    num_stored: int = 0
    num_reached: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_is_text: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        if not self.unit:
            self.unit = [self]

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_missing(self) -> int:
        """Tokens that must go through the model before the next one can be sampled."""
        return len(self.token_ids) - self.num_stored

    @property
    def started(self) -> bool:
        """Whether its first tokens were ever put in a batch."""
        return self.metrics.first_scheduled_time is not None

    @property
    def finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state is State.FINISHED

    def max_stored(self) -> int:
        """The most tokens that it will ever have in the cache: the last one generated is never stored."""
        return self.prompt_len + self.max_new_tokens - 1

    def store(self, n: int) -> None:
        """Note that the next ``n`` tokens have keys and values now."""
        self.num_stored += n
        fresh = max(0, self.num_stored - self.num_reached)
        self.num_computed_tokens += fresh
        self.num_recomputed_tokens += max(0, n - fresh)
        self.num_reached += fresh
