"""What comes back from ``LLM.generate``, ``chat`` and ``stream``, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.engine.metrics import RequestMetrics
from kvcore.engine.sampler import Logprob

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt (in an item of ``stream``: what is new of it).

    Attributes:
        index: which of the prompt's answers.
        text: the text; "" where the model has no tokenizer.
        token_ids: the ids, the one that stopped it included.
        cumulative_logprob: the sum of the sampled tokens' log probabilities so far, if they were asked for.
        logprobs: one dict per token id of ``token_ids``, from token id to ``Logprob``, if they were asked for.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the token id of ``stop_token_ids`` or the string of ``stop`` that stopped it; None for the
            end-of-sequence token.
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


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its answers and what they took.

    Attributes:
        request_id: the request's name.
        prompt: the prompt as text, or None where token ids were given.
        prompt_token_ids: the prompt as token ids.
        outputs: the answers; one, as long as ``n`` is 1.
        finished: whether all of them have ended.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        num_computed_tokens: token positions that went through the model: with the cache each position once (those
            from the prefix cache not at all, and the last token never); without it all of them for each new token.
        metrics: times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))

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
