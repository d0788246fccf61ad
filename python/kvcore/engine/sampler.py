"""From logits to tokens.

    for each row:
        temperature 0, top_k 1 or min_p 1:   the most probable token, the lowest id of several
        else  w  = exp((logits - max) / temperature)
              min_p: keep w >= min_p * max(w);  top_k: keep the k largest;  top_p: keep the largest until they sum to p
              typical_p: keep those whose surprise is closest to the entropy until they sum to p
              take the token in which  uniform() * sum(w)  falls

The order (temperature, min_p, top_k, top_p, each over what the one before left) is vLLM's; typical_p is transformers'.
Where probabilities are equal a cut keeps the lower ids, so that exactly k tokens pass top_k. A row's result depends on
nothing but its own logits, parameters and generator; all sums are float64, and one number is drawn from the generator
per token. What a request changes in its logits before (``logits.py``) is given as a function of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.engine.interfaces import FloatArray, IntArray
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidState, KvcoreError


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability, before temperature and cuts.
        rank: 1 for the most probable token of the vocabulary, 2 for the next, ...; the lower id first among equals.
        decoded_token: the token as text, or None where there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # frozen ones take four times as long to make
class Sampled:
    """One row's result: a token id, and the log probabilities if the request asked for them (the sampled one first).

    ``logprob`` is that of the token alone, where answers are to be compared.
    """

    token_id: int
    logprobs: dict[int, Logprob] | None = None
    logprob: float = 0.0


def make_generator(seed: int | None, *key: int) -> np.random.Generator:
    """A generator of its own for one request.

    Args:
        seed: where the randomness comes from; None takes the system's entropy.
        key: separates the streams that come from one seed, such as requests or parallel samples.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


Adjust = Callable[[FloatArray], FloatArray]
"""Makes of a row of logits those to sample from."""


def sample(
    logits: FloatArray,
    params: Iterable[SamplingParams],
    generators: Iterable[np.random.Generator | None],
    adjusters: Iterable[Adjust | None] | None = None,
) -> list[Sampled | KvcoreError]:
    """Pick one token per row.

    Args:
        logits: float32 [rows, vocab]; left as they are.
        params: one per row.
        generators: one per row; None will do where nothing is drawn (``params.greedy``).
        adjusters: one per row, None for rows that are sampled as they are; they return another array.

    Returns:
        One result per row. A row that cannot be sampled gets the reason instead, and the other rows get their tokens:
        it has NaN or +inf in it, or nothing but -inf, or its adjuster raised.
    """
    best = logits.argmax(axis=1)
    # argmax finds NaN before anything else, so the value it points at tells whether the row can be used at all
    peaks = logits[np.arange(len(best)), best]
    each = [None] * len(best) if adjusters is None else adjusters
    results: list[Sampled | KvcoreError] = []
    for row, token_id, peak, param, generator, adjust in zip(
        logits, best.tolist(), peaks.tolist(), params, generators, each, strict=True
    ):
        if generator is None and adjust is None and param.logprobs is param.best_of is None and math.isfinite(peak):
            results.append(Sampled(token_id))
            continue
        try:
            results.append(_sample_row(row, token_id, peak, param, generator, adjust))
        except KvcoreError as error:
            results.append(error)
    return results


def _sample_row(
    row: FloatArray,
    token: int,
    peak: float,
    params: SamplingParams,
    generator: np.random.Generator | None,
    adjust: Adjust | None,
) -> Sampled:
    if not math.isfinite(peak):
        raise InvalidState(f"logits: expected finite numbers, got a row whose largest is {peak}")
    values = row
    if adjust is not None:
        values = adjust(row)
        token = int(values.argmax())
        peak = float(values[token])
        if not math.isfinite(peak):
            raise InvalidState(
                f"logits: expected a token that the request's parameters allow, got a row whose largest is {peak}"
            )
    if not params.greedy and generator is not None:
        token = _draw(values, peak, params, generator)
    if params.logprobs is not None:
        found = logprobs(row, token, params.logprobs)
        return Sampled(token, found, found[token].logprob)
    return Sampled(token, None, token_logprob(row, token) if params.best_of is not None else 0.0)


def _draw(row: FloatArray, peak: float, params: SamplingParams, generator: np.random.Generator) -> int:
    # top_k goes before min_p here, so that few weights are computed. Both cut the same order, so the rest is the same.
    ids: IntArray | None = None  # None: all
    if 0 < params.top_k < len(row):
        ids = largest(row, params.top_k)
    values = row if ids is None else row[ids]
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, so a weight of 0, is right
        weights = np.exp((values.astype(np.float64) - peak) / params.temperature)
    kept: IntArray
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids = kept if ids is None else ids[kept]
        values, weights = values[kept], weights[kept]
    if params.top_p < 1.0:
        kept = _nucleus(values, weights, params.top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if params.typical_p < 1.0:
        kept = _typical(weights, params.typical_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
    # the product may round up to the whole sum, which the first token that reaches it then owns
    index = min(index, int(np.searchsorted(sums, sums[-1], side="left")))
    return index if ids is None else int(ids[index])


def largest(values: npt.NDArray[Any], k: int) -> IntArray:
    """Where the k largest values are, in ascending order; the first among equals."""
    if k >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > threshold)
    equal = np.flatnonzero(values == threshold)[: k - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(values: npt.NDArray[Any], weights: npt.NDArray[np.float64], p: float) -> IntArray:
    """Where the fewest largest values are whose weights reach the fraction p of the sum, at least one; descending."""
    wanted = p * weights.sum()
    # Few tokens are enough as a rule, so the rest is sorted only if they are not. The order, and with it every sum, is
    # that of the whole sorted row.
    for count in (256, 4096, len(values)):
        order = largest(values, count)
        order = order[np.argsort(-values[order], kind="stable")]
        sums = np.cumsum(weights[order])
        if sums[-1] >= wanted:
            break
    nucleus: IntArray = order[: int(np.searchsorted(sums, wanted, side="left")) + 1]
    return nucleus


def _typical(weights: npt.NDArray[np.float64], p: float) -> IntArray:
    """Where the fewest weights are that reach the fraction p of the sum, those of the most expected surprise first."""
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        entropy = np.nansum(probabilities * surprise)  # 0 * inf counts as 0
    return _nucleus(-np.abs(surprise - entropy), weights, p)


def token_logprob(row: FloatArray, token: int) -> float:
    """The log probability of one token; row float32 [vocab]."""
    values = row.astype(np.float64)
    peak = values.max()
    return float(values[token] - peak - np.log(np.exp(values - peak).sum()))


def logprobs(row: FloatArray, token: int, count: int) -> dict[int, Logprob]:
    """The log probabilities of a token and of the ``count`` most probable ones (-1: all); row float32 [vocab]."""
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    rank = 1 + int(np.count_nonzero(row > row[token])) + int(np.count_nonzero(row[:token] == row[token]))
    result = {token: Logprob(float(values[token]), rank)}
    if count:
        top = largest(row, len(row) if count < 0 else count)
        for place, i in enumerate(top[np.argsort(-row[top], kind="stable")].tolist(), start=1):
            result.setdefault(i, Logprob(float(values[i]), place))
    return result
