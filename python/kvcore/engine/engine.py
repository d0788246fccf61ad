"""The engine: requests come and go, and each step takes all running ones one batch further. Token ids only.

    step():  items  = scheduler.schedule()               who goes into the batch, with how many tokens
             batch  = cache.plan(items)                  their slots, all or nothing
             logits = model.forward(batch, ...)          writes and reads the cache layer by layer
             cache.commit(batch)                         the tokens now have keys and values
             for each sequence whose known tokens are all stored: sample the next one, append it or end

A request ends with "stop" (an end-of-sequence id, a stop token id or a stop string), "length" or "abort", or an error
ends it. If anything raises inside of a step, KeyboardInterrupt included, every sequence of that batch is ended
with that error and its blocks are returned, because nobody can know how far it got; the exception goes on to the
caller, all others wait on untouched, and the engine can be used at once. Logits that are not finite end only the
request whose row has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvcore.engine.interfaces import Cache, FloatArray, Model
from kvcore.engine.metrics import EngineMetrics, RequestMetrics
from kvcore.engine.sampler import Logprob, Sampled, make_generator, sample
from kvcore.engine.sampling_params import SamplingParams
from kvcore.engine.scheduler import Item, Scheduler
from kvcore.engine.sequence import Sequence
from kvcore.errors import InvalidArgument, InvalidState, KvcoreError, OutOfBlocks


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step did to one request.

    Attributes:
        request_id: the request.
        token_id: the token it got; None if it got none, but an error.
        logprobs: of this position, if asked for.
        finish_reason: "stop" or "length" if this token ended it.
        error: what ended it, if it could not go on.
    """

    request_id: str
    token_id: int | None = None
    logprobs: dict[int, Logprob] | None = None
    finish_reason: str | None = None
    error: KvcoreError | None = None


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
        seed: int | None = None,
    ) -> None:
        """Make an engine.

        Args:
            model: the decoder, with its cache.
            eos_token_ids: ids that end a text.
            max_model_len: the most tokens of a sequence, prompt and answer; None: what the cache can hold.
            max_num_seqs: the most sequences that run at once.
            max_num_batched_tokens: the most tokens of a step.
            seed: where requests without a seed get theirs from; None: from entropy.

        Raises:
            InvalidArgument: a limit below 1.
        """
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        for name, limit in limits.items():
            if limit is not None and limit < 1:
                raise InvalidArgument(f"{name}: expected an integer of at least 1, got {limit}")
        self._model = model
        self._cache: Cache = model.cache
        self._vocab_size = int(model.spec.vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._seed = seed
        self._scheduler = Scheduler(model, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._stepping = False
        self._abort_after_step: list[str] = []
        self.metrics = EngineMetrics()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._sequences)

    def check_request(self, prompt_token_ids: Any, params: SamplingParams) -> list[int]:
        """Say whether ``add_request`` would take a request, and return its prompt as a list.

        Raises:
            InvalidArgument: an empty prompt, one longer than ``max_model_len``, an id that the vocabulary lacks.
            OutOfBlocks: a prompt that would not fit into the cache even if nothing else were in it.
            TypeError: something that is no list of token ids.
        """
        token_ids = self._check_prompt(prompt_token_ids)
        params.check_vocab(self._vocab_size)
        return token_ids

    def add_request(
        self, request_id: str, prompt_token_ids: Any, params: SamplingParams, *, use_cache: bool = True
    ) -> Sequence:
        """Put a request in the queue.

        It ends with "length" after ``params.max_tokens`` tokens, or when prompt and answer together are
        ``max_model_len`` tokens, or when the cache is full with it (its last token needs no slot), whichever comes
        first; at least one token is generated.

        Args:
            request_id: a name that no unfinished request has.
            prompt_token_ids: the prompt, at least one id.
            params: how to sample.
            use_cache: False computes the whole sequence again for every token, as if there were no cache. The tokens
                are the same.

        Returns:
            The sequence, which tells how far the request has got.

        Raises:
            What ``check_request`` raises, and InvalidArgument for a name that is taken.
        """
        if request_id in self._sequences:
            raise InvalidArgument(f"request_id: expected one that no unfinished request has, got {request_id!r} again")
        token_ids = self.check_request(prompt_token_ids, params)
        max_new_tokens = self._cache.num_blocks * self._cache.block_size - len(token_ids) + 1
        if self._max_model_len is not None:
            max_new_tokens = min(max_new_tokens, max(1, self._max_model_len - len(token_ids)))
        if params.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, params.max_tokens)
        generator = None
        if not params.greedy:
            # separate streams: a request seeded with 7 is not the LLM seeded with 7
            request = self.metrics.num_requests
            generator = (
                make_generator(self._seed, 1, request) if params.seed is None else make_generator(params.seed, 0)
            )
        seq = Sequence(
            request_id,
            params,
            token_ids,
            len(token_ids),
            max_new_tokens,
            use_cache,
            generator,
            RequestMetrics(time.perf_counter()),
            logprobs=None if params.logprobs is None else [],
        )
        self._sequences[request_id] = seq
        self._scheduler.add(seq)
        self.metrics.num_requests += 1
        return seq

    def abort(self, request_id: str) -> None:
        """End a request and return its blocks, whatever it is doing. Unknown and finished ones are left alone.

        During a step (a garbage collector may close an iterator at any moment) it takes effect right after it.
        """
        self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request for a reason that the engine cannot see, such as a stop string. Else as ``abort``."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return
        if self._stepping:
            self._abort_after_step.append(request_id)
        else:
            self._end(seq, reason, stop_reason)

    def step(self) -> list[StepOutput]:
        """Run one batch; does nothing if no request is there.

        Returns:
            One output for every request that got a token or was ended by an error of its own.

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

    def logits(self, token_ids: Any) -> FloatArray:
        """The logits of every position, float32 [len(token_ids), vocab], in one go: nothing else runs meanwhile.

        The tokens are computed in chunks of ``max_num_batched_tokens``. Nothing is read from the prefix cache or
        left in it.

        Raises:
            InvalidArgument, TypeError: as ``check_request``.
            OutOfBlocks: more blocks needed than there are, or than running requests leave.
        """
        token_ids = self._check_prompt(token_ids)
        total, size = len(token_ids), self._cache.block_size
        needed, room = -(-total // size), self._scheduler.room()
        if needed > room:
            raise OutOfBlocks(
                f"{total} tokens need {needed} blocks of {size}, and {room} are available: "
                f"running requests hold or have reserved the rest of {self._cache.num_blocks}"
            )
        result = np.empty((total, self._vocab_size), np.float32)
        handles: list[Any] = []
        try:
            handles.extend(map(partial(self._cache.add, use_prefix=False), (token_ids,)))  # as Scheduler._open
            for start in range(0, total, self._max_num_batched_tokens):
                n = min(self._max_num_batched_tokens, total - start)
                batch = self._cache.plan([(handles[0], n)])
                positions = np.arange(start, start + n, dtype=np.int64)
                ids = np.array(token_ids[start : start + n], np.int64)
                lens = np.full(n, total, np.int64)
                result[start : start + n] = self._model.forward(batch, ids, positions, lens, positions - start)
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

    def _check_prompt(self, prompt_token_ids: Any) -> list[int]:
        token_ids = as_token_ids(prompt_token_ids, self._vocab_size)
        length, size, blocks = len(token_ids), self._cache.block_size, self._cache.num_blocks
        if self._max_model_len is not None and length > self._max_model_len:
            raise InvalidArgument(
                f"prompt: expected at most {self._max_model_len} tokens (max_model_len), got {length} tokens"
            )
        needed = -(-length // size)
        if needed > blocks:
            raise OutOfBlocks(
                f"a prompt of {length} tokens can never fit: {needed} blocks of {size} needed, {blocks} available"
            )
        return token_ids

    def _step(self) -> list[StepOutput]:
        scheduler, cache = self._scheduler, self._cache
        items = scheduler.schedule()
        if not items:
            return self._refuse_head()
        now = time.perf_counter()
        for seq, _ in items:
            if seq.metrics.first_scheduled_time is None:
                seq.metrics.first_scheduled_time = now
                self.metrics.num_cached_tokens += seq.num_cached_tokens
        batch = cache.plan([(seq.handles[0], n) for seq, n in items])
        logits = self._model.forward(batch, *_rows(items))
        cache.commit(batch)
        for seq, n in items:
            seq.num_stored += n
            seq.num_computed_tokens += n
            self.metrics.num_computed_tokens += n
        self.metrics.num_steps += 1
        ready = [seq for seq, _ in items if seq.num_missing == 0]
        if not ready:
            return []
        sampled = sample(logits, [seq.params for seq in ready], [seq.generator for seq in ready])
        now = time.perf_counter()
        return [self._accept(seq, result, now) for seq, result in zip(ready, sampled, strict=True)]

    def _accept(self, seq: Sequence, result: Sampled | InvalidState, now: float) -> StepOutput:
        """Give a sequence its next token, and end it or make it ready for the one after."""
        if isinstance(result, InvalidState):
            error = InvalidState(f"request {seq.request_id!r}, token {seq.num_generated}: {result}")
            self._end(seq, None, error=error)
            return StepOutput(seq.request_id, error=error)
        token_id = result.token_id
        if seq.num_generated == 0:
            self.metrics.num_prompt_tokens += seq.prompt_len
        self.metrics.num_generation_tokens += 1
        seq.metrics.token(now)
        if seq.logprobs is not None and result.logprobs is not None:
            seq.logprobs.append(result.logprobs)
        seq.token_ids.append(token_id)
        reason, stop_reason = self._end_reason(seq, token_id)
        if reason is not None:
            self._end(seq, reason, stop_reason)
        elif seq.use_cache:
            self._cache.append(seq.handles[0], [token_id])
        else:
            self._scheduler.end_round(seq)
        return StepOutput(seq.request_id, token_id, result.logprobs, reason)

    def _end_reason(self, seq: Sequence, token_id: int) -> tuple[str | None, int | None]:
        if token_id in self._eos_token_ids and not seq.params.ignore_eos:
            return "stop", None
        if token_id in seq.params.stop_ids:
            return "stop", token_id
        return ("length" if seq.num_generated >= seq.max_new_tokens else None), None

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
            self._scheduler.release(seq)
            self.metrics.num_finished[reason or "error"] += 1
        # last, so that an end that was interrupted is still found and ended by the next attempt
        self._sequences.pop(seq.request_id, None)

    def _refuse_head(self) -> list[StepOutput]:
        """Nothing runs and the first in the queue was not let in: nothing here will ever make room for it."""
        waiting = self._scheduler.waiting
        if not waiting:
            return []
        seq = waiting[0]
        cache, needed = self._cache, self._scheduler.worst_case(seq)
        error = OutOfBlocks(
            f"request {seq.request_id!r}: {needed} blocks of {cache.block_size} tokens needed, "
            f"{self._scheduler.room()} available: sequences outside of the engine hold the rest of {cache.num_blocks}"
        )
        self._end(seq, None, error=error)
        return [StepOutput(seq.request_id, error=error)]

    def _recover(self, error: BaseException) -> None:
        scheduler = self._scheduler
        # an error on the way into the cache concerns that sequence only: the others have not been touched yet
        concerned = [seq for seq, _ in scheduler.items] if scheduler.opening is None else [scheduler.opening]
        for seq in concerned:
            self._end(seq, None, error=error)
        self._after_step()

    def _after_step(self) -> None:
        self._scheduler.items, self._scheduler.opening = [], None
        self._stepping = False
        while self._abort_after_step:
            self.abort(self._abort_after_step[-1])
            self._abort_after_step.pop()


def as_token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """Check that ``prompt`` is a list (or array) of token ids, at least one, and return it as a list of ints.

    Raises:
        InvalidArgument: it is empty, or an id is negative or not below ``vocab_size``.
        TypeError: it is something else.
    """
    expected = "a list of token ids"
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise TypeError(f"prompt: expected {expected}, got an array of {prompt.dtype} with shape {prompt.shape}")
        token_ids = prompt.tolist()
    elif isinstance(prompt, (str, bytes, dict)) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: expected {expected}, got {type(prompt).__name__}")
    else:
        token_ids = list(prompt)
    for kind in set(map(type, token_ids)):
        if kind is not int and not issubclass(kind, np.integer):
            raise TypeError(f"prompt: expected {expected}, got a list with {kind.__name__} in it")
    if not token_ids:
        raise InvalidArgument("prompt: expected at least one token, got none")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        got = low if low < 0 else high
        raise InvalidArgument(f"prompt: expected token ids from 0 to {vocab_size - 1} (the vocabulary), got {got}")
    return [int(token_id) for token_id in token_ids]


def _rows(items: list[Item]) -> tuple[Any, Any, Any, Any]:
    """Token ids, positions and prompt lengths of a batch's rows in order, and the rows whose logits are wanted."""
    token_ids: list[int] = []
    positions: list[int] = []
    prompt_lens: list[int] = []
    logit_rows: list[int] = []
    for seq, n in items:
        end = seq.num_stored + n
        token_ids += seq.token_ids[seq.num_stored : end]
        positions += range(seq.num_stored, end)
        prompt_lens += [seq.prompt_len] * n
        if end == len(seq.token_ids):
            logit_rows.append(len(token_ids) - 1)
    return (
        np.array(token_ids, np.int64),
        np.array(positions, np.int64),
        np.array(prompt_lens, np.int64),
        np.array(logit_rows, np.int64),
    )
