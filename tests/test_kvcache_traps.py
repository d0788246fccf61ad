"""Faults that users of other systems reported, as small cases with the right values."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcore import (
    InvalidArgument,
    InvalidHandle,
    KVCache,
    Linear,
    OutOfBlocks,
    Threads,
    UnsupportedSimd,
    available_simd,
)
from kvcore import simd as current_simd
from kvcore._kvcore import argmax, e4m3_decode, e4m3_encode, rms_norm
from kvtools import (
    DTYPES,
    SIMD_ENV,
    Sample,
    advance,
    assert_bitwise,
    assert_no_leak,
    compute,
    expected_attention,
    forced_simd,
    make_cache,
    rounded,
    run_python,
    tolerance,
)

SCALES = {"k_scale": 0.5, "v_scale": 2.0}


def cold(sample: Sample, **sizes: object) -> np.ndarray:
    """What a cache without prefix caching computes."""
    return compute(make_cache(enable_prefix_caching=False, **sizes), sample)[1]


# Paging and prefix cache


def test_equal_hashes_of_different_blocks_do_not_hit() -> None:
    cache = make_cache(num_blocks=32, _equal_hashes=True)
    samples = [Sample.random(cache, 40, seed) for seed in range(4)]
    # Only the last token of the first block differs: the tokens before it are shared, the block is not.
    for name in ("k", "v", "q"):
        getattr(samples[3], name)[:, :15] = getattr(samples[2], name)[:, :15]
    samples[3].tokens[:15] = samples[2].tokens[:15]
    for sample, common in zip(samples, (0, 0, 0, 15), strict=True):
        seq, out = compute(cache, sample)
        assert seq.num_cached_tokens == common
        assert_bitwise(out, cold(sample)[:, common:])
    # The same first block and another second one.
    fork = Sample.random(cache, 40, 7)
    for name in ("k", "v", "q"):
        getattr(fork, name)[:, :16] = getattr(samples[1], name)[:, :16]
    fork.tokens[:16] = samples[1].tokens[:16]
    seq, out = compute(cache, fork)
    assert seq.num_cached_tokens == 16
    assert_bitwise(out, cold(fork)[:, 16:])
    # And what is equal is still found.
    for sample in (*samples, fork):
        seq, out = compute(cache, sample)
        assert seq.num_cached_tokens == 39
        assert_bitwise(out, cold(sample)[:, 39:])
    cache.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [15, 16, 17, 31, 32, 33])
def test_a_full_hit_leaves_a_token_to_compute(n: int, dtype: str) -> None:
    cached = n - 1  # to the token
    cache = make_cache(dtype=dtype)
    sample = Sample.random(cache, n)
    first, expected = compute(cache, sample)
    assert first.num_cached_tokens == 0
    for freed in (False, True):
        second, out = compute(cache, sample)
        assert second.num_cached_tokens == cached
        assert out.shape[1] == n - cached >= 1
        assert_bitwise(out, expected[:, cached:])
        cache.free(second)
        if not freed:
            cache.free(first)
    assert_no_leak(cache)


def test_salts_are_domains_of_their_own() -> None:
    cache = make_cache(num_blocks=64)
    tokens = Sample.random(cache, 40)
    salts = [None, "", "X", "Y", b"\xff", "é", "X" * 1000]
    for salt in salts:
        seq, out = compute(cache, tokens, salt=salt)
        assert seq.num_cached_tokens == 0, salt
        assert_bitwise(out, cold(tokens))
    for salt in [*salts, b"", b"X", b"Y", "é".encode()]:  # a str is its UTF-8 bytes
        assert cache.add(tokens.tokens, salt=salt).num_cached_tokens == 39, salt
    cache.check()


def test_equal_prompts_of_one_step() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 32)
    seqs = [cache.add(sample.tokens) for _ in range(2)]
    batch = cache.plan([(seq, 32) for seq in seqs])
    assert not set(cache.block_table(seqs[0])) & set(cache.block_table(seqs[1]))
    outs = []
    for layer in range(2):
        k, v, q = (np.concatenate([x[layer]] * 2) for x in (sample.k, sample.v, sample.q))
        assert cache.add([*sample.tokens, 1]).num_cached_tokens == 0  # never before every layer is written
        cache.write(layer, batch, k, v)
        outs.append(cache.attend(layer, batch, q))
    assert cache.add([*sample.tokens, 1]).num_cached_tokens == 0
    cache.commit(batch)
    out = np.stack(outs)
    assert_bitwise(out[:, :32], cold(sample))
    assert_bitwise(out[:, 32:], cold(sample))
    assert cache.add([*sample.tokens, 1]).num_cached_tokens == 32
    for seq in seqs:
        cache.free(seq)
    cache.check()


def test_an_evicted_block_is_not_found_under_its_old_prefix() -> None:
    cache = make_cache(num_blocks=2)
    old, new = Sample.random(cache, 32, 1), Sample.random(cache, 32, 2)
    seq, _ = compute(cache, old)
    cache.free(seq)
    assert cache.stats()["cached"] == 2
    seq, out = compute(cache, new)
    assert_bitwise(out, cold(new, num_blocks=2))
    assert cache.stats()["evictions"] == 2
    assert cache.add([*old.tokens, 1]).num_cached_tokens == 0
    assert cache.add([*new.tokens, 1]).num_cached_tokens == 32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fork_writes_into_a_copy_of_the_partial_last_block(dtype: str) -> None:
    cache = make_cache(dtype=dtype)
    prompt = Sample.random(cache, 19)
    parent, _ = compute(cache, prompt)
    child = cache.fork(parent)
    assert cache.block_table(child) == cache.block_table(parent)

    def branch(seed: int) -> Sample:
        own = Sample.random(cache, 24, seed)
        for name in ("k", "v", "q"):
            getattr(own, name)[:, :19] = getattr(prompt, name)
        own.tokens[:19] = prompt.tokens
        return own

    ours, theirs = branch(1), branch(2)
    before = [cache.read(layer, parent) for layer in range(2)]
    cache.append(child, theirs.tokens[19:])
    (out,) = advance(cache, (child, theirs, 5))
    assert_bitwise(out, cold(theirs, dtype=dtype)[:, 19:])
    assert cache.block_table(child)[0] == cache.block_table(parent)[0]
    assert cache.block_table(child)[1] != cache.block_table(parent)[1]
    assert cache.stats()["copies"] == 1
    for layer in range(2):
        for a, b in zip(before[layer], cache.read(layer, parent), strict=True):
            assert_bitwise(a, b)
    cache.append(parent, ours.tokens[19:])
    (out,) = advance(cache, (parent, ours, 5))
    assert_bitwise(out, cold(ours, dtype=dtype)[:, 19:])
    assert cache.stats()["copies"] == 1  # alone now: no second copy
    k, _ = cache.read(1, child)
    np.testing.assert_array_equal(k, rounded(theirs.k[1], dtype))
    cache.free(parent)
    cache.free(child)
    assert_no_leak(cache)


def test_decoding_over_the_boundary_takes_a_block_at_a_time() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 34)
    seq, out = compute(cache, sample.first(16))
    counts = [len(cache.block_table(seq))]
    outs = [out]
    for token in sample.tokens[16:]:
        cache.append(seq, [token])
        outs += advance(cache, (seq, sample, 1))
        counts.append(len(cache.block_table(seq)))
        assert counts[-1] == -(-cache.num_computed_tokens(seq) // 16)
        assert cache.stats()["used"] == counts[-1]
        assert cache.stats()["tokens"] == cache.num_computed_tokens(seq)
    assert counts == [1, *[2] * 16, 3, 3]
    assert_bitwise(np.concatenate(outs, axis=1), cold(sample))


def test_nothing_leaks_whatever_ends_a_sequence() -> None:
    cache = make_cache(num_layers=1, num_blocks=6)
    rng = np.random.default_rng(0)
    samples = [Sample.random(cache, 20 + 7 * seed, seed) for seed in range(5)]
    blocker = Sample.random(cache, 80, 99)
    refused = 0
    for i in range(1000):
        sample = samples[rng.integers(5)]
        how = i % 8
        seq = cache.add(sample.tokens)
        n = len(sample) - seq.num_cached_tokens
        if how == 0:  # aborted while it waits, with references to its prefix
            cache.free(seq)
        elif how == 1:  # with a plan that nothing was written to
            cache.plan([(seq, n)])
            cache.free(seq)
        elif how == 2:  # in the middle of the layers
            batch = cache.plan([(seq, n)])
            start = seq.num_cached_tokens
            cache.write(0, batch, sample.k[0, start:], sample.v[0, start:])
            cache.free(seq)
        elif how == 3:  # in the middle of the prompt
            advance(cache, (seq, sample, 1 + int(rng.integers(n))))
            cache.free(seq)
        elif how == 4:  # a branch, cut, and its parent
            advance(cache, (seq, sample, n))
            child = cache.fork(seq)
            cache.truncate(child, int(rng.integers(1, len(sample))))
            cache.free(seq)
            cache.free(child)
        elif how == 5:  # a failed allocation after a prefix hit
            other = cache.add(blocker.tokens, use_prefix=False)
            advance(cache, (other, blocker, min(80, 16 * cache.num_free_blocks)))
            more = 16 * cache.num_free_blocks + 17  # the last block of the prefix may have room for some
            cache.append(seq, range(more))
            with pytest.raises(OutOfBlocks):
                cache.plan([(seq, n + more)])
            refused += 1
            cache.free(seq)
            cache.free(other)
        else:  # to its end
            advance(cache, (seq, sample, n))
            cache.free(seq)
        assert_no_leak(cache)
    assert refused == 125
    assert cache.stats()["hit_tokens"] > 1000


def test_freeing_twice_is_an_error_and_changes_nothing() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 40)
    seq, _ = compute(cache, sample)
    child = cache.fork(seq)
    cache.free(seq)
    before = cache.stats()
    for _ in range(2):
        with pytest.raises(InvalidHandle):
            cache.free(seq)
    cache.append(child, [1])
    with pytest.raises(InvalidArgument, match="second time"):
        cache.plan([(child, 1), (child, 1)])
    assert cache.stats() == before
    cache.free(child)
    assert_no_leak(cache)


# Kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("written", [1, 5, 15, 16, 21])
def test_stale_memory_has_no_effect(written: int, dtype: str, simd_level: str) -> None:
    outs = []
    for poison in (0.0, float("nan"), 1e30, -1e30, float("inf")):
        cache = make_cache(dtype=dtype, head_dim=18)
        cache._fill(poison)
        sample = Sample.random(cache, written)
        seq, out = compute(cache, sample)
        child = cache.fork(seq)  # a copied block brings its stale slots along
        cache.append(child, [1])
        longer = Sample.random(cache, written + 1, 5)
        (step,) = advance(cache, (child, longer, 1))
        outs.append(np.concatenate([out, step], axis=1))
        for layer in range(2):
            np.testing.assert_array_equal(cache.read(layer, seq)[0], rounded(sample.k[layer], dtype))
    assert np.isfinite(outs[0]).all()
    for out in outs[1:]:
        assert_bitwise(out, outs[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_every_company(dtype: str, simd_level: str) -> None:
    """Alone, in batches of 2 and 7, in every slot, on 1 and 2 threads, the prompt whole and in chunks."""
    scales = SCALES if dtype == "fp8_e4m3" else {}
    sizes = dict(num_layers=1, num_kv_heads=2, head_dim=32, num_blocks=256, dtype=dtype, **scales)
    lengths = [530, 3, 17, 256, 257, 40, 300]
    threads = {n: Threads(n) for n in (1, 2)}
    whole: dict[int, np.ndarray] = {}
    for num_threads in (1, 2):
        cache = make_cache(**sizes, threads=threads[num_threads])
        samples = [Sample.random(cache, n, seed, group=4) for seed, n in enumerate(lengths)]
        for i, sample in enumerate(samples):
            for cuts in ((), (len(sample) - 1,), (1, 2), (16, 48, 256, 511), tuple(range(7, 530, 57))):
                cuts = tuple(cut for cut in cuts if cut < len(sample))
                seq, out = compute(cache, sample, cuts, use_prefix=False)
                assert_bitwise(out, whole.setdefault(i, out), f"{num_threads} threads, {len(sample)} cut at {cuts}")
                cache.free(seq)
        for size in (2, 7):
            for first in range(len(samples)):
                chosen = [(first + i) % 7 for i in range(size)]
                # All but the last token on its own; then one decoding step of all together, or whole prompts.
                seqs = [cache.add(samples[i].tokens, use_prefix=False) for i in chosen]
                if first % 2:
                    for seq, i in zip(seqs, chosen, strict=True):
                        if len(samples[i]) > 1:
                            advance(cache, (seq, samples[i], len(samples[i]) - 1))
                items = [(seq, samples[i], len(samples[i]) - cache.num_computed_tokens(seq))
                         for seq, i in zip(seqs, chosen, strict=True)]  # fmt: skip
                for i, out in zip(chosen, advance(cache, *items), strict=True):
                    assert_bitwise(out, whole[i][:, -out.shape[1] :], f"{num_threads} threads, {chosen}")
                for seq in seqs:
                    cache.free(seq)
        assert_no_leak(cache)


# Number formats


CODES = [
    (256, 0x78), (300, 0x79), (304, 0x7A), (448, 0x7E), (449, 0x7E), (1000, 0x7E), (1.0625, 0x38), (1.1875, 0x3A),
    (2.0**-9, 0x01), (2.0**-10, 0x00), (-0.0, 0x80), (0.0, 0x00), (float("inf"), 0x7E), (float("-inf"), 0xFE),
    (-1000, 0xFE),
]  # fmt: skip


def test_e4m3_codes() -> None:
    values = np.array([*(value for value, _ in CODES), np.nan], np.float32)
    codes = e4m3_encode(values[:-1])
    assert codes.dtype == np.uint8
    assert codes.tolist() == [code for _, code in CODES]
    assert e4m3_encode(np.array([np.nan], np.float32))[0] in (0x7F, 0xFF)
    # The cache encodes alike.
    cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=16, dtype="fp8")
    seq = cache.add([1])
    batch = cache.plan([(seq, 1)])
    cache.write(0, batch, values[None, None], values[None, None, ::-1].copy())
    cache.commit(batch)
    k, v = cache.read(0, seq)
    expected = e4m3_decode(e4m3_encode(values))
    np.testing.assert_array_equal(k[0, 0], expected)
    np.testing.assert_array_equal(v[0, 0], expected[::-1])


def test_every_finite_e4m3_code_round_trips() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    values = e4m3_decode(codes)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(e4m3_encode(values), codes)
    np.testing.assert_array_equal(e4m3_encode(e4m3_decode(codes, 0.25), 0.25), codes)
    np.testing.assert_array_equal(e4m3_decode(codes, 0.25), values / 4)
    assert np.isnan(e4m3_decode(np.array([0x7F, 0xFF], np.uint8))).all()
    every = np.arange(-500, 500, 0.013, dtype=np.float32)
    np.testing.assert_array_equal(e4m3_decode(e4m3_encode(every)), rounded(every, "fp8_e4m3"))


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e-50, 1e-40, 1e50])
def test_scales_that_make_no_sense(scale: float) -> None:
    for call in (
        lambda: e4m3_encode(np.ones(2, np.float32), scale),
        lambda: e4m3_decode(np.ones(2, np.uint8), scale),
        lambda: make_cache(dtype="fp8", k_scale=scale),
        lambda: make_cache(dtype="fp8", v_scale=scale),
    ):
        with pytest.raises(ValueError, match="scale"):
            call()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_fp8_takes_scales(dtype: str) -> None:
    for name in ("k_scale", "v_scale"):
        with pytest.raises(InvalidArgument, match=name):
            make_cache(dtype=dtype, **{name: 0.5})
        make_cache(dtype=dtype, **{name: 1.0})


def test_unequal_scales_cold_and_on_a_hit(simd_level: str) -> None:
    cache = make_cache(dtype="fp8", **SCALES)
    sample = Sample.random(cache, 40)
    sample.k *= 100  # saturates at 448 * 0.5 = 224
    sample.v *= 200
    cold_seq, expected = compute(cache, sample)
    hit, out = compute(cache, sample)
    assert hit.num_cached_tokens == 39
    assert_bitwise(out, expected[:, 39:])
    assert np.abs(cache.read(0, cold_seq)[0]).max() == 224
    for layer in range(2):
        k, v = rounded(sample.k[layer], "fp8_e4m3", 0.5), rounded(sample.v[layer], "fp8_e4m3", 2.0)
        for got, value in zip(cache.read(layer, hit), (k, v), strict=True):
            np.testing.assert_array_equal(got, value)
        oracle = expected_attention(sample.q[layer], k, v, "fp8_e4m3")
        np.testing.assert_allclose(expected[layer], oracle, rtol=0, atol=tolerance("fp8_e4m3", v))


# The Python boundary: these run in processes of their own, because they fork, interrupt or pin them.


def test_a_forked_child_computes_the_same() -> None:
    pytest.importorskip("fcntl")  # fork is Unix's
    run_python(
        """
