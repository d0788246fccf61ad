"""How one request wants to be sampled, with vLLM's names, defaults and meanings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from kvcore.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Every value is checked when the object is made.

    Attributes:
        n: answers per prompt. Only 1 is supported.
        temperature: what logits are divided by. 0 takes the most probable token, the lowest id of several.
        top_k: sample from the k most probable tokens only. 0, -1 and anything from the vocabulary's size on: all.
        top_p: sample from the fewest most probable tokens whose probabilities add up to at least this; 1: all.
        min_p: sample from tokens at least this fraction as probable as the most probable one; 0: all.
        seed: seeds this request's own generator, so that its tokens depend on nothing that runs beside it. None: the
            generator is derived from the LLM's seed and the request's number, or from entropy if the LLM has none.
        stop: a string or several that end the text. The text ends before the string.
        stop_token_ids: token ids that end the text, besides the model's own end-of-sequence ids.
        max_tokens: the most tokens to generate. None: until the model's length or the cache's capacity is reached.
        ignore_eos: go on after the model's end-of-sequence ids (``stop_token_ids`` still end the text).
        logprobs: how many of the most probable tokens to report the log probabilities of at each position, besides
            the sampled one. They are of the model's own distribution, before temperature and cuts. None: none.
        include_stop_str_in_output: keep the stop string (or the text of the token that stopped) in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidArgument: a value out of range; the message names the field, what was expected and what came.
        TypeError: a value of the wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if _integer("n", self.n) != 1:
            raise _bad("n", "1 (parallel samples are not supported yet)", self.n)
        self._set("n", 1)
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf, "of at least 0"))
        top_k = _integer("top_k", self.top_k)
        if top_k < -1:
            raise _bad("top_k", "an integer of at least -1 (0 and -1 switch it off)", self.top_k)
        self._set("top_k", max(top_k, 0))
        top_p = _number("top_p", self.top_p, 0.0, 1.0, "greater than 0 and at most 1")
        if top_p == 0.0:
            raise _bad("top_p", "a number greater than 0 and at most 1", self.top_p)
        self._set("top_p", top_p)
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1"))
        if self.seed is not None:
            seed = _integer("seed", self.seed)
            if not 0 <= seed < 2**64:
                raise _bad("seed", "None or an integer from 0 to 2**64 - 1", self.seed)
            self._set("seed", seed)
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.max_tokens is not None:
            max_tokens = _integer("max_tokens", self.max_tokens)
            if max_tokens < 1:
                raise _bad("max_tokens", "None or an integer of at least 1", self.max_tokens)
            self._set("max_tokens", max_tokens)
        if self.logprobs is not None:
            logprobs = _integer("logprobs", self.logprobs)
            if logprobs < 0:
                raise _bad("logprobs", "None or an integer of at least 0", self.logprobs)
            self._set("logprobs", logprobs)
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, field), bool):
                raise _wrong_type(field, "True or False", getattr(self, field))

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved: temperature 0, or a cut that leaves only the most probable token."""
        return self.temperature == 0.0 or self.top_k == 1 or self.min_p == 1.0

    def check_vocab(self, vocab_size: int) -> None:
        """Check the values that depend on the size of the vocabulary.

        Raises:
            InvalidArgument: a token id, or a number of log probabilities, that the vocabulary does not have.
        """
        for token_id in self.stop_ids:
            if token_id >= vocab_size:
                raise _bad("stop_token_ids", f"ids from 0 to {vocab_size - 1} (the vocabulary)", token_id)
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise _bad("logprobs", f"at most {vocab_size} (the size of the vocabulary)", self.logprobs)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as a tuple, empty if there are none."""
        return tuple(self.stop_token_ids or ())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, empty if there are none."""
        return tuple(self.stop or ())

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)


def _integer(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(field, "an integer", value)
    return int(value)


def _number(field: str, value: Any, low: float, high: float, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(field, f"a number {expected}", value)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise _bad(field, f"a finite number {expected}", value)
    return number


def _strings(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, (bytes, dict)):
        raise _wrong_type(field, "a string or a list of strings", value)
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str):
            raise _wrong_type(field, "a string or a list of strings", string)
        if not string:
            raise _bad(field, "strings that are not empty", value)
    return strings


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict)):
        raise _wrong_type(field, "a list of token ids", value)
    ids = tuple(_integer(field, item) for item in value)
    for token_id in ids:
        if token_id < 0:
            raise _bad(field, "token ids of at least 0", token_id)
    return ids


def _describe(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _bad(field: str, expected: str, got: object) -> InvalidArgument:
    return InvalidArgument(f"SamplingParams.{field}: expected {expected}, got {_describe(got)}")


def _wrong_type(field: str, expected: str, got: object) -> TypeError:
    return TypeError(f"SamplingParams.{field}: expected {expected}, got {_describe(got)}")
