"""Law 6 at every native entry point: any input gives a result or a typed exception, never a panic or a crash; and a
call that fails has changed nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InvalidArgument, KVCache, KvcoreError, Linear, Threads, UnsupportedSimd
from kvcore._kvcore import (
    activate,
    argmax,
    e4m3_decode,
    e4m3_encode,
    layer_norm,
    linear_heads,
    reference_attention,
    rms_norm,
    rope,
    rope_split,
    route,
    softcap,
)
from kvtools import Sample, compute, make_cache, run_python


class OutburstError(Exception):
    """What ill-behaved arguments raise themselves."""


TYPED = (KvcoreError, TypeError, ValueError, OverflowError, NotImplementedError, MemoryError, OutburstError)
"""What a call may raise. A panic (pyo3_runtime.PanicException) is none of these; it is not even an Exception."""


class Raises:
    """Breaks out when anybody looks at it."""

    def __len__(self) -> int:
        raise OutburstError

    def __iter__(self) -> Any:
        raise OutburstError

    def __index__(self) -> int:
        raise OutburstError

    def __float__(self) -> float:
        raise OutburstError

    def __bool__(self) -> bool:
        raise OutburstError

    def __repr__(self) -> str:
        raise OutburstError

    def __getitem__(self, i: object) -> object:
        raise OutburstError


class Boasts:
    """Claims a length that it does not have."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> int:
        if i > 2:
            raise IndexError
        return i

    def __repr__(self) -> str:
        return f"Boasts({self.length})"


class World:
    """A cache with every kind of handle in it, and what must not change when a call fails."""

    def __init__(self) -> None:
        self.cache = make_cache()
        sample = Sample.random(self.cache, 20)
        self.live, _ = compute(self.cache, sample)
        self.cache.append(self.live, range(10))
        self.fork = self.cache.fork(self.live)
        self.freed = self.cache.add([1, 2, 3])
        x = np.zeros((5, 2, 8), np.float32)
        self.stale = self.cache.plan([(self.live, 2)])
        self.batch = self.cache.plan([(self.live, 5)])
        self.cache.write(0, self.batch, x, x)
        other = self.cache.add(range(50, 55))
        self.committed = self.cache.plan([(other, 5)])
        for layer in range(2):
            self.cache.write(layer, self.committed, x, x)
        self.cache.commit(self.committed)
        self.cache.free(self.freed)
        self.complete = self.cache.plan([(self.fork, 5)])
        for layer in range(2):
            self.cache.write(layer, self.complete, x, x)
        self.foreign_cache = make_cache(num_layers=3)
        self.foreign = self.foreign_cache.add(range(30))
        self.foreign_batch = self.foreign_cache.plan([(self.foreign, 5)])
        self.closed = make_cache()
        self.closed.close()
        self.linear = Linear(np.ones((6, 8), np.float32))

    def snapshot(self) -> tuple[Any, ...]:
        state = []
        for cache, seqs in ((self.cache, [self.live, self.fork]), (self.foreign_cache, [self.foreign])):
            cache.check()
            state.append(cache.stats())
            for seq in seqs:
                try:
                    tokens = cache.token_ids(seq).tolist()
                except KvcoreError as gone:  # by a call that went well
                    state.append(type(gone))
                    continue
                state += [tokens, cache.block_table(seq), cache.num_computed_tokens(seq)]
                state += [x.tobytes() for layer in range(cache.num_layers) for x in cache.read(layer, seq)]
        return tuple(state)


# Garbage

