"""Runs the requests of all calls and threads on one engine.

Whoever advances its own requests takes those of all others along. The lock is held for a step at a time, and a thread
that has stepped lets others in before its next one.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcore.engine.engine import Engine
from kvcore.errors import InvalidState
from kvcore.reply import Reply, Submission

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer


class Dispatcher:
    """Keeps the replies of requests that have not ended, and the lock on the engine.

    Attributes:
        replies: by request id.
        here, lock: ``with dispatcher.here, dispatcher.lock:`` keeps other threads off the engine. (Two of them, so
            that no byte code lies between a lock and the ``with`` that gives it back.)
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self.replies: dict[str, Reply] = {}
        self._ids = map(str, itertools.count())
        # Reentrant: a garbage collector may close an iterator of stream() in the middle of a step.
        self.lock = threading.RLock()
        self.here = _Presence()

    @property
    def engine(self) -> Engine:
        """The engine. Raises InvalidState after ``close``."""
        if self._engine is None:
            raise InvalidState("LLM: expected an open one, got a call after close()")
        return self._engine

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine is None

    def check(self, submission: Submission) -> Submission:
        """The same with its prompt as a checked list. Raises as ``Engine.check_request``."""
        token_ids = self.engine.check_request(submission.asked.token_ids, submission.params, submission.asked.encoder)
        return replace(submission, asked=replace(submission.asked, token_ids=token_ids))

    def submit(self, replies: list[Reply], submissions: list[Submission]) -> None:
        """Check all, then give them to the engine. What must be dropped later is in ``replies``, always."""
        with self.here, self.lock:
            engine = self.engine
            for submission in [self.check(submission) for submission in submissions]:
                reply = Reply(next(self._ids), submission, self._tokenizer, self._stop)
                replies.append(reply)
                self.replies[reply.request_id] = reply
                reply.begin(
                    engine.add_request(
                        reply.request_id,
                        submission.asked.token_ids,
                        submission.params,
                        use_cache=submission.use_cache,
                        priority=submission.priority,
                        timeout=submission.timeout,
                        salt=submission.asked.cache_salt,
                        marks=submission.asked.marks,
                        make_constraint=submission.make_constraint,
                        adapter=submission.adapter,
                        encoder=submission.asked.encoder,
                        keep=submission.asked.keep,
                    )
                )

    def advance(self, replies: list[Reply], *, raise_errors: bool = True) -> None:
        """Step the engine for everybody, unless another thread has finished these requests meanwhile."""
        with self.here, self.lock:
            for reply in replies:  # a step of another call that raised has told nobody
                self._follow(reply)
            if not all(reply.finished for reply in replies):
                for output in self.engine.step():
                    self._follow(self.replies.get(output.request_id))
        for reply in replies:
            if reply.submission.callback is not None:
                self._call_back(reply)
        if raise_errors:
            for reply in replies:
                reply.raise_error()
        if self.here.others:
            time.sleep(1e-4)  # a lock is not fair: without a pause this thread would take it again at once

    def news(self, reply: Reply) -> Any:
        """What is new of a reply, or None. Raises what ended it."""
        with self.here, self.lock:
            reply.raise_error()
            return reply.output(new=True) if reply.has_news else None

    def drop(self, replies: list[Reply]) -> None:
        """Forget requests, and abort those that have not ended. Can be repeated."""
        with self.here, self.lock:
            for reply in replies:
                if self._engine is not None:
                    self._engine.abort(reply.request_id)
                self.replies.pop(reply.request_id, None)

    def close(self) -> None:
        """Abort all requests and let the engine go; again is fine."""
        with self.here, self.lock:
            if self._engine is not None:
                for request_id in list(self.replies):
                    self._engine.abort(request_id)
                self._engine = None

    def _follow(self, reply: Reply | None) -> None:
        if reply is None:
            return
        try:
            reply.advance()
        except Exception as error:  # concerns this request only; the call that owns it raises it
            reply.error, reply.finished = error, True
            if self._engine is not None:
                self._engine.abort(reply.request_id)

    def _call_back(self, reply: Reply) -> None:
        """Tell a request's callback what is new. What it raises ends its request, and no other."""
        callback = reply.submission.callback
        with self.here, self.lock:
            wanted = callback is not None and not reply.failed and not reply.told_end and reply.has_news
            item = reply.output(new=True) if wanted else None
        if callback is None or item is None:
            return
        reply.told_end = item.finished
        try:
            callback(item)
        except Exception as error:
            reply.callback_error, reply.told_end = error, True
            self.abort(reply)

    def abort(self, reply: Reply) -> None:
        """End a request now; its reply tells so."""
        with self.here, self.lock:
            if self._engine is not None:
                self._engine.abort(reply.request_id)
            self._follow(reply)

    def _stop(self, request_id: str, stop: str, index: int) -> None:
        self.engine.finish(request_id, "stop", stop, index)


class _Presence:
    """Which threads hold or wait for the lock.

    Only a hint, but one that cures itself: should an interrupt lose an exit, the thread's next one makes up for it.
    """

    def __init__(self) -> None:
        self._threads: dict[int, None] = {}

    def __enter__(self) -> None:
        self._threads[threading.get_ident()] = None

    def __exit__(self, *_: object) -> None:
        self._threads.pop(threading.get_ident(), None)

    @property
    def others(self) -> bool:
        """Whether any thread is here, asked by one that has left."""
        return bool(self._threads)
