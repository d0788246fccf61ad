"""Beam search: the most probable answers, found breadth first.

    beams = [prompt], its score 0
    each step:
        candidates = for all beams and tokens  score + log p(token | beam), the best first: so many that ``width`` of
                     them end no text
        a candidate that ends a text is a finished answer, if it is among the best ``width``
        the first ``width`` others are the next beams: blocks are shared by ``KVCache.reorder``, never copied ahead
        finished answers are ranked by  score / tokens ** length_penalty, the best ``width`` are kept
        stop when there are ``width`` of them and no beam can become better (``early_stopping``), or at ``max_tokens``

Source: transformers' beam search, whose results these are (``num_return_sequences`` = ``num_beams``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.engine.interfaces import FloatArray
from kvcore.engine.sampler import largest
from kvcore.engine.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer.

    Attributes:
        token_ids: of the answer.
        logprob: the sum of their log probabilities.
        score: what answers are ranked by.
        reason: "stop" or "length".
    """

    token_ids: list[int]
    logprob: float
    score: float
    reason: str


@dataclass(frozen=True, slots=True)
class Step:
    """A beam of the next step: which beam it continues, with which token."""

    parent: int
    token_id: int


class BeamSearch:
    """The state of one search; the engine runs the beams and keeps their blocks.

    Attributes:
        width: beams.
        finished: finished answers, the best first, at most ``width``.
        scores: of the running beams.
        handles: what the cache answered to ``reorder``, until the beams have it (see ``Scheduler`` on interrupts).
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_new_tokens: int) -> None:
        self.width = params.beam_width
        self.finished: list[Hypothesis] = []
        self.scores: list[float] = [0.0]
        self.handles: list[list[Any]] = []
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._candidates = max(2, 1 + len(self._eos)) * self.width
        self._offers: dict[int, tuple[list[int], list[float]]] = {}

    def offer(self, beam: int, row: FloatArray) -> None:
        """Take the logits behind a beam's last token, float32 [vocab]."""
        values = row.astype(np.float64)
        if self._params.temperature:
            values /= self._params.temperature
        values -= values.max()
        values -= np.log(np.exp(values).sum())
        top = largest(values, self._candidates)
        self._offers[beam] = top.tolist(), values[top].tolist()

    @property
    def ready(self) -> bool:
        """Whether all running beams have offered."""
        return len(self._offers) == len(self.scores)

    def select(self, answers: list[list[int]]) -> list[Step]:
        """The next beams; none if the search has ended, which leaves its result in ``finished``.

        Args:
            answers: token ids of each running beam, without the prompt.
        """
        candidates = [
            (self.scores[beam] + logprob, beam, token)
            for beam, (tokens, logprobs) in self._offers.items()
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        self._offers = {}
        length = len(answers[0]) + 1
        steps: list[Step] = []
        scores: list[float] = []
        for rank, (score, beam, token) in enumerate(candidates[: self._candidates]):
            if token in self._eos:
                if rank < self.width:
                    self._finish([*answers[beam], token], score, "stop")
            elif len(steps) < self.width and score > -np.inf:
                steps.append(Step(beam, token))
                scores.append(score)
        if not steps or self._is_done(max(scores), length):
            return []
        if length < self._max_new_tokens:
            self.scores = scores
            return steps
        for step, score in zip(steps, scores, strict=True):
            self._finish([*answers[step.parent], step.token_id], score, "length")
        return []

    def _is_done(self, best: float, length: int) -> bool:
        """Whether no running beam can get among the finished answers."""
        if len(self.finished) < self.width:
            return False
        stopping, penalty = self._params.early_stopping, self._params.length_penalty
        if stopping is True:
            return True
        reach = self._max_new_tokens if stopping == "never" and penalty > 0 else length
        return bool(self.finished[-1].score >= best / reach**penalty)

    def _finish(self, token_ids: list[int], logprob: float, reason: str) -> None:
        score = logprob / len(token_ids) ** self._params.length_penalty
        self.finished.append(Hypothesis(token_ids, logprob, score, reason))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]
