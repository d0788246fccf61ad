"""What each number format keeps, and where its scales come from."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kvcore import InvalidArgument, InvalidState, KVCache
from kvtools import Sample, advance, assert_bitwise, assert_no_leak, compute, make_cache

Floats = npt.NDArray[np.float32]
FORMATS = [
    ("float32", None), ("float16", None), ("bfloat16", None), ("fp8_e4m3", None), ("fp8_e5m2", None),
    ("fp8_e4m3", "per_token_head"), ("fp8_e5m2", "per_token_head"), ("int8", None), ("int4", None),
]  # fmt: skip


def store(cache: KVCache, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    seq = cache.add(range(len(k)))
    batch = cache.plan([(seq, len(k))])
    for layer in range(cache.num_layers):
        cache.write(layer, batch, k, v)
    cache.commit(batch)
    got = cache.read(0, seq)
    cache.free(seq)
    return got


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_values_come_back_as_near_as_the_format_can(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode, head_dim=64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((50, 2, 64)).astype(np.float32) * s for s in (3, 0.5))
    for got, want in zip(store(cache, k, v), (k, v), strict=True):
        largest = np.abs(want).max(-1, keepdims=True)
        step = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}
        bound = np.abs(want) * step.get(dtype, 0.0)
        if dtype.startswith("fp8"):
            bound = np.maximum(bound, largest * 2**-9 if mode else 2.0**-9)
        if dtype == "int8":
            bound = largest / 127 * 0.502
        if dtype == "int4":
            bound = largest * 2 / 15 * 0.56
        assert (np.abs(got - want) <= bound + 1e-30).all()


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_a_value_depends_on_its_token_alone(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode, head_dim=64)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((20, 2, 64)).astype(np.float32) for _ in range(2))
    before = store(make_cache(dtype=dtype, scale_mode=mode, head_dim=64), k, v)
    louder = k.copy()
    louder[3] *= 100
    after = store(cache, louder, v)
    others = np.arange(20) != 3
    assert_bitwise(before[0][others], after[0][others])
    assert_bitwise(before[1], after[1])


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_extremes(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode, head_dim=64)
    k = np.zeros((4, 2, 64), np.float32)
    k[1] = np.nan
    k[2, :, 0], k[2, :, 1] = np.inf, -np.inf
    k[3] = 1e-42
    got, _ = store(cache, k, k)
    assert (got[0] == 0).all()
    assert np.isnan(got[1]).all()
    assert not np.isnan(got[2]).any() or dtype == "int4"
    assert (np.abs(got[3]) <= 1e-40).all()
    assert_no_leak(cache)


@pytest.mark.parametrize(("dtype", "mode"), FORMATS)
def test_attention_over_every_format(dtype: str, mode: str | None) -> None:
    cache = make_cache(dtype=dtype, scale_mode=mode, head_dim=64, num_blocks=64)
    cold = make_cache(dtype=dtype, scale_mode=mode, head_dim=64, num_blocks=64, enable_prefix_caching=False)
    sample = Sample.random(cache, 300)
    seq, whole = compute(cold, sample)
    k, v = cold.read(0, seq)
    exact = dtype in ("float32", "float16")
    for row in (0, 15, 16, 255, 256, 299):
        for h in range(4):
            q = sample.q[0, row, h]
            if not exact:
                q = q.astype(ml_dtypes.bfloat16).astype(np.float32)
            scores = k[: row + 1, h // 2].astype(np.float64) @ q * 64**-0.5
            weights = np.exp(scores - scores.max())
            want = weights / weights.sum() @ v[: row + 1, h // 2]
            bound = np.abs(v).max() * (1e-5 if exact else 2.0**-7)
            np.testing.assert_allclose(whole[0, row, h], want, atol=bound)
    cut, parts = compute(cache, sample, (1, 20, 255))
    assert_bitwise(parts, whole)
    cache.free(cut)
    hit, last = compute(cache, sample)
    assert hit.num_cached_tokens == 299
    assert_bitwise(last, whole[:, 299:])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"])
def test_arrays_of_the_format_go_in_and_out_unchanged(dtype: str) -> None:
    types: dict[str, Any] = {
        "bfloat16": ml_dtypes.bfloat16, "float16": np.float16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
    }  # fmt: skip
    cache = make_cache(dtype=dtype)
    x = np.random.default_rng(1).standard_normal((5, 2, 8)).astype(types[dtype])
    seq = cache.add(range(5))
    batch = cache.plan([(seq, 5)])
    for layer in range(2):
        cache.write(layer, batch, x, x)
    cache.commit(batch)
    for kind in (dtype, types[dtype]):
        k, v = cache.read(1, seq, kind)
        assert k.dtype == v.dtype == types[dtype]
        np.testing.assert_array_equal(k.view(np.uint8), x.view(np.uint8))
    with pytest.raises(InvalidArgument, match="dtype"):
        cache.read(0, seq, "float12")


def test_static_scales_of_each_layer_and_head() -> None:
    rng = np.random.default_rng(0)
    k_scale = rng.uniform(0.1, 2, (2, 2)).astype(np.float32)
    v_scale = rng.uniform(0.1, 2, (2, 2)).astype(np.float32)
    cache = make_cache(dtype="fp8_e4m3", k_scale=k_scale, v_scale=v_scale)
    np.testing.assert_array_equal(cache.k_scale, k_scale)
    np.testing.assert_array_equal(cache.v_scale, v_scale)
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    for layer in range(2):
        k, v = cache.read(layer, seq)
        for got, x, scale in ((k, sample.k[layer], k_scale[layer]), (v, sample.v[layer], v_scale[layer])):
            codes = np.clip(x / scale[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            np.testing.assert_array_equal(got, codes * scale[:, None])
    for bad in (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), np.zeros((2, 2), np.float32),
                np.full((2, 2), np.nan, np.float32), np.ones(2, np.float32)):  # fmt: skip
        with pytest.raises(InvalidArgument, match="scale"):
            make_cache(dtype="fp8_e4m3", k_scale=bad)
    with pytest.raises(TypeError, match="k_scale"):
        make_cache(dtype="fp8_e4m3", k_scale="big")


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [("float32", "per_token_head"), ("bfloat16", "per_token_head"), ("int8", "static"), ("fp8", "dynamic")],
)
def test_scale_modes_that_a_format_does_not_have(dtype: str, mode: str) -> None:
    with pytest.raises(InvalidArgument, match=r"scale[_ ]mode|scales"):
        make_cache(dtype=dtype, scale_mode=mode)


@pytest.mark.parametrize("dtype", ["int8", "int4", "float32"])
def test_other_formats_take_no_static_scale(dtype: str) -> None:
    with pytest.raises(InvalidArgument, match="scale"):
        make_cache(dtype=dtype, k_scale=0.5)


def test_calibration_finds_the_largest_values() -> None:
    cache = make_cache(dtype="fp8_e4m3")
    sample = Sample.random(cache, 50)
    sample.k[1, 7, 1, 3] = -900.0

    def run() -> str:
        seq, _ = compute(cache, sample)
        cache.free(seq)
        return "done"

    assert cache.calibrate(run) == "done"
    np.testing.assert_array_equal(cache.k_scale, np.abs(sample.k).max((1, 3)) / np.float32(448))
    np.testing.assert_array_equal(cache.v_scale, np.abs(sample.v).max((1, 3)) / np.float32(448))
    assert cache.stats()["cached"] == 0
    seq, _ = compute(cache, sample)
    assert seq.num_cached_tokens == 0
    k, _ = cache.read(1, seq)
    assert k[7, 1, 3] == -900.0
    with pytest.raises(InvalidState, match="empty"):
        cache.calibrate(run)
    cache.free(seq)
    with pytest.raises(InvalidState, match="empty"):
        cache.calibrate(run)
    cache.reset_prefix_cache()
    cache.calibrate(run)


def test_a_calibration_that_fails_changes_nothing() -> None:
    cache = make_cache(dtype="fp8_e4m3")

    def fail() -> None:
        raise RuntimeError("no text")

    with pytest.raises(RuntimeError, match="no text"):
        cache.calibrate(fail)
    with pytest.raises(InvalidState, match="nothing was written"):
        cache.calibrate(lambda: None)
    kept = []
    with pytest.raises(InvalidState, match="freed"):
        cache.calibrate(lambda: kept.append(compute(cache, Sample.random(cache, 5))[0]))
    assert cache.k_scale == 1.0
    cache.free(kept[0])
    with pytest.raises(TypeError, match="callable"):
        cache.calibrate(5)  # type: ignore[arg-type]
    for dtype, mode in (("bfloat16", None), ("int8", None), ("fp8", "per_token_head")):
        with pytest.raises(InvalidState, match="calibrate"):
            make_cache(dtype=dtype, scale_mode=mode).calibrate(lambda: None)


def test_an_unused_pool_takes_no_memory() -> None:
    resource = pytest.importorskip("resource")

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * int(resource.getpagesize())

    try:
        before = resident()
    except OSError:
        pytest.skip("needs /proc")
    cache = KVCache(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=4096, num_threads=1)
    assert cache.nbytes >= 8 << 30
    assert resident() - before < 64 << 20
    seq = cache.add(range(32))
    batch = cache.plan([(seq, 32)])
    x = np.zeros((32, 8, 128), np.float32)
    for layer in range(32):
        cache.write(layer, batch, x, x)
    cache.commit(batch)
    assert resident() - before < 128 << 20
    full = resident()
    cache.close()
    assert resident() < full - (3 << 20)
    with pytest.raises(MemoryError, match=r"\d{12}"):
        KVCache(num_layers=64, num_kv_heads=64, head_dim=256, num_blocks=1 << 26, num_threads=1)


def test_another_threads_of_the_machine_is_no_matter() -> None:
    cache = make_cache(dtype="int8", num_threads=2)
    sample = Sample.random(cache, 30)
    seq = cache.add(sample.tokens)
    (out,) = advance(cache, (seq, sample, 30))
    _, alone = compute(make_cache(dtype="int8"), sample)
    assert_bitwise(out, alone)
