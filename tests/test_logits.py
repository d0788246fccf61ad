"""What requests change in their logits, against vLLM's formulas written plainly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.engine import Engine
from kvcore.engine.logits import Adjuster
from kvcore.engine.sampler import Sampled, make_generator, sample
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidState
from mocks import MockCache, MockDecoder

VOCAB = 12


def plain(row: list[float], prompt: list[int], answer: list[int], params: SamplingParams) -> list[float]:
    """One token at a time, in vLLM's order."""
    result = []
    for token, logit in enumerate(row):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        if len(answer) < params.min_tokens and token == 0:
            logit = -math.inf
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = answer.count(token)
        logit -= params.frequency_penalty * count
        logit -= params.presence_penalty * (count > 0)
        result.append(logit)
    return result


@given(
    st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.5, 0.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.7, -1.0]),
            "presence_penalty": st.sampled_from([0.0, 1.1, -0.3]),
            "min_tokens": st.integers(0, 4),
            "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5)),
            "allowed_token_ids": st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1),
        }
    ),
)
def test_against_plain_formulas(values: list[int], prompt: list[int], answer: list[int], fields: Any) -> None:
    params = SamplingParams(**fields)
    adjust = Adjuster(params, prompt, {0}, VOCAB)
    row = np.array(values, np.float32) / 4
    before = row.copy()
    for token in answer:
        adjust.accept(token)
    np.testing.assert_allclose(adjust(row), plain(row.tolist(), prompt, answer, params), rtol=1e-5, atol=1e-5)
    assert (row == before).all()
    assert Adjuster.wanted(params) or (adjust(row) == row).all() or params.repetition_penalty == 1.0


def test_bad_words() -> None:
    params = SamplingParams(bad_words=["x"]).with_bad_words([[5], [1, 2, 3]])
    adjust = Adjuster(params, [1, 2], (), VOCAB)
    row = np.zeros(VOCAB, np.float32)
    forbidden = []
    for token in (4, 1, 2, 1):
        forbidden.append(np.flatnonzero(np.isinf(adjust(row))).tolist())
        adjust.accept(token)
    # the prompt's tokens are no part of it
    assert forbidden == [[5], [5], [5], [3, 5]]


