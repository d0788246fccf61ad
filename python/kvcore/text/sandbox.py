"""The sandbox that a chat template runs in: Jinja's immutable one, and a meter on what it leaves open.

    meter = Meter(max_chars); variables[METER] = meter
    every loop round, call, operator and comparison of the template asks the meter first

Loop rounds and macro calls are counted, values may not expand beyond a limit, and the CPU time is limited.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvcore.errors import InvalidArgument

MAX_CHARS = 8 << 20
MAX_ROUNDS = 200_000
MAX_CPU_SECONDS = 5.0

_MAX_DEPTH = 200
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))

METER = "_kvcore_meter"
"""The variable that holds a render's meter; no template may use the name."""


class Meter:
    """What one rendering has used up."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self._rounds = MAX_ROUNDS
        self._end = time.thread_time() + MAX_CPU_SECONDS
        self._written = 0
        self._known: dict[int, tuple[Any, int]] = {}
        self._kept = 0

    def wrote(self, size: int) -> str:
        """Count what is written anywhere, be it into the prompt, a macro's result or a variable."""
        self._written += size
        if self._written > 8 * self.max_chars:
            raise InvalidArgument(f"the chat template makes more than {8 * self.max_chars:,} characters in all")
        return ""

    def check_values(self, *values: Any) -> None:
        """Refuse values that expand to too much: lists may hold a list many times, and that one another, and so on."""
        self.check_time()
        limit = 2 * self.max_chars + (1 << 20)
        for value in values:
            if isinstance(value, _CONTAINERS) and self._expanded(value, 0) > limit:
                raise InvalidArgument(f"the chat template makes more than {limit:,} characters of one value")

    def _expanded(self, value: Any, depth: int) -> int:
        """Values and characters in a container, counted as often as they occur. It cannot change in the sandbox."""
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if depth > _MAX_DEPTH:
            raise InvalidArgument("the chat template makes more than 200 levels of nested values")
        size = 1
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            if isinstance(item, _CONTAINERS):
                size += self._expanded(item, depth + 1)
            else:
                size += 1 + _length(item)
        if isinstance(value, (list, tuple, dict)):  # views are made anew each time
            self._kept += 1 + len(value)
            if self._kept > 1 << 20:
                self._known.clear()
                self._kept = 1 + len(value)
            self._known[id(value)] = (value, size)  # keeps it, so that its id stays its own
        return size

    def tick(self) -> str:
        """Count a loop round or a macro call. Raises InvalidArgument beyond the limit."""
        self._rounds -= 1
        if self._rounds < 0:
            raise InvalidArgument(f"the chat template takes more than {MAX_ROUNDS:,} loop rounds; does it end?")
        self.check_time()
        return ""

    def check_time(self) -> None:
        """Raise InvalidArgument once the CPU time is used up."""
        # CPU time of this thread: a busy machine makes no template slow.
        if time.thread_time() > self._end:
            raise InvalidArgument(f"the chat template takes more than {MAX_CPU_SECONDS:g} s of CPU time")

    def check_size(self, size: float) -> None:
        """Raise InvalidArgument if a value of this many characters is too large."""
        if size > self.max_chars:
            raise InvalidArgument(f"the chat template makes more than {self.max_chars:,} characters")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here its content just stays."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a meter: loop rounds and macro calls tick, and what makes large values is looked at first."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for used in tree.find_all(nodes.Name):
            if used.name == METER:
                raise jinja2.TemplateSyntaxError(f"{METER} is no name for a template's variable", used.lineno)
        for node in [*tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))]:
            tick = nodes.ExprStmt(_meter_call("tick"))
            node.body.insert(0, tick.set_lineno(node.lineno))  # type: ignore[attr-defined]
        for output in [*tree.find_all(nodes.Output)]:
            size = sum(len(part.data) for part in output.nodes if isinstance(part, nodes.TemplateData))
            if size:
                wrote = nodes.Filter(nodes.Const(size), "_wrote", [], [], None, None)
                wrote.set_lineno(output.lineno)
                output.nodes.insert(0, wrote)
        for part in [*tree.find_all((nodes.Compare, nodes.Getitem, nodes.Pair))]:
            # comparing and hashing walk through all of a value
            if isinstance(part, nodes.Compare):
                part.expr = _checked_expr(part.expr)
                for operand in part.ops:
                    operand.expr = _checked_expr(operand.expr)
            elif isinstance(part, nodes.Pair):
                part.key = _checked_expr(part.key)
            elif isinstance(part, nodes.Getitem) and not isinstance(part.arg, nodes.Slice):
                part.arg = _checked_expr(part.arg)
        for concat in [*tree.find_all(nodes.Concat)]:
            # a ~ b ~ c has no hook of its own: its parts go through the filter "join", which has.
            joined = nodes.Filter(nodes.List(concat.nodes), "_concat", [], [], None, None)
            joined.set_lineno(concat.lineno)
            concat.nodes = [joined]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter_of(context)
        meter.check_values(left, right)
        meter.check_size(_size_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The sandbox gives str.format out as a wrapper, with the method itself in __wrapped__.
        method = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, Meter):
            return obj()
        meter = _meter_of(context)
        meter.check_values(owner, *args, *kwargs.values())
        if isinstance(owner, (str, bytes)):
            meter.check_size(_size_of_method(owner, name, args, kwargs))
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, (str, bytes, list, tuple)):
            meter.check_size(len(result))
        return result


