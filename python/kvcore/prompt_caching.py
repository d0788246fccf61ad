"""Marks in a conversation up to which a prompt shall be kept, as the Claude API has them.

    {"role": "system", "content": [{"type": "text", "text": manual, "cache_control": {"type": "ephemeral"}}]}

A mark stands on a message or on a text block of its content. What is before it, and the block itself, is kept for five
minutes after its last use, or an hour with ``"ttl": "1h"``; up to four marks, longer times first. Prefixes that are
shorter than the model's minimum (``LLM(prompt_cache_min_tokens=)``) are not marked. The output's ``usage`` counts what
was read and written, and ``usage.cost_line()`` says what that saves.

Without any mark equal beginnings are shared as well, for ``prefix_ttl``; a mark says for how long, and what is counted
as written.

Source: https://docs.claude.com/en/docs/build-with-claude/prompt-caching
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvcore.engine.intake import Marks
from kvcore.errors import InvalidArgument

MAX_MARKS = 4
TTLS = {"5m": 300.0, "1h": 3600.0}

# characters that no text has and no template changes
_SENTINEL = "\uf8f0\uf8f1kvcore\uf8f1\uf8f0"


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a mark is: behind ``end`` characters of a message's content, and how long in seconds it keeps."""

    message: int
    end: int
    ttl: float


def take_marks(messages: Any) -> tuple[Any, list[Mark]]:
    """The conversation without its marks, contents of text blocks joined to texts, and the marks in order.

    What is no conversation is returned as it is: the template says what is wrong with it.

    Raises:
        InvalidArgument: a mark of another type or time, more than four, or a longer time behind a shorter one.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages, []
    plain: list[Any] = []
    marks: list[Mark] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            return messages, []
        message = dict(message)
        content = message.get("content")
        if isinstance(content, (list, tuple)) and content and all(_is_text(block) for block in content):
            end = 0
            for j, block in enumerate(content):
                end += len(block["text"])
                if block.get("cache_control") is not None:
                    marks.append(Mark(i, end, _ttl(block["cache_control"], f"messages[{i}]['content'][{j}]")))
            message["content"] = content = "".join(block["text"] for block in content)
        control = message.pop("cache_control", None)
        if control is not None:
            end = len(content) if isinstance(content, str) else 0
            marks.append(Mark(i, end, _ttl(control, f"messages[{i}]")))
        plain.append(message)
    if len(marks) > MAX_MARKS:
        raise InvalidArgument(f"cache_control: expected at most {MAX_MARKS} marks, got {len(marks)}")
    for before, after in pairwise(marks):
        if after.ttl > before.ttl:
            raise InvalidArgument("cache_control: expected marks with ttl '1h' before those with '5m', got one behind")
    return plain, marks


def find_mark(mark: Mark, messages: list[dict[str, Any]], text: str, render: Callable[[Any], str]) -> int:
    """How many characters of the rendered conversation ``text`` a mark covers.

    The conversation is rendered once more, with something else behind the marked text: where the two part is the place.
    """
    changed = [dict(message) for message in messages]
    content = changed[mark.message].get("content") or ""
    changed[mark.message]["content"] = content[: mark.end] + _SENTINEL + content[mark.end :]
    return _common(text, render(changed))


def mark_tokens(marks: list[Mark], prefixes: list[list[int]], token_ids: list[int], minimum: int) -> Marks:
    """The marks as numbers of tokens and seconds.

    Args:
        marks: in order.
        prefixes: the token ids of the text up to each. The last may differ from the prompt's: it is not covered then.
        token_ids: the prompt.
        minimum: shorter prefixes are not marked.
    """
    found = []
    for mark, prefix in zip(marks, prefixes, strict=True):
        length = _common(prefix, token_ids)
        if length >= max(minimum, 1):
            found.append((length, mark.ttl))
    return tuple(found)


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How many items at the beginning are equal."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


def _is_text(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "text" and isinstance(block.get("text"), str)


def _ttl(control: Any, where: str) -> float:
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise InvalidArgument(f"{where}['cache_control']: expected {{'type': 'ephemeral'}}, got {control!r}")
    unknown = set(control) - {"type", "ttl"}
    ttl = control.get("ttl", "5m")
    if unknown or not isinstance(ttl, str) or ttl not in TTLS:
        raise InvalidArgument(
            f"{where}['cache_control']: expected a ttl of '5m' or '1h' and nothing else, got {control!r}"
        )
    return TTLS[ttl]
