"""How one request wants to be sampled, with vLLM's names, defaults and meanings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from kvcore.errors import InvalidArgument

MAX_N = 1024
"""The most answers or beams of one prompt."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like; exactly one of these. Needs the extra ``kvcore[structured]``.

    Attributes:
        json: a JSON schema, as a dict or as text.
        regex: a regular expression (of Rust's kind) for the whole answer.
        choice: the answers that are allowed.
        grammar: a grammar in Lark's syntax.
        json_object: any JSON object.

    Raises:
        InvalidArgument: none of them, or more than one.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(self, name)]
        if len(kinds) != 1:
            raise InvalidArgument(
                "StructuredOutputsParams: expected exactly one of json, regex, choice, grammar and json_object, "
                f"got {', '.join(kinds) or 'none'}"
            )
        kind = kinds[0]
        if kind == "choice":
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
        elif kind in ("regex", "grammar") and not isinstance(getattr(self, kind), str):
            raise _wrong_type(f"structured_outputs.{kind}", "a string", getattr(self, kind))
        elif kind == "json" and not isinstance(self.json, (str, Mapping)):
            raise _wrong_type("structured_outputs.json", "a JSON schema as a dict or a string", self.json)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Every value is checked when the object is made.

    Attributes:
        n: answers per prompt; the prompt is computed once. At temperature 0 they would all be equal: only 1 is taken.
        best_of: generate this many answers and give back the ``n`` whose tokens are the most probable together. None:
            ``n``.
        temperature: what logits are divided by. 0 takes the most probable token, the lowest id of several.
        top_k: sample from the k most probable tokens only. 0, -1 and anything from the vocabulary's size on: all.
        top_p: sample from the fewest most probable tokens whose probabilities add up to at least this; 1: all.
        min_p: sample from tokens at least this fraction as probable as the most probable one; 0: all.
        typical_p: sample from the fewest tokens that add up to at least this, those first whose surprise is closest to
            the one that is expected (locally typical sampling, Meister et al., 2022); 1: all.
        presence_penalty: is subtracted from the logits of tokens that the answer has, -2 to 2.
        frequency_penalty: is subtracted for each time that the answer has the token, -2 to 2.
        repetition_penalty: divides the logits above 0 of tokens in prompt and answer, and multiplies those below;
            0.001 to 1000 (vLLM takes all above 0; float32 logits do not survive more), 1 switches it off.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        bad_words: words that may not come, also in the middle of the text. Needs a tokenizer.
        allowed_token_ids: the only token ids that may come.
        min_tokens: no end-of-sequence and stop id before there are this many tokens, and no stop string counts.
        seed: seeds this request's own generator, so that its tokens depend on nothing that runs beside it. None: the
            generator is derived from the LLM's seed and the request's number, or from entropy if the LLM has none.
        stop: a string or several that end the text. The text ends before the string.
        stop_token_ids: token ids that end the text, besides the model's own end-of-sequence ids.
        max_tokens: the most tokens to generate. None: until the model's length or the cache's capacity is reached.
        ignore_eos: go on after the model's end-of-sequence ids (``stop_token_ids`` still end the text).
        logprobs: how many of the most probable tokens to report the log probabilities of at each position, besides
            the sampled one; -1: of all. They are of the model's own distribution, before anything above. None: none.
        prompt_logprobs: the same for each token of the prompt but the first; all of it is computed then.
        logits_processors: functions of (token ids of the answer so far, logits float32 [vocab]), or of (prompt token
            ids, token ids of the answer, logits), that return the logits to sample from. They are called in order,
            behind everything but temperature and cuts.
        structured_outputs: what the answer must look like.
        include_stop_str_in_output: keep the stop string (or the text of the token that stopped) in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidArgument: a value out of range; the message names the field, what was expected and what came.
        TypeError: a value of the wrong type.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logits_processors: Iterable[Callable[..., Any]] = ()
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Iterable[int] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), init=False, repr=False, compare=False)
    """What ``bad_words`` are in the model's tokens: see ``with_bad_words``."""

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        if self.best_of is not None:
            self._set("best_of", _integer("best_of", self.best_of, self.n, MAX_N))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf, "of at least 0"))
        if self.temperature == 0.0 and self.num_sequences > 1:
            which = "n" if self.n > 1 else "best_of"
            raise _bad(which, "1 at temperature 0, where all answers are equal", getattr(self, which))
        self._set("top_k", max(_integer("top_k", self.top_k, -1, note="0 and -1 switch it off"), 0))
        for name in ("top_p", "typical_p"):
            value = _number(name, getattr(self, name), 0.0, 1.0, "greater than 0 and at most 1")
            if value == 0.0:
                raise _bad(name, "a number greater than 0 and at most 1", getattr(self, name))
            self._set(name, value)
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1"))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, _number(name, getattr(self, name), -2.0, 2.0, "from -2 to 2"))
        penalty = _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3, "from 0.001 to 1000")
        self._set("repetition_penalty", penalty)
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, 0, 2**64 - 1, "None or "))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, none="None or "))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"at most max_tokens={self.max_tokens}", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _integer(name, value, -1, none="None or ", note="-1 means all"))
        self._set("stop", _strings("stop", self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _bad("allowed_token_ids", "None or at least one token id", self.allowed_token_ids)
            self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("logits_processors", _functions("logits_processors", self.logits_processors))
        structured: Any = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise _wrong_type("structured_outputs", "StructuredOutputsParams", structured)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, "True or False", getattr(self, name))

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved: temperature 0, or a cut that leaves only the most probable token."""
        return self.temperature == 0.0 or self.top_k == 1 or self.min_p == 1.0

    @property
    def num_sequences(self) -> int:
        """Answers that are generated: ``best_of`` or ``n``."""
        return self.best_of or self.n

    def check_vocab(self, vocab_size: int) -> None:
        """Check the values that depend on the size of the vocabulary.

        Raises:
            InvalidArgument: a token id, or a number of log probabilities, that the vocabulary does not have.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise _bad(name, f"ids from 0 to {vocab_size - 1} (the vocabulary)", token_id)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise _bad(name, f"at most {vocab_size} (the size of the vocabulary)", count)

    def with_bad_words(self, token_ids: Iterable[Iterable[int]]) -> SamplingParams:
        """A copy that knows its ``bad_words`` as token ids, each of at least one."""
        copy = replace(self)
        copy._set("bad_words_token_ids", tuple(map(tuple, token_ids)))
        return copy

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


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How one request is answered by beam search, with vLLM's names.

    Attributes:
        beam_width: beams, and answers that come back.
        max_tokens: the most tokens to generate.
        ignore_eos: no end-of-sequence id ends a beam.
        temperature: what logits are divided by; 0 leaves them as they are.
        length_penalty: a finished beam's score is its log probability divided by its number of tokens, prompt not
            included, to this power.
        early_stopping: as transformers has it. True: ends when there are ``beam_width`` finished beams. False: ends
            when the best running beam, as long as it is now, can no longer beat the worst of them. "never": ends when
            it cannot at any length.
        include_stop_str_in_output: keep the end-of-sequence token's text in the text.

    Raises:
        InvalidArgument, TypeError: as ``SamplingParams``.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        owner = "BeamSearchParams"
        values: dict[str, Any] = {
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_N, owner=owner),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, owner=owner),
            "temperature": _number("temperature", self.temperature, 0.0, math.inf, "of at least 0", owner),
            "length_penalty": _number("length_penalty", self.length_penalty, -50.0, 50.0, "from -50 to 50", owner),
        }
        if not isinstance(self.early_stopping, (bool, str)):
            raise _wrong_type("early_stopping", "True, False or 'never'", self.early_stopping, owner)
        if self.early_stopping not in (True, False, "never"):
            raise _bad("early_stopping", "True, False or 'never'", self.early_stopping, owner)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, "True or False", getattr(self, name), owner)
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _integer(
    field: str,
    value: Any,
    low: int | None = None,
    high: int | None = None,
    none: str = "",
    note: str = "",
    owner: str = "SamplingParams",
) -> int:
    expected = f"{none}an integer" + ("" if low is None else f" of at least {low}")
    if high is not None:
        expected = f"{none}an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong_type(field, expected, value, owner)
    if (low is not None and int(value) < low) or (high is not None and int(value) > high):
        raise _bad(field, expected + (f" ({note})" if note else ""), value, owner)
    return int(value)