SHAPES = [
    (), (0,), (1,), (5,), (8,), (5, 8), (6, 8), (5, 6), (8, 6), (0, 8), (5, 0), (5, 2, 8), (5, 4, 8), (0, 2, 8),
    (5, 0, 8), (5, 2, 0), (4, 2, 8), (5, 8, 2), (1, 5, 2, 8), (5, 16), (5, 32), (5, 4), (3, 0, 4), (1,) * 30,
]  # fmt: skip
ARRAY_DTYPES: list[Any] = [
    np.float32, np.float32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ">f4", "<f4", np.int8, np.uint8,
    np.int64, np.uint64, np.uint32, ">i4", bool, np.complex64, "U3", "S2", "O", "M8[s]", ml_dtypes.float8_e4m3fn,
    [("a", "f4"), ("b", "i2")],
]  # fmt: skip
LAYOUTS = ["c", "c", "f", "strided", "reversed", "broadcast", "read-only", "unaligned", "matrix", "masked"]
FILLS = [0, 1, -1, 2.5, float("nan"), float("inf"), -float("inf"), 3e38, 2**31, 2**40]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of many dtypes, shapes and layouts."""
    shape, dtype, fill = (draw(st.sampled_from(options)) for options in (SHAPES, ARRAY_DTYPES, FILLS))
    with np.errstate(all="ignore"):
        try:
            array = np.full(shape, fill).astype(dtype)
        except (TypeError, ValueError, OverflowError):
            array = np.zeros(shape, dtype)
    match draw(st.sampled_from(LAYOUTS)):
        case "f":
            return np.asfortranarray(array)
        case "strided" if array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        case "reversed" if array.ndim:
            return array[::-1]
        case "broadcast" if array.size:
            return np.broadcast_to(array.ravel()[0], shape)
        case "read-only":
            array.flags.writeable = False
            return array
        case "unaligned" if not array.dtype.hasobject:
            raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
            other = np.ndarray(shape, array.dtype, raw.data)
            other[...] = array
            return other
        case "matrix" if array.ndim == 2:
            return array.view(np.matrix) if array.dtype.kind == "f" else array
        case "masked" if array.dtype.kind == "f":
            return np.ma.masked_array(array, np.ones(shape, bool))
        case _:
            return array


INTEGERS = st.sampled_from([
    0, 1, 2, -1, 3, 5, 7, 15, 16, 17, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, 2**64, -(2**63), -(2**64), 10**4000,
])  # fmt: skip
NUMBERS = st.sampled_from([
    0.0, 1.0, -1.0, 0.5, 1e-50, 1e-40, 1e38, 1e300, float("nan"), float("inf"), -float("inf"), 5e-324,
])  # fmt: skip
OTHERS = st.sampled_from([
    None, True, False, "", "float32", "f", "\ud800", b"", b"\xff", (), [], {}, [None], ["a"], [1.0], [1, 2, 3], [-1],
    [True], [2**32], [10**4000], [[]], [[1]], {1: 2}, object(), print, 1j, Raises(), [Raises()], Boasts(2**62),
    Boasts(2**40), Boasts(-1), Boasts(3), range(2**62), range(2**40), range(5), np.float32(3), np.int64(3),
    np.bool_(True), type, Ellipsis,
])  # fmt: skip


def handles(world: World) -> st.SearchStrategy[Any]:
    w = world
    return st.sampled_from([
        w.live, w.fork, w.freed, w.foreign, w.batch, w.complete, w.stale, w.committed, w.foreign_batch, w.cache,
        w.foreign_cache, w.closed, w.linear,
    ])  # fmt: skip


def garbage(world: World) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(handles(world), st.one_of(INTEGERS, OTHERS)), max_size=3)
    return st.one_of(OTHERS, INTEGERS, NUMBERS, arrays(), handles(world), pairs)


# Entry points: what is called, and a good value of each argument


def args(**arguments: Any) -> dict[str, Any]:
    return arguments


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


GOOD_CACHE = args(
    num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=4, block_size=16, dtype="fp8", k_scale=1.0, v_scale=0.5,
    groups=None, num_threads=1, threads=None, enable_prefix_caching=True, _equal_hashes=False,
)  # fmt: skip

Call = tuple[Callable[..., Any], dict[str, Any]]


def entry_points(w: World) -> dict[str, Call]:
    c, x = w.cache, floats(5, 2, 8)
    return {
        "KVCache": (KVCache, GOOD_CACHE),
        "add": (c.add, args(token_ids=[1, 2, 3], salt="a", use_prefix=True)),
        "append": (c.append, args(seq=w.live, token_ids=[1, 2])),
        "plan": (c.plan, args(items=[(w.live, 3), (w.fork, 2)])),
        "write": (c.write, args(layer=1, batch=w.batch, k=x, v=x)),
        "attend": (c.attend, args(layer=0, batch=w.batch, q=floats(5, 4, 8), scale=0.5, window=None, softcap=None,
                                  sinks=None)),
        "commit": (c.commit, args(batch=w.complete)),
        "fork": (c.fork, args(seq=w.live)),
        "truncate": (c.truncate, args(seq=w.live, num_tokens=7)),
        "free": (c.free, args(seq=w.live)),
        "read": (c.read, args(layer=1, seq=w.live)),
        "block_table": (c.block_table, args(seq=w.live)),
        "token_ids": (c.token_ids, args(seq=w.live)),
        "num_tokens": (c.num_tokens, args(seq=w.live)),
        "num_computed_tokens": (c.num_computed_tokens, args(seq=w.live)),
        "closed.add": (w.closed.add, args(token_ids=[1], salt=None)),
        "closed.write": (w.closed.write, args(layer=0, batch=w.batch, k=x, v=x)),
        "closed.attend": (w.closed.attend, args(layer=0, batch=w.batch, q=x)),
        "closed.free": (w.closed.free, args(seq=w.live)),
        "Threads": (Threads, args(num_threads=2)),
        "Linear": (Linear, args(weight=floats(6, 8), bias=floats(6), dtype="bfloat16", threads=None)),
        "linear": (w.linear, args(x=floats(5, 8))),
        "norm_forward": (w.linear.norm_forward, args(x=floats(5, 8), norm_weight=floats(8), eps=1e-5,
                                                          norm_bias=floats(8), norm="layer")),
        "add_forward": (w.linear.add_forward, args(x=floats(5, 8), residual=floats(5, 6))),
        "gated_add_forward": (w.linear.gated_add_forward, args(gate_up=floats(5, 16), residual=floats(5, 6),
                                                                   activation="clamped_swiglu", alpha=1.0, limit=2.0)),
        "activated_add_forward": (w.linear.activated_add_forward, args(x=floats(5, 8), residual=floats(5, 6),
                                                                       activation="gelu")),
        "linear_heads": (linear_heads, args(linears=[w.linear, w.linear], x=floats(5, 2, 8))),
        "rms_norm": (rms_norm, args(x=floats(5, 8), weight=floats(8), eps=1e-5, threads=None)),
        "rope_split": (rope_split, args(qkv=floats(5, 32), cos=floats(5, 2), sin=floats(5, 2), num_heads=4,
                                        num_kv_heads=2, head_dim=4, interleaved=True, q_norm=floats(16),
                                        k_norm=floats(8), norm="rms", norm_eps=1e-5, joint_norm=True, threads=None)),
        "layer_norm": (layer_norm, args(x=floats(5, 8), weight=floats(8), bias=floats(8), eps=1e-5, threads=None)),
        "rope": (rope, args(x=floats(5, 3, 8), cos=floats(5, 2), sin=floats(5, 2), interleaved=True, threads=None)),
        "activate": (activate, args(x=floats(5, 8), activation="silu", gated=True, alpha=1.0, limit=1.0, threads=None)),
        "softcap": (softcap, args(x=floats(5, 8), cap=3.0, threads=None)),
        "route": (route, args(logits=floats(5, 8), bias=floats(8), top_k=2, scoring="sigmoid", groups=4, top_groups=2,
                              group_best=2, renormalize=True, scale=2.0, threads=None)),
        "argmax": (argmax, args(row=floats(8))),
        "e4m3_encode": (e4m3_encode, args(values=floats(8), scale=0.5)),
        "e4m3_decode": (e4m3_decode, args(codes=np.arange(8, dtype=np.uint8), scale=0.5)),
        "reference_attention": (reference_attention, args(q=floats(5, 4, 8), k=x, v=x, scale=0.5)),
    }  # fmt: skip


NAMES = list(entry_points(World()))


@pytest.mark.parametrize("name", NAMES)
def test_good_arguments_are_good(name: str) -> None:
    """Or else the tests below would show nothing."""
    call, arguments = entry_points(World())[name]
    if name.startswith("closed."):
        with pytest.raises(KvcoreError):
            call(**arguments)
    else:
        call(**arguments)


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element")  # numpy's word on such a scalar
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_bad_arguments(name: str, data: st.DataObject) -> None:
    """One or more arguments replaced by garbage."""
    world = World()
    call, arguments = entry_points(world)[name]
    bad = data.draw(st.sets(st.sampled_from(list(arguments)), min_size=1, max_size=len(arguments)), label="replaced")
    arguments = arguments | {key: data.draw(garbage(world), label=key) for key in sorted(bad)}
    before = world.snapshot()
    try:
        call(**arguments)
    except TYPED:
        assert world.snapshot() == before, "a call that failed has changed something"
    else:
        world.snapshot()  # checks


@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers_of_arguments(name: str) -> None:
    call, arguments = entry_points(World())[name]
    with pytest.raises(TypeError):
        call(*[1] * 20)
    with pytest.raises(TypeError):
        call(**arguments, nonsense=1)


def test_handles_and_batches_are_not_made_by_hand() -> None:
    world = World()
    for kind in (type(world.live), type(world.batch)):
        with pytest.raises(TypeError):
            kind()
        with pytest.raises(TypeError):
            type("Sub", (kind,), {})
    with pytest.raises(AttributeError):
        world.live.num_cached_tokens = 3  # type: ignore[misc]
    assert "Sequence" in repr(world.live)
    assert "Batch" in repr(world.batch)


@pytest.mark.parametrize(("changes", "named"), [
    (args(num_layers=0), "num_layers"), (args(num_kv_heads=0), "num_kv_heads"), (args(num_blocks=0), "num_blocks"),
    (args(head_dim=0), "head_dim"), (args(head_dim=7), "head_dim"), (args(head_dim=258), "head_dim"),
    (args(block_size=0), "block_size"), (args(block_size=8), "block_size"), (args(block_size=24), "block_size"),
    (args(block_size=1040), "block_size"), (args(dtype="int3"), "int3"),
    (args(num_threads=0), "num_threads"), (args(num_threads=1025), "num_threads"),
])  # fmt: skip
def test_sizes_of_a_cache(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        make_cache(**changes)


def test_sizes_that_overflow() -> None:
    for name in ("num_layers", "num_kv_heads", "num_blocks"):
        for value in (2**62, 2**63, 2**64, -1, -(2**63)):
            with pytest.raises((KvcoreError, OverflowError)):
                make_cache(**{name: value})
    with pytest.raises(KvcoreError):
        make_cache(num_layers=2**31, num_kv_heads=2**31, num_blocks=2**31)


def test_both_kinds_of_threads() -> None:
    with pytest.raises(InvalidArgument, match="threads"):
        make_cache(num_threads=1, threads=Threads(1))


@pytest.mark.parametrize(("ids", "error"), [
    ([], ValueError), (np.zeros(0, np.int64), ValueError), ("abc", TypeError), (b"abc", TypeError), ([1.0], TypeError),
    (np.zeros(3), TypeError), ([True], TypeError), (np.ones(3, bool), TypeError), ([None], TypeError), (5, TypeError),
    (None, TypeError), ([-1], ValueError), ([2**32 - 1], ValueError), ([2**70], ValueError),
    (np.array([-1]), ValueError), (np.array([2**63], np.uint64), ValueError), (np.ones((2, 2), int), ValueError),
    (np.array(3), ValueError), ([[1]], TypeError), ([10**5000], ValueError), (np.array([1], object), TypeError),
])  # fmt: skip
def test_token_ids(ids: Any, error: type[Exception]) -> None:
    cache = make_cache()
    with pytest.raises(error, match=r"token_ids|token"):
        cache.add(ids)
    seq = cache.add([1])
    if not (hasattr(ids, "__len__") and len(np.shape(ids)) and len(ids) == 0):  # appending nothing is no error
        with pytest.raises(error, match="token_ids"):
            cache.append(seq, ids)
    assert cache.num_tokens(seq) == 1
    cache.check()


def test_what_an_argument_raises_comes_through() -> None:
    cache = make_cache()
    seq = cache.add([1])
    for bad in (Raises(), [1, Raises()]):
        with pytest.raises((OutburstError, TypeError)):
            cache.add(bad)

    def broken() -> Any:
        yield 1
        raise OutburstError

    with pytest.raises(OutburstError):
        cache.append(seq, broken())
    with pytest.raises(OutburstError):
        cache.add([1, Raises()])
    with pytest.raises(OutburstError):
        cache.plan((seq, 1) if i == 0 else broken_pair() for i in range(2))
    assert cache.num_tokens(seq) == 1


def broken_pair() -> Any:
    raise OutburstError


def test_arguments_that_use_the_cache_themselves() -> None:
    """An __index__ or an iterator may call back into the cache whose call it is an argument of."""
    cache = make_cache()
    seq = cache.add(range(20))

    class Frees:
        def __index__(self) -> int:
            cache.free(seq)
            return 1

    with pytest.raises(KvcoreError):
        cache.append(seq, [Frees()])
    other = cache.add(range(20))

    def pairs() -> Any:
        cache.plan([(other, 3)])
        yield other, 2

    assert cache.plan(pairs()).num_tokens == 2
    cache.check()
    assert cache.stats()["num_sequences"] == 1


def test_shapes_are_named() -> None:
    world = World()
    x = floats(5, 2, 8)
    for k, v, named in [(floats(4, 2, 8), x, "k: expected shape"), (x, floats(5, 8, 2), "v: expected shape"),
                        (floats(5, 16), x, "k: expected shape")]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=named):
            world.cache.write(0, world.batch, k, v)
    with pytest.raises(TypeError, match="k: expected a float32 array, got float64"):
        world.cache.write(0, world.batch, x.astype(float), x)
    with pytest.raises(TypeError, match="foreign byte order"):
        world.cache.write(0, world.batch, x.astype(">f4"), x)
    with pytest.raises(TypeError, match="k: expected a numpy array"):
        world.cache.write(0, world.batch, x.tolist(), x)
    for heads in (0, 1, 3):
        with pytest.raises(InvalidArgument, match="q heads"):
            world.cache.attend(0, world.batch, floats(5, heads, 8))
    for scale in (float("nan"), float("inf"), 1e300):
        with pytest.raises(InvalidArgument, match="scale"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), scale)
    for window in (0, -1):
        with pytest.raises(InvalidArgument, match="window"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), window=window)
    for cap in (0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300):
        with pytest.raises(InvalidArgument, match="softcap: expected a finite number above 0"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), softcap=cap)
    for number in (3e38, -3e38):  # finite, but not in base 2
        numbers = np.full((4, 1), number, np.float32)
        with pytest.raises(InvalidArgument, match="position_bias: expected finite numbers from -2e38 to 2e38"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), position_bias=numbers)
        with pytest.raises(InvalidArgument, match="alibi_slopes: expected finite numbers from -1e28 to 1e28"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), alibi_slopes=numbers[:, 0])
    for name in ("sinks", "alibi_slopes"):
        for wrong in (floats(3), floats(5), floats(4, 1), floats(0)):
            with pytest.raises(InvalidArgument, match=name):
                world.cache.attend(0, world.batch, floats(5, 4, 8), **{name: wrong})
        for number in (float("nan"), float("inf")):
            with pytest.raises(InvalidArgument, match=name):
                world.cache.attend(0, world.batch, floats(5, 4, 8), **{name: np.full(4, number, np.float32)})
        with pytest.raises(TypeError, match=name):
            world.cache.attend(0, world.batch, floats(5, 4, 8), **{name: 4})
    for wrong in (floats(4), floats(3, 2), floats(4, 0), np.full((4, 2), np.nan, np.float32)):
        with pytest.raises(InvalidArgument, match="position_bias"):
            world.cache.attend(0, world.batch, floats(5, 4, 8), position_bias=wrong)
    with pytest.raises(InvalidArgument, match="position_bias: expected None beside alibi_slopes"):
        world.cache.attend(0, world.batch, floats(5, 4, 8), alibi_slopes=floats(4), position_bias=floats(4, 2))
    with pytest.raises(InvalidArgument, match="layer: expected 0 to 1, got 2"):
        world.cache.attend(2, world.batch, floats(5, 4, 8))


def test_an_oracle_without_heads_or_tokens() -> None:
    for q, k in [((3, 0, 4), (5, 2, 4)), ((0, 0, 4), (5, 2, 4)), ((3, 2, 4), (5, 0, 4)), ((3, 2, 0), (5, 2, 0)),
                 ((6, 2, 4), (5, 2, 4)), ((1, 2, 4), (0, 2, 4)), ((1, 3, 4), (5, 2, 4))]:  # fmt: skip
        with pytest.raises(InvalidArgument):
            reference_attention(floats(*q), floats(*k), floats(*k))
    assert reference_attention(floats(0, 2, 4), floats(5, 2, 4), floats(5, 2, 4)).shape == (0, 2, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_absurd_sizes_are_refused_without_harm() -> None:
    """With 4 GB of address space: nothing may end the process, or take long to say no."""
    run_python(
        """
