"""One KVCache and several Python threads: values stay right, reads run side by side, misuse is a typed error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvcore import InvalidHandle, InvalidState, KVCache, StaleBatch, Threads
from kvtools import DTYPES, Sample, advance, assert_bitwise, assert_no_leak, compute, make_cache, rounded, run_python

SECONDS = 60
"""How long a thread may hang before that is a failure."""


def run_all(*works: Callable[[], Any]) -> list[Any]:
    """Run these at the same time, from a common start; their results. A failure in any of them is raised."""
    start = threading.Barrier(len(works))
    results: list[Any] = [None] * len(works)
    failures: list[BaseException] = []

    def wrapped(i: int, work: Callable[[], Any]) -> None:
        try:
            start.wait(SECONDS)
            results[i] = work()
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=wrapped, args=item, daemon=True) for item in enumerate(works)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        assert not worker.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_readers_beside_writers(dtype: str) -> None:
    """Writers add, compute, branch, cut and free sequences with a common front; readers see one that never changes."""
    cache = make_cache(num_blocks=64, threads=Threads(2), dtype=dtype)
    kept = Sample.random(cache, 70, 99)
    seq, expected = compute(cache, kept)
    cache.append(seq, [1])
    batch = cache.plan([(seq, 1)])
    last = Sample.random(cache, 71, 98)
    for layer in range(cache.num_layers):
        cache.write(layer, batch, last.k[layer, 70:], last.v[layer, 70:])
    cache.commit(batch)
    query = [last.q[layer, 70:] for layer in range(cache.num_layers)]
    answers = [cache.attend(layer, batch, query[layer]) for layer in range(cache.num_layers)]
    alone = [compute(make_cache(num_blocks=64, dtype=dtype), Sample.random(cache, 45, n))[1] for n in range(3)]
    writers_left = [3]
    rounds = 30

    def write(number: int) -> None:
        try:
            sample = Sample.random(cache, 45, number)
            for turn in range(rounds):
                mine, out = compute(cache, sample, (5 + turn % 20, 25 + turn % 20), use_prefix=turn % 3 > 0)
                assert_bitwise(out, alone[number][:, -out.shape[1] :])
                child = cache.fork(mine)
                cache.append(child, [turn])
                advance(cache, (child, Sample.random(cache, 46, turn), 1))
                cache.truncate(mine, 30)
                for layer in range(cache.num_layers):
                    assert_bitwise(cache.read(layer, mine)[0], rounded(sample.k[layer, :30], dtype))
                    assert_bitwise(cache.read(layer, child)[1][:45], rounded(sample.v[layer], dtype))
                cache.free(mine)
                cache.free(child)
        finally:
            writers_left[0] -= 1

    def read() -> int:
        turns = 0
        while writers_left[0] or not turns:
            for layer in range(cache.num_layers):
                assert_bitwise(cache.attend(layer, batch, query[layer]), answers[layer])
                assert_bitwise(cache.read(layer, seq)[0][:70], rounded(kept.k[layer], dtype))
            turns += 1
        return turns

    def look() -> int:
        turns = 0
        while writers_left[0] or not turns:
            stats = cache.stats()
            assert stats["free"] + stats["cached"] + stats["used"] == stats["total"]
            assert 1 <= stats["num_sequences"] <= 1 + 2 * 3
            cache.check()
            if hasattr(cache, "snapshot"):
                snapshot = cache.snapshot()
                (group,) = snapshot["groups"]
                tables = [block for entry in snapshot["sequences"] for block in entry["tables"][0]]
                assert all(group["refs"][block] >= tables.count(block) for block in set(tables))
            if hasattr(cache, "events"):
                cache.events()
            turns += 1
        return turns

    results = run_all(*[lambda n=n: write(n) for n in range(3)], read, read, look)
    assert all(turns > 0 for turns in results[3:])
    cache.free(seq)
    assert_no_leak(cache)
    assert expected.shape[1] == 70


def test_threads_that_add_the_same_prompt() -> None:
    """Who comes first is not said, but everybody reads what is right and nothing leaks."""
    cache = make_cache(num_blocks=64, threads=Threads(1))
    sample = Sample.random(cache, 50)

    def work() -> int:
        found = 0
        for _ in range(20):
            seq, _ = compute(cache, sample)
            found += seq.num_cached_tokens
            assert_bitwise(cache.read(1, seq)[0], sample.k[1])
            cache.free(seq)
        return found

    assert sum(run_all(work, work, work)) > 0
    assert_no_leak(cache)


def test_two_threads_free_the_same_handle() -> None:
    """One of them frees it, the other is told."""
    cache = make_cache()
    for _ in range(200):
        seq, _ = compute(cache, Sample.random(cache, 5), use_prefix=False)

        def free(seq: Any = seq) -> bool:
            try:
                cache.free(seq)
            except InvalidHandle:
                return False
            return True

        assert sorted(run_all(free, free)) == [False, True]
    assert_no_leak(cache)


def test_a_handle_that_another_thread_frees() -> None:
    """Its owner either still gets what is right, or a typed error; from then on always the error."""
    cache = make_cache(num_blocks=32)
    sample = Sample.random(cache, 40)
    _, expected = compute(cache, sample)
    for _ in range(20):
        seq = cache.add(sample.tokens, use_prefix=False)
        in_use = threading.Event()

        def use(seq: Any = seq, in_use: threading.Event = in_use) -> type[Exception]:
            try:
                for _ in range(1000):
                    batch = cache.plan([(seq, 40)])
                    for layer in range(cache.num_layers):
                        cache.write(layer, batch, sample.k[layer], sample.v[layer])
                        assert_bitwise(cache.attend(layer, batch, sample.q[layer]), expected[layer])
                    in_use.set()
            except (InvalidHandle, StaleBatch) as error:
                return type(error)
            finally:
                in_use.set()
            raise AssertionError("the handle outlived its free")

        def free(seq: Any = seq, in_use: threading.Event = in_use) -> None:
            assert in_use.wait(SECONDS)
            cache.free(seq)

        kind, _ = run_all(use, free)
        assert kind in (InvalidHandle, StaleBatch)
        for call in (cache.num_tokens, cache.free, cache.fork, lambda s: cache.plan([(s, 1)])):
            with pytest.raises(InvalidHandle):
                call(seq)
        cache.check()


def test_two_threads_plan_the_same_sequence() -> None:
    """The later plan wins; the batch of the earlier one is stale, never mixed up with it."""
    cache = make_cache()
    sample = Sample.random(cache, 20)
    seq = cache.add(sample.tokens)

    def work() -> int:
        done = 0
        for _ in range(50):
            with suppress(StaleBatch):
                batch = cache.plan([(seq, 20)])
                for layer in range(cache.num_layers):
                    cache.write(layer, batch, sample.k[layer], sample.v[layer])
                done += 1
        return done

    assert sum(run_all(work, work)) > 0
    advance(cache, (seq, sample, 20))
    for layer in range(cache.num_layers):
        assert_bitwise(cache.read(layer, seq)[0], sample.k[layer])
    cache.free(seq)
    assert_no_leak(cache)


def test_close_while_others_read() -> None:
    """They end with a typed error: memory is not taken from under a call."""
    for _ in range(5):
        cache = make_cache(num_blocks=64, head_dim=64)
        sample = Sample.random(cache, 500)
        seq = cache.add(sample.tokens)
        batch = cache.plan([(seq, 500)])
        cache.write(0, batch, sample.k[0], sample.v[0])
        expected = cache.attend(0, batch, sample.q[0])
        reading = threading.Event()

        def read(c: KVCache = cache, b: Any = batch, q: Any = sample.q[0], e: Any = expected,
                 reading: threading.Event = reading) -> str:  # fmt: skip
            while True:
                try:
                    out = c.attend(0, b, q)
                except InvalidState as error:
                    return str(error)
                reading.set()
                assert_bitwise(out, e)

        def close(cache: KVCache = cache, reading: threading.Event = reading) -> None:
            assert reading.wait(SECONDS)
            cache.close()

        assert all("closed" in message for message in run_all(read, read, close)[:2])


IN_THE_MIDDLE = """
import signal, threading
import numpy as np
from kvcore import InvalidState
from kvtools import assert_bitwise, make_cache

