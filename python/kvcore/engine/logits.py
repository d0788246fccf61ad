"""What a request changes in its logits before a token is drawn.

    constraint              what a grammar does not allow      -> -inf
    allowed_token_ids       all others                         -> -inf
    bad_words               the last token of each that would be completed      -> -inf
    min_tokens              end-of-sequence and stop ids, until there are enough    -> -inf
    logit_bias              added
    repetition_penalty r    ids of prompt and answer: divided by r above 0, multiplied by r below
    frequency_penalty       ids of the answer: minus the penalty times how often
    presence_penalty        ids of the answer: minus the penalty
    logits_processors       any functions

That is vLLM's order and vLLM's meaning of each. An ``Adjuster`` belongs to one sequence and remembers what was
generated, so that a step costs as much as the request asks for, and nothing for requests that ask for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from kvcore.engine.interfaces import FloatArray
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidState


class Constraint(Protocol):
    """A grammar that the answer must follow, and how far it has got in it."""

    def mask(self, row: FloatArray, /) -> None:
        """Set the logits of all tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token_id: int, /) -> None:
        """Take the token that came."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may come any more."""
        ...


class Adjuster:
    """Changes the logits of one sequence.

    Args:
        params: what the request asks for.
        prompt_token_ids: its prompt.
        end_ids: what ``min_tokens`` keeps away: end-of-sequence and stop ids.
        vocab_size: width of the logits.
        constraint: a grammar of its own.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        end_ids: Iterable[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._prompt = prompt_token_ids
        self._generated: list[int] = []
        self._constraint = constraint
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._forbidden: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, bool)
            self._forbidden[list(params.allowed_token_ids)] = False
        self._bias: tuple[np.ndarray, np.ndarray] | None = None
        if params.logit_bias:
            ids = np.array(list(params.logit_bias), np.int64)
            self._bias = ids, np.array(list(params.logit_bias.values()), np.float32)
        self._processors = [(p, len(inspect.signature(p).parameters) > 2) for p in params.logits_processors]
        self._counts: dict[int, int] = {}
        self._seen = set(prompt_token_ids) if params.repetition_penalty != 1.0 else set()

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether these parameters change any logits."""
        return bool(
            params.allowed_token_ids is not None
            or params.bad_words_token_ids
            or params.min_tokens
            or params.logit_bias
            or params.repetition_penalty != 1.0
            or params.frequency_penalty
            or params.presence_penalty
            or params.logits_processors
        )

    def __call__(self, row: FloatArray) -> FloatArray:
        """The changed logits, float32 [vocab]; ``row`` is left as it is."""
        params, row = self._params, row.copy()
        if self._constraint is not None:
            self._constraint.mask(row)
        if self._forbidden is not None:
            row[self._forbidden] = -np.inf
        for word in params.bad_words_token_ids:
            before = len(word) - 1
            if before == 0 or self._generated[-before:] == list(word[:-1]):
                row[word[-1]] = -np.inf
        if len(self._generated) < params.min_tokens:
            row[self._end_ids] = -np.inf
        if self._bias is not None:
            row[self._bias[0]] += self._bias[1]
        if self._seen:
            self._penalise_repetition(row)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(ids))
            row[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
        for process, with_prompt in self._processors:
            row = self._processed(process, with_prompt, row)
        return row

    def accept(self, token_id: int) -> None:
        """Take the token that was drawn."""
        params = self._params
        self._generated.append(token_id)
        if params.repetition_penalty != 1.0:
            self._seen.add(token_id)
        if params.frequency_penalty or params.presence_penalty:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._constraint is not None:
            self._constraint.accept(token_id)

    @property
    def finished(self) -> bool:
        """Whether the grammar lets nothing come any more."""
        return self._constraint is not None and self._constraint.finished

    def _penalise_repetition(self, row: FloatArray) -> None:
        ids = np.fromiter(self._seen, np.int64, len(self._seen))
        values = row[ids]
        penalty = np.float32(self._params.repetition_penalty)
        row[ids] = np.where(values > 0, values / penalty, values * penalty)

    def _processed(self, process: Callable[..., Any], with_prompt: bool, row: FloatArray) -> FloatArray:
        tokens = [self._prompt, list(self._generated)] if with_prompt else [list(self._generated)]
        try:
            result = np.asarray(process(*tokens, row), np.float32)
        except Exception as error:  # the caller's code: it concerns this request only
            raise InvalidState(f"SamplingParams.logits_processors: a function raised {error!r}") from error
        if result.shape != row.shape:
            raise InvalidState(
                f"SamplingParams.logits_processors: expected logits of shape {row.shape} back, got {result.shape}"
            )
        return result