import resource
import numpy as np
from kvcore import KVCache, Linear, Threads
from kvcore._kvcore import activate, e4m3_encode, rms_norm
from kvtools import make_cache
from test_bad_input import TYPED, Boasts

cache = make_cache()
seq = cache.add([1])
linear = Linear(np.ones((1 << 20, 1), np.float32), threads=Threads(1))
tall = np.ones((1 << 24, 1), np.float32)  # 16 M rows x 1 M outputs
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
wide = np.broadcast_to(np.float32(1), (1 << 20, 1 << 20))
calls = [
    lambda: cache.add(range(2**62)),
    lambda: cache.add(range(2**40)),
    lambda: cache.add(range(-(2**40), 0)),
    lambda: cache.append(seq, Boasts(2**62)),
    lambda: cache.append(seq, range(2**62)),
    lambda: cache.add(np.broadcast_to(np.int64(1), 2**40)),
    lambda: cache.plan(range(2**62)),
    lambda: cache.plan(range(2**40)),
    lambda: cache.plan(Boasts(2**62)),
    lambda: linear(tall),
    lambda: linear.norm_forward(tall, np.ones(1, np.float32), 1e-5),
    lambda: linear(np.broadcast_to(np.float32(1), (1 << 40, 1))),
    lambda: Linear(wide),
    lambda: rms_norm(wide, wide[0], 1e-5),
    lambda: activate(wide, gated=True),
    lambda: e4m3_encode(np.broadcast_to(np.float32(1), 1 << 40)),
    lambda: KVCache(num_layers=1 << 20, num_kv_heads=1 << 10, head_dim=256, num_blocks=1 << 20),
    lambda: KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=(1 << 32) - 1),
    lambda: KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=1 << 40),
    lambda: KVCache(num_layers=1, num_kv_heads=1 << 50, head_dim=2, num_blocks=1),
    lambda: Threads(1 << 40),
]
for i, call in enumerate(calls):
    try:
        call()
    except TYPED as error:
        print(i, type(error).__name__, error)
    else:
        print(i, "no error")
    cache.check()
