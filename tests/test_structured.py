"""Answers that must follow a schema, an expression or a grammar. The model would say anything."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from kvcore.engine.sampling_params import SamplingParams, StructuredOutputsParams
from kvcore.errors import InvalidArgument, KvcoreError
from mocks import MockTokenizer
from test_llm import make

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def answers(count: int = 4, *, max_tokens: int = 200, llm: Any = None, **wanted: Any) -> list[str]:
    llm = llm or make(tokenizer=MockTokenizer())
    params = SamplingParams(
        n=count, seed=1, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**wanted)
    )
    (output,) = llm.generate("hello", params)
    assert {c.finish_reason for c in output.outputs} == {"stop"}
    llm.cache.check_empty()
    return [c.text for c in output.outputs]


def test_json_schema() -> None:
    for wanted in (SCHEMA, json.dumps(SCHEMA)):
        for text in answers(json=wanted, max_tokens=700):
            value = json.loads(text)
            assert set(value) == {"name", "size", "kind"}
            assert 0 <= value["size"] <= 99
            assert value["kind"] in ("cat", "dog")


def test_regex_choice_and_grammar() -> None:
    for text in answers(8, regex=r"[a-f]{3}-\d{2}(x|yy)"):
        assert re.fullmatch(r"[a-f]{3}-\d{2}(x|yy)", text)
    said = set(answers(16, choice=["yes", "no", 'say "maybe"']))
    assert len(said) > 1
    assert said <= {"yes", "no", 'say "maybe"'}
    for text in answers(8, grammar='start: "(" num ("+" num)? ")"\nnum: /[0-9]{1,3}/'):
        assert re.fullmatch(r"\([0-9]{1,3}(\+[0-9]{1,3})?\)", text)


def test_a_grammar_changes_no_other_request() -> None:
    llm = make(tokenizer=MockTokenizer())
    free = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    expected = llm.generate("other", free)[0].token_ids
    bound = SamplingParams(seed=1, max_tokens=50, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
    alone = llm.generate("hello", bound)[0].text
    outputs = llm.generate(["other", "hello", "other"], [free, bound, free])
    assert [o.token_ids for o in outputs][::2] == [expected, expected]
    assert outputs[1].text == alone
    assert re.fullmatch("[ab]{9}", alone)


def test_greedy_answers_follow_it_too_and_length_cuts_it() -> None:
    llm = make(tokenizer=MockTokenizer())
    wanted = StructuredOutputsParams(regex="[ab]{9}")
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, structured_outputs=wanted))
    assert re.fullmatch("[ab]{4}", output.text)
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "("},
        {"grammar": "start: nowhere"},
        {"json": "{"},
        {"json": {"type": "colour"}},
        {"choice": ["e\ud800"]},
        {"regex": "e\ud800"},
    ],
)
def test_what_is_no_grammar_is_refused_before_anything_runs(wanted: Any) -> None:
    llm = make(tokenizer=MockTokenizer())
    with pytest.raises(InvalidArgument, match=rf"structured_outputs\.{next(iter(wanted))}"):
        llm.generate(
            ["a", "b"], [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))]
        )
    assert llm.stats()["num_requests"] == 0


def test_without_a_tokenizer_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(InvalidArgument, match=r"structured_outputs: expected none"):
        make().generate([1], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(KvcoreError, match=r"pip install 'kvcore\[structured\]'"):
        make(tokenizer=MockTokenizer()).generate("a", params)
