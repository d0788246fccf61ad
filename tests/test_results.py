"""Results lie in memory of arrays that nobody has any more: no array changes by it, and no old value shows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore import KVCache, Linear, Threads
from kvcore._kvcore import activate, layer_norm, linear_heads, rms_norm, rope, rope_split
from kvtools import assert_bitwise

ROWS = 300
"""With 64 values a row and more, results are large enough to be kept."""

THREADS = Threads(2)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def attend(threads: Threads) -> np.ndarray:
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=64, num_blocks=20, threads=threads)
    seq = cache.add(np.arange(ROWS))
    batch = cache.plan([(seq, ROWS)])
    cache.write(0, batch, normal(ROWS, 1, 64), normal(ROWS, 1, 65)[..., 1:])
    out: np.ndarray = cache.attend(0, batch, normal(ROWS, 2, 64))
    return out


def linear(dtype: str, call: Callable[[Linear, np.ndarray], np.ndarray], inputs: int = 70) -> Callable[[Threads], Any]:
    return lambda threads: call(Linear(normal(90, inputs), dtype=dtype, threads=threads), normal(ROWS, inputs))


def heads(threads: Threads) -> np.ndarray:
    return linear_heads([Linear(normal(40, 33), threads=threads) for _ in range(2)], normal(ROWS, 2, 33))


def added(layer: Linear, x: np.ndarray) -> np.ndarray:
    residual = np.ones((len(x), layer.out_features), np.float32)
    layer.gated_add_forward(np.concatenate([x, x], axis=1), residual)
    return residual


CALLS: dict[str, Callable[[Threads], Any]] = {
    **{
        f"linear {dtype}": linear(dtype, lambda f, x: f(x))
        for dtype in ("float32", "bfloat16", "float16", "int8", "int4")
    },
    "linear of 512 steps": linear("bfloat16", lambda f, x: f(x), 1024),
    "norm_forward": linear("int4", lambda f, x: f.norm_forward(x, np.ones(70, np.float32), 1e-5)),
    "gated_add_forward": linear("int8", added),
    "linear_heads": heads,
    "attend": attend,
    "rms_norm": lambda threads: rms_norm(normal(ROWS, 70), normal(70), 1e-5, threads=threads),
    "layer_norm": lambda threads: layer_norm(normal(ROWS, 70), normal(70), None, 1e-5, threads=threads),
    "rope": lambda threads: rope(normal(ROWS, 2, 40), normal(ROWS, 13), normal(ROWS, 13), threads=threads),
    "rope_split": lambda threads: np.concatenate(
        rope_split(normal(ROWS, 360), normal(ROWS, 20), normal(ROWS, 20), 3, 3, 40, threads=threads), axis=1
    ),
    "activate": lambda threads: activate(normal(ROWS, 140), "silu", gated=True, threads=threads),
}


@pytest.mark.parametrize("name", CALLS)
def test_old_values_do_not_show(name: str) -> None:
    """Memory full of NaN, of many sizes, is what calls get; what they return is what they return in fresh memory."""
    call = CALLS[name]
    expected = call(Threads(1)).copy()
    for threads in (Threads(1), Threads(2)):
        wide = Linear(np.full((1024, 1), np.nan, np.float32), threads=threads)
        stale = [wide(np.ones((rows, 1), np.float32)) for rows in (16, 20, 24, 32, 48, 64, 100, 200)]
        assert all(np.isnan(x).all() for x in stale)
        del stale
        assert_bitwise(call(threads), expected)
        assert_bitwise(call(threads), expected)


def address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    layer = Linear(normal(64, 64), threads=Threads(2))
    x = normal(ROWS, 64)
    first = layer(x)
    at, copy = address(first), first.copy()
    view = first[5:, 3:]
    del first
    second = layer(2 * x)
    assert address(second) != at
    assert_bitwise(view, copy[5:, 3:])
    del view
    assert address(layer(x)) == at


def test_results_are_arrays_like_any_other() -> None:
    result = Linear(normal(64, 64), threads=THREADS)(normal(ROWS, 64))
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape) == (np.float32, (ROWS, 64))
    assert result.flags.c_contiguous
    assert result.flags.writeable
    result += 1  # may be written to
    Linear(normal(64, 64), threads=THREADS).add_forward(normal(ROWS, 64), result)


def test_results_outlive_their_pool() -> None:
    threads = Threads(2)
    result = rms_norm(normal(ROWS, 70), np.ones(70, np.float32), 1e-5, threads=threads)
    copy = result.copy()
    del threads
    for _ in range(3):
        rms_norm(normal(ROWS, 71), np.ones(71, np.float32), 1e-5, threads=Threads(1))
    assert_bitwise(result, copy)


def test_callers_at_the_same_time_have_memory_of_their_own() -> None:
    layer = Linear(normal(64, 64), threads=THREADS)
    wrong: list[int] = []

    def work(factor: int) -> None:
        x = factor * normal(ROWS, 64)
        expected = layer(x).copy()
        for _ in range(50):
            first, second = layer(x), layer(x)
            if address(first) == address(second) or (first != expected).any() or (second != expected).any():
                wrong.append(factor)

    workers = [threading.Thread(target=work, args=(factor,)) for factor in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
