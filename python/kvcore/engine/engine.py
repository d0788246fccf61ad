"""The engine: requests come and go, and each step takes all running ones one batch further. Token ids only.

    step():  items  = scheduler.schedule()               who goes into the batch, with how many tokens, and their slots
             logits = model.forward(batch, ...)          writes and reads the cache layer by layer
             for each sequence whose known tokens are all computed: sample the next one, and along its draft
             cache.commit(batch)                         the tokens now have keys and values; rejected drafts are undone
             for each that has a next token: append it or end

A sequence whose draft was right has more tokens than one then (``speculation.py``). It gets one in each step all the
same: steps compute nothing as long as there are such tokens. So whoever follows a request sees what it always sees.

A request is one sequence, or ``n`` that fork when the prompt has been computed, or the beams of a search. It ends with
"stop" (an end-of-sequence id, a stop token id or a stop string), "length" or "abort" (by the caller, or because its
time is over), or an error ends it. If anything raises inside of a step, KeyboardInterrupt included, every request of
that batch is ended with that error and its blocks are returned, because nobody can know how far it got; the exception
goes on to the caller, all others wait on untouched, and the engine can be used at once. Logits that are not finite end
only the request whose row has them. Blocks that run out end nobody: see ``scheduler.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from kvcore.engine import policy
from kvcore.engine.batch import adapter_rows, batch_rows
from kvcore.engine.intake import Intake, Marks
from kvcore.engine.interfaces import Adapter, Cache, EncoderInput, FloatArray, Handle, Model
from kvcore.engine.logits import Constraint
from kvcore.engine.metrics import EngineMetrics
from kvcore.engine.next_tokens import NextTokens, StepOutput
from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams
from kvcore.engine.scheduler import Scheduler
from kvcore.engine.sequence import Sequence
from kvcore.engine.speculation import SpeculativeConfig
from kvcore.errors import InvalidArgument, InvalidState, OutOfBlocks


class Engine:
    """Runs requests on a model. Not thread-safe: whoever shares it brings a lock (``LLM`` does)."""

    def __init__(
        self,
        model: Model,
        *,
        eos_token_ids: Iterable[int] = (),
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        scheduling_policy: str = "fcfs",
        reservation: str = "known",
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        speculation: SpeculativeConfig | None = None,
    ) -> None:
        """Make an engine.

        Args:
            model: the decoder, with its cache.
            eos_token_ids: ids that end a text.
            max_model_len: the most tokens of a sequence, prompt and answer; None: what the cache can hold.
            max_num_seqs: the most sequences that run at once.
            max_num_batched_tokens: the most tokens of a step.
            scheduling_policy: "fcfs", or "priority": by each request's priority, which ages (``policy.py``).
            reservation: how much of the cache a request takes when it is let in: "known", or one of the ways of
                contiguous memory, for comparison (``policy.reservation``).
            enable_prefix_caching: whether the cache shares prefixes, so that equal prompts are worth waiting for.
            seed: where requests without a seed get theirs from; None: from entropy.
            speculation: how next tokens are guessed, to compute several in a step; None: not at all.

        Raises:
            InvalidArgument: a limit below 1, an unknown policy or reservation.
        """
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise InvalidArgument(f"{name}: expected an integer of at least 1, got {limit}")
        if scheduling_policy not in policy.POLICIES:
            raise InvalidArgument(f"scheduling_policy: expected one of fcfs, priority, got {scheduling_policy!r}")
        self._model = model
        self._cache: Cache = model.cache
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scheduler = Scheduler(
            model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            reservation=None if reservation == "known" else policy.reservation(reservation, max_model_len),
            share_prompts=enable_prefix_caching,
        )
        self._intake = Intake(
            self._scheduler.space,
            vocab_size=int(model.spec.vocab_size),
            eos_token_ids=self._eos_token_ids,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            scheduling_policy=scheduling_policy,
            mark_prefixes=enable_prefix_caching,
            seed=seed,
            speculation=speculation,
        )
        self._requests: dict[str, list[Sequence]] = {}
        self._deadlines: dict[str, float] = {}
        self._stepping = False
        self._abort_after_step: list[str] = []
        self.metrics = EngineMetrics()
        self._next_tokens = NextTokens(self._cache, self._scheduler, self.metrics, self._eos_token_ids)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def check_request(
        self, prompt_token_ids: Any, params: SamplingParams | BeamSearchParams, encoder: EncoderInput | None = None
    ) -> list[int]:
        """Say whether ``add_request`` would take a request, and return its prompt as a list. See ``Intake.check``."""
        return self._intake.check(prompt_token_ids, params, encoder)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Any,
        params: SamplingParams | BeamSearchParams,
        *,
        use_cache: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        salt: str | None = None,
        marks: Marks = (),
        make_constraint: Callable[[], Constraint] | None = None,
        adapter: Adapter | None = None,
        encoder: EncoderInput | None = None,
        keep: list[Handle] | None = None,
    ) -> Sequence:
        """Put a request in the queue.

        It ends with "length" after ``params.max_tokens`` tokens, or when prompt and answer together are
        ``max_model_len`` tokens, or when the cache is full with it (its last token needs no slot), whichever comes
        first; at least one token is generated.

        Args:
            request_id: a name that no unfinished request has.
            prompt_token_ids: the prompt, at least one id.
            params: how to sample, or how to search.
            use_cache: False computes the whole sequence again for every token, as if there were no cache. The tokens
                are the same. Not for beam search.
            priority: smaller goes first, where the policy is "priority".
            timeout: seconds from now after which it is aborted, with the stop reason "timeout".
            salt: only requests with equal salts share blocks.
            marks: prefixes of the prompt that the cache shall keep for a time of their own.
            make_constraint: makes the grammar that an answer must follow, a new one for each.
            adapter: changes the model for this request.
            encoder: what the encoder is given, where there is one; the prompt is then the decoder's.
            keep: takes the handles of a request that ends without an error, which are the caller's to free then. So
                nobody can take their blocks between the request's end and what the caller does next.

        Returns:
            The sequence, which tells how far the request has got; others are its ``siblings``.

        Raises:
            What ``Intake.check`` raises, and InvalidArgument for a name that is taken.
        """
        if request_id in self._requests:
            raise InvalidArgument(f"request_id: expected one that no unfinished request has, got {request_id!r} again")
        sequences = self._intake.make(
            request_id,
            prompt_token_ids,
            params,
            use_cache=use_cache,
            arrival=self.metrics.num_requests,
            priority=priority,
            salt=salt,
            marks=marks,
            make_constraint=make_constraint,
            adapter=adapter,
            encoder=encoder,
            keep=keep,
        )
        first = sequences[0]
        self._requests[request_id] = sequences
        if timeout is not None:
            self._deadlines[request_id] = first.metrics.arrival_time + timeout
        self._scheduler.add(first)
        self.metrics.num_requests += 1
        return first

    def abort(self, request_id: str) -> None:
        """End a request and return its blocks, whatever it is doing. Unknown and finished ones are left alone.

        During a step (a garbage collector may close an iterator at any moment) it takes effect right after it.
        """
        if self._stepping:
            self._abort_after_step.append(request_id)
            return
        for seq in list(self._requests.get(request_id, ())):
            self._end(seq, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None, index: int = 0) -> None:
        """End one answer for a reason that the engine cannot see, such as a stop string. Not during a step."""
        sequences = self._requests.get(request_id, ())
        if self._stepping:
            self._abort_after_step.append(request_id)
        elif index < len(sequences):
            self._end(sequences[index], reason, stop_reason)

    def step(self) -> list[StepOutput]:
        """Run one batch; does nothing if no request is there.

        Returns:
            One output for every answer that got a token or has ended.

        Raises:
            Whatever the model or the cache raises. The requests of the batch are ended with that error then.
        """
        if self._stepping:
            raise InvalidState("step: expected no step under way, got a call from inside of one")
        # No `finally`: whatever is interrupted in here, the clean-up itself included, is cleaned up once more.
        try:
            self._stepping = True
            outputs = self._step()
            self._after_step()
            return outputs
        except BaseException as error:
            try:
                self._recover(error)
            except BaseException:
                self._recover(error)
                raise
            raise

    def logits(
        self,
        token_ids: Any,
        adapter: Adapter | None = None,
        encoder: EncoderInput | None = None,
        maps: list[dict[int, FloatArray]] | None = None,
    ) -> FloatArray:
        """The logits of every position, float32 [len(token_ids), vocab], in one go: nothing else runs meanwhile.

        The tokens are computed in chunks of ``max_num_batched_tokens`` (or as many as a window's pool holds). Nothing
        is read from the prefix cache or left in it. ``maps`` takes for each chunk the weights of each layer's
        cross-attention, see ``Model.forward``.

        Raises:
            InvalidArgument, TypeError: as ``check_request``.
            OutOfBlocks: more blocks needed than there are, or than running requests leave.
        """
        token_ids = self._intake.check_prompt(token_ids, encoder)
        total, space = len(token_ids), self._scheduler.space
        needed, free = space.to_come(0, 0, total, encoder), space.free()
        if any(need > have for need, have in zip(needed, free, strict=True)):
            raise OutOfBlocks(
                f"{total} tokens need {max(needed)} blocks of {space.block_size}, and {min(free)} are available: "
                f"running requests hold the rest of {self._cache.num_blocks}"
            )
        result = np.empty((total, self._intake.vocab_size), np.float32)
        handles: list[Any] = []
        try:
            handles.extend(map(partial(self._cache.add, use_prefix=False), (token_ids,)))  # as Scheduler._open
            if encoder is not None:
                self._model.encode(handles[0], encoder)
            for start in range(0, total, space.max_chunk):
                n = min(space.max_chunk, total - start)
                batch = self._cache.plan([(handles[0], n)])
                positions = np.arange(start, start + n, dtype=np.int64)
                ids = np.array(token_ids[start : start + n], np.int64)
                lens = np.full(n, self._model.context_len(total, total), np.int64)
                rows = positions - start
                options: dict[str, Any] = {} if adapter is None else {"adapters": [(adapter, rows)]}
                if maps is not None:
                    maps.append({})
                    options["maps"] = maps[-1]
                result[start : start + n] = self._model.forward(batch, ids, positions, lens, rows, **options)
                self._cache.commit(batch)
                self.metrics.num_steps += 1
                self.metrics.num_computed_tokens += n
        finally:
            self._scheduler.free(handles)
        return result

    def stats(self) -> dict[str, Any]:
        """All counts, how many requests wait and run, and the counts of the cache under "cache"."""
        return {
            **self.metrics.snapshot(),
            "num_waiting": len(self._scheduler.waiting),
            "num_running": len(self._scheduler.running),
            "cache": dict(self._cache.stats()),
        }

    # -- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> list[StepOutput]:
        outputs = self._expire() if self._deadlines else []
        scheduler, metrics = self._scheduler, self.metrics
        if not scheduler.ahead():
            try:
                scheduler.schedule()
            except OutOfBlocks as error:
                if scheduler.moving is not None or not scheduler.running:
                    raise
                return outputs + self._end_stuck(scheduler.running[0], error)
            if not scheduler.items:
                if scheduler.waiting and not scheduler.running:
                    # nothing here will ever make room for it
                    outputs += self._end_stuck(scheduler.waiting[0])
                return outputs
            self._compute()
        for seq, n in scheduler.items:
            recomputed = seq.num_recomputed_tokens
            seq.store(n)
            metrics.num_recomputed_tokens += seq.num_recomputed_tokens - recomputed
            metrics.num_computed_tokens += n
        metrics.num_preemptions = scheduler.num_preemptions
        taken = self._next_tokens.take(scheduler.items, self._requests)
        for output in taken:
            if output.finish_reason is not None or output.error is not None:
                seq = self._requests[output.request_id][output.index]
                self._end(seq, output.finish_reason, output.stop_reason, output.error)
        return outputs + taken

    def _compute(self) -> None:
        """Run the model on the batch, and sample; drafts are behind us then."""
        scheduler, metrics = self._scheduler, self.metrics
        now = time.perf_counter()
        for seq, _ in scheduler.items:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now
                metrics.num_cached_tokens += seq.num_cached_tokens
        rows = batch_rows(scheduler.items)
        adapters = adapter_rows(scheduler.items)
        logits = self._model.forward(scheduler.batch, *rows, **({"adapters": adapters} if adapters else {}))
        metrics.num_steps += 1
        self._next_tokens.sample(scheduler.items, logits)
        drafted = [seq for seq, _ in scheduler.items if seq.draft]
        if not drafted:
            self._cache.commit(scheduler.batch)
            return
        # as many rows as tokens were sampled: the last token's, and those of the accepted part of the draft
        keep = [range(len(seq.ahead)) if seq.draft else None for seq, _ in scheduler.items]
        self._cache.commit(scheduler.batch, keep)
        scheduler.items = [(seq, n - len(seq.draft)) for seq, n in scheduler.items]
        for seq in drafted:
            metrics.draft(len(seq.draft), len(seq.ahead) - 1)
            assert seq.drafts is not None
            seq.drafts.judge(len(seq.draft), len(seq.ahead) - 1, len(seq.token_ids))
            seq.draft = []

    # -- how they end -----------------------------------------------------------------------------------------------

    def _end(
        self,
        seq: Sequence,
        reason: str | None,
        stop_reason: int | str | None = None,
        error: BaseException | None = None,
    ) -> None:
        if not seq.finished:
            seq.finish_reason, seq.stop_reason, seq.error = reason, stop_reason, error
            seq.metrics.finished_time = time.perf_counter()
            if seq.search is not None:
                self._scheduler.free([handle for handles in seq.search.handles for handle in handles])
            self._scheduler.release(seq)
        # last, so that an end that was interrupted is still found and ended by the next attempt
        sequences = self._requests.get(seq.request_id)
        if sequences is not None and seq in sequences and all(s.finished for s in sequences):
            self._deadlines.pop(seq.request_id, None)
            first = sequences[0]
            first.metrics.finished_time = seq.metrics.finished_time
            self._requests.pop(seq.request_id)
            generated = sum(s.num_generated for s in sequences)
            latencies = [latency for s in sequences for latency in s.metrics.inter_token_latencies]
            self.metrics.end(first.metrics, first.finish_reason or "error", first.prompt_len, generated, latencies)

    def _expire(self) -> list[StepOutput]:
        """Abort the requests whose time is over."""
        now = time.perf_counter()
        outputs = []
        for request_id in [name for name, deadline in self._deadlines.items() if deadline <= now]:
            for seq in list(self._requests.get(request_id, ())):
                if not seq.finished:
                    outputs.append(StepOutput(request_id, None, None, "abort", "timeout", index=seq.index))
                self._end(seq, "abort", "timeout")
            self._deadlines.pop(request_id, None)
        return outputs

    def _end_stuck(self, seq: Sequence, cause: OutOfBlocks | None = None) -> list[StepOutput]:
        """End a request that is alone and still does not get its blocks: others than the engine hold them."""
        space, num_tokens = self._scheduler.space, len(seq.token_ids)
        needed, available, total = max(
            space.lacking([member.num_stored for member in seq.unit], num_tokens), key=lambda pool: pool[0] - pool[1]
        )
        error = OutOfBlocks(
            f"request {seq.request_id!r}: {needed} blocks of {space.block_size} tokens needed, {available} available: "
            f"sequences outside of the engine hold the rest of {total}"
        )
        error.__cause__ = cause
        outputs = []
        for member in list(self._requests[seq.request_id]):
            if not member.finished:
                outputs.append(StepOutput(seq.request_id, error=error, index=member.index))
            self._end(member, None, error=error)
        return outputs

    def _recover(self, error: BaseException) -> None:
        scheduler = self._scheduler
        # an error on the way into the cache concerns that sequence only: the others have not been touched yet
        concerned = [seq for seq, _ in scheduler.items] if scheduler.moving is None else [scheduler.moving]
        for seq in concerned:
            for member in list(self._requests.get(seq.request_id, (seq,))):
                self._end(member, None, error=error)
        self._after_step()

    def _after_step(self) -> None:
        self._scheduler.items, self._scheduler.batch, self._scheduler.moving = [], None, None
        self._stepping = False
        while self._abort_after_step:
            self.abort(self._abort_after_step[-1])
            self._abort_after_step.pop()
