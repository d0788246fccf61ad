"""The drafts of a sequence: speculative decoding by prompt look-up.

    index: min-gram -> where it ended last; each place knows the one before it
    draft(tokens, k):
        walk the places at which the last ``lookup_min`` tokens have stood before, the latest first
        take the one before which most of the last ``lookup_max`` tokens are the same
        the k tokens that followed there are the draft; where they run into the end, they go on with themselves

A draft costs rows of a batch, no tokens: the step computes the rows of the last token and of the draft together, and
samples one after the other as ever. As long as what is sampled is what the draft says, the next row is the right one.
Answers that repeat their prompt (summaries, edits, code) or themselves get several tokens from one forward pass.

Rows are not free where weights are small, so drafts follow their success: one that was right to its end lets the next
be twice as long, another lets it be one token longer than what was right of it. After three in a row without any right
token the sequence makes none for 8 tokens, then for 16, and so on up to 128. There is no clock in it: a run
can be repeated.

Source: Prompt Lookup Decoding (Saxena, 2023); verification: Leviathan et al., Fast Inference from Transformers via
Speculative Decoding (2023), in its exact form, where a draft counts only if it is what is sampled anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvcore.errors import InvalidArgument

_MOST_PLACES = 16
"""Places that are compared for a draft: few, so that its cost does not grow with the text."""

_MISSES = 3
"""Rejected drafts in a row after which a sequence pauses; the pause is 2 to the number of misses, in tokens."""

_LONGEST_PAUSE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How drafts are made, with vLLM's names.

    Attributes:
        method: "ngram": prompt look-up.
        num_speculative_tokens: the most tokens of a draft.
        prompt_lookup_max: so many of the last tokens are looked up, if possible.
        prompt_lookup_min: so many must be found.

    Raises:
        InvalidArgument: a value out of range.
        TypeError: a value of the wrong type.
    """

    method: str = "ngram"
    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise InvalidArgument(f"speculative_config.method: expected 'ngram', got {self.method!r}")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"speculative_config.{name}: expected an integer, got {type(value).__name__}")
            if value < 1:
                raise InvalidArgument(f"speculative_config.{name}: expected an integer of at least 1, got {value}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidArgument(
                f"speculative_config.prompt_lookup_min: expected at most {self.prompt_lookup_max} "
                f"(prompt_lookup_max), got {self.prompt_lookup_min}"
            )

    @classmethod
    def from_dict(cls, values: Any) -> SpeculativeConfig:
        """From a dict as vLLM takes it; what is missing gets its default, beside which it must fit.

        Raises:
            InvalidArgument: an unknown or missing name, a value out of range.
            TypeError: no dict, or a value of the wrong type.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"speculative_config: expected None or a dict, got {type(values).__name__}")
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                raise InvalidArgument(f"speculative_config: expected the names {', '.join(names)}, got {name!r}")
        if "num_speculative_tokens" not in values:
            raise InvalidArgument("speculative_config.num_speculative_tokens: expected an integer, got none")
        return cls(**values)


class Drafts:
    """Makes the drafts of one sequence, whose tokens only ever become more.

    Args:
        config: how.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._last: dict[int, int] = {}  # hash of a min-gram -> the end of its last place
        self._before: list[int] = []  # end of a min-gram -> the end of the place before, 0: none
        self._longest = config.num_speculative_tokens
        self._misses = 0
        self._silent_until = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """What may follow: at most ``most`` tokens, and none while it pauses or if nothing was found."""
        length = len(token_ids)
        most = min(most, self._longest)
        if most < 1 or length < self._silent_until:
            return []
        self._index(token_ids)
        end = self._find(token_ids)
        if end == 0:
            return []
        draft = token_ids[end : end + most]
        while len(draft) < most:  # what followed was the end itself: a period of length - end tokens
            draft.append(draft[len(draft) - (length - end)])
        return draft

    def judge(self, num_tokens: int, num_accepted: int, length: int) -> None:
        """Take note that of a draft's tokens so many were right, behind ``length`` tokens."""
        longer = 2 * num_tokens if num_accepted == num_tokens else num_accepted + 1
        self._longest = min(longer, self._config.num_speculative_tokens)
        self._misses = 0 if num_accepted else self._misses + 1
        if self._misses >= _MISSES:
            self._silent_until = length + min(1 << self._misses, _LONGEST_PAUSE)

    def _index(self, token_ids: list[int]) -> None:
        """Take in the min-grams that end before the last token."""
        n, last, before = self._config.prompt_lookup_min, self._last, self._before
        for end in range(len(before), len(token_ids)):
            if end < n:
                before.append(0)
                continue
            key = hash(tuple(token_ids[end - n : end]))
            before.append(last.get(key, 0))
            last[key] = end

    def _find(self, token_ids: list[int]) -> int:
        """The end of the place that matches best, 0 if there is none. (Hashes may be equal for other tokens.)"""
        most, least, length = self._config.prompt_lookup_max, self._config.prompt_lookup_min, len(token_ids)
        best, found = least - 1, 0
        end = self._last.get(hash(tuple(token_ids[-least:])), 0) if length > least else 0
        for _ in range(_MOST_PLACES):
            if end == 0 or best >= most:
                break
            same = 0
            while same < min(most, end) and token_ids[end - 1 - same] == token_ids[-1 - same]:
                same += 1
            if same > best:
                best, found = same, end
            end = self._before[end]
        return found