import hashlib, os, select, warnings
import numpy as np
from kvcore import Linear, Threads
from kvtools import Sample, make_cache

warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
threads = Threads(2)
cache = make_cache(num_layers=1, head_dim=64, num_blocks=64, dtype="bfloat16", threads=threads)
sample = Sample.random(cache, 600, group=4)
batch = cache.plan([(cache.add(sample.tokens), 600)])
cache.write(0, batch, sample.k[0], sample.v[0])
linear = Linear(np.random.default_rng(0).standard_normal((512, 512), np.float32), threads=threads)

def call():
    out = cache.attend(0, batch, sample.q[0])
    return hashlib.sha256(out.tobytes() + linear(out.reshape(-1, 512)).tobytes()).digest()

expected = call()
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, call())
    os._exit(0)
ready, _, _ = select.select([read], [], [], 10)
if not ready:
    os.kill(child, 9)
    raise SystemExit("the child did not answer within 10 s")
got = os.read(read, 32)
os.waitpid(child, 0)
assert got == expected
assert call() == expected  # and the parent goes on
"""
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_threads_follow_the_affinity() -> None:
    run_python(
        """
import os
from kvcore import Threads
from kvtools import make_cache

cpus = sorted(os.sched_getaffinity(0))
assert 1 <= Threads().num_threads <= len(cpus)
os.sched_setaffinity(0, cpus[:1])
assert Threads().num_threads == 1
assert make_cache(threads=None).threads.num_threads == 1
assert Threads(3).num_threads == 3  # who asks for more gets more
"""
    )


def test_threads_follow_the_cpu_quota() -> None:
    """In a cgroup of one CPU's time, where the system lets us make one."""
    root = Path("/sys/fs/cgroup")
    unified = (root / "cgroup.controllers").exists()
    group = (root if unified else root / "cpu") / f"kvcore-test-{os.getpid()}"
    limits = {"cpu.max": "100000 100000"} if unified else {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}
    try:
        group.mkdir()
    except OSError as reason:
        pytest.skip(f"no cgroup can be made: {reason}")
    try:
        try:
            for name, limit in limits.items():
                (group / name).write_text(limit)
        except OSError as reason:
            pytest.skip(f"no CPU quota can be set: {reason}")
        run_python(
            f"""
import os
from pathlib import Path
from kvcore import Threads
Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
assert Threads().num_threads == 1, Threads()
"""
        )
    finally:
        group.rmdir()


