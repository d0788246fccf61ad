"""From what a caller gives to token ids and checked parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcore.engine.intake import Marks
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcore.engine.interfaces import EncoderInput
    from kvcore.text.tokenizer import Tokenizer

Prompt = Any
"""A text, a list (or array) of token ids, {"prompt": text} or {"prompt_token_ids": ids}, and "cache_salt" beside it.

Of an encoder-decoder a text for the encoder, or {"encoder_token_ids": ids} or {"input_features": features}, with
optional "decoder_token_ids".
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the engine takes it.

    Attributes:
        text: as text, if it came as text.
        token_ids: its token ids, not checked yet.
        marks: prefixes that are to be kept.
        cache_salt: whose it is: only prompts with equal salts share blocks.
        encoder: what the encoder is given, if there is one.
        keep: takes the request's sequence in the cache when it ends, instead of having it freed.
    """

    text: str | None
    token_ids: Any
    marks: Marks = ()
    cache_salt: str | None = None
    encoder: EncoderInput | None = None
    keep: list[Any] | None = None


class Reader(Protocol):
    """What an encoder-decoder says of its prompts."""

    @property
    def start_token_id(self) -> int:
        """The decoder's first token."""
        ...

    @property
    def mel_bins(self) -> int | None:
        """Rows of the sound's features that the encoder takes; None: it takes token ids."""
        ...

    def encoder_input(self, given: Mapping[str, Any], /) -> EncoderInput:
        """Check what a prompt has for the encoder."""
        ...


