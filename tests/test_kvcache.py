"""KVCache: what is stored, what attention computes from it, and the life of handles and batches."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore import InvalidArgument, InvalidHandle, InvalidState, KVCache, OutOfBlocks, StaleBatch, Threads
from kvcore._kvcore import reference_attention
from kvtools import (
    DTYPES,
    Sample,
    advance,
    assert_bitwise,
    assert_no_leak,
    compute,
    forced_simd,
    make_cache,
    rounded,
    tolerance,
)

# "Understanding the KV cache", the worked example: scores 4, 1, 0.
ARTICLE_K = [[4, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
ARTICLE_V = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 2, 0, 0]]
ARTICLE_Q = [1, 0, 0, 0]
ONE_HOT = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]


def mix_and_weights(k: list, v: list, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """The last token's attention over three tokens: over ``v`` in KV head 0, over one-hot values in KV head 1."""
    cache = make_cache(num_layers=1, num_kv_heads=2, head_dim=4, dtype=dtype)
    batch = cache.plan([(cache.add([1, 2, 3]), 3)])
    k = np.repeat(np.array(k, np.float32)[:, None], 2, axis=1)
    v = np.stack([np.array(v, np.float32), np.array(ONE_HOT, np.float32)], axis=1)
    q = np.broadcast_to(np.array(ARTICLE_Q, np.float32), (3, 2, 4))
    cache.write(0, batch, k, v)
    out = cache.attend(0, batch, q, scale=1.0)
    return out[-1, 0], out[-1, 1, :3]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.005), ("float16", 0.005), ("bfloat16", 0.009),
                                              ("fp8_e4m3", 0.009)])  # fmt: skip
def test_the_articles_worked_example(dtype: str, bound: float, simd_level: str) -> None:
    mix, weights = mix_and_weights(ARTICLE_K, ARTICLE_V, dtype)
    np.testing.assert_allclose(weights, [0.94, 0.05, 0.02], atol=bound)
    np.testing.assert_allclose(mix, [0.94, 0.08, 0.98, 0.94], atol=bound)


def test_one_tokens_k_changes_the_weights_and_its_v_only_the_mix() -> None:
    mix, weights = mix_and_weights(ARTICLE_K, ARTICLE_V)
    for token in range(3):
        k = [[*row] for row in ARTICLE_K]
        k[token][0] += 1
        _, other = mix_and_weights(k, ARTICLE_V)
        assert (other != weights).all()
        assert other[token] > weights[token]

        v = [[*row] for row in ARTICLE_V]
        v[token] = [5, -3, 2, 7]
        other_mix, other = mix_and_weights(ARTICLE_K, v)
        assert_bitwise(other, weights)
        assert (other_mix != mix).any()


def test_the_first_token_sees_only_itself() -> None:
    cache = make_cache(num_layers=1, head_dim=4)
    sample = Sample.random(cache, 5)
    _, out = compute(cache, sample)
    np.testing.assert_allclose(out[0, 0], np.repeat(sample.v[0, 0], 2, axis=0), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", 2**17), ("f16", 2**17), ("f32", 2**18), ("fp8", 2**16)])
def test_llama_3_8b_takes_128_kib_a_token_in_16_bits(dtype: str, expected: int) -> None:
    cache = KVCache(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=2, dtype=dtype)
    assert cache.bytes_per_token == expected
    assert cache.nbytes == 2 * 16 * expected


def test_sizes_can_be_read() -> None:
    threads = Threads(2)
    cache = KVCache(num_layers=3, num_kv_heads=4, head_dim=24, num_blocks=5, block_size=48, dtype="fp8",
                    k_scale=0.5, v_scale=2, threads=threads)  # fmt: skip
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim) == (3, 4, 24)
    assert (cache.num_blocks, cache.block_size, cache.num_free_blocks) == (5, 48, 5)
    assert (cache.dtype, cache.k_scale, cache.v_scale) == ("fp8_e4m3", 0.5, 2.0)
    assert cache.threads.num_threads == 2
    assert "fp8_e4m3" in repr(cache)
    stats = cache.stats()
    assert stats["total"] == stats["free"] == 5
    assert stats["utilisation"] == 1.0
    assert stats["bytes_total"] == cache.nbytes
    assert stats["groups"] == [{"kind": "full"} | {key: stats[key] for key in stats["groups"][0] if key != "kind"}]
    assert not any(stats[key] for key in stats if key not in ("total", "free", "utilisation", "bytes_total", "groups"))