# Some seconds of work, which the handler ends when it has seen what it came for.
n = 8192
cache = make_cache(num_layers=1, num_kv_heads=1, head_dim=128, num_blocks=520, num_threads=1)
seq, small = cache.add(range(n)), cache.add(range(100))
x = np.ones((n, 1, 128), np.float32)
q = np.ones((n, 32, 128), np.float32)
batch, small_batch = cache.plan([(seq, n)]), cache.plan([(small, 100)])
cache.write(0, batch, x, x)
cache.write(0, small_batch, x[:100], 3 * x[:100])
cache.commit(small_batch)
asked, answered = threading.Event(), threading.Event()

def other_thread(call):
    def work():
        asked.wait()
        call()
        answered.set()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread

def attend_until(look):
    # Calls look() in the middle of a long attend, then ends that.
    seen = []
    def handler(*_):
        try:
            cache.reset_prefix_cache()
        except InvalidState:  # as it must be in the middle of a call
            seen.append(look())
            raise InterruptedError
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # too early
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        cache.attend(0, batch, q)
    except InterruptedError:
        return seen[0]
    raise SystemExit("the long call ended before the signal came: make it longer")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
@pytest.mark.parametrize("other", ["attend", "read", "stats", "snapshot"])
def test_reads_run_side_by_side(other: str) -> None:
    """In the middle of a long attend, a signal handler waits until another thread has done a read."""
    if not hasattr(KVCache, other):
        pytest.skip(f"this build has no {other}")
    run_python(
        IN_THE_MIDDLE
        + f"""
def attend():
    assert_bitwise(cache.attend(0, small_batch, q[:100]), np.full((100, 32, 128), 3))

def read():
    assert_bitwise(cache.read(0, small)[1], 3 * x[:100])

def stats():
    assert cache.stats()["num_sequences"] == 2

def snapshot():
    assert len(cache.snapshot()["sequences"]) == 2

def look():
    asked.set()
    return answered.wait({SECONDS // 2})

other_thread({other})
assert attend_until(look), "{other} waited for the attend of another thread"
"""
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_a_change_waits_for_reads() -> None:
    """It is asked for in the middle of an attend, and done after it: nothing is changed beneath a read."""
    run_python(
        IN_THE_MIDDLE
        + f"""
def look():
    asked.set()
    return answered.wait(0.3)  # if it could, it would be done by then

thread = other_thread(lambda: cache.write(0, batch, x, 5 * x))
assert not attend_until(look)
thread.join({SECONDS // 2})
assert answered.is_set()
np.testing.assert_array_equal(cache.read(0, small)[1], 3 * x[:100])
cache.commit(batch)
np.testing.assert_array_equal(cache.read(0, seq)[1], 5 * x)
"""
    )


@pytest.mark.skipif(not hasattr(KVCache, "mark"), reason="this build has no clock")
def test_a_clock_may_use_the_cache() -> None:
    """It is asked before the cache is locked; else this would hang."""
    run_python(
        """
import numpy as np
from kvtools import Sample, compute, make_cache

calls = []

def clock():
    if calls is not None and "cache" in globals():
        calls.append(cache.stats()["total"])
    return float(len(calls))

cache = make_cache(clock=clock)
sample = Sample.random(cache, 40)
for _ in range(3):
    seq, _ = compute(cache, sample)
    cache.free(seq)
assert calls and set(calls) == {16}
cache.check()
""",
        timeout=SECONDS,
    )


def test_many_threads_and_little_work() -> None:
    """More threads than processors, calls of a few microseconds: nothing is lost."""
    cache = make_cache(num_layers=1, num_blocks=128, num_threads=1)
    row = np.zeros((1, 2, 8), np.float32)

    def work() -> None:
        for _ in range(30):
            seq = cache.add([1, 2, 3], use_prefix=False)
            for n in range(3):
                batch = cache.plan([(seq, 1)])
                cache.write(0, batch, row, row)
                cache.commit(batch)
                assert cache.num_computed_tokens(seq) == n + 1
            cache.free(seq)

    run_all(*[work] * 16)
    assert_no_leak(cache)
    assert cache.stats()["free"] == 128
