"""Attention and its companions with arguments of any kind: a result or an error of ours, and the cache is as it was."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InvalidArgument, KVCache, KvcoreError, KVGroup, OutOfMemory
from kvtools import assert_bitwise

TOKENS = 40
NEW = 7
"""Tokens of the sequence that lives through a test, and how many of them its batch plans."""

FORMATS = [
    *((dtype, "static") for dtype in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")),
    *((dtype, "per_token_head") for dtype in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")),
]


class World:
    """A cache of one layer with a planned batch of two sequences, and calls of it that are right."""

    def __init__(self, kind: str, heads: int, group: int, dims: tuple[int, int], dtype: str, scale_mode: str) -> None:
        self.k_dim, self.v_dim = dims
        self.kv_heads, self.q_heads = heads, heads * group
        layer: dict[str, Any] = {"num_kv_heads": heads, "head_dim": self.k_dim, "v_head_dim": self.v_dim}
        if kind == "latent":
            layer = {"rank": self.v_dim, "rope_dim": self.k_dim - self.v_dim}
        if kind == "sliding_window":
            layer["window"] = 9
        self.latent = kind == "latent"
        self.cache = KVCache(
            groups=[KVGroup(kind, [0], **layer)],
            num_blocks=24, dtype=dtype, scale_mode=scale_mode, num_threads=2,
        )  # fmt: skip
        rng = np.random.default_rng(3)
        self.k = rng.standard_normal((TOKENS + 3, heads, self.k_dim), np.float32)
        self.v = rng.standard_normal((TOKENS + 3, heads, self.v_dim), np.float32)
        self.q = rng.standard_normal((NEW + 3, self.q_heads, self.k_dim), np.float32)
        self.seq, self.other = self.cache.add(range(TOKENS)), self.cache.add([1, 2, 3], use_prefix=False)
        first = self.cache.plan([(self.seq, TOKENS - NEW)])
        self.write(first, slice(0, TOKENS - NEW))
        self.cache.commit(first)
        self.batch = self.cache.plan([(self.seq, NEW), (self.other, 3)])
        self.rows = slice(TOKENS - NEW, TOKENS + 3)
        self.write(self.batch, self.rows)

    def write(self, batch: Any, rows: slice) -> None:
        self.cache.write(0, batch, self.k[rows], None if self.latent else self.v[rows])

    def attend(self) -> Any:
        return self.cache.attend(0, self.batch, self.q, 0.3, return_lse=True)

    def anew(self) -> Any:
        """What a new sequence gets for the same tokens: all calls, from the first to the last."""
        seq = self.cache.add(range(TOKENS), use_prefix=False)
        batch = self.cache.plan([(seq, TOKENS)])
        self.write(batch, slice(0, TOKENS))
        q = np.repeat(self.q[:1], TOKENS, 0)
        out = self.cache.attend(0, batch, q, 0.3)
        weights = self.cache.attention_weights(0, batch, q, rows=[TOKENS - 1], scale=0.3)
        self.cache.free(seq)
        return out, weights


@st.composite
def worlds(draw: st.DrawFn) -> World:
    kind = draw(st.sampled_from(["full", "full", "sliding_window", "latent"]))
    even = st.integers(1, 24).map(lambda half: 2 * half)
    k_dim, v_dim = draw(even), draw(even)
    heads = 1 if kind == "latent" else draw(st.integers(1, 3))
    if kind == "latent":
        k_dim, v_dim = k_dim + v_dim, v_dim
    return World(kind, heads, draw(st.integers(1, 4)), (k_dim, v_dim), *draw(st.sampled_from(FORMATS)))


def in_memory(order: str, x: Any) -> Any:
    """The same values in another order of memory."""
    if order == "Fortran":
        return np.asfortranarray(x)
    if order == "backwards":
        return x[::-1].copy()[::-1]
    if order == "strided":
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if order == "transposed":
        return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    if order == "unaligned":
        raw = np.zeros(x.nbytes + 1, np.uint8)
        y = raw[1:].view(x.dtype).reshape(x.shape)
        y[...] = x
        return y
    if order == "read-only":
        y = x.copy()
        y.flags.writeable = False
        return y
    return x


ORDERS = st.sampled_from(["C", "Fortran", "backwards", "strided", "transposed", "unaligned", "read-only"])
NUMBERS = st.sampled_from([
    0, 1, 2, 3, -1, 16, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, -(10**400), 0.0, -0.5, 1e-45,
    1e38, 3e38, 1e308, float("nan"), float("inf"), float("-inf"), True, None, "1", b"1", 1j, [], [0], (), {}, object(),
    np.int64(-1), np.uint64(2**64 - 1), np.float32("nan"), np.float64(0.5), np.bool_(True), np.array(1),
    np.array([1, 2]),
])  # fmt: skip
INDICES = st.one_of(
    st.none(),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(NUMBERS, max_size=4),
    st.lists(st.integers(-(2**70), 2**70), max_size=3),
    st.lists(st.integers(0, 3), max_size=4).map(lambda x: np.array(x, np.int64)),
    NUMBERS,
)


@st.composite
def arrays(draw: st.DrawFn, right: Any) -> Any:
    """Rather the array that is right, in any order of memory; else one that differs in some way."""
    how = draw(st.sampled_from(["right"] * 6 + ["values", "dtype", "shape", "dims", "huge", "no array"]))
    if how == "values":
        right = right.copy()
        place = tuple(draw(st.integers(0, max(n - 1, 0))) for n in right.shape)
        if right.size:
            right[place] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45]))
    if how == "dtype":
        kinds = [
            "float16", "float64", ">f4", "int8", "int64", "uint64", "complex64", "bool", "object", "U3", "M8[s]",
            ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4,
        ]  # fmt: skip
        kind = draw(st.sampled_from(kinds))
        return np.zeros(right.shape, kind) if kind == "M8[s]" else right.astype(kind)
    if how == "shape":
        shape = list(right.shape)
        shape[draw(st.integers(0, len(shape) - 1))] += draw(st.sampled_from([-1, 1, 2, 16]))
        return np.zeros([max(n, 0) for n in shape], np.float32)
    if how == "dims":
        return draw(st.sampled_from([right[None], right.ravel(), right[0], np.float32(1), np.zeros(0, np.float32)]))
    if how == "huge" and right.ndim > 1:
        # Nothing in it, whatever its shape says.
        shape = list(right.shape)
        at = draw(st.integers(0, len(shape) - 1))
        shape[at], shape[at - 1] = 0, draw(st.sampled_from([2**31, 2**40, 2**50]))
        return np.empty(shape, np.float32)
    if how == "no array":
        return draw(st.one_of(NUMBERS, st.just(right.tolist()), st.just(memoryview(bytes(8)))))
    return in_memory(draw(ORDERS), right)


def or_else(right: Any, wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(right), st.just(right), st.just(right), wrong)


@st.composite
def scores(draw: st.DrawFn, world: World) -> dict[str, Any]:
    """Arguments that say how scores become weights, each of them rarely there."""
    heads = world.q_heads
    given: dict[str, Any] = {"scale": draw(or_else(0.3, NUMBERS))}
    for name, right in [("window", 5), ("softcap", 3.0)]:
        if draw(st.integers(0, 3)) == 0:
            given[name] = draw(or_else(right, NUMBERS))
    for name, shape in [("sinks", (heads,)), ("alibi_slopes", (heads,)), ("position_bias", (heads, 4))]:
        if draw(st.integers(0, 4)) == 0:
            given[name] = draw(arrays(np.full(shape, 0.1, np.float32)))
    return given


def handles(world: World) -> st.SearchStrategy[Any]:
    return or_else(world.batch, st.one_of(NUMBERS, st.just(world.seq)))


def call(world: World, data: st.DataObject) -> Any:
    """One call, drawn with all its arguments."""
    cache, draw = world.cache, data.draw
    method = draw(st.sampled_from(["attend", "attention_weights", "write", "plan"]))
    layer = draw(or_else(0, NUMBERS))
    if method == "attend":
        args = {**draw(scores(world)), "return_lse": draw(or_else(True, NUMBERS))}
        return cache.attend(layer, draw(handles(world)), draw(arrays(world.q)), **args)
    if method == "attention_weights":
        args = draw(scores(world))
        for name, values in [("index", or_else(1, NUMBERS)), ("rows", INDICES), ("heads", INDICES)]:
            if draw(st.booleans()):
                args[name] = draw(values)
        return cache.attention_weights(layer, draw(handles(world)), draw(arrays(world.q)), **args)
    if method == "write":
        v = draw(or_else(None, NUMBERS)) if world.latent else draw(arrays(world.v[world.rows]))
        return cache.write(layer, draw(handles(world)), draw(arrays(world.k[world.rows])), v)
    foreign = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=1, num_threads=1).add([1])
    pair = st.tuples(st.sampled_from([world.seq, foreign, *[None, 3]]), NUMBERS)
    items = draw(st.one_of(st.lists(st.one_of(pair, NUMBERS), min_size=1, max_size=3), NUMBERS))
    cache.plan(items)
    # That has outdated the batch.
    world.batch = cache.plan([(world.seq, NEW), (world.other, 3)])
    world.write(world.batch, world.rows)
    return None


@given(worlds(), st.data())
def test_any_arguments_give_a_result_or_an_error_of_ours(world: World, data: st.DataObject) -> None:
    before, anew = world.attend(), world.anew()
    for _ in range(8):
        try:
            call(world, data)
        except (KvcoreError, TypeError, ValueError):
            world.cache.check()
    # A write that was right has written other values; nothing else may have changed anything, so the batch is valid.
    world.write(world.batch, world.rows)
    for x, y in zip((*before, *anew), (*world.attend(), *world.anew()), strict=True):
        assert_bitwise(x, y)
    world.cache.commit(world.batch)
    for seq in (world.seq, world.other):
        world.cache.free(seq)
    world.cache.check()


@given(worlds(), ORDERS, ORDERS, ORDERS)
def test_the_order_of_memory_changes_no_bit(world: World, of_q: str, of_k: str, of_v: str) -> None:
    out, lse = world.attend()
    weights = world.cache.attention_weights(0, world.batch, world.q, scale=0.3)
    v = None if world.latent else in_memory(of_v, world.v[world.rows])
    world.cache.write(0, world.batch, in_memory(of_k, world.k[world.rows]), v)
    again = world.cache.attend(0, world.batch, in_memory(of_q, world.q), 0.3, return_lse=True)
    assert_bitwise(out, again[0])
    assert_bitwise(lse, again[1])
    assert_bitwise(weights, world.cache.attention_weights(0, world.batch, in_memory(of_q, world.q), scale=0.3))


@given(worlds(), st.integers(0, NEW + 2), st.sampled_from([np.nan, np.inf, -np.inf, 3e38]))
def test_a_query_that_is_no_number_stays_in_its_row(world: World, row: int, value: float) -> None:
    out, lse = world.attend()
    q = world.q.copy()
    q[row, 0, 0] = value
    got, got_lse = world.cache.attend(0, world.batch, q, 0.3, return_lse=True)
    others = np.arange(len(q)) != row
    assert_bitwise(out[others], got[others])
    assert_bitwise(lse[others], got_lse[others])
    # In its row it stays in its head.
    assert_bitwise(out[row, 1:], got[row, 1:])


def test_more_than_memory_holds() -> None:
    """Arrays that are one number for any shape, and one row chosen over and over: an error, and nothing has changed."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=1, dtype="float32")
    batch = cache.plan([(cache.add([1, 2]), 2)])
    rows = np.ones((2, 1, 8), np.float32)
    cache.write(0, batch, rows, rows)
    with pytest.raises(MemoryError):
        cache.attend(0, batch, np.broadcast_to(np.float32(1), (2, 2**48, 8)))
    with pytest.raises(OutOfMemory):
        cache.attention_weights(0, batch, rows, rows=[1] * 2**20, heads=[0] * 2**20)
    with pytest.raises(InvalidArgument, match="rows: expected at most 1048576 indices, got more"):
        cache.attention_weights(0, batch, rows, rows=itertools.repeat(1))
    assert_bitwise(cache.attend(0, batch, rows), rows)
    cache.check()