@pytest.mark.parametrize(("name", "full"), [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"),
                                            ("fp8", "fp8_e4m3")])  # fmt: skip
def test_short_names_of_dtypes(name: str, full: str) -> None:
    assert make_cache(dtype=name).dtype == make_cache(dtype=full).dtype == full


# What is stored


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["bits", "near", "ties"]))
def test_stored_values_are_rounded_to_nearest_ties_to_even(dtype: str, seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, 16, 2, 8)
    if kind == "bits":  # every kind of float32: subnormals, infinities and NaN among them
        x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    elif kind == "near":
        x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 10, shape)).astype(np.float32)
    else:  # half-way between neighbours of the short formats
        x = (rng.integers(-(2**12), 2**12, shape) * 2.0 ** rng.integers(-14, 1, shape)).astype(np.float32)
    scales = {"k_scale": 0.5, "v_scale": 2.0} if dtype == "fp8_e4m3" else {}
    cache = make_cache(num_layers=1, dtype=dtype, num_blocks=2, **scales)
    seq = cache.add(range(16))
    batch = cache.plan([(seq, 16)])
    cache.write(0, batch, x[0], x[1])
    assert cache.read(0, seq)[0].shape == (0, 2, 8)  # not before the commit
    cache.commit(batch)
    for got, value, scale in zip(cache.read(0, seq), x, (cache.k_scale, cache.v_scale), strict=True):
        assert got.dtype == np.float32
        expected = rounded(value, dtype, scale)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)])


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_arrays_are_widened_exactly(dtype: str, source: type) -> None:
    rng = np.random.default_rng(5)
    k, v, q = (rng.standard_normal((20, heads, 8)).astype(source) for heads in (2, 2, 4))
    outs = []
    for arrays in ((k, v, q), tuple(x.astype(np.float32) for x in (k, v, q))):
        cache = make_cache(num_layers=1, dtype=dtype)
        seq = cache.add(range(20))
        batch = cache.plan([(seq, 20)])
        cache.write(0, batch, arrays[0], arrays[1])
        outs.append(cache.attend(0, batch, arrays[2]))
        cache.commit(batch)
        np.testing.assert_array_equal(cache.read(0, seq)[0], rounded(k, dtype))
        np.testing.assert_array_equal(cache.read(0, seq)[1], rounded(v, dtype))
    assert_bitwise(*outs)


def layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    """The same values, laid out in other ways."""
    spread = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
    spread[::2] = x
    raw = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "strided": spread[::2],
        "reversed": x[::-1].copy()[::-1],
        "transposed": x.transpose(2, 1, 0).copy().transpose(2, 1, 0),
        "unaligned": unaligned,
        "read-only": frozen,
    }


@pytest.mark.parametrize("layout", ["fortran", "strided", "reversed", "transposed", "unaligned", "read-only"])
def test_arrays_may_be_laid_out_in_any_way(layout: str) -> None:
    cache = make_cache(num_layers=1)
    sample = Sample.random(cache, 20)
    seq, expected = compute(cache, sample)
    k, v, q = (layouts(x[0])[layout] for x in (sample.k, sample.v, sample.q))
    other = cache.add(sample.tokens, use_prefix=False)
    batch = cache.plan([(other, 20)])
    cache.write(0, batch, k, v)
    assert_bitwise(cache.attend(0, batch, q), expected[0])
    cache.commit(batch)
    for a, b in zip(cache.read(0, other), cache.read(0, seq), strict=True):
        assert_bitwise(a, b)


# What attention computes


