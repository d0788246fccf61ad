"""From the logits of a batch to the next token of each sequence, and to what becomes of it then.

    sample, before the batch is committed; for each sequence whose known tokens are all computed:
        one answer:       sample; while that is the next token of its draft: sample from the row behind it
        n answers:        sample a first token for each
        beams:            offer the best continuations
    take, when the tokens are stored:
        one answer:       append the token, or end
        n answers:        fork the handle for each; from then on each is on its own
        beams:            when all beams have offered: choose, and reorder the handles

A token is known here with all that it does (``StepOutput``) before its sequence has it. Nothing is ended here: outputs
say what is to end, and the engine does it.
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
        logprob: of the token, where answers are compared.
    """

    request_id: str
    token_id: int | None = None
    logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: KvcoreError | None = None
    index: int = 0
    logprob: float = 0.0


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

    def sample(self, items: list[Item], logits: FloatArray) -> None:
        """Find the next token of every sequence that this batch completes, and along its draft; see ``Sequence.ahead``.

        Args:
            items: the batch, not noted as stored yet.
            logits: float32 [rows that ``batch_rows`` asked for, vocab].
        """
        takers: list[Sequence] = []
        rows: list[int] = []
        row = 0
        for seq, n in items:
            if seq.prompt_logprobs is not None:
                row = self._take_prompt_logprobs(seq, n, logits, row)
            if seq.num_stored + n < len(seq.token_ids):
                continue
            if seq.search is not None:
                seq.search.offer(seq.index, logits[row])
            else:
                answers = [seq, *(sibling for sibling in seq.siblings if not sibling.finished)]
                takers += answers
                rows += [row] * len(answers)
            row += 1 + len(seq.draft)
        while takers:
            chosen = logits if len(rows) == len(logits) and rows == list(range(len(rows))) else logits[rows]
            sampled = sample(
                chosen, [s.params for s in takers], [s.generator for s in takers], [s.adjust for s in takers]
            )
            right = [self._is_drafted(seq, result) for seq, result in zip(takers, sampled, strict=True)]
            rows = [row + 1 for row, goes_on in zip(rows, right, strict=True) if goes_on]
            takers = [seq for seq, goes_on in zip(takers, right, strict=True) if goes_on]

    def take(self, items: list[Item], requests: Mapping[str, list[Sequence]]) -> list[StepOutput]:
        """Give every sequence whose tokens are all stored its next one. The caller ends those whose outputs say so.

        Args:
            items: the batch, its tokens noted as stored.
            requests: the sequences of each request.
        """
        takers: list[Sequence] = []
        searches: dict[str, BeamSearch] = {}
        for seq, _ in items:
            if seq.num_stored < len(seq.token_ids):
                continue
            if seq.search is not None:
                searches[seq.request_id] = seq.search
            else:
                takers += [seq, *self._fork(seq)] if seq.siblings else [seq]
        now = time.perf_counter()
        outputs = [self._accept(seq, now) for seq in takers]
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
        """Note those of the prompt's tokens whose rows are in this batch; returns the row behind them."""
        assert seq.prompt_logprobs is not None
        assert seq.params.prompt_logprobs is not None
        for position in prompt_rows(seq, seq.num_stored, seq.num_stored + n):
            token = seq.token_ids[position + 1]
            seq.prompt_logprobs.append(logprobs(logits[row], token, seq.params.prompt_logprobs))
            row += 1
        return row

    def _is_drafted(self, seq: Sequence, result: Sampled | KvcoreError) -> bool:
        """Note what was sampled behind all that is known, and say whether the draft was right and goes on."""
        place = len(seq.ahead)
        if isinstance(result, KvcoreError):
            error = InvalidState(f"request {seq.request_id!r}, token {seq.num_generated + place}: {result}")
            seq.ahead.append(StepOutput(seq.request_id, error=error, index=seq.index))
            return False
        token_id = result.token_id
        if seq.adjust is not None:
            seq.adjust.accept(token_id)
        reason, stop_reason = self._end_reason(seq, token_id, seq.num_generated + place + 1)
        seq.ahead.append(
            StepOutput(seq.request_id, token_id, result.logprobs, reason, stop_reason, None, seq.index, result.logprob)
        )
        return reason is None and place < len(seq.draft) and seq.draft[place] == token_id

    def _accept(self, seq: Sequence, now: float) -> StepOutput:
        """Give a sequence its next token, and make it ready for the one after."""
        output = seq.ahead.pop(0)
        token_id = output.token_id
        if token_id is None:
            return output
        if seq.index == 0 and seq.metrics.first_token_time is None:
            self._metrics.num_prompt_tokens += seq.prompt_len
        self._metrics.num_generation_tokens += 1
        seq.metrics.token(now)
        if seq.logprobs is not None and output.logprobs is not None:
            seq.logprobs.append(output.logprobs)
        seq.cumulative_logprob += output.logprob
        seq.token_ids.append(token_id)
        if output.finish_reason is None and not seq.use_cache:
            seq.num_reached = 0  # a new round, in which all is computed once more
            self._scheduler.restart(seq)
        elif output.finish_reason is None and seq.handles and not seq.ahead:  # else the cache has it, from the draft
            self._cache.append(seq.handles[0], [token_id])
        return output

    def _end_reason(self, seq: Sequence, token_id: int, count: int) -> tuple[str | None, int | None]:
        params = seq.params
        if token_id in self._eos_token_ids and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and token_id in params.stop_ids:
            return "stop", token_id
        if seq.adjust is not None and seq.adjust.finished:
            seq.last_is_text = True
            return "stop", None
        return ("length" if count >= seq.max_new_tokens else None), None