LONG_ATTEND = """
import os, signal, threading, time
import numpy as np
from kvcore import Threads
from kvtools import Sample, assert_bitwise, assert_no_leak, make_cache

# Some seconds of work: 8192 rows of 32 heads over 4096 tokens on average, at 256 operations for each.
cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=128, num_blocks=520, num_threads={threads})
n = 8192
seq = cache.add(range(n))
batch = cache.plan([(seq, n)])
x = np.ones((n, 1, 128), np.float32)
cache.write(0, batch, x, x)
q = np.ones((n, 32, 128), np.float32)

def usable():
    other = cache.add(range(100))
    batch = cache.plan([(other, 100)])
    cache.write(0, batch, x[:100], x[:100] * 3)
    out = cache.attend(0, batch, q[:100])
    assert_bitwise(out, np.full_like(out, 3))
    cache.commit(batch)
    cache.free(other)
    cache.check()

"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_ends_a_long_call(threads: int) -> None:
    """And another Python thread runs on meanwhile."""
    run_python(
        LONG_ATTEND.replace("{threads}", str(threads))
        + """
ticks = 0
running = True
def tick():
    global ticks
    while running:
        ticks += 1
        time.sleep(0.005)
ticker = threading.Thread(target=tick)
ticker.start()
sent = []
def interrupt():
    sent.append((time.monotonic(), ticks))
    os.kill(os.getpid(), signal.SIGINT)
