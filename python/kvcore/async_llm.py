"""AsyncLLM: an ``LLM`` for asyncio.

    async with AsyncLLM("smollm2") as llm:
        async for item in llm.generate("Hello", params):
            print(item.text, end="")

    event loop                                          thread
    generate: check, post the request            -->    takes it to the engine
                                                         while there are requests: step, put what is new into each
    async for: take what is there                <--     request's slot if that is empty, and wake the loop
    end or cancellation: post the end            -->    aborts what has not ended, which returns its blocks

One thread steps the engine for all. A slot holds one item, and what comes while nobody takes it is joined to the next
one: a consumer that is slow costs no memory and holds up nobody.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument, InvalidState
from kvcore.llm import LLM
from kvcore.outputs import RequestOutput
from kvcore.prompts import Prompt, is_batch
from kvcore.reply import Reply, Submission

if TYPE_CHECKING:
    from types import TracebackType

    from kvcore.lora import LoRARequest


class AsyncLLM:
    """A language model for asyncio. Its thread starts with the first request and ends with ``close``."""

    def __init__(self, model: str | Path | LLM, **options: Any) -> None:
        """Load a model, which blocks (``await asyncio.to_thread(AsyncLLM, ...)`` does not).

        Args:
            model: as for ``LLM``, or an ``LLM`` that is there already; its own calls can go on beside.
            options: as for ``LLM``.

        Raises:
            As ``LLM``.
        """
        if isinstance(model, LLM) and options:
            raise InvalidArgument(f"options: expected none beside an LLM that is loaded, got {', '.join(options)}")
        self._llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._inbox: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def llm(self) -> LLM:
        """The ``LLM`` beneath: its cache, tokenizer and so on."""
        return self._llm

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt, as ``LLM.stream``: each item has what is new.

        The prompt is checked here; work begins when the first item is asked for. If the task is cancelled or the
        iterator closed, the request is aborted and its blocks are returned.

        Raises:
            As ``LLM.stream``.
        """
        inputs = self._llm._prompts.inputs(prompt)
        if len(inputs) != 1 or is_batch(prompt):
            raise InvalidArgument(f"prompt: expected one prompt, got a list of {len(inputs)}")
        return self._start(self._llm._submissions(inputs, params, True, priority, timeout, None, lora_request)[0])

    def chat(
        self,
        messages: list[Any],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_values: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, as ``LLM.stream_chat``."""
        values = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt, **template_values}
        asked = [self._llm._conversation(messages, values, cache_salt)]
        return self._start(self._llm._submissions(asked, params, True, priority, timeout, None, lora_request)[0])

    async def stats(self) -> dict[str, Any]:
        """As ``LLM.stats``; waits for the step that runs."""
        return await asyncio.to_thread(self._llm.stats)

    async def close(self) -> None:
        """Abort all requests, end the thread and close the ``LLM``. Again is fine."""
        self._closed = True
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)
        self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, submission: Submission) -> AsyncIterator[RequestOutput]:
        if self._closed:
            raise InvalidState("AsyncLLM: expected an open one, got a call after close()")
        return self._items(self._llm._dispatcher.check(submission))

    async def _items(self, submission: Submission) -> AsyncIterator[RequestOutput]:
        if self._closed:
            raise InvalidState("AsyncLLM: expected an open one, got a call after close()")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvcore-engine", daemon=True)
            self._thread.start()
        stream = _Stream(submission, asyncio.get_running_loop())
        self._inbox.put(stream)
        try:
            while True:
                stream.wake.clear()
                item, stream.item = stream.item, None
                if item is not None:
                    self._inbox.put(stream)  # the slot is empty again
                    yield item
                    if item.finished:
                        return
                elif stream.error is not None:
                    raise stream.error
                else:
                    await stream.wake.wait()
        finally:
            stream.left = True
            self._inbox.put(stream)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        streams: list[_Stream] = []
        dispatcher = self._llm._dispatcher
        while self._receive(streams, wait=all(s.settled for s in streams)):
            # an error of the model is told to those whose batch it was, by their sequences
            with suppress(Exception):
                dispatcher.advance([reply for s in streams for reply in s.replies], raise_errors=False)
            for stream in streams:
                with dispatcher.here, dispatcher.lock:
                    stream.deliver()
        for stream in streams:
            dispatcher.drop(stream.replies)
            stream.fail(InvalidState("AsyncLLM: closed before the request had ended"))

    def _receive(self, streams: list[_Stream], *, wait: bool) -> bool:
        """Take in what was posted; waits for something if there is nothing else to do. False when it is to end."""
        while wait or not self._inbox.empty():
            stream, wait = self._inbox.get(), False
            if stream is None:
                return False
            if stream.left:
                self._llm._dispatcher.drop(stream.replies)
                if stream in streams:
                    streams.remove(stream)
            elif stream not in streams:
                try:
                    self._llm._dispatcher.submit(stream.replies, [stream.submission])
                    streams.append(stream)
                except Exception as error:
                    stream.fail(error)
        return True


class _Stream:
    """One request: posted by the event loop, carried out by the thread."""

    def __init__(self, submission: Submission, loop: asyncio.AbstractEventLoop) -> None:
        self.submission = submission
        self.replies: list[Reply] = []
        self.item: RequestOutput | None = None
        self.error: BaseException | None = None
        self.left = False
        self.wake = asyncio.Event()
        self._loop = loop
        self._told_end = False

    @property
    def settled(self) -> bool:
        """Whether nothing is to be done before the consumer takes what is there."""
        reply = self.replies[0]
        return self.error is not None or self._told_end or (reply.finished and self.item is not None)

    def deliver(self) -> None:
        """Fill the slot, if it is empty and there is anything new."""
        reply = self.replies[0]
        if self.error is not None or self._told_end:
            return
        if reply.failed:
            try:
                reply.raise_error()
            except Exception as error:
                self.fail(error)
        elif self.item is None and reply.has_news:
            item = reply.output(new=True)
            self._told_end = item.finished
            self.item = item
            self._notify()

    def fail(self, error: BaseException) -> None:
        """End with an error, behind what is in the slot."""
        self.error = error
        self._notify()

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self.wake.set)
