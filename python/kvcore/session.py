"""A conversation whose keys and values stay in the cache between its turns.

    session = Session(llm, "You are a helpful assistant. ")
    session.append("Hello!")
    print(session.generate(params).text)        computes what was appended, and nothing twice
    other = session.fork()                      both go on from here; blocks are shared
    session.rewind(20)                          back to the first 20 tokens

A session is a list of token ids and a sequence in the cache that holds the blocks of what is computed of them, so that
nobody else can take them: a request's end hands them over. They count as used until ``close``: other requests have to
do with the rest. What is held is what the last answer's adapter (``lora_request``) has computed, or the model without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument, InvalidHandle, InvalidState
from kvcore.llm import LLM
from kvcore.outputs import RequestOutput
from kvcore.prompts import Asked, Prompt, Prompts

if TYPE_CHECKING:
    from types import TracebackType


class Session:
    """A conversation with an ``LLM``. To be used by one thread at a time."""

    def __init__(self, llm: LLM, prompt: Prompt | None = None) -> None:
        """Begin one.

        Args:
            llm: who answers.
            prompt: as for ``append``; None: nothing yet.

        Raises:
            InvalidArgument: an LLM that keeps no prefixes (``enable_prefix_caching=False`` or ``prefix_ttl=0``), by
                which a session finds what it holds.
        """
        if not isinstance(llm, LLM):
            raise TypeError(f"llm: expected an LLM, got {type(llm).__name__}")
        if not llm._finds_prefixes:
            raise InvalidArgument(
                "llm: expected one that finds prefixes, as sessions do what they hold, "
                "got one with enable_prefix_caching=False or prefix_ttl=0"
            )
        self._llm = llm
        self._prompts = Prompts(llm.tokenizer, llm.name)
        self._token_ids: list[int] = []
        self._held: list[Any] = []  # the sequence in the cache; the last, while there are several
        self._ended: list[Any] = []  # what requests left when they ended, until it is held
        self._adapter: str | None = None  # the identity of the one that has computed it
        self._closed = False
        if prompt is not None:
            self.append(prompt)
            self._hold()

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, a copy."""
        return list(self._token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose keys and values the session holds."""
        if not self._held or self._llm._dispatcher.closed:
            return 0
        return int(self._llm.cache.num_computed_tokens(self._held[-1]))

    def __len__(self) -> int:
        return len(self._token_ids)

    def append(self, prompt: Prompt) -> None:
        """Add a text or token ids; they are computed with the next answer.

        Special tokens are added at the very beginning only, as the tokenizer's configuration says.

        Raises:
            As ``LLM.generate`` for one prompt.
        """
        self._check_open()
        if isinstance(prompt, str) and prompt:
            new = self._prompts.encode(prompt, add_special_tokens=not self._token_ids)
        else:
            inputs = self._prompts.inputs(prompt)
            if len(inputs) != 1:
                raise InvalidArgument(f"prompt: expected one prompt, got a list of {len(inputs)}")
            if inputs[0].cache_salt is not None:
                raise InvalidArgument("prompt: expected no 'cache_salt': a session shares with nobody by salt")
            new = list(inputs[0].token_ids)
        checked = self._llm._dispatcher.engine.check_request([*self._token_ids, *new], SamplingParams())
        self._token_ids = checked

    def generate(self, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """Answer what is there so far; the answer becomes part of the session.

        Args:
            params: as ``LLM.generate``, with one answer.
            options: of ``LLM.generate``, such as ``timeout`` and ``lora_request``.

        Returns:
            The output; its prompt is the whole session, and ``num_cached_tokens`` what was there of it.

        Raises:
            As ``LLM.generate``, and InvalidArgument for a session without a token, or without room for one more
            (``max_model_len``). The session is as before then.
        """
        return self._answer(self._token_ids, params, options)

    def stream(self, params: SamplingParams | None = None, **options: Any) -> Iterator[RequestOutput]:
        """Answer token by token. What has come when the loop is left becomes part of the session."""
        self._check(self._token_ids, params)
        adapter = self._find_adapter(options)
        stream = self._llm.stream(Asked(None, self._token_ids, keep=self._ended), params, **options)

        def items() -> Iterator[RequestOutput]:
            tokens: list[int] = []
            try:
                for item in stream:
                    tokens += item.token_ids
                    yield item
            finally:
                stream.close()  # type: ignore[attr-defined]
                self._take([*self._token_ids, *tokens], adapter)

        return items()

    def chat(self, messages: list[Any], params: SamplingParams | None = None, **template_values: Any) -> RequestOutput:
        """Answer a whole conversation, of which the session keeps what it has computed before.

        The session goes back to where the conversation parts from it, so messages may have been added or changed.

        Args:
            messages: the conversation, as for ``LLM.chat``.
            params: with one answer.
            template_values: of the chat template.

        Raises:
            As ``LLM.chat`` and ``generate``. The session is as before then.
        """
        self._check_open()
        return self._answer(self._llm._conversation(messages, template_values).token_ids, params, {})

    def fork(self) -> Session:
        """Another session with the same tokens; blocks are shared until the two part."""
        self._check_open()
        twin = Session(self._llm)
        twin._held.extend(map(self._llm.cache.fork, self._held[-1:]))  # as in _hold
        twin._token_ids, twin._adapter = self._token_ids, self._adapter
        return twin

    def rewind(self, num_tokens: int) -> None:
        """Go back to the first ``num_tokens`` tokens.

        Raises:
            InvalidArgument: more than there are, or fewer than 0.
        """
        self._check_open()
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
            raise TypeError(f"num_tokens: expected an integer, got {num_tokens!r}")
        if not 0 <= num_tokens <= len(self._token_ids):
            raise InvalidArgument(f"num_tokens: expected 0 to {len(self._token_ids)}, got {num_tokens}")
        self._token_ids = self._token_ids[:num_tokens]
        self._hold()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens and what is computed of them to a file, for ``load`` with the same model and cache format.

        Raises:
            InvalidState: nothing is computed yet.
            CheckpointError: the file cannot be written.
        """
        self._check_open()
        if not self.num_cached_tokens:
            raise InvalidState("session: expected at least one computed token to save, got none")
        appended = self._token_ids[self._llm.cache.num_tokens(self._held[-1]) :]
        if appended:
            self._llm.cache.append(self._held[-1], appended)
        self._llm.cache.save(self._held[-1], path)

    @classmethod
    def load(cls, llm: LLM, path: str | os.PathLike[str]) -> Session:
        """A session from a file of ``save``. What an adapter computed is held until the first ``rewind`` or answer.

        Raises:
            CheckpointError: the file is damaged, or of another model or format.
            OutOfBlocks: the cache lacks the space.
            InvalidArgument, TypeError: as ``Session``.
        """
        session = cls(llm)
        # One C call from the cache's answer to the list, as in Scheduler._open.
        session._held.extend(map(llm.cache.load, (path,)))
        session._token_ids = llm.cache.token_ids(session._held[0]).tolist()
        return session

    def close(self) -> None:
        """Let the blocks go; equal beginnings may still be found for a time. Again is fine."""
        self._closed = True
        self._free()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_held", None) or getattr(self, "_ended", None):
            self._free()

    def __repr__(self) -> str:
        return f"<Session of {len(self)} tokens{' (closed)' if self._closed else ''}>"

    def _check(self, token_ids: list[int], params: SamplingParams | None) -> None:
        self._check_open()
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {type(params).__name__}")
        if params is not None and params.n != 1:
            raise InvalidArgument(f"params: expected one answer (n=1), got n={params.n}")
        if not token_ids:
            raise InvalidArgument("session: expected at least one token before an answer, got none")
        limit = self._llm.max_model_len
        if limit is not None and len(token_ids) >= limit:
            raise InvalidArgument(
                f"session: expected at most {limit - 1} tokens before an answer (max_model_len - 1, so that one can be "
                f"generated), got {len(token_ids)} tokens"
            )

    def _find_adapter(self, options: dict[str, Any]) -> str | None:
        """The identity of the adapter that a request asks for. Raises as ``LLM.generate``."""
        wanted = options.get("lora_request")
        adapter = self._llm._adapters.get(wanted[0] if isinstance(wanted, list) and len(wanted) == 1 else wanted)
        return None if adapter is None else str(adapter.identity)

    def _answer(self, token_ids: list[int], params: SamplingParams | None, options: dict[str, Any]) -> RequestOutput:
        """Answer ``token_ids``; with the answer they are the session then. It is as before if anything raises."""
        self._check(token_ids, params)
        adapter = self._find_adapter(options)
        try:
            output = self._llm.generate(Asked(None, token_ids, keep=self._ended), params, **options)[0]
            self._take([*token_ids, *output.token_ids], adapter)
        except BaseException:
            self._free(keep=1)
            raise
        return output

    def _take(self, token_ids: list[int], adapter: str | None) -> None:
        self._token_ids, self._adapter = token_ids, adapter
        self._hold()

    def _hold(self) -> None:
        """Hold what the cache knows of the tokens, and let go what was held before."""
        holds = bool(self._token_ids) and not self._closed and not self._llm._dispatcher.closed
        if holds:
            options = {} if self._adapter is None else {"adapter": self._adapter}
            salt = self._llm._decoder.prompt_salt(len(self._token_ids))
            # One C call from the cache's answer to the list, as in Scheduler._open.
            self._held.extend(map(partial(self._llm.cache.add, **options), (self._token_ids,), (salt,)))
        self._free(keep=1 if holds else 0)

    def _free(self, keep: int = 0) -> None:
        """Let go all sequences but the last ``keep`` that are held. Can be repeated."""
        for handles, left in ((self._held, keep), (self._ended, 0)):
            while len(handles) > left:
                if not self._llm._dispatcher.closed:
                    with suppress(InvalidHandle):  # freed before, by a call that was interrupted
                        self._llm.cache.free(handles[0])
                del handles[0]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidState("session: expected an open one, got a call after close()")
