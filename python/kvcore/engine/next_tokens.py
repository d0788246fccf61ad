"""From the logits of a batch to the next token of each sequence, and to what becomes of it then.

    for each sequence of the batch whose known tokens are all stored:
        one answer:       sample; append the token, or end
        n answers:        fork the handle for each, sample a first token for each; from then on each is on its own
        beams:            offer the best continuations; when all beams have: choose, and reorder the handles

Nothing is ended here: outputs say what is to end, and the engine does it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.engine.batch import prompt_rows
from kvcore.engine.beams import BeamSearch
from kvcore.engine.interfaces import Cache, FloatArray
from kvcore.engine.metrics import EngineMetrics
from kvcore.engine.sampler import Logprob, Sampled, logprobs, sample
from kvcore.engine.scheduler import Item, Scheduler
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidState, KvcoreError


@dataclass(slots=True)  # frozen ones take four times as long to make, and there is one for each token
class StepOutput:
    """What a step did to one request.

    Attributes:
        request_id: the request.
        token_id: the token it got; None if it got none, but an error or its end.
        logprobs: of this position, if asked for.
        finish_reason: "stop" or "length" if this token ends it, "abort" if its time is over.
        stop_reason: what stopped it, see ``Sequence``.
        error: what ended it, if it could not go on.
        index: which of the request's answers.
    """

    request_id: str
    token_id: int | None = None
    logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: KvcoreError | None = None
    index: int = 0


class NextTokens:
    """Samples, forks and searches.

    Args:
        cache, scheduler, metrics, eos_token_ids: the engine's.
    """

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._metrics = metrics
        self._eos_token_ids = eos_token_ids

    def take(self, items: list[Item], logits: FloatArray, requests: Mapping[str, list[Sequence]]) -> list[StepOutput]:
        """Give every sequence whose tokens are all stored its next one. The caller ends those whose outputs say so.

        Args:
            items: the batch, its tokens noted as stored.
            logits: float32 [rows that ``batch_rows`` asked for, vocab].
            requests: the sequences of each request.
        """
        takers: list[Sequence] = []
        rows: list[int] = []
        searches: dict[str, BeamSearch] = {}
        row = 0
        for seq, n in items:
            if seq.prompt_logprobs is not None:
                row = self._take_prompt_logprobs(seq, n, logits, row)
            if seq.num_stored < len(seq.token_ids):
                continue
            if seq.search is not None:
                seq.search.offer(seq.index, logits[row])
                searches[seq.request_id] = seq.search
            else:
                answers = [seq, *self._fork(seq)] if seq.siblings else [seq]
                takers += answers
                rows += [row] * len(answers)
            row += 1
        outputs: list[StepOutput] = []
        if takers:
            chosen = logits if len(rows) == len(logits) and rows == list(range(len(rows))) else logits[rows]
            sampled = sample(
                chosen, [s.params for s in takers], [s.generator for s in takers], [s.adjust for s in takers]
            )
            now = time.perf_counter()
            outputs = [self._accept(seq, result, now) for seq, result in zip(takers, sampled, strict=True)]
        for request_id, search in searches.items():
            if search.ready:
                outputs += self._next_beams(requests[request_id], search)
        return outputs

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Let the answers begin that share this sequence's prompt."""
        siblings, seq.siblings, seq.seats = seq.siblings, [], 1
        now = time.perf_counter()
        for sibling in siblings:
            if not sibling.finished:  # else aborted meanwhile
                sibling.handles.extend(map(self._cache.fork, seq.handles))
                sibling.num_stored = sibling.num_reached = seq.num_stored
                sibling.num_cached_tokens, sibling.context_len = seq.num_cached_tokens, seq.context_len
                sibling.metrics.first_scheduled_time = now
                self._scheduler.start(sibling)
        return [sibling for sibling in siblings if not sibling.finished]

    def _next_beams(self, sequences: list[Sequence], search: BeamSearch) -> list[StepOutput]:
        """The beams that have offered their candidates go on, as the search says, or all end."""
        running = sequences[: len(search.scores)]
        steps = search.select([seq.token_ids[seq.prompt_len :] for seq in running])
        now = time.perf_counter()
        if not steps:
            for seq, answer in zip(sequences, search.finished, strict=False):
                seq.token_ids = seq.token_ids[: seq.prompt_len] + answer.token_ids
                seq.cumulative_logprob, seq.finish_reason = answer.logprob, answer.reason
                seq.metrics.last_token_time = now
            self._metrics.num_generation_tokens += sum(len(answer.token_ids) for answer in search.finished)
            reasons = [seq.finish_reason or "length" for seq in sequences]
            return [
                StepOutput(seq.request_id, finish_reason=reason, index=seq.index)
                for seq, reason in zip(sequences, reasons, strict=True)
            ]
        if sequences[0].num_generated == 0:
            self._metrics.num_prompt_tokens += sequences[0].prompt_len
        parents = [step.parent for step in steps]
        known = [running[parent].token_ids for parent in parents]
        for seq in running[len(steps) :]:  # too few tokens have any probability
            self._scheduler.running.remove(seq)
        # One C call from the cache's answer to the list, as in Scheduler._open.
        search.handles.extend(map(self._cache.reorder, ([seq.handles[0] for seq in running],), (parents,)))
        first = sequences[0]
        for seq, step, token_ids, handle in zip(sequences, steps, known, search.handles[0], strict=False):
            seq.token_ids = [*token_ids, step.token_id]
            seq.handles[:] = [handle]
            seq.num_stored, seq.num_cached_tokens = first.num_stored, first.num_cached_tokens
            seq.context_len = first.context_len
            seq.metrics.token(now)
            self._cache.append(handle, [step.token_id])
        for seq in running[len(steps) :]:
            seq.handles.clear()
        search.handles.clear()
        first.seats, first.siblings = 1, []
        for seq in sequences[: len(steps)]:
            seq.unit = sequences[: len(steps)]
            if seq not in self._scheduler.running:
                seq.num_reached = seq.num_stored
                seq.metrics.first_scheduled_time = now
                self._scheduler.start(seq)
        return []

    def _take_prompt_logprobs(self, seq: Sequence, n: int, logits: FloatArray, row: int) -> int:
        """Note those of the prompt's tokens whose rows this step has computed; returns the row behind them."""
        assert seq.prompt_logprobs is not None
        assert seq.params.prompt_logprobs is not None
        for position in prompt_rows(seq, seq.num_stored - n, seq.num_stored):
            token = seq.token_ids[position + 1]
            seq.prompt_logprobs.append(logprobs(logits[row], token, seq.params.prompt_logprobs))
            row += 1
        return row

    def _accept(self, seq: Sequence, result: Sampled | KvcoreError, now: float) -> StepOutput:
        """Give a sequence its next token, and end it or make it ready for the one after."""
        if isinstance(result, KvcoreError):
            error = InvalidState(f"request {seq.request_id!r}, token {seq.num_generated}: {result}")
            return StepOutput(seq.request_id, error=error, index=seq.index)
        token_id = result.token_id
        if seq.index == 0 and seq.metrics.first_token_time is None:
            self._metrics.num_prompt_tokens += seq.prompt_len
        self._metrics.num_generation_tokens += 1
        seq.metrics.token(now)
        if seq.logprobs is not None and result.logprobs is not None:
            seq.logprobs.append(result.logprobs)
        seq.cumulative_logprob += result.logprob
        seq.token_ids.append(token_id)
        if seq.adjust is not None:
            seq.adjust.accept(token_id)
        reason, stop_reason = self._end_reason(seq, token_id)
        if reason is None and not seq.use_cache:
            seq.num_reached = 0  # a new round, in which all is computed once more
            self._scheduler.restart(seq)
        elif reason is None and seq.handles:
            self._cache.append(seq.handles[0], [token_id])
        return StepOutput(seq.request_id, token_id, result.logprobs, reason, stop_reason, index=seq.index)

    def _end_reason(self, seq: Sequence, token_id: int) -> tuple[str | None, int | None]:
        params = seq.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and token_id in params.stop_ids:
            return "stop", token_id
        if seq.adjust is not None and seq.adjust.finished:
            seq.last_is_text = True
            return "stop", None
        return ("length" if seq.num_generated >= seq.max_new_tokens else None), None
