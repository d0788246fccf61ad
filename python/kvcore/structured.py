"""Answers that follow a JSON schema, a regular expression or a grammar, by llguidance (``kvcore[structured]``).

A grammar says after each token which of the vocabulary may come next; all others get a logit of -inf. llguidance does
that over the bytes of the tokens, in some tens of microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.engine.interfaces import FloatArray
from kvcore.engine.sampling_params import StructuredOutputsParams
from kvcore.errors import InvalidArgument, InvalidState, KvcoreError

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer


class Grammars:
    """Makes grammars for one model's tokens.

    Raises:
        KvcoreError: llguidance is not installed.
        InvalidArgument: a model without an end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise KvcoreError(
                "structured_outputs: expected the package llguidance, which is not there: "
                "pip install 'kvcore[structured]'"
            ) from error
        self._guidance = llguidance
        ends = list(eos_token_ids)
        if not ends:
            raise InvalidArgument("structured_outputs: expected a model with an end-of-sequence token, got none")
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokenizer, vocab_size, ends[0])), eos_token=ends
        )

    def compile(self, params: StructuredOutputsParams) -> Callable[[], Grammar]:
        """Check a grammar; the result makes one at its beginning for each answer.

        Raises:
            InvalidArgument: it is not a grammar, with what is wrong.
        """
        matcher, kind = self._guidance.LLMatcher, ""
        try:
            if params.regex is not None:
                kind = "regex"
                grammar = matcher.grammar_from_regex(params.regex)
            elif params.grammar is not None:
                kind = "grammar"
                grammar = matcher.grammar_from_lark(params.grammar)
            elif params.choice:
                kind = "choice"
                words = " | ".join(json.dumps(word, ensure_ascii=False) for word in params.choice)
                grammar = matcher.grammar_from_lark(f"start: {words}")
            else:
                kind, schema = "json", {"type": "object"} if params.json is None else params.json
                grammar = matcher.grammar_from_json_schema(schema if isinstance(schema, str) else json.dumps(schema))
            fault = matcher.validate_grammar(grammar, self._tokenizer)
        except Exception as error:  # whatever it raises for texts that are none of its languages
            raise InvalidArgument(f"structured_outputs.{kind}: {error}") from error
        if fault:
            raise InvalidArgument(f"structured_outputs.{kind}: {fault}")
        return lambda: Grammar(self._guidance, self._tokenizer, grammar, self._vocab_size)


class Grammar:
    """A grammar, and how far one answer has got in it."""

    def __init__(self, guidance: Any, tokenizer: Any, grammar: str, vocab_size: int) -> None:
        self._matcher = guidance.LLMatcher(tokenizer, grammar)
        # one bit for each token, in little-endian words
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)
        self._vocab_size = vocab_size

    def mask(self, row: FloatArray, /) -> None:
        """Set the logits of tokens that may not come next to -inf."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._words[: len(words)] = words[: len(self._words)]
        allowed = np.unpackbits(self._words.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)
        row[~allowed] = -np.inf

    def accept(self, token_id: int, /) -> None:
        """Take the token that came."""
        if not self._matcher.consume_token(token_id) and not self._matcher.is_stopped():
            raise InvalidState(f"structured_outputs: {self._matcher.get_error() or f'token {token_id} does not fit'}")

    @property
    def finished(self) -> bool:
        """Whether nothing may come any more."""
        return bool(self._matcher.is_stopped())


class _Tokens:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        size = min(vocab_size, tokenizer.vocab_size)
        self.special_token_ids = [i for i in range(size) if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)
