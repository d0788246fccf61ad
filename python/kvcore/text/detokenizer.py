"""Token ids to text, piece by piece.

    bytes of each token --> incremental UTF-8 --> only whole characters leave; a byte that cannot become part of one
                                                  leaves as U+FFFD as soon as that is known
    text --> StopChecker --> only text that cannot be the start of a stop string leaves

Where a tokenizer's text is not its tokens' bytes joined (WordPiece, for example), the last tokens are decoded twice:
up to what has been given out, and up to the end. What the second has more is the new text, whatever the decoder puts
between tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsIndex

from kvcore.errors import InvalidArgument

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so a window that ends in U+FFFD for longer than this many tokens is not waiting.
_MAX_HELD_TOKENS = 4


class TokenDecoder(Protocol):
    """What a `Detokenizer` needs of a tokenizer."""

    @property
    def byte_exact(self) -> bool:
        """True if `decode` is the tokens' bytes joined."""

    @property
    def strips_leading_space(self) -> bool:
        """True if `decode` drops one space at the very start."""

    def token_bytes(self, token_id: SupportsIndex, /) -> bytes:
        """The bytes that a token stands for."""

    def is_special(self, token_id: SupportsIndex, /) -> bool:
        """True for control tokens."""

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = ...) -> str:
        """The text of token ids."""


class Detokenizer:
    """Streams the text of a sequence of token ids; one per sequence.

    The pieces of all `push` calls and of `finish`, joined, equal `tokenizer.decode` of all the ids, and no piece
    ends inside a character.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space
        # Only for tokenizers that are not byte exact: the window, and how many of its ids have been given out.
        self._window: list[int] = []
        self._given = 0

    def push(self, token_id: SupportsIndex) -> str:
        """The text that became certain with this token; often "" in the middle of a character.

        Raises:
            TypeError: the id is not an integer.
            InvalidArgument: the id is negative.
        """
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if not self._tokenizer.byte_exact:
            self._window.append(token_id.__index__())
            return self._advance_window()
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        held = self._utf8.getstate()[0]
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            # The start of a surrogate, which is no character. Python's decoder would wait for its third byte.
            text += self._utf8.decode(b"", final=True)
        return self._without_prefix(text)

    def finish(self) -> str:
        """The rest: U+FFFD for a character that never became whole. The detokenizer is then as new."""
        if self._tokenizer.byte_exact:
            text = self._without_prefix(self._utf8.decode(b"", final=True))
        else:
            text = self._advance_window(final=True)
        self._utf8.reset()
        self._strip = self._tokenizer.strips_leading_space
        self._window.clear()
        self._given = 0
        return text

    def _without_prefix(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def _advance_window(self, final: bool = False) -> str:
        before = self._tokenizer.decode(self._window[: self._given], self._skip_special)
        text = self._tokenizer.decode(self._window, self._skip_special)
        held = len(self._window) - self._given
        if text.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS and not final:
            return ""
        if len(text) <= len(before):
            return ""
        # What was given out stays as the left context of the next token, and no more than that.
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text[len(before) :]


class StopChecker:
    """Finds stop strings in streamed text, and lets no part of one out before it is known not to be one.

    The stop string that is complete first counts, as if the text came character by character; of several that end at
    the same character the longest. So the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: str | Sequence[str] | None, include_stop: bool = False) -> None:
        """Prepare the search.

        Args:
            stop: the strings to stop at; None or [] for none.
            include_stop: let the found stop string out, too.

        Raises:
            TypeError: a stop string is not a str.
            InvalidArgument: a stop string is empty.
        """
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        for s in stops:
            if not isinstance(s, str):
                raise TypeError(f"stop strings must be str, got {type(s).__name__}")
            if not s:
                raise InvalidArgument("a stop string must not be empty")
        self._stops = stops
        self._include = include_stop
        self._held = ""
        self._stopped = False
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str) -> tuple[str, bool]:
        """Take new text.

        Returns:
            (text that may go out now, whether a stop string has been found). After that nothing goes out any more.
        """
        if self._stopped:
            return "", True
        self._held += text
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                found = (start + len(stop), start, stop)
                best = found if best is None else min(best, found)
        if best is not None:
            end, start, self.matched = best
            emit = self._held[: end if self._include else start]
            self._held, self._stopped = "", True
            return emit, True
        keep = self._possible_start()
        emit = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return emit, False

    def finish(self) -> str:
        """The text still held back, at the end of the sequence."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that is the start of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
