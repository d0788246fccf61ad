from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import InvalidArgument
from kvcore.text.chat import ChatTemplate

EXPECTED = json.loads((Path(__file__).parent / "data" / "smollm2" / "expected.json").read_text(encoding="utf-8"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def render(template: str, **extra: Any) -> str:
    return ChatTemplate(template, "<s>", "</s>").render(HI, **extra)


SHARED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)


def test_golden() -> None:
    template = ChatTemplate(EXPECTED["tokenizer"]["chat_template"], EXPECTED["tokenizer"]["bos"])
    chats = [prompt for prompt in EXPECTED["prompts"] if "messages" in prompt]
    assert len(chats) == 3
    for chat in chats:
        assert template.render(chat["messages"]) == chat["prompt"]
    assert not template.render(HI, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Blocks on lines of their own leave no trace, as with transformers.
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}", "<s></s>"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "023",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "<é>"\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ 2 ~ none ~ undefined_name }}", "[1]2None"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ loop_free | default('d') }}{{ ['a', 1] | join('-') }}{{ [1, 2] | sum }}{{ 'x' * 3 }}", "da-13xxx"),
        ("{{ messages | map(attribute='role') | join(',') }}{{ messages | join('', 'content') }}", "userhi"),
        ("{{ 'a-b'.split('-')[-1].upper() }}{{ 'aXa'.replace('X', 'bb') }}{{ 'aXa' | replace('X', '') }}", "Babbaaa"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '%s' | format('b') }}{{ '{:>3}{}'.format('c', 1) }}", "a-007b  c1"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | center(3) }}|{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}", "a\n  b x |338"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        (
            "{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.nextitem is defined }}{% endfor %}",
            "1TrueFalse",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)
def test_what_templates_use(template: str, expected: str) -> None:
    assert render(template) == expected


def test_time() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_extra_variables() -> None:
    assert render(
        "{{ enable_thinking }}{{ documents[0].title }}", enable_thinking=False, documents=[{"title": "t"}]
    ) == ("Falset")


# -- several templates, or none --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "several",
    [
        {"default": "plain", "tool_use": "{{ tools[0].name }}"},
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}],
    ],
)
def test_several_templates(several: Any) -> None:
    template = ChatTemplate(several)
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=[]) == "plain"
    assert template.render(HI, tools=[{"name": "search"}]) == "search"
    only_tools = ChatTemplate({"tool_use": "x", "rag": "y"})
    with pytest.raises(InvalidArgument, match="'default'; there are 'tool_use', 'rag'"):
        only_tools.render(HI)


@pytest.mark.parametrize("nothing", [None, {}, []])
def test_no_template(nothing: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"no chat template; pass one as chat_template=.*generate\(\)"):
        ChatTemplate(nothing)


@pytest.mark.parametrize("wrong", [1, {"default": 2}, [{"name": "default", "template": None}]])
def test_wrong_template_types(wrong: Any) -> None:
    with pytest.raises(TypeError, match="chat"):
        ChatTemplate(wrong)


def test_wrong_template_list() -> None:
    with pytest.raises(InvalidArgument, match=r"chat_template\[1\]"):
        ChatTemplate([{"name": "default", "template": ""}, {"name": "x"}])


def test_from_tokenizer() -> None:
    tokenizer = SimpleNamespace(
        chat_template="{{ bos_token }}{{ pad_token }}", special_tokens={"bos_token": "B", "pad_token": "P"}
    )
    assert ChatTemplate.from_tokenizer(tokenizer).render(HI) == "BP"
    with pytest.raises(InvalidArgument, match="no chat template"):
        ChatTemplate.from_tokenizer(SimpleNamespace(chat_template=None, special_tokens={}))


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages: expected a list of dicts with role and content, got str"),
        ({"role": "user", "content": "hi"}, "messages: expected .*, got dict"),
        (None, "messages: expected .*, got NoneType"),
        ([], "messages: expected at least one message, got none"),
        (["hi"], r"messages\[0\]: expected a dict with role and content, got str"),
        ([HI], r"messages\[0\]: expected a dict .* got list"),
        ([*HI, {"content": "x"}], r"messages\[1\]\['role'\]: expected a str that is not empty, got None"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\['role'\]"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\['role'\]: .* got 1"),
        ([{"role": "user"}], r"messages\[0\]\['content'\]: expected .* \(role 'user'\), got none"),
        ([{"role": "user", "content": None}], r"content.*, got none"),
        (
            [{"role": "user", "content": ["x"]}],
            r"\['content'\]: expected a str or a list of blocks .*, got list",
        ),
        ([{"role": "user", "content": b"x"}], "expected plain data .* got bytes"),
        (
            [{"role": "user", "content": "x", "image": object()}],
            r"messages\[0\]\['image'\]: .* got object",
        ),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ChatTemplate(CHATML).render(messages)