class Prompts:
    """Reads the prompts and parameters of calls for one model."""

    def __init__(self, tokenizer: Tokenizer | None, name: str, reader: Reader | None = None) -> None:
        """``reader``: of an encoder-decoder; it says what the encoder takes."""
        self._tokenizer = tokenizer
        self.reader = reader
        self._name = name

    def inputs(self, prompts: Prompt | list[Prompt]) -> list[Asked]:
        """One prompt or several as the engine takes them.

        Raises:
            InvalidArgument: no prompt, an empty one, or keys that a prompt does not have.
            TypeError: something that is no prompt.
        """
        if isinstance(prompts, Asked):
            return [prompts]
        if not is_batch(prompts):
            return [self._input(prompts, "prompt")]
        if len(prompts) == 0:
            raise InvalidArgument("prompts: expected at least one prompt, got an empty list")
        return [self._input(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]

    def encoder_input(self, given: Any, where: str = "encoder") -> EncoderInput | None:
        """What a call has for the encoder alone, a dict as a prompt has it. Raises as ``inputs``."""
        if given is None and self.reader is None:
            return None
        if self.reader is None:
            raise InvalidArgument(f"{where}: expected None, because {self._name} has no encoder, got an input for one")
        if isinstance(given, Mapping) and "decoder_token_ids" in given:
            raise InvalidArgument(f"{where}: expected an input for the encoder alone, got 'decoder_token_ids' as well")
        return self._input(given, where).encoder

    def _input(self, prompt: Prompt, where: str) -> Asked:
        if self.reader is not None:
            return self._encoder_decoder_input(self.reader, prompt, where)
        salt = None
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if key in prompt]
            if len(known) != 1 or set(prompt) - {*known, "cache_salt"}:
                raise InvalidArgument(
                    f"{where}: expected a dict with either 'prompt_token_ids' or 'prompt' (and 'cache_salt' or not), "
                    f"got the keys {list(prompt)}"
                )
            salt = check_salt(prompt.get("cache_salt"), f"{where}['cache_salt']")
            prompt = prompt[known[0]]
            if isinstance(prompt, str) != (known[0] == "prompt"):
                kind = "a string" if known[0] == "prompt" else "a list of token ids"
                raise TypeError(f"{where}[{known[0]!r}]: expected {kind}, got {type(prompt).__name__}")
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidArgument(f"{where}: expected a text that is not empty, got ''")
            return Asked(prompt, self.encode(prompt, add_special_tokens=True), cache_salt=salt)
        if not isinstance(prompt, (list, tuple, range, np.ndarray)) or getattr(prompt, "ndim", 1) == 0:
            raise TypeError(f"{where}: expected a string, a list of token ids or a dict, got {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InvalidArgument(f"{where}: expected at least one token, got none")
        return Asked(None, prompt, cache_salt=salt)

    def _encoder_decoder_input(self, reader: Reader, prompt: Prompt, where: str) -> Asked:
        source = "encoder_token_ids" if reader.mel_bins is None else "input_features"
        expected = f"{where}: expected a dict with {source!r} and perhaps 'decoder_token_ids'"
        given = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"{expected}, as {self._name} has an encoder, got {type(prompt).__name__}")
        beside = {"decoder_token_ids", "cache_salt"}
        sources = set(given) - beside
        if len(sources) > 1 or not sources <= {"prompt", "encoder_token_ids", "input_features"}:
            raise InvalidArgument(f"{expected}, got the keys {list(given)}")
        text, start = given.get("prompt"), given.get("decoder_token_ids")
        salt = check_salt(given.get("cache_salt"), f"{where}['cache_salt']")
        if "prompt" in given:
            if not isinstance(text, str) or reader.mel_bins is not None:
                raise InvalidArgument(f"{expected}, got {'a text' if isinstance(text, str) else type(text).__name__}")
            if not text:
                raise InvalidArgument(f"{where}: expected a text that is not empty, got ''")
            given = {source: self.encode(text, add_special_tokens=True)}
        token_ids = [reader.start_token_id] if start is None else start
        return Asked(text, token_ids, cache_salt=salt, encoder=reader.encoder_input(given))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises InvalidArgument without a tokenizer."""
        if self._tokenizer is None:
            raise InvalidArgument(
                f"prompt: expected token ids, because {self._name} came without a tokenizer, got a string"
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def params(self, params: Any, count: int) -> list[SamplingParams]:
        """One for each prompt, with what needs a tokenizer made of it.

        Raises:
            InvalidArgument: another number of them, or stop strings and the like without a tokenizer.
            TypeError: something else.
        """
        if params is None:
            params = SamplingParams()
        each = list(params) if isinstance(params, (list, tuple)) else [params] * count
        if len(each) != count:
            raise InvalidArgument(f"params: expected one for each of the {count} prompts, got {len(each)}")
        for item in each:
            if not isinstance(item, SamplingParams):
                raise TypeError(f"params: expected SamplingParams or a list of them, got {type(item).__name__}")
            for field in ("stop", "bad_words", "structured_outputs"):
                if getattr(item, field) and self._tokenizer is None:
                    raise InvalidArgument(
                        f"SamplingParams.{field}: expected none, because {self._name} came without a tokenizer"
                    )
        return [item.with_bad_words(self._bad_words(item)) if item.bad_words else item for item in each]

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as token ids: as it begins a text, and as it follows a space where that is one more way."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            alone = self.encode(word.lstrip(), add_special_tokens=False)
            behind = self.encode(f" {word.lstrip()}", add_special_tokens=False)
            found.append(alone)
            # with as many tokens it is a word of its own; with more the first of them is the space alone
            if behind[:1] != alone[:1] and len(behind) == len(alone):
                found.append(behind)
        return [ids for ids in found if ids]


def is_batch(prompts: Any) -> bool:
    """Whether this is a list of prompts, not one prompt. (A list of token ids is one prompt.)"""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim > 1
    return isinstance(prompts, (list, tuple)) and not (len(prompts) > 0 and isinstance(prompts[0], Integral))


def check_salt(salt: Any, where: str) -> str | None:
    """A salt, or None. Raises TypeError for something else, InvalidArgument for an empty one."""
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"{where}: expected a string or None, got {type(salt).__name__}")
    if salt == "":
        raise InvalidArgument(f"{where}: expected a string that is not empty, got ''")
    return salt
