"""Chat messages to a prompt, by the model's own Jinja template.

    messages --check--> plain data --template, sandboxed and metered--> prompt

A template comes with the checkpoint, so it is a stranger's program: it runs in ``sandbox.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from kvcore.errors import InvalidArgument, KvcoreError
from kvcore.text.sandbox import MAX_CHARS, METER, Meter, Refusal, make_environment

_NO_TEMPLATE = (
    "the model has no chat template; pass one as chat_template=..., or give the whole prompt to generate() yourself"
)


class ChatTemplate:
    """A chat template, or several by name, ready to render."""

    def __init__(
        self,
        template: str | Mapping[str, str] | Sequence[Mapping[str, str]] | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """Check and compile the template.

        Args:
            template: Jinja text; or several as {name: text} or as [{"name": ..., "template": ...}]. Of several,
                "tool_use" is used when tools are given, and "default" otherwise.
            bos_token, eos_token: what the template's variables of that name hold.
            special_tokens: further ones ("pad_token", ...).
            max_chars: the longest prompt, and the longest string on the way there, in characters.

        Raises:
            InvalidArgument: no template, or one that is not Jinja.
        """
        self._variables = dict(special_tokens or {})
        self._variables |= {k: v for k, v in (("bos_token", bos_token), ("eos_token", eos_token)) if v is not None}
        self._max_chars = max_chars
        self._fault: str | None = None
        environment = make_environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, text in _by_name(template).items():
            try:
                self._templates[name] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise InvalidArgument(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
            except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
                raise InvalidArgument(f"chat template {name!r} cannot be compiled: {error}") from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatTemplate:
        """The template and special tokens of a `Tokenizer`.

        A template that cannot be compiled is an error of `render` only: the model can do without.

        Raises:
            InvalidArgument: it has no template.
        """
        if tokenizer.chat_template is None:
            raise InvalidArgument(_NO_TEMPLATE)
        try:
            return cls(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
        except (InvalidArgument, TypeError) as error:
            broken = cls("", special_tokens=tokenizer.special_tokens)
            broken._fault = str(error)
            return broken

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """The prompt for a conversation. Encode it with `add_special_tokens=False`: the template wrote them already.

        Args:
            messages: the conversation, oldest first: {"role": str, "content": str}, and whatever else the template
                reads ("tool_calls", "reasoning_content", ...). "content" may be missing beside "tool_calls", and may
                be a list of blocks with a "type" for templates that know these. Entries that are None count as missing.
            add_generation_prompt: end with the start of the assistant's turn.
            tools: JSON schemas of functions, for templates that know them.
            extra: further variables of the template ("documents", "enable_thinking", ...); plain data.

        Raises:
            InvalidArgument: a message is not as above, the template refuses the conversation or has a fault, or
                it grows beyond the limits.
        """
        if self._fault is not None:
            raise InvalidArgument(f"the model's own template is broken: {self._fault}")
        plain = _checked_messages(messages)
        tool_list = None if tools is None else [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
        name = "tool_use" if tool_list and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(map(repr, self._templates))
            raise InvalidArgument(f"no chat template is named {name!r}; there are {names}")
        variables = {
            "documents": None,
            **self._variables,
            **{key: _plain(value, key) for key, value in extra.items()},
            "messages": plain,
            "tools": tool_list,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        meter = Meter(self._max_chars)
        variables[METER] = meter
        try:
            # Piece by piece, so that a template that writes without end is stopped.
            pieces: list[str] = []
            length = 0
            for piece in self._templates[name].generate(variables):
                pieces.append(piece)
                length += len(piece)
                meter.check_size(length)
            return "".join(pieces)
        except KvcoreError:
            raise
        except Refusal as error:
            raise InvalidArgument(f"the chat template refuses the conversation: {error}") from error
        except RecursionError as error:
            raise InvalidArgument("the chat template calls itself without end") from error
        except Exception as error:  # whatever the template's own expressions raise
            raise InvalidArgument(f"the chat template failed with {type(error).__name__}: {error}") from error


# -- what goes in ----------------------------------------------------------------------------------------------------


def _by_name(template: Any) -> dict[str, str]:
    if template is None:
        raise InvalidArgument(_NO_TEMPLATE)
    if isinstance(template, str):
        return {"default": template}
    named: dict[str, str] = {}
    if isinstance(template, Mapping):
        named = dict(template)
    elif isinstance(template, Sequence):
        for i, entry in enumerate(template):
            if not isinstance(entry, Mapping) or not {"name", "template"} <= entry.keys():
                raise InvalidArgument(f'chat_template[{i}] must be {{"name": ..., "template": ...}}, got {entry!r:.80}')
            named[entry["name"]] = entry["template"]
    else:
        raise TypeError(f"chat_template must be a str, a dict or a list of dicts, got {type(template).__name__}")
    for name, text in named.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"chat template {name!r} must be a str, got {type(text).__name__}")
    if not named:
        raise InvalidArgument(_NO_TEMPLATE)
    return named


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgument(
            f"messages: expected a list of dicts with role and content, got {type(messages).__name__}"
        )
    if not messages:
        raise InvalidArgument("messages: expected at least one message, got none")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgument(f"messages[{i}]: expected a dict with role and content, got {type(message).__name__}")
        # Some interfaces write None for what is not there, and templates would print "None".
        plain = {k: v for k, v in _plain(message, f"messages[{i}]").items() if v is not None}
        role = plain.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidArgument(f"messages[{i}]['role']: expected a str that is not empty, got {role!r}")
        content = plain.get("content")
        if content is None:
            if not plain.get("tool_calls"):
                raise InvalidArgument(f"messages[{i}]['content']: expected a text or blocks (role {role!r}), got none")
        elif not isinstance(content, str) and not _is_blocks(content):
            raise InvalidArgument(
                f"messages[{i}]['content']: expected a str or a list of blocks like "
                f'{{"type": "text", "text": ...}}, got {type(content).__name__}'
            )
        checked.append(plain)
    return checked


def _is_blocks(content: Any) -> bool:
    """Whether this is a list of blocks with a type: text, reasoning and so on, for templates that know them."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(block, Mapping) and isinstance(block.get("type"), str) for block in content)
    )


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's types only: methods of other objects are nothing for a stranger's program."""
    if depth > 64:
        raise InvalidArgument(f"{where}: expected at most 64 levels of lists and dicts, got more")
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise InvalidArgument(
        f"{where}: expected plain data (str, int, float, bool, None, list, dict), got {type(value).__name__}"
    )
