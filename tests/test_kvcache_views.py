"""Views: what is stored, without a copy, as it was for as long as anybody looks at it."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvcore import InvalidArgument, InvalidHandle, InvalidState, KVCache, KVGroup, OutOfBlocks, Sequence, TileView
from kvtools import Sample, advance, assert_bitwise, assert_no_leak, compute, make_cache, run_python

Floats = npt.NDArray[np.float32]

T = 16
"""Tokens of a tile."""

FORMATS = [
    ("float32", None), ("float16", None), ("bfloat16", None), ("fp8_e4m3", None), ("fp8_e5m2", None),
    ("fp8_e4m3", "per_token_head"), ("fp8_e5m2", "per_token_head"), ("int8", None),
]  # fmt: skip

TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}


def arrays(view: TileView) -> list[npt.NDArray[Any]]:
    return [x for x in (view.k, view.v, view.v_last, view.k_scale, view.v_scale) if x is not None]


def dense(view: TileView) -> tuple[Floats, Floats | None]:
    """K and V as read gives them, by the documented shapes."""
    n = view.num_tokens
    k = view.k.astype(np.float32)
    k = k.reshape(n, k.shape[1], -1)
    v = None
    if view.v is not None:
        v = view.v.astype(np.float32)
        if v.ndim == 4:
            v = v.reshape(-1, *v.shape[2:])
        if view.v_last is not None:
            v = np.concatenate([v, view.v_last.astype(np.float32)[None]])
        assert len(v) == n
    if view.k_scale is not None:
        k = k * view.k_scale[..., None]
    if view.v_scale is not None and v is not None:
        v = v * view.v_scale[..., None]
    return k, v


def tiles(cache: KVCache, layer: int, seq: Sequence) -> list[TileView]:
    return [cache.view(layer, seq, i) for i in range(-(-cache.num_computed_tokens(seq) // T))]


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_values_are_those_of_read(dtype: str, mode: str | None, block_size: int) -> None:
    scales = {"k_scale": 0.5, "v_scale": 2.0} if dtype.startswith("fp8") and mode is None else {}
    cache = make_cache(head_dim=24, num_kv_heads=3, dtype=dtype, scale_mode=mode, block_size=block_size, **scales)
    for n in (1, 2, 15, 16, 17, 50):
        seq, _ = compute(cache, Sample.random(cache, n, group=1))
        for layer in range(cache.num_layers):
            k, v = cache.read(layer, seq)
            views = tiles(cache, layer, seq)
            for i, view in enumerate(views):
                assert view.start == T * i
                assert view.num_tokens == min(T, n - T * i)
                assert view.v is not None
                assert view.k.dtype == view.v.dtype == np.dtype(TYPES[dtype])
                got_k, got_v = dense(view)
                span = slice(view.start, view.start + view.num_tokens)
                assert_bitwise(got_k, k[span])
                assert got_v is not None
                assert_bitwise(got_v, v[span])
        cache.check()
        del views, view
        cache.free(seq)
    assert_no_leak(cache)


def test_shapes_are_as_documented() -> None:
    cache = make_cache(num_kv_heads=3, head_dim=24)
    seq, _ = compute(cache, Sample.random(cache, 21, group=1))
    view = cache.view(0, seq, 1)
    assert view.v is not None
    assert view.k.shape == view.v.shape == (5, 3, 24)
    assert (view.v_last, view.k_scale, view.v_scale) == (None, None, None)
    assert repr(view) == "TileView(start=16, num_tokens=5)"
    cache = make_cache(num_kv_heads=3, head_dim=24, dtype="int8")
    seq, _ = compute(cache, Sample.random(cache, 21, group=1))
    view = cache.view(0, seq, 1)
    assert [x.shape for x in arrays(view)] == [(5, 3, 12, 2), (2, 2, 3, 24), (3, 24), (5, 3), (5, 3)]
    assert [x.shape for x in arrays(cache.view(0, seq, 0))] == [(16, 3, 12, 2), (8, 2, 3, 24), (16, 3), (16, 3)]
    cache = make_cache(num_kv_heads=3, head_dim=24, dtype="fp8", k_scale=0.5)
    seq, _ = compute(cache, Sample.random(cache, 1, group=1))
    view = cache.view(0, seq, 0)
    assert [x.shape for x in arrays(view)] == [(1, 3, 12, 2), (0, 2, 3, 24), (3, 24), (3,), (3,)]
    assert view.k_scale is not None
    assert view.k_scale.tolist() == [0.5] * 3


def test_widths_of_k_and_v_may_differ() -> None:
    for dtype in ("float32", "bfloat16"):
        group = KVGroup("full", [0], num_kv_heads=2, head_dim=6, v_head_dim=18)
        cache = KVCache(groups=[group], num_blocks=4, dtype=dtype, num_threads=1)
        seq = cache.add(range(19))
        batch = cache.plan([(seq, 19)])
        rng = np.random.default_rng(0)
        cache.write(0, batch, *(rng.standard_normal((19, 2, width)).astype(np.float32) for width in (6, 18)))
        cache.commit(batch)
        k, v = cache.read(0, seq)
        for view in tiles(cache, 0, seq):
            got_k, got_v = dense(view)
            assert_bitwise(got_k, k[view.start :][: view.num_tokens])
            assert got_v is not None
            assert_bitwise(got_v, v[view.start :][: view.num_tokens])


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_latent_layers_have_k_alone(dtype: str, mode: str | None) -> None:
    cache = KVCache(
        groups=[KVGroup("latent", [0], rank=16, rope_dim=4)], num_blocks=4, dtype=dtype, scale_mode=mode, num_threads=1
    )
    seq = cache.add(range(20))
    batch = cache.plan([(seq, 20)])
    cache.write(0, batch, np.random.default_rng(0).standard_normal((20, 1, 20)).astype(np.float32))
    cache.commit(batch)
    for view in tiles(cache, 0, seq):
        assert view.v is None
        assert view.v_last is None
        assert view.v_scale is None
        assert_bitwise(dense(view)[0], cache.read(0, seq)[0][view.start :][: view.num_tokens])


def test_sliding_layers_show_what_is_kept() -> None:
    groups = [KVGroup("full", [0]), KVGroup("sliding_window", [1], window=20)]
    cache = KVCache(groups=groups, num_kv_heads=1, head_dim=8, num_blocks=12, dtype="float32", num_threads=1)
    seq = cache.add(range(90))
    rng = np.random.default_rng(0)
    held = None
    for n in (40, 30, 20):
        batch = cache.plan([(seq, n)])
        for layer in (0, 1):
            x = rng.standard_normal((n, 1, 8)).astype(np.float32)
            cache.write(layer, batch, x, x)
        cache.commit(batch)
        if held is None:
            held = cache.view(1, seq, 0)
            before = held.k.copy()
    first = cache.block_table(seq, 1).index(cache.block_table(seq, 1)[-1]) - 1
    kept, _ = cache.read(1, seq)
    start = 90 - len(kept)
    assert start >= 48
    assert_bitwise(dense(cache.view(1, seq, first))[0], kept[16 * first - start :][:16])
    with pytest.raises(InvalidArgument, match=r"expected [34] to 5: a sliding window has passed; got 0"):
        cache.view(1, seq, 0)
    assert held is not None
    assert_bitwise(held.k, before)  # the window has returned its block, the view keeps it
    cache.check()
    del held
    cache.check()


def test_cross_layers_show_the_encoder() -> None:
    groups = [KVGroup("full", [0]), KVGroup("cross", [1, 2], num_blocks=4)]
    cache = KVCache(groups=groups, num_kv_heads=2, head_dim=8, num_blocks=4, dtype="float32", num_threads=1)
    seq = cache.add([1, 2, 3])
    k, v, other = (np.random.default_rng(i).standard_normal((20, 2, 8)).astype(np.float32) for i in range(3))
    with pytest.raises(InvalidState, match="not written"):
        cache.view(1, seq, 0)
    cache.write_cross(1, seq, k, v)
    views = [cache.view(1, seq, i) for i in (0, 1)]
    # The other layer's bytes lie in the same block and may still be written.
    with pytest.raises(InvalidState, match="not written"):
        cache.view(2, seq, 0)
    cache.write_cross(2, seq, other, other)
    assert_bitwise(cache.view(2, seq, 1).k, other[16:])
    with pytest.raises(InvalidArgument, match="expected 0 to 1, got 2"):
        cache.view(1, seq, 2)
    with pytest.raises(InvalidArgument, match="no stored tokens"):
        cache.view(0, seq, 0)  # the decoder's tokens are not computed yet
    cache.check()
    cache.free(seq)
    cache.check()
    # Two of four blocks are viewed: three are not to be had.
    more = cache.add([1])
    big = np.full((40, 2, 8), 9, np.float32)
    with pytest.raises(OutOfBlocks, match="3 needed, 2 available"):
        cache.write_cross(1, more, big, big)
    assert_bitwise(np.concatenate([view.k for view in views]), k)
    assert_bitwise(np.concatenate([view.v for view in views if view.v is not None]), v)
    del views
    cache.write_cross(1, more, big, big)
    cache.check()


def test_nothing_is_copied() -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 40))
    first, again, other = cache.view(0, seq, 1), cache.view(0, cache.fork(seq), 1), cache.view(1, seq, 1)
    for a, b in zip(arrays(first), arrays(again), strict=True):
        assert a.__array_interface__["data"] == b.__array_interface__["data"]
        assert a.strides == b.strides
        assert not a.flags.owndata
    assert np.shares_memory(first.k, again.k)
    assert not np.shares_memory(first.k, other.k)
    # From one token to the next, one dimension, and one block to the next.
    assert first.k.strides[0] == 4
    assert first.k.strides[2] == 16 * 4
    block = cache.bytes_per_token * cache.block_size
    table = cache.block_table(seq)
    distance = first.k.ctypes.data - cache.view(0, seq, 0).k.ctypes.data
    assert distance == (table[1] - table[0]) * block
    assert abs(other.k.ctypes.data - first.k.ctypes.data) == block // cache.num_layers


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_views_are_read_only(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode)
    seq, _ = compute(cache, Sample.random(cache, 21))
    for array in arrays(cache.view(0, seq, 1)):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        if array.ndim > 1 or array.base is not None:  # static scales are a copy: whoever writes there hurts nobody
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="numpy exports no read-only arrays before")
def test_dlpack() -> None:
    for dtype in ("float32", "float16", "int8"):
        cache = make_cache(dtype=dtype)
        seq, _ = compute(cache, Sample.random(cache, 21))
        array = np.from_dlpack(cache.view(0, seq, 1).k)
        expected = cache.view(0, seq, 1).k
        np.testing.assert_array_equal(array, expected)
        assert np.shares_memory(array, expected)
        # The array that came of it keeps the memory alone.
        cache.free(seq)
        cache.close()
        gc.collect()
        np.testing.assert_array_equal(array, expected)
    # DLPack of numpy knows no bfloat16 and no fp8: their bits go.
    cache = make_cache(dtype="bfloat16")
    seq, _ = compute(cache, Sample.random(cache, 21))
    view = cache.view(0, seq, 1)
    bits = np.from_dlpack(view.k.view(np.uint16))
    assert np.shares_memory(bits, view.k)
    np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16), view.k)


def test_the_buffer_protocol() -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 21))
    view = cache.view(0, seq, 1)
    array: Any = view.k  # stubs of numpy know of no buffer before Python 3.12
    buffer: Any = memoryview(array)
    assert buffer.readonly
    assert (buffer.shape, buffer.strides, buffer.format) == (view.k.shape, view.k.strides, "f")
    expected = view.k.copy()
    del view, array
    cache.free(seq)
    cache.close()
    np.testing.assert_array_equal(np.asarray(buffer), expected)
    with pytest.raises(TypeError):
        buffer[0, 0, 0] = 1.0
    cache = make_cache(dtype="fp8")
    seq, _ = compute(cache, Sample.random(cache, 21))
    view = cache.view(0, seq, 1)
    codes: Any = view.k.view(np.uint8)
    assert memoryview(codes).tolist() == codes.tolist()


class Watched:
    """Views of all tiles of a sequence in all layers, and what they showed at first."""

    def __init__(self, cache: KVCache, seq: Sequence) -> None:
        self.views = [view for layer in range(cache.num_layers) for view in tiles(cache, layer, seq)]
        self.before = [[x.tobytes() for x in arrays(view)] for view in self.views]

    def check(self) -> None:
        assert [[x.tobytes() for x in arrays(view)] for view in self.views] == self.before


def churn(cache: KVCache, seed: int, rounds: int = 12) -> None:
    """Fills whatever can be had with other values, again and again."""
    for i in range(rounds):
        n = T * cache.num_free_blocks if i % 3 == 0 else 37
        if n == 0:
            return
        sample = Sample.random(cache, n, seed=1000 * seed + i)
        seq = cache.add(sample.tokens)
        with contextlib.suppress(OutOfBlocks):
            advance(cache, (seq, sample, n - seq.num_cached_tokens))
        cache.free(seq)


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_values_stay_whatever_happens(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode)
    sample = Sample.random(cache, 100)
    seq, _ = compute(cache, sample.first(37))
    watched = Watched(cache, seq)

    # The sequence writes behind its last token: into a copy.
    copies = cache.stats()["copies"]
    advance(cache, (seq, append(cache, seq, sample, 40), 3))
    assert cache.stats()["copies"] == copies + 1
    watched.check()
    cache.check()
    # Once more: nobody views the copy.
    advance(cache, (seq, append(cache, seq, sample, 43), 3))
    assert cache.stats()["copies"] == copies + 1

    # It goes back and writes something else.
    cache.truncate(seq, 20)
    other = Sample.random(cache, 100, seed=1)
    advance(cache, (seq, append(cache, seq, other, 60), 40))
    watched.check()
    cache.check()
    # So does a fork; then both end, and so do the prefixes.
    fork = cache.fork(seq)
    cache.truncate(seq, 1)
    advance(cache, (seq, append(cache, seq, other, 30), 29))
    cache.free(fork)
    cache.free(seq)
    watched.check()
    churn(cache, 1)
    watched.check()
    cache.reset_prefix_cache()
    churn(cache, 2)
    cache._fill(7.0)
    watched.check()
    cache.check()
    cache.close()
    watched.check()
    del cache
    gc.collect()
    watched.check()


def append(cache: KVCache, seq: Sequence, sample: Sample, end: int) -> Sample:
    cache.append(seq, sample.tokens[cache.num_tokens(seq) : end])
    return sample


def test_a_prefix_that_another_goes_on_with_stays() -> None:
    """The one who owns a block may write behind what others have found in it, but not once that is viewed."""
    cache = make_cache()
    sample = Sample.random(cache, 60)
    owner, _ = compute(cache, sample.first(24))
    finder = cache.add(np.append(sample.tokens[:23], 60_000))
    assert finder.num_cached_tokens == 23
    assert cache.block_table(finder) == cache.block_table(owner)
    view = cache.view(1, finder, 1)
    assert view.num_tokens == 7  # not the token of the owner that the finder has not
    before = view.k.copy()
    table = cache.block_table(owner)
    advance(cache, (owner, append(cache, owner, sample, 32), 8))
    assert cache.block_table(owner)[1] != table[1]
    assert_bitwise(view.k, before)
    cache.check()
    cache.free(owner)
    cache.free(finder)
    cache.check()
    # A viewed block is found again, while nobody but the view holds it.
    again = cache.add(sample.tokens[:24])
    assert again.num_cached_tokens == 23
    cache.check()
    del view
    cache.check()
    cache.free(again)
    assert_no_leak(cache)


def test_blocks_come_back() -> None:
    cache = make_cache(num_blocks=4, enable_prefix_caching=False)
    seq, _ = compute(cache, Sample.random(cache, 40))
    view = cache.view(0, seq, 1)
    cache.free(seq)
    stats = cache.stats()
    assert (stats["used"], stats["free"], stats["num_sequences"]) == (1, 3, 0)
    assert cache.num_free_blocks == 3
    assert cache.snapshot()["groups"][0]["refs"].tolist().count(1) == 1
    cache.check()
    with pytest.raises(OutOfBlocks, match="4 needed, 3 available"):
        cache.plan([(cache.add(range(64)), 64)])
    # Any array of the view keeps the block, and any array of that array.
    part = view.v[2:4, 0] if view.v is not None else None
    del view
    gc.collect()
    assert cache.num_free_blocks == 3
    del part
    gc.collect()
    assert cache.num_free_blocks == 4
    assert cache.stats()["used"] == 0
    assert_no_leak_but(cache, sequences=1)
    # Nothing but a plan has to be asked.
    seq = cache.add(range(64))
    cache.plan([(seq, 64)])
    cache.free(seq)
    seq, _ = compute(cache, Sample.random(cache, 40))
    view = cache.view(0, seq, 1)
    cache.free(seq)
    del view
    cache.plan([(cache.add(range(64)), 64)])


def assert_no_leak_but(cache: KVCache, sequences: int) -> None:
    cache.check()
    stats = cache.stats()
    assert (stats["used"], stats["num_sequences"]) == (0, sequences)


def test_many_views_of_one_block() -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 20))
    views = [cache.view(i % 2, seq, i % 2) for i in range(1000)]
    cache.free(seq)
    assert cache.stats()["used"] == 2
    random.Random(0).shuffle(views)
    while len(views) > 1:
        views.pop()
    assert cache.stats()["used"] == 1
    views.clear()
    assert_no_leak(cache)


def test_a_block_that_is_being_written_is_not_shown() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 60)
    seq, _ = compute(cache, sample.first(20))
    finder = cache.add(np.append(sample.tokens[:19], 60_000))
    append(cache, seq, sample, 40)
    batch = cache.plan([(seq, 5)])
    for layer in range(2):
        cache.write(layer, batch, sample.k[layer, 20:25], sample.v[layer, 20:25])
    for one in (seq, finder):
        assert cache.view(0, one, 0).num_tokens == 16  # nobody writes there
        with pytest.raises(InvalidState, match="being written by a batch that is not committed"):
            cache.view(0, one, 1)
    cache.check()
    cache.commit(batch)
    assert cache.view(0, seq, 1).num_tokens == 9
    # A plan that was given up.
    cache.plan([(seq, 5)])
    cache.truncate(seq, 25)
    assert_bitwise(cache.view(0, seq, 1).k, sample.k[0, 16:25])
    # A plan that needs a new block hides nothing.
    append(cache, seq, sample, 40)
    advance(cache, (seq, sample, 7))
    cache.plan([(seq, 3)])
    assert_bitwise(cache.view(1, seq, 1).k, sample.k[1, 16:32])
    cache.check()


def test_a_batch_writes_beside_a_view() -> None:
    """A view that is taken before the plan does not hinder it, nor one of full blocks in the middle of it."""
    cache = make_cache()
    sample = Sample.random(cache, 60)
    seq, _ = compute(cache, sample.first(20))
    watched = Watched(cache, seq)
    append(cache, seq, sample, 60)
    batch = cache.plan([(seq, 40)])
    for layer in range(2):
        cache.write(layer, batch, sample.k[layer, 20:], sample.v[layer, 20:])
        cache.attend(layer, batch, sample.q[layer, 20:])
        assert_bitwise(cache.view(layer, seq, 0).k, sample.k[layer, :16])
    cache.commit(batch)
    watched.check()
    assert_bitwise(cache.read(0, seq)[0], sample.k[0])
    cache.check()


def test_calibration_waits_for_views() -> None:
    cache = make_cache(dtype="fp8")
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    view = cache.view(0, seq, 0)
    cache.free(seq)
    cache.reset_prefix_cache()
    with pytest.raises(InvalidState, match="empty cache"):
        cache.calibrate(lambda: None)
    del view
    kept: list[TileView] = []

    def run() -> None:
        seq, _ = compute(cache, sample)
        kept.append(cache.view(0, seq, 0))
        cache.free(seq)

    with pytest.raises(InvalidState, match="no views"):
        cache.calibrate(run)
    before = kept[0].k.tobytes()
    churn(cache, 3)
    assert kept[0].k.tobytes() == before
    kept.clear()
    cache.reset_prefix_cache()
    cache.calibrate(lambda: cache.free(compute(cache, sample)[0]))
    assert_no_leak(cache)


def test_saved_and_spilled_blocks_beside_views(tmp_path: Any) -> None:
    cache = make_cache(num_blocks=6, spill_dir=tmp_path, spill_bytes=1 << 20)
    sample = Sample.random(cache, 60)
    seq, _ = compute(cache, sample)
    cache.save(seq, tmp_path / "one.safetensors")
    watched = Watched(cache, seq)
    cache.free(seq)
    churn(cache, 4)
    watched.check()
    loaded = cache.load(tmp_path / "one.safetensors")
    watched.check()
    assert_bitwise(cache.read(1, loaded)[0], sample.k[1])
    cache.free(loaded)
    cache.check()
    watched.views.clear()
    churn(cache, 5)
    assert cache.stats()["spills"] > 0
    again = cache.add(sample.tokens)  # fetched
    n = again.num_cached_tokens
    if n:
        assert_bitwise(cache.read(1, again)[0], sample.k[1, :n])
        assert_bitwise(np.concatenate([view.k for view in tiles(cache, 1, again)]), sample.k[1, :n])
    cache.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_with_views(seed: int) -> None:
    """Law: no call changes what a view shows, no view changes what a call gives, and all blocks come back."""
    rng = random.Random(seed)
    dtype, mode = FORMATS[seed % len(FORMATS)]
    cache = make_cache(dtype=dtype, scale_mode=mode, num_blocks=24)
    samples = [Sample.random(cache, 120, seed=s) for s in range(3)]
    for sample in samples[1:]:
        for name in ("tokens", "k", "v"):  # common beginnings
            axis = 0 if name == "tokens" else 1
            own, first = getattr(sample, name), getattr(samples[0], name)
            setattr(sample, name, np.concatenate([first.take(range(21), axis), own.take(range(21, 120), axis)], axis))
    live: list[tuple[Sequence, Sample]] = []
    watched: list[tuple[TileView, list[bytes]]] = []
    for step in range(300):
        call = rng.choice(["add", "go on", "go on", "fork", "truncate", "free", "view", "view", "drop", "reset"])
        try:
            if call == "add" and len(live) < 5:
                sample = rng.choice(samples)
                live.append((cache.add(sample.tokens[: rng.randint(2, 60)]), sample))
            elif call == "drop" and watched:
                for _ in range(rng.randint(1, len(watched))):
                    watched.pop(rng.randrange(len(watched)))
            elif call == "reset" and rng.random() < 0.2:
                cache.reset_prefix_cache()
            elif live:
                at = rng.randrange(len(live))
                seq, sample = live[at]
                if call == "go on":
                    open_ = cache.num_tokens(seq) - cache.num_computed_tokens(seq)
                    if open_ == 0:
                        append(cache, seq, sample, min(120, cache.num_tokens(seq) + rng.randint(1, 20)))
                        open_ = cache.num_tokens(seq) - cache.num_computed_tokens(seq)
                    if open_:
                        advance(cache, (seq, sample, rng.randint(1, open_)))
                elif call == "fork" and len(live) < 5:
                    live.append((cache.fork(seq), sample))
                elif call == "truncate":
                    cache.truncate(seq, rng.randint(1, cache.num_tokens(seq)))
                elif call == "free":
                    cache.free(seq)
                    live.pop(at)
                elif call == "view" and cache.num_computed_tokens(seq):
                    index = rng.randrange(-(-cache.num_computed_tokens(seq) // T))
                    layer = rng.randrange(2)
                    view = cache.view(layer, seq, index)
                    assert_bitwise(dense(view)[0], cache.read(layer, seq)[0][view.start :][: view.num_tokens])
                    watched.append((view, [x.tobytes() for x in arrays(view)]))
        except OutOfBlocks:
            if watched:
                watched.pop()
        for view, before in watched:
            assert [x.tobytes() for x in arrays(view)] == before, f"step {step}: {call}"
        cache.check()
    expected = make_cache(dtype=dtype, scale_mode=mode, num_blocks=24)
    for seq, sample in live:
        n = cache.num_computed_tokens(seq)
        if n:
            alone, _ = compute(expected, sample.first(n))
            assert_bitwise(cache.read(1, seq)[1], expected.read(1, alone)[1])
            expected.free(alone)
        cache.free(seq)
    del view
    watched.clear()
    assert_no_leak(cache)


def test_views_from_threads() -> None:
    """They come and go in many threads, while others write: nobody sees a change."""
    cache = make_cache(num_blocks=64)
    sample = Sample.random(cache, 40)
    failures: list[BaseException] = []
    shared: list[TileView] = []

    def work(number: int) -> None:
        try:
            rng = random.Random(number)
            mine = Sample.random(cache, 40, seed=number + 10)
            for _ in range(40):
                both = rng.choice([sample, mine])
                seq = cache.add(both.tokens)
                with contextlib.suppress(OutOfBlocks):
                    advance(cache, (seq, both, len(both) - seq.num_cached_tokens))
                watched = Watched(cache, seq)
                cache.free(seq)
                shared.extend(watched.views[:2])
                churn(cache, 100 + number, rounds=1)
                watched.check()
                while len(shared) > 20:
                    with contextlib.suppress(IndexError):
                        shared.pop()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    cache.check()
    shared.clear()
    assert_no_leak(cache)


BUSY = """
import signal, threading
import numpy as np
from kvcore import InvalidState
from kvtools import make_cache