def _number(field: str, value: Any, low: float, high: float, expected: str, owner: str = "SamplingParams") -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(field, f"a number {expected}".rstrip(), value, owner)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise _bad(field, f"a finite number {expected}".rstrip(), value, owner)
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


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong_type("logit_bias", "a dict from token ids to numbers", value)
    keys = _token_ids("logit_bias", [int(key) if _is_digits(key) else key for key in value])
    return {
        key: _number("logit_bias", number, -100.0, 100.0, "from -100 to 100")
        for key, number in zip(keys, value.values(), strict=True)
    }


def _is_digits(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit()  # JSON has no other keys than strings


def _functions(field: str, value: Any) -> tuple[Callable[..., Any], ...]:
    functions = () if value is None else value
    if not isinstance(functions, Iterable):
        raise _wrong_type(field, "a list of functions", value)
    functions = tuple(functions)
    for function in functions:
        if not callable(function):
            raise _wrong_type(field, "a list of functions", function)
    return functions


def _describe(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _bad(field: str, expected: str, got: object, owner: str = "SamplingParams") -> InvalidArgument:
    return InvalidArgument(f"{owner}.{field}: expected {expected}, got {_describe(got)}")


def _wrong_type(field: str, expected: str, got: object, owner: str = "SamplingParams") -> TypeError:
    return TypeError(f"{owner}.{field}: expected {expected}, got {_describe(got)}")
