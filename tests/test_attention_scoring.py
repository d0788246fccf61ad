"""Soft caps, sinks, position biases, log-sum-exp and attention weights, against the formula in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import KVCache

HEADS, KV_HEADS, DIM = 4, 2, 24


def formula(
    q: Any, k: Any, v: Any, start: int, *, scale: float, softcap: float | None = None, sinks: Any = None,
    bias: Any = None, window: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Output, log-sum-exp and weights; ``bias`` is a function of (head, distances token - position)."""
    tokens = len(k)
    out = np.zeros((len(q), HEADS, v.shape[-1]))
    lse = np.zeros((len(q), HEADS))
    weights = np.zeros((len(q), HEADS, tokens))
    for row in range(len(q)):
        for head in range(HEADS):
            position = start + row
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, position + 1)
            kv = head // (HEADS // KV_HEADS)
            s = k[seen, kv].astype(float) @ q[row, head].astype(float) * scale
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if bias is not None:
                s = s + bias(head, seen - position)
            e = np.exp(s)
            total = e.sum() + (0.0 if sinks is None else np.exp(float(sinks[head])))
            weights[row, head, seen] = e / total
            out[row, head] = (e / total) @ v[seen, kv].astype(float)
            lse[row, head] = np.log(total)
    return out, lse, weights


@pytest.fixture
def world() -> Any:
    rng = np.random.default_rng(7)
    cache = KVCache(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, num_blocks=64, dtype="float32")
    tokens = 300
    seqs = [cache.add(range(tokens)), cache.add([5, 6, 7])]
    k, v = (rng.standard_normal((tokens + 3, KV_HEADS, DIM), np.float32) for _ in "kv")
    first = cache.plan([(seqs[0], 280)])
    cache.write(0, first, k[:280], v[:280])
    cache.commit(first)
    batch = cache.plan([(seqs[1], 3), (seqs[0], 20)])
    order = [300, 301, 302, *range(280, 300)]
    cache.write(0, batch, k[order], v[order])
    q = rng.standard_normal((23, HEADS, DIM), np.float32)
    return cache, batch, q, k, v, rng