timer = threading.Timer(0.2, interrupt)
before = ticks
timer.start()
try:
    cache.attend(0, batch, q)
    raise SystemExit("the call was not interrupted: it ended by itself, or the signal was lost")
except KeyboardInterrupt:
    took = time.monotonic() - sent[0][0]
running = False
ticker.join()
assert took < 1, f"{took:.2f} s from the signal to KeyboardInterrupt"
assert sent[0][1] - before >= 5, f"{sent[0][1] - before} ticks of another thread in 0.2 s"
usable()
cache.commit(batch)  # the batch itself is still good
assert cache.num_computed_tokens(seq) == n
cache.free(seq)
assert_no_leak(cache)
""",
        timeout=120,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="signals are Unix's")
def test_a_signal_handler_may_use_the_cache() -> None:
    """It runs in the middle of the call that it interrupts; what would have to wait for that call is an error."""
    run_python(
        LONG_ATTEND.replace("{threads}", "2")
        + """
from kvcore import InvalidState
seen = []
def handler(*_):
    seen.append(cache.stats()["num_sequences"])
    for change in (lambda: cache.free(seq), lambda: cache.add([1]), cache.close):
        try:
            change()
        except InvalidState as busy:
            assert "signal handler" in str(busy)
            seen.append("busy")
    raise InterruptedError("enough")
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    cache.attend(0, batch, q)
    raise SystemExit("the call was not interrupted")
