"""SamplingParams: vLLM's names and defaults, and messages that name the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvcore.engine.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from kvcore.errors import InvalidArgument


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.ignore_eos, params.logprobs) == (None, 16, False, None)
    assert params.stop_strings == ()
    assert params.stop_ids == ()
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1025),
        ("best_of", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [3, -1]),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("typical_p", 0.0),
        ("typical_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", 1e300),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {-3: 1.0}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", ["a", ""]),
    ],
)
def test_bad_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"SamplingParams\.{field}: expected .*, got ") as info:
        SamplingParams(**{field: value})
    assert isinstance(info.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("n", 1.0),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", 5.0),
        ("top_p", [0.5]),
        ("min_p", "0"),
        ("seed", 1.5),
        ("seed", True),
        ("stop", 5),
        ("stop", [5]),
        ("stop", b"x"),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("max_tokens", 3.0),
        ("max_tokens", "3"),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("best_of", 2.0),
        ("presence_penalty", "1"),
        ("min_tokens", 1.0),
        ("logit_bias", [3]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {3: "1"}),
        ("allowed_token_ids", 3),
        ("bad_words", [3]),
        ("logits_processors", 3),
        ("logits_processors", [3]),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_wrong_types_are_named(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"SamplingParams\.{field}: expected .*, got "):
        SamplingParams(**{field: value})


def test_values_are_normalised_and_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(7),
        stop="end",
        stop_token_ids=np.array([1, 2]),
        max_tokens=None,
    )
    assert params.temperature == 0.5
    assert type(params.temperature) is float
    assert (params.top_k, params.seed, type(params.seed)) == (3, 7, int)
    assert params.stop_strings == ("end",)
    assert params.stop_ids == (1, 2)
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=7, stop=["end"], stop_token_ids=[1, 2], max_tokens=None
    )
    hash(params)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_several_answers_need_chance() -> None:
    for field in ("n", "best_of"):
        with pytest.raises(InvalidArgument, match=rf"SamplingParams\.{field}: expected 1 at temperature 0"):
            SamplingParams(temperature=0, **{field: 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"SamplingParams\.best_of: expected an integer from 3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=5).num_sequences == 5


def test_keys_of_logit_bias_may_be_json() -> None:
    params = SamplingParams(logit_bias={"12": 1, 3: -2})  # type: ignore[dict-item]
    assert params.logit_bias == {12: 1.0, 3: -2.0}
    hash(params)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("beam_width", 0, InvalidArgument),
        ("beam_width", 2.0, TypeError),
        ("max_tokens", 0, InvalidArgument),
        ("max_tokens", None, TypeError),
        ("temperature", -1.0, InvalidArgument),
        ("length_penalty", 1e9, InvalidArgument),
        ("length_penalty", math.nan, InvalidArgument),
        ("early_stopping", "soon", InvalidArgument),
        ("early_stopping", np.array([1, 2]), TypeError),
        ("early_stopping", [], TypeError),
        ("ignore_eos", 1, TypeError),
    ],
)
def test_beam_search_params(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"BeamSearchParams\.{field}: expected .*, got "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})


def test_structured_outputs_are_one_of_several() -> None:
    for values in ({}, {"regex": "a", "json": {}, "choice": ["a"]}, {"regex": "a", "grammar": "b"}):
        with pytest.raises(InvalidArgument, match="exactly one"):
            StructuredOutputsParams(**values)  # type: ignore[arg-type]
    assert StructuredOutputsParams(choice=iter(["a", "b"])).choice == ("a", "b")
    with pytest.raises(TypeError, match="regex"):
        StructuredOutputsParams(regex=3)  # type: ignore[arg-type]


def test_ids_outside_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logprobs=10).check_vocab(10)
    with pytest.raises(InvalidArgument, match=r"stop_token_ids: expected ids from 0 to 9 .*, got 10"):
        SamplingParams(stop_token_ids=[3, 10]).check_vocab(10)
    with pytest.raises(InvalidArgument, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[10]).check_vocab(10)
    with pytest.raises(InvalidArgument, match="logit_bias"):
        SamplingParams(logit_bias={10: 1.0}).check_vocab(10)
    with pytest.raises(InvalidArgument, match="logprobs: expected at most 10"):
        SamplingParams(logprobs=11).check_vocab(10)


@pytest.mark.parametrize("values", [{"temperature": 0}, {"top_k": 1}, {"min_p": 1.0}])
def test_greedy(values: dict[str, Any]) -> None:
    assert SamplingParams(**values).greedy
    assert not SamplingParams().greedy
