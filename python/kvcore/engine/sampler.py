"""From logits to tokens.

    for each row:
        temperature 0, top_k 1 or min_p 1:   the most probable token, the lowest id of several
        else  w  = exp((logits - max) / temperature)
              min_p: keep w >= min_p * max(w);  top_k: keep the k largest;  top_p: keep the largest until they sum to p
              take the token in which  uniform() * sum(w)  falls

The order (temperature, min_p, top_k, top_p, each over what the one before left) is vLLM's. Where probabilities are
equal a cut keeps the lower ids, so that exactly k tokens pass top_k. A row's result depends on nothing but its own
logits, parameters and generator; all sums are float64, and one number is drawn from the generator per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.engine.interfaces import FloatArray, IntArray
from kvcore.engine.sampling_params import SamplingParams
from kvcore.errors import InvalidState


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's result: a token id, and the log probabilities if the request asked for them (the sampled one first)."""

    token_id: int
    logprobs: dict[int, Logprob] | None = None


def make_generator(seed: int | None, *key: int) -> np.random.Generator:
    """A generator of its own for one request.

    Args:
        seed: where the randomness comes from; None takes the system's entropy.
        key: separates the streams that come from one seed, such as requests or parallel samples.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def sample(
    logits: FloatArray, params: Iterable[SamplingParams], generators: Iterable[np.random.Generator | None]
) -> list[Sampled | InvalidState]:
    """Pick one token per row.

    Args:
        logits: float32 [rows, vocab]; left as they are.
        params: one per row.
        generators: one per row; None will do where nothing is drawn (``params.greedy``).

    Returns:
        One result per row. A row that has NaN or +inf in it, or nothing but -inf, gets an ``InvalidState`` as its
        result, and the other rows get their tokens.
    """
    best = logits.argmax(axis=1)
    # argmax finds NaN before anything else, so the value it points at tells whether the row can be used at all
    peaks = logits[np.arange(len(best)), best]
    results: list[Sampled | InvalidState] = []
    for row, token_id, peak, param, generator in zip(logits, best, peaks, params, generators, strict=True):
        if not np.isfinite(peak):
            results.append(InvalidState(f"logits: expected finite numbers, got a row whose largest is {peak}"))
            continue
        token = int(token_id) if param.greedy or generator is None else _draw(row, peak, param, generator)
        results.append(Sampled(token, None if param.logprobs is None else _logprobs(row, token, param.logprobs)))
    return results


def _draw(row: FloatArray, peak: np.float32, params: SamplingParams, generator: np.random.Generator) -> int:
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, so a weight of 0, is right
        weights = np.exp((row.astype(np.float64) - np.float64(peak)) / params.temperature)
    ids: IntArray | None = None  # None: all, in order
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= params.min_p)
    if 0 < params.top_k < (len(row) if ids is None else len(ids)):
        ids = _largest(row, ids, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(row, weights, ids, params.top_p)
    sums = np.cumsum(weights if ids is None else weights[ids])
    index = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
    # the product may round up to the whole sum, which the first token that reaches it then owns
    index = min(index, int(np.searchsorted(sums, sums[-1], side="left")))
    return index if ids is None else int(ids[index])


def _largest(row: FloatArray, ids: IntArray | None, k: int) -> IntArray:
    """The ids of the k largest of ``row[ids]``, in ascending order; the lower id first among equals."""
    values = row if ids is None else row[ids]
    if k < len(values):
        threshold = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > threshold)
        equal = np.flatnonzero(values == threshold)[: k - len(above)]
        kept: IntArray = np.sort(np.concatenate([above, equal]))
    else:
        kept = np.arange(len(values))
    return kept if ids is None else ids[kept]


def _nucleus(row: FloatArray, weights: npt.NDArray[np.float64], ids: IntArray | None, p: float) -> IntArray:
    """The fewest of ``ids`` in descending order whose weights reach the fraction p of the sum, at least one."""
    if ids is None:
        ids = np.arange(len(row))
    kept = weights[ids]
    total = kept.sum()
    # All tokens below (1 - p) / n of the sum have less than 1 - p together, so the others reach p without them. This
    # leaves few to sort. (Half of it, so that rounding does not matter.)
    candidates = ids[kept >= 0.5 * (1.0 - p) / len(ids) * total]
    candidates = candidates[np.lexsort((candidates, -row[candidates]))]
    sums = np.cumsum(weights[candidates])
    count = int(np.searchsorted(sums, p * total, side="left")) + 1
    nucleus: IntArray = candidates[:count]
    return nucleus


def _logprobs(row: FloatArray, token: int, count: int) -> dict[int, Logprob]:
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    rank = 1 + int(np.count_nonzero(row > row[token])) + int(np.count_nonzero(row[:token] == row[token]))
    result = {token: Logprob(float(values[token]), rank)}
    if count:
        top = _largest(row, None, count)
        for place, i in enumerate(top[np.lexsort((top, -row[top]))].tolist(), start=1):
            result.setdefault(i, Logprob(float(values[i]), place))
    return result