except InterruptedError:
    pass
assert seen == [1, "busy", "busy", "busy"], seen
usable()
cache.free(seq)  # no longer busy
assert_no_leak(cache)
""",
        timeout=120,
    )


# SIMD levels


def test_levels_agree() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((9, 70)).astype(np.float32)
    weight = rng.standard_normal((50, 70)).astype(np.float32)
    outs: dict[str, dict[str, np.ndarray]] = {}
    for level in available_simd():
        with forced_simd(level):
            assert current_simd() == Threads().simd == level
            out = outs[level] = {"norm": rms_norm(x, x[0], 1e-5)}
            assert argmax(x[0]) == x[0].argmax()
            for dtype in ("float32", "bfloat16", "float16"):
                out[f"linear {dtype}"] = Linear(weight, x[0, :50].copy(), dtype=dtype)(x)
            caches = {dtype: make_cache(head_dim=34, num_kv_heads=3, num_blocks=32, dtype=dtype) for dtype in DTYPES}
        for dtype, cache in caches.items():  # what is constructed keeps its level
            sample = Sample.random(cache, 300, group=5)
            out[dtype] = compute(cache, sample)[1]
    for level, out in outs.items():
        for name, value in out.items():
            coarse = name in ("bfloat16", "fp8_e4m3")
            bound = 5 * 2.0**-8 if coarse else 1e-4
            np.testing.assert_allclose(value, outs["scalar"][name], rtol=0, atol=bound, err_msg=f"{level}, {name}")


@pytest.mark.parametrize("level", available_simd())
def test_the_sign_of_a_zero_is_the_rows_own(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products too small for any float keep a sign; a row beside, which sees one tile more, must not change it."""
    monkeypatch.setenv(SIMD_ENV, level)
    tokens = 33
    k = np.zeros((tokens, 1, 16), np.float32)
    v = k.copy()
    v[0], v[16] = 1.5 * 2.0**-126, -1.625 * 2.0**-126

    def rows(cut: list[int]) -> np.ndarray:
        cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=16, num_blocks=8)
        seq, out, at = cache.add(range(tokens)), [], 0
        for n in cut:
            batch = cache.plan([(seq, n)])
            cache.write(0, batch, k[at : at + n], v[at : at + n])
            out.append(cache.attend(0, batch, k[at : at + n]))
            cache.commit(batch)
            at += n
        return np.concatenate(out).view(np.uint32)

    alone = rows([1] * tokens)
    for cut in ([tokens], [31, 2], [31, 1, 1], [16, 17]):
        np.testing.assert_array_equal(rows(cut), alone, err_msg=str(cut))