def textbook_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str, scale: float | None = None
) -> np.ndarray:
    """softmax(q K^T * scale) V in float64: q [rows, q heads, d] are the last of k, v [tokens, kv heads, d]."""
    q = rounded(q, "bfloat16" if dtype in ("bfloat16", "fp8_e4m3") else "float32").astype(np.float64)
    k, v = (np.repeat(x.astype(np.float64), q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("rhd,thd->hrt", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    hidden = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", weights, v)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_tokens=st.one_of(st.integers(1, 40), st.integers(250, 300)),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.one_of(st.integers(1, 24).map(lambda n: 2 * n), st.sampled_from([64, 128, 256])),
    block_size=st.sampled_from([16, 48]),
    factor=st.one_of(st.none(), st.floats(-2, 2)),
    level=st.sampled_from(kvcore.available_simd()),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_oracles(
    dtype: str,
    num_tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    factor: float | None,
    level: str,
    seed: int,
) -> None:
    scale = None if factor is None else factor / head_dim**0.5
    scales = {"k_scale": 0.25, "v_scale": 0.125} if dtype == "fp8_e4m3" else {}
    with forced_simd(level):
        cache = make_cache(num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
                           num_blocks=-(-num_tokens // block_size), dtype=dtype, **scales)  # fmt: skip
    cache._fill(float("nan"))
    sample = Sample.random(cache, num_tokens, seed, group)
    batch = cache.plan([(cache.add(sample.tokens), num_tokens)])
    cache.write(0, batch, sample.k[0], sample.v[0])
    out = cache.attend(0, batch, sample.q[0], scale)
    k = rounded(sample.k[0], dtype, cache.k_scale)
    v = rounded(sample.v[0], dtype, cache.v_scale)
    np.testing.assert_allclose(
        out, textbook_attention(sample.q[0], k, v, dtype, scale), atol=tolerance(dtype, v), rtol=0
    )


@given(num_tokens=st.integers(1, 40), rows=st.integers(1, 40), kv_heads=st.integers(1, 3), group=st.integers(1, 4))
def test_the_oracle_is_the_textbooks(num_tokens: int, rows: int, kv_heads: int, group: int) -> None:
    rng = np.random.default_rng(num_tokens)
    k, v = rng.standard_normal((2, num_tokens, kv_heads, 6)).astype(np.float32)
    q = rng.standard_normal((min(rows, num_tokens), kv_heads * group, 6)).astype(np.float32)
    np.testing.assert_allclose(
        reference_attention(q, k, v, 0.7), textbook_attention(q, k, v, "float32", 0.7), atol=1e-6
    )


def test_default_scale_and_zero_scale() -> None:
    cache = make_cache(num_layers=1, head_dim=16)
    sample = Sample.random(cache, 20)
    batch = cache.plan([(cache.add(sample.tokens), 20)])
    cache.write(0, batch, sample.k[0], sample.v[0])
    assert_bitwise(cache.attend(0, batch, sample.q[0]), cache.attend(0, batch, sample.q[0], 0.25))
    mean = np.cumsum(sample.v[0], axis=0) / np.arange(1, 21)[:, None, None]
    np.testing.assert_allclose(cache.attend(0, batch, sample.q[0], 0), np.repeat(mean, 2, axis=1), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_reaches_only_who_sees_it(dtype: str, simd_level: str) -> None:
    """NaN in one query, in a later token, or in another sequence of the batch."""
    cache = make_cache(num_layers=1, dtype=dtype)
    a, b = Sample.random(cache, 40, 1), Sample.random(cache, 23, 2)

    def run(a: Sample, b: Sample) -> list[np.ndarray]:
        seqs = [cache.add(s.tokens, use_prefix=False) for s in (a, b)]
        outs = advance(cache, (seqs[0], a, 40), (seqs[1], b, 23))
        for seq in seqs:
            cache.free(seq)
        return [out[0] for out in outs]

    def spoil(x: np.ndarray, at: tuple) -> np.ndarray:
        x = x.copy()
        x[at] = np.nan
        return x

    clean = run(a, b)
    spoiled = run(Sample(a.tokens, a.k, a.v, spoil(a.q, (0, 7, 1))), b)
    assert np.isnan(spoiled[0][7, 1]).all()
    others = np.ones(clean[0].shape[:2], bool)
    others[7, 1] = False
    assert_bitwise(spoiled[0][others], clean[0][others])
    assert_bitwise(spoiled[1], clean[1])
    for name in "kv":
        changed = Sample(a.tokens, a.k, a.v, a.q)
        setattr(changed, name, spoil(getattr(a, name), (0, 21)))
        spoiled = run(changed, b)
        assert_bitwise(spoiled[0][:21], clean[0][:21], name)
        assert np.isnan(spoiled[0][21:]).all()
        assert_bitwise(spoiled[1], clean[1], name)


# Handles and batches


def test_a_handle_that_was_freed_is_an_error_everywhere() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 20)
    kept, _ = compute(cache, sample)
    freed, _ = compute(cache, sample)
    cache.free(freed)
    again = cache.add(sample.tokens)  # takes the freed one's place
    calls = {
        "append": lambda s: cache.append(s, [1]),
        "plan": lambda s: cache.plan([(s, 1)]),
        "plan, second": lambda s: cache.plan([(again, 1), (s, 1)]),
        "fork": cache.fork,
        "truncate": lambda s: cache.truncate(s, 1),
        "free": cache.free,
        "read": lambda s: cache.read(0, s),
        "block_table": cache.block_table,
        "token_ids": cache.token_ids,
        "num_tokens": cache.num_tokens,
        "num_computed_tokens": cache.num_computed_tokens,
    }
    for foreign in (freed, make_cache().add([1, 2, 3])):
        for name, call in calls.items():
            with pytest.raises(InvalidHandle):
                call(foreign)
            cache.check()
            assert cache.num_tokens(kept) == 20, name
    assert cache.num_computed_tokens(again) == 19
    for seq in (kept, again):
        cache.free(seq)
    assert_no_leak(cache)


def zeros(cache: KVCache, rows: int) -> np.ndarray:
    return np.zeros((rows, cache.num_kv_heads, cache.head_dim), np.float32)


def write_all(cache: KVCache, batch: kvcore.Batch) -> None:
    for layer in range(cache.num_layers):
        cache.write(layer, batch, zeros(cache, batch.num_tokens), zeros(cache, batch.num_tokens))


def test_the_life_of_a_batch() -> None:
    cache = make_cache()
    seq = cache.add(range(10))
    batch = cache.plan([(seq, 4)])
    assert batch.num_tokens == 4
    np.testing.assert_array_equal(batch.positions, [0, 1, 2, 3])
    assert batch.positions.dtype == np.int64
    x = zeros(cache, 4)
    with pytest.raises(InvalidState, match="layer 1"):
        cache.attend(1, batch, x)
    cache.write(0, batch, x, x)
    cache.attend(0, batch, x)
    with pytest.raises(InvalidState, match="layer 1"):
        cache.commit(batch)
    assert cache.num_computed_tokens(seq) == 0
    cache.write(1, batch, x, x)
    cache.write(1, batch, x + 1, x)  # again, until the commit
    cache.append(seq, [77])  # does not outdate the batch
    cache.commit(batch)
    assert cache.num_computed_tokens(seq) == 4
    np.testing.assert_array_equal(cache.read(1, seq)[0], x + 1)
    cache.attend(1, batch, x)
    with pytest.raises(InvalidState):
        cache.commit(batch)
    with pytest.raises(InvalidState):
        cache.write(1, batch, x, x)
    cache.append(seq, [78])
    cache.attend(1, batch, x)
    later = cache.plan([(seq, 8)])
    np.testing.assert_array_equal(later.positions, range(4, 12))
    with pytest.raises(StaleBatch):
        cache.attend(1, batch, x)
    cache.check()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("how", ["plan", "fork", "truncate", "free"])
def test_a_batch_goes_stale(how: str, committed: bool) -> None:
    cache = make_cache()
    first, second = cache.add(range(10)), cache.add(range(10, 15))
    batch = cache.plan([(first, 4), (second, 5)])
    write_all(cache, batch)
    if committed:
        cache.commit(batch)
    match how:
        case "plan":
            cache.append(second, [1])
            cache.plan([(second, 1)])
        case "fork":
            cache.fork(second)
        case "truncate":
            cache.truncate(second, 5)
        case _:
            cache.free(second)
    x, q = zeros(cache, 9), np.zeros((9, 4, 8), np.float32)
    for call in (lambda: cache.write(0, batch, x, x), lambda: cache.attend(0, batch, q), lambda: cache.commit(batch)):
        with pytest.raises(StaleBatch):
            call()
    cache.check()
    assert cache.num_computed_tokens(first) == (4 if committed else 0)


def test_a_failed_plan_leaves_the_earlier_batch_usable() -> None:
    cache = make_cache(num_blocks=2)
    seq, other = cache.add(range(40)), cache.add(range(50, 60))
    batch = cache.plan([(seq, 10)])
    write_all(cache, batch)
    for bad, error in [([(seq, 33)], OutOfBlocks), ([(seq, 41)], InvalidArgument), ([(seq, 0)], InvalidArgument),
                       ([(seq, 1), (seq, 1)], InvalidArgument), ([(other, 1), (seq, 20)], OutOfBlocks),
                       ([], InvalidArgument), ([(seq, -1)], InvalidArgument)]:  # fmt: skip
        before = cache.stats(), cache.block_table(seq), cache.block_table(other)
        with pytest.raises(error):
            cache.plan(bad)
        assert before == (cache.stats(), cache.block_table(seq), cache.block_table(other))
        cache.check()
    cache.commit(batch)
    assert cache.num_computed_tokens(seq) == 10


def test_out_of_blocks_names_the_numbers() -> None:
    cache = make_cache(num_blocks=3)
    compute(cache, Sample.random(cache, 20))
    seq = cache.add(range(100))
    with pytest.raises(OutOfBlocks, match=r"7 needed.*1 available.*3"):
        cache.plan([(seq, 100)])
    assert cache.block_table(seq) == []
    advance(cache, (seq, Sample.random(cache, 100), 16))


def test_a_batch_of_another_cache() -> None:
    cache, other = make_cache(), make_cache(num_layers=1)
    batch = other.plan([(other.add(range(4)), 4)])
    cache.add(range(4))
    x = zeros(cache, 4)
    for call in (lambda: cache.write(0, batch, x, x), lambda: cache.attend(1, batch, x), lambda: cache.commit(batch)):
        with pytest.raises(InvalidHandle):
            call()


def test_two_sequences_of_one_plan_that_share_their_last_block() -> None:
    """Both planned at once: one of the two must get a copy, whichever comes first, even if they fill the pool."""
    cache = make_cache(num_blocks=2, dtype="bfloat16")
    sample = Sample.random(cache, 8)
    seq, _ = compute(cache, sample)
    child = cache.fork(seq)
    assert cache.block_table(seq) == cache.block_table(child)
    ours, theirs = Sample.random(cache, 12, 1), Sample.random(cache, 12, 2)
    for handle, other in ((child, theirs), (seq, ours)):
        cache.append(handle, other.tokens[8:])
    advance(cache, (child, theirs, 4), (seq, ours, 4))
    assert cache.block_table(seq) != cache.block_table(child)
    for handle, other in ((child, theirs), (seq, ours)):
        k, v = cache.read(1, handle)
        np.testing.assert_array_equal(k, rounded(np.concatenate([sample.k[1], other.k[1, 8:]]), "bfloat16"))
        np.testing.assert_array_equal(v, rounded(np.concatenate([sample.v[1], other.v[1, 8:]]), "bfloat16"))
    assert cache.stats()["copies"] == 1


def test_a_copy_needs_a_block_too() -> None:
    cache = make_cache(num_blocks=2)
    seq, _ = compute(cache, Sample.random(cache, 20))
    child = cache.fork(seq)
    cache.append(child, [1])
    with pytest.raises(OutOfBlocks, match="1 needed, 0 available"):
        cache.plan([(child, 1)])
    assert cache.block_table(child) == cache.block_table(seq)
    cache.check()
    cache.free(seq)  # alone now: no copy
    cache.plan([(child, 1)])


def test_a_smaller_plan_gives_back_what_a_larger_one_took() -> None:
    cache = make_cache(num_blocks=4)
    seq, other = cache.add(range(64)), cache.add(range(100, 148))
    cache.plan([(seq, 64)])
    cache.plan([(seq, 1), (other, 48)])
    assert (len(cache.block_table(seq)), len(cache.block_table(other))) == (1, 3)
    cache.check()


def test_truncate() -> None:
    cache = make_cache(num_blocks=4)
    sample = Sample.random(cache, 40)
    seq, _ = compute(cache, sample)
    cache.append(seq, [1, 2, 3])
    cache.truncate(seq, 41)
    assert (cache.num_tokens(seq), cache.num_computed_tokens(seq)) == (41, 40)
    cache.truncate(seq, 20)
    assert (cache.num_tokens(seq), cache.num_computed_tokens(seq)) == (20, 20)
    np.testing.assert_array_equal(cache.token_ids(seq), sample.tokens[:20])
    assert_bitwise(cache.read(0, seq)[0], sample.k[0, :20])
    assert len(cache.block_table(seq)) == 2
    for bad in (0, 21, -1):
        with pytest.raises(InvalidArgument):
            cache.truncate(seq, bad)
    # The cut block is written again from its middle: what was found by the old prefix must not change.
    finder = cache.add([*sample.tokens[:32], 5])
    assert finder.num_cached_tokens == 32
    cache.append(seq, [9] * 8)
    advance(cache, (seq, Sample.random(cache, 28, 3), 8))
    assert_bitwise(cache.read(0, finder)[0], sample.k[0, :32])
    assert cache.block_table(seq)[1] != cache.block_table(finder)[1]
    cache.free(seq)
    cache.free(finder)
    assert_no_leak(cache)


def test_a_cut_block_written_in_place_is_no_longer_found() -> None:
    cache = make_cache(num_blocks=2)
    sample = Sample.random(cache, 32)
    seq, _ = compute(cache, sample)
    cache.truncate(seq, 20)
    cache.append(seq, [9] * 4)
    advance(cache, (seq, Sample.random(cache, 24, 3), 4))
    assert cache.add([*sample.tokens, 5]).num_cached_tokens == 20  # what was kept of it


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = make_cache(num_blocks=3)
    samples = [Sample.random(cache, 16, seed) for seed in range(3)]
    for sample in samples[:2]:
        seq, _ = compute(cache, sample)
        cache.free(seq)
    # A hit renews the older one.
    seq = cache.add(samples[0].tokens)
    assert seq.num_cached_tokens == 15
    cache.free(seq)
    third, _ = compute(cache, Sample.random(cache, 32, 9))
    assert cache.stats()["evictions"] == 1
    assert cache.add(samples[1].tokens).num_cached_tokens == 0
    assert cache.add(samples[0].tokens).num_cached_tokens == 15
    assert cache.num_free_blocks == 0
    cache.free(third)
    cache.check()


def test_prefixes_can_be_left_out_and_forgotten() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 40)
    private, _ = compute(cache, sample, use_prefix=False)
    assert cache.add(sample.tokens).num_cached_tokens == 0
    public, _ = compute(cache, sample)
    assert cache.add(sample.tokens, use_prefix=False).num_cached_tokens == 0
    assert not set(cache.block_table(private)) & set(cache.block_table(public))
    found = cache.add(sample.tokens)
    assert found.num_cached_tokens == 39
    assert cache.stats()["hit_tokens"] == 39
    cache.reset_prefix_cache()
    assert cache.add(sample.tokens).num_cached_tokens == 0
    assert_bitwise(cache.read(0, found)[0], sample.k[0, :39])
    cache.check()
    # What was begun before is not published after.
    late = Sample.random(cache, 40, 1)
    begun = cache.add(late.tokens)
    advance(cache, (begun, late, 20))
    cache.reset_prefix_cache()
    advance(cache, (begun, late, 20))
    assert cache.add(late.tokens).num_cached_tokens == 0
    cache.check()

    off = make_cache(enable_prefix_caching=False)
    for _ in range(2):
        seq, _ = compute(off, sample)
        assert seq.num_cached_tokens == 0
        off.free(seq)
    assert off.stats()["free"] == off.stats()["total"]


def test_token_ids_come_in_many_forms() -> None:
    cache = make_cache()
    for ids in ([1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint32),
                np.array([1, 2, 3], np.int32), np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], ">i8"),
                np.array([1, 0, 2, 0, 3, 0])[::2], [np.int64(1), np.uint8(2), 3]):  # fmt: skip
        seq = cache.add(ids)
        cache.append(seq, ids)
        np.testing.assert_array_equal(cache.token_ids(seq), [1, 2, 3, 1, 2, 3])
    limit = cache.add([0, 2**32 - 2])
    np.testing.assert_array_equal(cache.token_ids(limit), [0, 2**32 - 2])


def test_close() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    batch = cache.plan([(cache.add([1]), 1)])
    cache.close()
    cache.close()
    x = zeros(cache, 1)
    for call in (lambda: cache.add([1]), lambda: cache.read(0, seq), lambda: cache.write(0, batch, x, x), cache.stats,
                 lambda: cache.attend(0, batch, x), cache.check, lambda: cache.free(seq), cache.reset_prefix_cache,
                 lambda: cache.num_free_blocks):  # fmt: skip
        with pytest.raises(InvalidState, match="closed"):
            call()
    assert cache.num_blocks == 16
    assert cache.nbytes > 0
    assert batch.num_tokens == 1


def test_python_threads_share_a_cache() -> None:
    """Each thread advances its own sequence; each result is that of the sequence alone."""
    threads = Threads(2)
    cache = make_cache(num_blocks=64, threads=threads, dtype="bfloat16")
    samples = [Sample.random(cache, 70, seed) for seed in range(4)]
    expected = [compute(make_cache(num_blocks=64, dtype="bfloat16"), sample)[1] for sample in samples]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for cut in range(1, 15):
                seq, out = compute(cache, samples[i], (cut, 2 * cut, 3 * cut + i), use_prefix=cut % 2 == 0)
                assert_bitwise(out, expected[i][:, -out.shape[1] :])
                cache.check()
                cache.free(seq)
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert_no_leak(cache)