def _meter_call(method: str) -> nodes.Call:
    return nodes.Call(nodes.Getattr(nodes.Name(METER, "load"), method, "load"), [], [], None, None)


def _checked_expr(node: Any) -> Any:
    if isinstance(node, nodes.Const):
        return node
    checked = nodes.Filter(node, "_check", [], [], None, None)
    checked.set_lineno(node.lineno)
    return checked


@jinja2.pass_context
def _check(context: Context, value: Any) -> Any:
    _meter_of(context).check_values(value)
    return value


@jinja2.pass_context
def _wrote(context: Context, size: int) -> str:
    return _meter_of(context).wrote(size)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """What the template writes out passes through here, the text between its tags excepted."""
    meter = _meter_of(context)
    meter.check_values(value)
    text = str(value)
    meter.wrote(len(text))
    return text


def _checking(original: Any) -> Callable[..., Any]:
    """A filter or test that is only called with values that do not expand to too much."""
    kind = getattr(getattr(original, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def checking(context: Context, *args: Any, **kwargs: Any) -> Any:
        _meter_of(context).check_values(*args, *kwargs.values())
        if kind == "context":
            return original(context, *args, **kwargs)
        if kind == "eval_context":
            return original(context.eval_ctx, *args, **kwargs)
        if kind == "environment":
            return original(context.environment, *args, **kwargs)
        return original(*args, **kwargs)

    return checking


def _meter_of(context: Context) -> Meter:
    meter = context.resolve(METER)
    return meter if isinstance(meter, Meter) else Meter(MAX_CHARS)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _size_of_binop(operator: str, left: Any, right: Any) -> float:
    """An upper bound of the size of the result, as far as it can be large."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%":
        return _size_of_format(left, right) if isinstance(left, str) else 0
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                if _length(value):
                    return _length(value) * max(times, 0)
                if isinstance(value, int):
                    return (value.bit_length() + times.bit_length()) / 3
        return 0
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * max(right, 0) / 3  # decimal digits
    return 0


def _size_of_format(text: str, values: Any) -> float:
    """Bound of `text % values`: widths written out or given as numbers, and the values' own text."""
    numbers = [int(n) for n in re.findall(r"\d{1,18}", text)]
    items = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    numbers += [abs(v) for v in items if isinstance(v, int)] if "*" in text or "{" in text else []
    own = sum(_length(v) if isinstance(v, str) else 64 for v in items)
    return len(text) * (1 + own) if own > 1 << 16 else len(text) + own * (text.count("%") + 1) + sum(numbers)


def _size_of_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    numbers = [abs(a) for a in (*args, *kwargs.values()) if isinstance(a, int)]
    if name in ("center", "ljust", "rjust", "zfill"):
        return max([len(owner), *numbers])
    if name == "expandtabs":
        return len(owner) * max([8, *numbers])
    if name in ("format", "format_map"):
        return sum(int(n) for n in re.findall(r"\d{1,18}", str(owner))) + sum(numbers)
    if name == "replace" and len(args) >= 2 and isinstance(args[1], type(owner)):
        return len(owner) + owner.count(args[0]) * len(args[1])
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        return sum(map(_length, args[0])) + len(owner) * len(args[0])
    return 0


@jinja2.pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    """Jinja's filter, metered. A list that holds one long string many times is short itself."""
    meter = _meter_of(context)
    items = [*_metered(meter, value)]
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    items = [item if isinstance(item, str) else str(item) for item in items]
    meter.check_size(sum(map(len, items)) + len(str(d)) * max(len(items) - 1, 0))
    return str(d).join(items)


@jinja2.pass_context
def _concat(context: Context, value: list[Any]) -> str:
    return str(_join(context, value))


def _metered(meter: Meter, values: Any) -> Iterator[Any]:
    for value in values:
        meter.tick()
        yield value


def _guarded(original: Callable[..., Any], size: Callable[..., float]) -> Callable[..., Any]:
    """A filter that is only called if the size it could reach is within the limit."""
    checked = _checking(original)

    @jinja2.pass_context
    def guarded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter_of(context)
        meter.check_time()
        meter.check_size(size(value, *args, **kwargs))
        return checked(context, value, *args, **kwargs)

    return guarded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without Jinja's escaping for HTML."""
    if _length(indent) > 64 or (isinstance(indent, int) and indent > 64):
        raise InvalidArgument(f"the chat template indents JSON by more than 64: {indent!r:.80}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Refusal(jinja2.TemplateError):
    """Raised by the template itself."""


def _raise_exception(message: object = "") -> None:
    raise Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which could shadow what Python itself looks up."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __repr__(self) -> str:  # without what it holds, which could hold more
        return "<Namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.TemplateRuntimeError(f"a namespace's names must not begin with an underscore, got {name!r}")


# Filters of Jinja that can make much from little, and a bound of what they make.
_GUARDED: Mapping[str, Callable[..., float]] = {
    "center": lambda value, width=80: max(len(str(value)), int(width)),
    "indent": lambda value, width=4, first=False, blank=False: (
        len(str(value)) + (str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else int(width))
    ),
    "format": lambda value, *args, **kwargs: _size_of_format(str(value), args or kwargs),
    "urlize": lambda value, *args, **kwargs: 0 if len(str(value)) <= 10_000 else float("inf"),  # its time is quadratic
    "batch": lambda value, linecount, fill_with=None: int(linecount),
    "slice": lambda value, slices, fill_with=None: int(slices),
}


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    return str(value).replace(str(old), str(new), -1 if count is None else count)


def _size_of_replace(value: Any, old: Any, new: Any, count: int | None = None) -> float:
    return len(str(value)) + str(value).count(str(old)) * len(str(new))


@jinja2.pass_context
def _sum(context: Context, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter, metered: lists can be summed, too."""
    meter = _meter_of(context)
    total = start
    for item in _metered(meter, value):
        item = item if attribute is None else context.environment.getitem(item, attribute)
        meter.check_size(_size_of_binop("+", total, item))
        total = total + item
    return total


def make_environment() -> _Environment:
    """The environment that templates are compiled in: as transformers has it, sandboxed and metered."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
    )
    filters = environment.filters
    for name, size in _GUARDED.items():
        filters[name] = _guarded(filters[name], size)
    filters["replace"] = _guarded(_replace, _size_of_replace)
    filters["tojson"] = _tojson
    filters["join"] = _join
    filters["sum"] = _sum
    filters["_concat"] = _concat
    for table in (filters, environment.tests):
        table.update({name: _checking(original) for name, original in table.items()})
    filters["_check"] = _check
    filters["_wrote"] = _wrote
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]  # text of any length
    return environment