n = 8192
cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=128, num_blocks=520, num_threads=1)
seq, small = cache.add(range(n)), cache.add(range(100))
x = np.ones((n, 1, 128), np.float32)
batch, small_batch = cache.plan([(seq, n)]), cache.plan([(small, 100)])
cache.write(0, batch, x, x)
cache.write(0, small_batch, x[:100], 3 * x[:100])
cache.commit(small_batch)
views = [cache.view(0, small, 0), cache.view(0, small, 1)]
seen = []

def handler(*_):
    # In the middle of the attend, on its own thread: a view needs the cache, the end of a view does not.
    try:
        cache.view(0, small, 1)
    except InvalidState as error:
        seen.append(str(error))
        views.pop()
        thread = threading.Thread(target=views.pop)
        thread.start()
        thread.join(20)
        seen.append(thread.is_alive())
        cache.check()
        raise InterruptedError
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # too early

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    cache.attend(0, batch, np.ones((n, 32, 128), np.float32))
except InterruptedError:
    pass
assert "signal handler" in seen[0], seen
assert seen[1] is False
cache.free(seq)
cache.free(small)
assert cache.stats()["used"] == 0
cache.check()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_a_view_ends_in_the_middle_of_another_call() -> None:
    run_python(BUSY)


def test_bad_arguments() -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 20))
    call: Any = cache.view
    with pytest.raises(InvalidArgument, match="layer: expected 0 to 1, got 2"):
        cache.view(2, seq, 0)
    with pytest.raises(InvalidArgument, match="index: expected 0 to 1, got 2"):
        cache.view(0, seq, 2)
    with pytest.raises(InvalidArgument, match="index: expected an integer from 0"):
        cache.view(0, seq, -1)
    with pytest.raises(InvalidArgument, match="index"):
        cache.view(0, seq, 2**63)
    with pytest.raises(TypeError, match="index"):
        call(0, seq, 0.5)
    with pytest.raises(TypeError, match="layer"):
        call("0", seq, 0)
    with pytest.raises(TypeError):
        call(0, 7, 0)
    with pytest.raises(TypeError):
        call(0, seq)
    with pytest.raises(InvalidArgument, match="no stored tokens"):
        cache.view(0, cache.add([1, 2]), 0)
    with pytest.raises(InvalidHandle, match="another cache"):
        make_cache().view(0, seq, 0)
    cache.free(seq)
    with pytest.raises(InvalidHandle, match="freed"):
        cache.view(0, seq, 0)
    with pytest.raises(TypeError):
        TileView()
    cache.check()
    cache.close()
    with pytest.raises(InvalidState, match="closed"):
        cache.view(0, seq, 0)

    none = KVCache(groups=[KVGroup("full", [0]), KVGroup("none", [1])], num_kv_heads=1, head_dim=8, num_blocks=4)
    with pytest.raises(InvalidArgument, match="none"):
        none.view(1, none.add([1, 2]), 0)
    int4 = make_cache(dtype="int4")
    seq, _ = compute(int4, Sample.random(int4, 20))
    with pytest.raises(InvalidArgument, match=r"int4.*read\(\)"):
        int4.view(0, seq, 0)
    int4.check()