def test_message_details() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    text = ChatTemplate("{{ messages | tojson }}").render((*HI, call))
    assert json.loads(text) == [*HI, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgument, match="expected at most 64 levels"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x", "extra": loop}])


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "hi", "list": [1]}]
    with pytest.raises(InvalidArgument, match="unsafe"):
        ChatTemplate("{{ messages[0].list.append(2) }}").render(messages)
    with pytest.raises(InvalidArgument, match="unsafe"):
        ChatTemplate("{{ messages.clear() }}").render(messages)
    assert messages == [{"role": "user", "content": "hi", "list": [1]}]


# -- faulty and hostile templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "'default', line 1: "),
        ("a\n{{ 1 +", "line 2"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ missing.attribute }}", "UndefinedError: 'missing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.__init__.__globals__ }}", "SecurityError"),
        ("{% include 'secret' %}", "no loader"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{% set _kvcore_meter = 1 %}", "_kvcore_meter is no name"),
        ("{% macro f(_kvcore_meter) %}{% endmacro %}", "_kvcore_meter is no name"),
        ("{{ messages | tojson(indent=10**9) }}", "indents JSON"),
    ],
)
def test_faulty_templates(template: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
        "{{ 'x' * 10**12 }}",
        "{{ 10**12 * [1] }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ '%010000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%010000000000d' | format(1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**10) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ ('\n' * 100000) | indent('y' * 100000) }}",
        "{{ ['x' * 1000000] * 1000 | join }}{{ (['x' * 1000000] * 1000) | join }}",
        "{{ ''.join(['x' * 1000000] * 1000) }}",
        "{{ [[1] * 1000000] * 1000 | sum(start=[]) }}{{ ([[1] * 1000000] * 1000) | sum(start=[]) }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ [1] | slice(10**10) | list }}",
        SHARED + "{{ ns.x == ns.y }}",
        SHARED + "{{ ns.x | tojson }}",
        SHARED + "{{ ns.x | string }}",
        SHARED + "{{ ns.x | pprint }}",
        SHARED + "{{ [ns.x, ns.y] | sort }}",
        SHARED + "{{ ns.x }}",
        SHARED + "{{ ns.x is eq(ns.y) }}",
        SHARED + "{{ {(ns.x,): 1} }}",
        SHARED + "{{ '%s' % ns.x }}",
        SHARED + "{{ '{}'.format(ns.x) }}",
        SHARED + "{{ ns.x ~ '' }}",
        "{{ ('<' * 8000000) | urlize }}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 8000 }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 8000 + "{% endfor %}{% endset %}",
    ],
)
def test_hostile_templates_are_stopped(template: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidArgument, match=r"makes more than|takes more than|without end|failed with TypeError"):
        render(template)
    assert time.monotonic() - start < 60


def test_the_limit_can_be_set() -> None:
    template = ChatTemplate(CHATML, max_chars=100)
    assert template.render(HI)
    with pytest.raises(InvalidArgument, match="more than 100 characters"):
        template.render([{"role": "user", "content": "x" * 101}])


def test_long_conversations_are_not_hostile() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(5000)]
    assert len(ChatTemplate(CHATML).render(messages)) > 2_500_000


def test_filters_still_work() -> None:
    assert render("{{ 'https://example.com' | urlize }}").startswith("<a href=")
    assert render("{{ [3, 1] | sort | list }}{{ [1, 2] | select('odd') | list }}") == "[1, 3][1]"


def test_a_broken_template_of_the_model_is_an_error_of_render() -> None:
    tokenizer = SimpleNamespace(chat_template="{% if %}", special_tokens={})
    template = ChatTemplate.from_tokenizer(tokenizer)
    with pytest.raises(InvalidArgument, match="own template is broken: chat template 'default', line 1"):
        template.render(HI)


def test_tool_calls_and_reasoning_pass_through() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for b in m.content %}[{{ b.type }}:{{ b.text or b.thinking }}]{% endfor %}{% endif %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
        "{% endfor %}{% for t in tools %}{{ t.function.name }};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "reasoning_content": "look it up", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "dry"}, {"type": "text", "text": "No."}]},
    ]
    text = template.render(messages, False, tools=[{"type": "function", "function": {"name": "weather"}}])
    assert text == (
        '<user>Rain?<assistant><think>look it up</think>weather({"city": "Oslo"})<tool>no'
        "<assistant>[thinking:dry][text:No.]weather;"
    )
