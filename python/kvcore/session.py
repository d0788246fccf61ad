"""A conversation whose keys and values stay in the cache between its turns.

    session = Session(llm, "You are a helpful assistant. ")
    session.append("Hello!")
    print(session.generate(params).text)        computes what was appended, and nothing twice
    other = session.fork()                      both go on from here; blocks are shared
    session.rewind(20)                          back to the first 20 tokens

A session is a list of token ids and a sequence in the cache that holds the blocks of what is computed of them, so that
nobody else can take them. They count as used until ``close``: other requests have to do with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument, InvalidHandle, InvalidState
from kvcore.llm import LLM
from kvcore.outputs import RequestOutput
from kvcore.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from types import TracebackType


class Session:
    """A conversation with an ``LLM``. To be used by one thread at a time."""

    def __init__(self, llm: LLM, prompt: Prompt | None = None) -> None:
        """Begin one.

        Args:
            llm: who answers.
            prompt: as for ``append``; None: nothing yet.
        """
        self._llm = llm
        self._prompts = Prompts(llm.tokenizer, llm.name)
        self._token_ids: list[int] = []
        self._held: list[Any] = []  # the sequence in the cache; the last, while there are several
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
        return int(self._held[-1].num_cached_tokens) if self._held else 0

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
            options: of ``LLM.generate``, such as ``timeout``.

        Returns:
            The output; its prompt is the whole session, and ``num_cached_tokens`` what was there of it.
        """
        self._check(params)
        output = self._llm.generate(self._token_ids, params, **options)[0]
        self._take(output.token_ids)
        return output

    def stream(self, params: SamplingParams | None = None, **options: Any) -> Iterator[RequestOutput]:
        """Answer token by token. What has come when the loop is left becomes part of the session."""
        self._check(params)
        stream = self._llm.stream(self._token_ids, params, **options)

        def items() -> Iterator[RequestOutput]:
            tokens: list[int] = []
            try:
                for item in stream:
                    tokens += item.token_ids
                    yield item
            finally:
                stream.close()  # type: ignore[attr-defined]
                self._take(tokens)

        return items()

    def chat(self, messages: list[Any], params: SamplingParams | None = None, **template_values: Any) -> RequestOutput:
        """Answer a whole conversation, of which the session keeps what it has computed before.

        The session goes back to where the conversation parts from it, so messages may have been added or changed.

        Args:
            messages: the conversation, as for ``LLM.chat``.
            params: with one answer.
            template_values: of the chat template.
        """
        self._check(params, empty=True)
        self._token_ids = self._llm._conversation(messages, template_values).token_ids
        return self.generate(params)

    def fork(self) -> Session:
        """Another session with the same tokens; blocks are shared until the two part."""
        self._check_open()
        return Session(self._llm, self._token_ids or None)

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
        if not self._held:
            raise InvalidState("session: expected at least one computed token to save, got none")
        self._llm.cache.save(self._held[-1], path)

    @classmethod
    def load(cls, llm: LLM, path: str | os.PathLike[str]) -> Session:
        """A session from a file of ``save``.

        Raises:
            CheckpointError: the file is damaged, or of another model or format.
            OutOfBlocks: the cache lacks the space.
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
        if getattr(self, "_held", None):
            self._free()

    def __repr__(self) -> str:
        return f"<Session of {len(self)} tokens{' (closed)' if self._closed else ''}>"

    def _check(self, params: SamplingParams | None, *, empty: bool = False) -> None:
        self._check_open()
        if params is not None and params.n != 1:
            raise InvalidArgument(f"params: expected one answer (n=1), got n={params.n}")
        if not self._token_ids and not empty:
            raise InvalidArgument("session: expected at least one token before an answer, got none")

    def _take(self, tokens: list[int]) -> None:
        self._token_ids = [*self._token_ids, *tokens]
        self._hold()

    def _hold(self) -> None:
        """Hold what the cache knows of the tokens, and let go what was held before."""
        if self._token_ids:
            salt = self._llm._decoder.prompt_salt(len(self._token_ids))
            # One C call from the cache's answer to the list, as in Scheduler._open.
            self._held.extend(map(self._llm.cache.add, (self._token_ids,), (salt,)))
        self._free(keep=1 if self._token_ids else 0)

    def _free(self, keep: int = 0) -> None:
        """Let go all sequences but the last ``keep``. Can be repeated."""
        while len(self._held) > keep:
            if not self._llm._dispatcher.closed:
                with suppress(InvalidHandle):  # freed before, by a call that was interrupted
                    self._llm.cache.free(self._held[0])
            del self._held[0]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidState("session: expected an open one, got a call after close()")