def test_logits_processors() -> None:
    seen: list[Any] = []

    def two(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        return logits + 1

    def three(prompt: list[int], tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((prompt, tokens))
        logits[3] = 100.0  # in place is fine, too
        return logits

    params = SamplingParams(logits_processors=[two, three])
    adjust = Adjuster(params, [1, 2], (), VOCAB)
    adjust.accept(7)
    row = np.zeros(VOCAB, np.float32)
    assert adjust(row)[2:5].tolist() == [1.0, 100.0, 1.0]
    assert seen == [[7], ([1, 2], [7])]
    assert not row.any()


@pytest.mark.parametrize(
    "process", [lambda tokens, logits: logits[:3], lambda tokens, logits: 1 / 0, lambda tokens, logits: "text"]
)
def test_a_processor_that_fails_ends_its_request_only(process: Any) -> None:
    engine = Engine(MockDecoder(MockCache(50)))
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    good = engine.add_request("good", [1, 2, 3], greedy)
    bad = engine.add_request("bad", [1, 2, 3], SamplingParams(logits_processors=[process]))
    while engine.has_unfinished:
        engine.step()
    assert good.finish_reason == "length"
    assert isinstance(bad.error, InvalidState)
    assert "logits_processors" in str(bad.error)
    engine._cache.check_empty()  # type: ignore[attr-defined]


def test_nothing_is_allowed() -> None:
    params = SamplingParams(allowed_token_ids=[0], min_tokens=1)
    row = np.zeros((1, VOCAB), np.float32)
    (result,) = sample(row, [params], [make_generator(0)], [Adjuster(params, [1], {0}, VOCAB)])
    assert isinstance(result, InvalidState)
    assert "that the request's parameters allow" in str(result)


def test_logprobs_stay_the_models_own() -> None:
    params = SamplingParams(allowed_token_ids=[3], logprobs=1)
    row = np.log(np.array([0.7, 0.1, 0.1, 0.1], np.float32))
    (result,) = sample(row[None], [params], [make_generator(0)], [Adjuster(params, [1], (), 4)])
    assert isinstance(result, Sampled)
    assert result.token_id == 3
    assert result.logprobs is not None
    assert result.logprobs[3].logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert list(result.logprobs) == [3, 0]


def test_all_logprobs() -> None:
    row = np.arange(VOCAB, dtype=np.float32)[None]
    (result,) = sample(row, [SamplingParams(logprobs=-1)], [make_generator(0)])
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert sorted(p.rank for p in result.logprobs.values()) == list(range(1, VOCAB + 1))


def reference_typical(row: np.ndarray, p: float) -> set[int]:
    """transformers' TypicalLogitsWarper, in plain Python."""
    weights = [math.exp(x) for x in row]
    logs = [math.log(w / sum(weights)) for w in weights]
    entropy = -sum(math.exp(x) * x for x in logs)
    order = sorted(range(len(logs)), key=lambda i: abs(-logs[i] - entropy))
    kept, mass = set(), 0.0
    for i in order:
        kept.add(i)
        mass += math.exp(logs[i])
        if mass >= p:
            break
    return kept


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.95])
def test_typical_p(p: float) -> None:
    row = (3 * np.random.default_rng(3).standard_normal(40)).astype(np.float32)
    params = SamplingParams(typical_p=p)
    generator = make_generator(0)
    found = set()
    for _ in range(400):
        (result,) = sample(row[None], [params], [generator])
        assert isinstance(result, Sampled)
        found.add(result.token_id)
    allowed = reference_typical(row.astype(np.float64), p)
    assert found <= allowed
    assert len(found) >= min(len(allowed), 3)
    masked = np.where(np.arange(40) % 2 == 0, row, -np.inf).astype(np.float32)
    (result,) = sample(masked[None], [params], [generator])
    assert isinstance(result, Sampled)
    assert result.token_id % 2 == 0


def test_min_tokens_in_the_engine() -> None:
    engine = Engine(MockDecoder(MockCache(50), script=dict.fromkeys(range(20), 31)), eos_token_ids=[31])
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=8)
    seq = engine.add_request("a", [1, 2], params)
    while engine.has_unfinished:
        engine.step()
    answer = seq.token_ids[2:]
    assert 31 not in answer[:3]
    assert answer[3:] == [31]
    assert seq.finish_reason == "stop"


def test_prompt_logprobs() -> None:
    """Of every token of the prompt, whatever the chunks, and they are what ``logits`` gives."""
    prompt = [i * i % 31 for i in range(15)]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=2, ignore_eos=True)
    results = []
    for budget, blocks in ((100, 50), (4, 50), (4, 5)):
        engine = Engine(MockDecoder(MockCache(blocks)), max_num_batched_tokens=budget)
        engine.add_request("warm", prompt, SamplingParams(temperature=0, max_tokens=1))
        while engine.has_unfinished:
            engine.step()
        seq = engine.add_request("a", prompt, params)
        other = engine.add_request("b", [3, 1, 4], params)
        while engine.has_unfinished:
            engine.step()
        assert seq.prompt_logprobs is not None
        assert other.prompt_logprobs is not None
        assert seq.num_cached_tokens == 0
        assert (len(seq.prompt_logprobs), len(other.prompt_logprobs)) == (15, 3)
        results.append((seq.prompt_logprobs, other.prompt_logprobs, seq.token_ids))
    assert results[0] == results[1] == results[2]
    logits = Engine(MockDecoder(MockCache(50))).logits(prompt).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    first, *rest = results[0][0]
    assert first is None
    for position, entry in enumerate(rest):
        assert entry is not None
        token = prompt[position + 1]
        assert next(iter(entry)) == token
        assert entry[token].logprob == pytest.approx(logs[position, token], abs=1e-6)
        assert len(entry) in (2, 3)