def styles(rng: np.random.Generator) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    slopes = rng.uniform(0.01, 0.1, HEADS).astype(np.float32)
    table = rng.standard_normal((HEADS, 33)).astype(np.float32)
    sinks = rng.standard_normal(HEADS).astype(np.float32)
    alibi = {"bias": lambda head, d: float(slopes[head]) * d}
    relative = {"bias": lambda head, d: table[head][np.clip(d + 32, 0, 32)].astype(float)}
    return {
        "plain": ({}, {}),
        "softcap": ({"softcap": 2.5}, {"softcap": 2.5}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
        "alibi": ({"alibi_slopes": slopes}, alibi),
        "relative": ({"position_bias": table}, relative),
        "all": ({"softcap": 3.0, "sinks": sinks, "alibi_slopes": slopes, "window": 40},
                {"softcap": 3.0, "sinks": sinks, "window": 40, **alibi}),
    }  # fmt: skip


@pytest.mark.parametrize("style", ["plain", "softcap", "sinks", "alibi", "relative", "all"])
def test_outputs_and_weights_follow_the_formula(world: Any, style: str) -> None:
    cache, batch, q, k, v, rng = world
    given, meant = styles(rng)[style]
    out, lse = cache.attend(0, batch, q, 0.3, **given, return_lse=True)
    assert np.array_equal(out, cache.attend(0, batch, q, 0.3, **given))
    parts = [(slice(0, 3), slice(300, 303), 0), (slice(3, 23), slice(0, 300), 280)]
    for index, (rows, tokens, start) in enumerate(parts):
        expected = formula(q[rows], k[tokens], v[tokens], start, scale=0.3, **meant)
        np.testing.assert_allclose(out[rows], expected[0], atol=1e-5)
        np.testing.assert_allclose(lse[rows], expected[1], atol=1e-5)
        weights = cache.attention_weights(0, batch, q, index, scale=0.3, **given)
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, expected[2], atol=1e-5)
        # A choice is a part of all.
        some = cache.attention_weights(0, batch, q, index, rows=[2, 0, 2], heads=np.array([3, 1]), scale=0.3, **given)
        assert np.array_equal(some, weights[[2, 0, 2]][:, [3, 1]])
    if style != "sinks" and style != "all":
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_parts_of_a_context_merge_by_their_log_sums(world: Any) -> None:
    """What return_lse is for: attention over two parts, weighed by their sums, is attention over both."""
    cache, batch, q, k, v, _ = world
    out, lse = cache.attend(0, batch, q, 0.3, return_lse=True)
    near, near_lse = cache.attend(0, batch, q, 0.3, window=7, return_lse=True)
    share = np.exp(near_lse - lse)
    far = (out - near * share[..., None]) / np.maximum(1 - share, 1e-9)[..., None]
    for head in range(HEADS):
        s = k[:293, head // 2].astype(float) @ q[22, head].astype(float) * 0.3
        e = np.exp(s - s.max())
        np.testing.assert_allclose(far[22, head], (e / e.sum()) @ v[:293, head // 2], atol=1e-4)


def test_a_head_without_a_sink(world: Any) -> None:
    cache, batch, q, *_ = world
    none = np.full(HEADS, -np.inf, np.float32)
    np.testing.assert_allclose(cache.attend(0, batch, q, sinks=none), cache.attend(0, batch, q), rtol=1e-6, atol=1e-7)
    large = cache.attend(0, batch, q, sinks=np.full(HEADS, 1e30, np.float32))
    assert np.array_equal(large, np.zeros_like(large))


def test_what_is_not_there_cannot_be_shown(world: Any) -> None:
    cache, batch, q, *_ = world
    for wrong, match in [
        ({"index": 2}, "index: expected a sequence of the batch, 0 to 1, got 2"),
        ({"index": -1}, "index"),
        ({"rows": [3]}, "rows: expected indices below 3, got 3"),
        ({"heads": [0, 4]}, "heads: expected indices below 4, got 4"),
        ({"rows": [-1]}, "rows"),
        ({"softcap": -1.0}, "softcap"),
    ]:
        with pytest.raises(ValueError, match=match):
            cache.attention_weights(0, batch, q, **wrong)
    with pytest.raises(TypeError):
        cache.attention_weights(0, batch, q, rows=3)
    with pytest.raises(TypeError, match="heads: expected an integer"):
        cache.attention_weights(0, batch, q, heads=[True])
    assert cache.attention_weights(0, batch, q, rows=[], heads=[]).shape == (0, 0, 3)


def test_the_articles_example_as_a_map() -> None:
    """Scores 4, 1, 0 give weights 0.94, 0.05, 0.02 over V = [1,0,1,1], [0,1,1,0], [0,2,0,0]."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=1, dtype="float32")
    batch = cache.plan([(cache.add([1, 2, 3]), 3)])
    k = np.array([[4, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], np.float32)[:, None]
    v = np.array([[1, 0, 1, 1], [0, 1, 1, 0], [0, 2, 0, 0]], np.float32)[:, None]
    cache.write(0, batch, k, v)
    q = np.zeros((3, 1, 4), np.float32)
    q[2, 0, 0] = 1
    weights = cache.attention_weights(0, batch, q, rows=[2], scale=1.0)
    np.testing.assert_allclose(weights[0, 0], [0.94, 0.05, 0.02], atol=0.005)
    np.testing.assert_allclose(cache.attend(0, batch, q, 1.0)[2, 0], [0.94, 0.08, 0.98, 0.94], atol=0.005)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_scores_of_any_size_give_the_values_of_the_largest(dtype: str, tokens: int) -> None:
    """The largest score has weight 1 exactly, however large it is: no rounding of it may take part."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=20, dtype=dtype, num_threads=1)
    seq = cache.add(list(range(tokens)), use_prefix=False)
    batch = cache.plan([(seq, tokens)])
    k, v = np.full((2, tokens, 1, 2), [[[[0.5]]], [[[-2.0]]]], np.float32)
    k[-1], v[-1] = 1, 1.5
    cache.write(0, batch, k, v)
    q = np.full((tokens, 1, 2), [1.3, 0.37], np.float32)
    for scale in np.geomspace(2e3, 1e35, 80).astype(np.float32):
        out = cache.attend(0, batch, q, float(scale))
        np.testing.assert_allclose(out[-1], 1.5, rtol=5e-3, err_msg=f"scale {scale}")
