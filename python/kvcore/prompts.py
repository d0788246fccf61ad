"""From what a caller gives to token ids and checked parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.engine.intake import Marks
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidArgument

if TYPE_CHECKING:
    from kvcore.text.tokenizer import Tokenizer

Prompt = Any
"""A text, a list (or array) of token ids, {"prompt": text} or {"prompt_token_ids": ids}, and "cache_salt" beside it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the engine takes it.

    Attributes:
        text: as text, if it came as text.
        token_ids: its token ids, not checked yet.
        marks: prefixes that are to be kept.
        cache_salt: whose it is: only prompts with equal salts share blocks.
    """

    text: str | None
    token_ids: Any
    marks: Marks = ()
    cache_salt: str | None = None


class Prompts:
    """Reads the prompts and parameters of calls for one model."""

    def __init__(self, tokenizer: Tokenizer | None, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def inputs(self, prompts: Prompt | list[Prompt]) -> list[Asked]:
        """One prompt or several as the engine takes them.

        Raises:
            InvalidArgument: no prompt, an empty one, or keys that a prompt does not have.
            TypeError: something that is no prompt.
        """
        if not is_batch(prompts):
            return [self._input(prompts, "prompt")]
        if len(prompts) == 0:
            raise InvalidArgument("prompts: expected at least one prompt, got an empty list")
        return [self._input(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]

    def _input(self, prompt: Prompt, where: str) -> Asked:
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
