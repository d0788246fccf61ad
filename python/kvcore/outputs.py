"""What comes back from ``LLM.generate``, ``chat``, ``stream`` and ``beam_search``, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampler import Logprob

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "Usage",
]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt (in an item of ``stream``: what is new of it).

    Attributes:
        index: which of the prompt's answers.
        text: the text; "" where the model has no tokenizer.
        token_ids: the ids, the one that stopped it included.
        cumulative_logprob: the sum of the sampled tokens' log probabilities so far, if they were asked for or needed.
        logprobs: one dict per token id of ``token_ids``, from token id to ``Logprob``, if they were asked for.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the token id of ``stop_token_ids`` or the string of ``stop`` that stopped it, or "timeout"; None
            for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request is charged for, as the Claude API counts it.

    The three kinds of input tokens add up to the prompt: what was found in the prefix cache, what was written for
    later requests because of a mark (``cache_control``), and all others.

    Attributes:
        input_tokens: tokens of the prompt behind the last mark that were not found.
        cache_read_input_tokens: tokens of the prompt that were found.
        cache_creation_input_tokens: tokens up to the last mark that were not found: written and kept.
        ephemeral_5m_input_tokens, ephemeral_1h_input_tokens: the same, by how long they are kept.
        output_tokens: tokens of all answers.
    """

    input_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0
    output_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompt."""
        return self.input_tokens + self.cache_read_input_tokens + self.cache_creation_input_tokens

    def input_cost(self, read: float = 0.1, write_5m: float = 1.25, write_1h: float = 2.0) -> float:
        """What the prompt costs, in tokens of the base price.

        Args:
            read, write_5m, write_1h: what a token costs that was found, or written for 5 minutes or an hour.
        """
        return (
            self.input_tokens
            + read * self.cache_read_input_tokens
            + write_5m * self.ephemeral_5m_input_tokens
            + write_1h * self.ephemeral_1h_input_tokens
        )

    def cost_line(self, read: float = 0.1, write_5m: float = 1.25, write_1h: float = 2.0) -> str:
        """The same as one line of text, beside what the prompt would cost without a cache."""
        cost, full = self.input_cost(read, write_5m, write_1h), self.prompt_tokens
        return (
            f"{self.input_tokens} x 1 + {self.cache_read_input_tokens} read x {read:g} + "
            f"{self.ephemeral_5m_input_tokens} written x {write_5m:g} + "
            f"{self.ephemeral_1h_input_tokens} written for 1h x {write_1h:g} = {cost:.1f} of {full} tokens "
            f"({cost / full:.0%})"
        )


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers and what they took.

    Attributes:
        request_id: the request's name.
        prompt: the prompt as text, or None where token ids were given.
        prompt_token_ids: the prompt as token ids.
        outputs: the answers: ``n`` of them, of ``best_of`` the most probable ones, the best first.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        num_computed_tokens: token positions that went through the model: with the cache each position once (those
            from the prefix cache not at all, and the last token never); without it all of them for each new token.
            What a preempted request computes again is not in it, but in ``num_recomputed_tokens``.
        metrics: times.
        num_recomputed_tokens: token positions that were computed again because others needed the blocks meanwhile.
        prompt_logprobs: for each token of the prompt a dict from token id to ``Logprob``, None for the first; if they
            were asked for.
        usage: what the request is charged for.
        error: what the request's callback raised, which ended it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    num_recomputed_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    usage: Usage = field(default_factory=lambda: Usage(0))
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        """How the first answer ended; None while it goes on."""
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search.

    Attributes:
        tokens: prompt and answer.
        cum_logprob: the sum of the answer's log probabilities.
        score: what answers are ranked by: ``cum_logprob / len(answer) ** length_penalty``.
        text: of the answer; None where the model has no tokenizer.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers of a beam search, the best first.

    Attributes:
        sequences: as many as there were beams, or fewer where there were too few tokens to choose from.
        metrics: times.
    """

    sequences: list[BeamSearchSequence]
    metrics: RequestMetrics
