"""cache_control marks: where they fall, how long they keep, and what the usage says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcore import LLM, SamplingParams
from kvcore.errors import InvalidArgument
from kvcore.outputs import Usage
from kvcore.prompt_caching import take_marks
from mocks import MockTokenizer
from models import END, add_tokenizer, chain_folder
from test_llm import make

FAST = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
MANUAL = "The red lamp means that the pump is off. " * 6


def block(text: str, ttl: str | None = None, *, marked: bool = True) -> dict[str, Any]:
    control: dict[str, str] = {"type": "ephemeral"} | ({} if ttl is None else {"ttl": ttl})
    return {"type": "text", "text": text} | ({"cache_control": control} if marked else {})


def talk(question: str, ttl: str | None = None, *, marked: bool = True) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": [block(MANUAL, ttl, marked=marked)]},
        {"role": "user", "content": question},
    ]


def model(**options: Any) -> LLM:
    return make(
        300, tokenizer=MockTokenizer(), **{"prompt_cache_min_tokens": 64, "max_num_batched_tokens": 4096, **options}
    )


def test_usage_adds_up_to_the_prompt() -> None:
    llm = model()
    begin = len("<system>") + len(MANUAL)
    shared = len("\n<user>")  # of the template, behind the mark: found as well
    for question, read in (("Is it on?", 0), ("Why?", (begin + shared) // 4 * 4)):
        (output,) = llm.chat(talk(question), FAST)
        usage = output.usage
        total = len(output.prompt_token_ids)
        assert usage.prompt_tokens == total
        assert usage.cache_read_input_tokens == read
        assert usage.cache_creation_input_tokens == usage.ephemeral_5m_input_tokens == max(0, begin - read)
        assert usage.input_tokens == total - max(begin, read)
        assert usage.output_tokens == 3
    assert [len(tokens) for tokens, _ in llm.cache.marks] == [begin, begin]
    assert {ttl for _, ttl in llm.cache.marks} == {300.0}


def test_the_prompt_is_that_without_marks() -> None:
    llm = model()
    plain = [{"role": "system", "content": MANUAL}, {"role": "user", "content": "Why?"}]
    outputs = [llm.chat(m, FAST)[0] for m in (plain, talk("Why?"), talk("Why?", marked=False))]
    assert len({o.prompt for o in outputs}) == 1
    assert outputs[0].usage == Usage(len(outputs[0].prompt_token_ids), output_tokens=3)
    assert "".join(i.text for i in llm.stream_chat(talk("Why?"), FAST)) == outputs[0].text


def test_hours_go_before_minutes() -> None:
    llm = model()
    messages = [
        {"role": "system", "content": [block(MANUAL, "1h")]},
        {"role": "user", "content": [block(MANUAL, "5m"), block("Why?", marked=False)]},
    ]
    (output,) = llm.chat(messages, FAST)
    first, second = len("<system>") + len(MANUAL), len("<system>\n<user>") + 2 * len(MANUAL)
    assert [(len(tokens), ttl) for tokens, ttl in llm.cache.marks] == [(first, 3600.0), (second, 300.0)]
    usage = output.usage
    assert (usage.ephemeral_1h_input_tokens, usage.ephemeral_5m_input_tokens) == (first, second - first)
    assert usage.cache_creation_input_tokens == second
    messages[0]["content"], messages[1]["content"] = [block(MANUAL)], [block(MANUAL, "1h")]
    with pytest.raises(InvalidArgument, match="'1h' before"):
        llm.chat(messages, FAST)


def test_marks_on_messages_and_short_ones() -> None:
    llm = model()
    messages = [
        {"role": "system", "content": "short", "cache_control": {"type": "ephemeral"}},
        {"role": "user", "content": MANUAL, "cache_control": {"type": "ephemeral"}},
    ]
    llm.chat(messages, FAST)
    assert [len(tokens) for tokens, _ in llm.cache.marks] == [len("<system>short\n<user>" + MANUAL)]
    assert make(tokenizer=MockTokenizer()).chat(talk("Why?"), FAST)[0].usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(
    ("control", "match"),
    [
        ({"type": "persistent"}, "ephemeral"),
        ("ephemeral", "ephemeral"),
        ({"type": "ephemeral", "ttl": "2h"}, "'5m' or '1h'"),
        ({"type": "ephemeral", "ttl": 300}, "'5m' or '1h'"),
        ({"type": "ephemeral", "ttl": [1]}, "'5m' or '1h'"),
        ({"type": "ephemeral", "colour": 1}, "nothing else"),
    ],
)
def test_bad_marks(control: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match) as info:
        take_marks([{"role": "user", "content": "x", "cache_control": control}])
    assert "messages[0]" in str(info.value)


def test_at_most_four() -> None:
    messages = [{"role": "user", "content": [block("x")]} for _ in range(5)]
    assert len(take_marks(messages[:4])[1]) == 4
    with pytest.raises(InvalidArgument, match="at most 4 marks, got 5"):
        take_marks(messages)


def test_what_is_no_conversation_is_left_to_the_template() -> None:
    for messages in ("text", [1], {"role": "user"}, 5):
        assert take_marks(messages) == (messages, [])
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    assert take_marks(picture) == (picture, [])


def test_costs() -> None:
    usage = Usage(100, 1000, 300, 200, 100, 50)
    assert usage.prompt_tokens == 1400
    assert usage.input_cost() == pytest.approx(100 + 100 + 250 + 200)
    assert usage.input_cost(read=0.5, write_5m=1, write_1h=1) == pytest.approx(100 + 500 + 300)
    assert usage.cost_line() == (
        "100 x 1 + 1000 read x 0.1 + 200 written x 1.25 + 100 written for 1h x 2 = 650.0 of 1400 tokens (46%)"
    )


def test_a_mark_outlives_what_is_not_marked(tmp_path: Path) -> None:
    """With the real cache: after the usual time only the marked part is found."""
    now = [0.0]
    import kvcore._kvcore
    import kvcore.loading as loading

    add_tokenizer(chain_folder(tmp_path, {}, eos_token_id=END))
    real = kvcore._kvcore.KVCache

    def make_cache(*args: Any, **options: Any) -> Any:
        return real(*args, **options, clock=lambda: now[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcore._kvcore, "KVCache", make_cache)
        llm = LLM(tmp_path, num_kv_blocks=64, prompt_cache_min_tokens=64, prefix_ttl=60.0)
    assert loading is not None
    with llm:
        first = llm.chat(talk("Is the pump on?", "1h"), FAST)[0]
        assert first.usage.cache_read_input_tokens == 0
        now[0] = 3000.0
        second = llm.chat(talk("Is the pump on?", "1h"), FAST)[0]
        marked = first.usage.cache_creation_input_tokens
        assert marked <= second.usage.cache_read_input_tokens < marked + 16
        now[0] = 3000.0 + 3700.0
        third = llm.chat(talk("Is the pump on?", "1h"), FAST)[0]
        assert third.usage.cache_read_input_tokens == 0