LEVEL_NAMES = ("scalar", "avx2", "avx512", "avx512f", "avx512bf16", "amx", "neon")


def test_forcing_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    have = set(available_simd())
    lacking = [name for name in LEVEL_NAMES if not any(level.startswith(name) for level in have)]
    assert lacking  # no CPU has both AVX and NEON
    for name in [*lacking, "sse9", "AVX2", "avx512 ", "0"]:
        monkeypatch.setenv(SIMD_ENV, name)
        for construct in (
            make_cache,
            lambda: Linear(np.ones((2, 2), np.float32)),
            current_simd,
            Threads,
            lambda: rms_norm(np.ones((1, 2), np.float32), np.ones(2, np.float32), 1e-5),
        ):
            with pytest.raises(UnsupportedSimd, match=SIMD_ENV):
                construct()
    monkeypatch.setenv(SIMD_ENV, "auto")
    assert current_simd() == available_simd()[-1]
    assert available_simd()[0] == "scalar"
    assert isinstance(make_cache(), KVCache)


def test_importing_does_not_read_the_level() -> None:
    run_python("import kvcore\nprint(kvcore.available_simd())", **{SIMD_ENV: "sse9"})


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
@pytest.mark.parametrize("level", available_simd())
def test_a_product_without_memory_is_an_error_or_a_result(level: str) -> None:
    code = """
import resource
import numpy as np
from kvcore import OutOfMemory
from kvcore._kvcore import Linear, Threads

layer = Linear(np.ones((32, 50_000), np.float32), dtype="int8", threads=Threads(1))
x = np.ones((64, 50_000), np.float32)
layer(x[:1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
for mebibytes in (1, 2, 4, 6, 8, 10, 12, 16, 32):
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        assert layer(x).shape == (64, 32)
    except OutOfMemory:
        pass
"""
    run_python(code, **{SIMD_ENV: level})
