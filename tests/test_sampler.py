"""The sampler against a plain reference, and the laws of a row's independence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.engine.sampler import Sampled, _nucleus, make_generator, sample
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidState


def draw(row: list[float] | np.ndarray, seed: int = 0, **values: Any) -> int:
    params = SamplingParams(**values)
    result = sample(np.array([row], np.float32), [params], [make_generator(seed)])[0]
    assert isinstance(result, Sampled)
    return result.token_id


def support(row: list[float], count: int = 300, **values: Any) -> dict[int, int]:
    """How often each token comes in ``count`` draws of one generator."""
    generator = make_generator(1)
    logits = np.array([row], np.float32)
    params = SamplingParams(**values)
    found: dict[int, int] = {}
    for _ in range(count):
        result = sample(logits, [params], [generator])[0]
        assert isinstance(result, Sampled)
        found[result.token_id] = found.get(result.token_id, 0) + 1
    return found


def reference_support(row: np.ndarray, params: SamplingParams) -> set[int]:
    """The candidates, in plain Python: temperature, min_p, top_k, top_p."""
    weights = [math.exp((float(x) - float(row.max())) / params.temperature) for x in row]
    ids = [i for i in range(len(row)) if weights[i] >= params.min_p]
    ids.sort(key=lambda i: (-float(row[i]), i))
    if 0 < params.top_k < len(ids):
        ids = ids[: params.top_k]
    total = math.fsum(weights[i] for i in ids)
    kept, mass = [], 0.0
    for i in ids:
        if mass >= params.top_p * total and kept:
            break
        kept.append(i)
        mass += weights[i]
    return {i for i in kept if weights[i] > 0}


def test_trap_25() -> None:
    row = [2.875, 2.9551, 11.0625]
    for temperature in (1e-5, 1e-300, 5e-324, 0.0):
        assert draw(row, temperature=temperature) == 2
    for seed in range(20):
        assert draw([1.0, 3.0, 2.0], seed, top_k=1) == 1
        assert draw([1.0, 3.0, 2.0], seed, min_p=1.0) == 1
    off = [draw([0.0] * 50, seed) for seed in range(30)]
    for top_k in (0, -1, 50, 51, 10**9):
        assert [draw([0.0] * 50, seed, top_k=top_k) for seed in range(30)] == off


def test_ties_go_to_the_lowest_id() -> None:
    assert draw([1.0, 5.0, 5.0, 5.0], temperature=0) == 1
    assert draw([5.0, 5.0], top_k=1) == 0
    assert draw([5.0, 5.0], min_p=1.0) == 0
    assert set(support([1.0, 5.0, 5.0, 5.0], top_k=2)) == {1, 2}


def test_support() -> None:
    row = [math.log(p) for p in (0.1, 0.4, 0.05, 0.3, 0.15)]
    assert set(support(row)) == {0, 1, 2, 3, 4}
    assert set(support(row, top_k=2)) == {1, 3}
    assert set(support(row, top_p=0.7 - 1e-6)) == {1, 3}
    assert set(support(row, top_p=0.75)) == {1, 3, 4}
    assert set(support(row, top_p=1e-9)) == {1}
    assert set(support(row, min_p=0.37)) == {1, 3, 4}
    # top_p counts within what top_k has left: 0.4 / 0.7 = 0.57
    assert set(support(row, top_k=2, top_p=0.55)) == {1}
    # temperature comes before min_p: at 0.5 the weights are squared
    assert set(support(row, temperature=0.5, min_p=0.37)) == {1, 3}


def test_top_p_over_many_tokens() -> None:
    """Few, some and many tokens in the nucleus give what a full sort gives."""
    random = np.random.default_rng(0)
    for scale in (0.0, 0.5, 1.0, 3.0):
        row = (scale * random.standard_normal(10_000)).round(1).astype(np.float32)
        for p in (0.01, 0.3, 0.9, 0.999):
            weights = np.exp(row.astype(np.float64) - row.max())
            order = np.lexsort((np.arange(10_000), -row))
            sums = np.cumsum(weights[order])
            order = order[: np.searchsorted(sums, p * weights.sum()) + 1]
            assert (_nucleus(row, weights, p) == order).all()
            assert draw(row, 5, top_p=p) in order


def test_frequencies() -> None:
    counts = support([math.log(p) for p in (0.5, 0.3, 0.2)], count=3000)
    for token, p in enumerate((0.5, 0.3, 0.2)):
        assert abs(counts[token] / 3000 - p) < 0.04


def test_masked_tokens_never_come() -> None:
    assert set(support([-math.inf, 0.0, -math.inf, 0.0])) == {1, 3}
    assert set(support([-math.inf, 0.0, -math.inf, 0.0], top_k=3, top_p=0.999)) == {1, 3}
    assert draw([-math.inf, -math.inf, -3.0], temperature=0) == 2


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    st.sampled_from([0.1, 1.0, 3.0]),
    st.integers(0, 8),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.integers(0, 5),
)
def test_draws_stay_in_the_reference_support(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    row = np.array(values, np.float32) / 4
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = reference_support(row, params)
    generator = make_generator(seed)
    for _ in range(5):
        result = sample(row[None], [params], [generator])[0]
        assert isinstance(result, Sampled)
        assert result.token_id == int(row.argmax()) if params.greedy else result.token_id in allowed


def test_a_row_depends_on_itself_only() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((7, 200)).astype(np.float32)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1, temperature=2.0),
        SamplingParams(top_k=1),
        SamplingParams(top_k=50, top_p=0.9, logprobs=3),
    ]
    alone = [sample(logits[i : i + 1], [params[i]], [make_generator(i)])[0] for i in range(7)]
    before = logits.copy()
    assert sample(logits, params, [make_generator(i) for i in range(7)]) == alone
    order = [3, 1, 6, 0, 2, 5, 4]
    mixed = sample(logits[order], [params[i] for i in order], [make_generator(i) for i in order])
    assert mixed == [alone[i] for i in order]
    assert (logits == before).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_concern_their_row_only(bad: float | None, temperature: float) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[:, 4] = 50.0
    logits[1] = -math.inf
    if bad is not None:
        logits[1, 6] = bad
    params = [SamplingParams(temperature=temperature)] * 3
    first, second, third = sample(logits, params, [make_generator(i) for i in range(3)])
    assert isinstance(second, InvalidState)
    assert "finite" in str(second)
    assert [r.token_id for r in (first, third) if isinstance(r, Sampled)] == [4, 4]


def test_logprobs_are_of_the_raw_distribution() -> None:
    probabilities = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    row = np.log(probabilities).astype(np.float32) + np.float32(7)
    params = SamplingParams(temperature=0.01, top_k=2, logprobs=3)
    result = sample(row[None], [params], [make_generator(0)])[0]
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    assert list(result.logprobs) == [1, 3, 4]
    for place, (token, entry) in enumerate(result.logprobs.items(), start=1):
        assert entry.logprob == pytest.approx(math.log(probabilities[token]), abs=1e-6)
        assert entry.rank == place


def test_the_sampled_token_is_always_in_the_logprobs() -> None:
    row = np.array([0.0, 0.0, -5.0, 1.0], np.float32)
    generator = make_generator(3)
    for count in (0, 1, 4):
        params = SamplingParams(logprobs=count, temperature=50.0)
        ranks = {}
        for _ in range(60):
            result = sample(row[None], [params], [generator])[0]
            assert isinstance(result, Sampled)
            assert result.logprobs is not None
            assert next(iter(result.logprobs)) == result.token_id
            assert len(result.logprobs) in {max(count, 1), count + 1}
            ranks[result.token_id] = result.logprobs[result.token_id].rank
        assert ranks == {3: 1, 0: 2, 1: 3, 2: 4}


def test_generators_are_separate_streams() -> None:
    assert make_generator(5, 1).random() == make_generator(5, 1).random()
    assert len({make_generator(5).random(), make_generator(5, 0).random(), make_generator(5, 1).random()}) == 3
    assert make_generator(None).random() != make_generator(None).random()