assert cache.num_tokens(seq) in (1, 4)
cache.free(seq)
assert cache.stats()["num_sequences"] == 0
""",
        timeout=60,
    )


def test_a_level_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    before = world.snapshot()
    monkeypatch.setenv("KVCORE_SIMD", "\udcff")
    with pytest.raises(UnsupportedSimd):
        make_cache()
    with pytest.raises(UnsupportedSimd):
        argmax(floats(3))
    assert world.snapshot() == before  # what exists keeps its level


@pytest.mark.parametrize("bad", [-1, 2**64, True, None, 1.5, "4"], ids=repr)
def test_sizes_are_refused_by_name(bad: object) -> None:
    kind = InvalidArgument if type(bad) is int else TypeError
    for name in ("num_layers", "num_kv_heads", "head_dim", "num_blocks"):
        sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "num_blocks": 2, name: bad}
        with pytest.raises(kind, match=f"{name}: expected an integer"):
            KVCache(**sizes)
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=2)
    seq = cache.add([1, 2])
    with pytest.raises(kind, match="layer: expected an integer"):
        cache.read(bad, seq)  # type: ignore[arg-type]
    with pytest.raises(kind, match="num_tokens: expected an integer"):
        cache.truncate(seq, bad)  # type: ignore[arg-type]
    if bad is not None:
        with pytest.raises(kind, match="num_threads: expected an integer"):
            Threads(bad)  # type: ignore[arg-type]
    cache.check()
