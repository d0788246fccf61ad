"""How long cached prefixes stay: time to live, priority, marks, pins, and then the least recently used first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import InvalidArgument, InvalidHandle, KVCache, OutOfBlocks, PinLimit
from kvtools import Sample, assert_no_leak, compute, make_cache


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def keep(cache: KVCache, seed: int, tokens: int = 32, **add: Any) -> np.ndarray[Any, Any]:
    """Compute a prompt and free it; its tokens."""
    sample = Sample.random(cache, tokens, seed)
    seq, _ = compute(cache, sample, **add)
    cache.free(seq)
    return sample.tokens


def cached(cache: KVCache, tokens: Any) -> int:
    seq = cache.add(tokens)
    n = seq.num_cached_tokens
    cache.free(seq)
    return n


def test_a_prefix_is_kept_for_300_seconds_and_each_hit_renews_it() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    tokens = keep(cache, 1)
    for _ in range(3):
        clock.now += 299
        assert cached(cache, tokens) == 31
    clock.now += 301
    assert cache.stats()["cached"] == 0
    assert cache.stats()["evicted_expired"] == 2
    assert cached(cache, tokens) == 0
    assert_no_leak(cache)


def test_what_a_sequence_holds_does_not_expire() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, prefix_ttl=10)
    sample = Sample.random(cache, 32)
    seq, _ = compute(cache, sample)
    clock.now += 1000
    assert cached(cache, sample.tokens) == 31
    cache.free(seq)
    clock.now += 9
    assert cached(cache, sample.tokens) == 31
    clock.now += 11
    assert cached(cache, sample.tokens) == 0


def test_each_prefix_may_have_a_time_of_its_own() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, num_blocks=64)
    short, usual, forever = keep(cache, 1, ttl=5), keep(cache, 2), keep(cache, 3, ttl=None)
    clock.now += 6
    assert [cached(cache, tokens) for tokens in (short, usual, forever)] == [0, 31, 31]
    clock.now += 301
    assert [cached(cache, tokens) for tokens in (short, usual, forever)] == [0, 0, 31]
    clock.now += 1e9
    assert cached(cache, forever) == 31


def test_a_clock_that_goes_back_is_ignored() -> None:
    clock = Clock()
    cache = make_cache(clock=clock)
    tokens = keep(cache, 1)
    clock.now -= 500
    assert cached(cache, tokens) == 31
    clock.now += 500 + 299
    assert cached(cache, tokens) == 31


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_broken_clock_is_an_error(value: float) -> None:
    cache = make_cache(clock=lambda: value)
    with pytest.raises(InvalidArgument, match="clock"):
        cache.add([1])
    with pytest.raises(TypeError, match="clock"):
        make_cache(clock=lambda: "noon").add([1])


def test_lower_priorities_go_first_then_the_least_recently_used() -> None:
    cache = make_cache(num_blocks=6)
    low, high, usual = keep(cache, 1, priority=10), keep(cache, 2, priority=90), keep(cache, 3)
    keep(cache, 4)  # takes the low one's two blocks
    assert [cached(cache, tokens) for tokens in (low, high)] == [0, 31]
    keep(cache, 5)  # the usual one is older than number 4
    assert [cached(cache, tokens) for tokens in (usual, high)] == [0, 31]


def test_expired_ones_go_before_low_priorities() -> None:
    clock = Clock()
    cache = make_cache(num_blocks=4, clock=clock)
    high = keep(cache, 1, priority=100, ttl=1)
    low = keep(cache, 2, priority=0)
    clock.now += 2
    keep(cache, 3)
    assert [cached(cache, tokens) for tokens in (high, low)] == [0, 31]


def test_a_mark_keeps_the_prefix_up_to_it() -> None:
    clock = Clock()
    cache = make_cache(clock=clock, num_blocks=16)
    sample = Sample.random(cache, 80)
    seq = cache.add(sample.tokens)
    cache.mark(seq, 36, ttl=3600)  # before it is computed
    from kvtools import advance

    advance(cache, (seq, sample, 80))
    cache.free(seq)
    clock.now += 301
    assert 36 <= cached(cache, sample.tokens) < 80
    clock.now += 3601
    assert cached(cache, sample.tokens) == 0


def test_a_mark_needs_tokens() -> None:
    cache = make_cache()
    seq = cache.add([1, 2, 3])
    for n in (0, 4):
        with pytest.raises(InvalidArgument):
            cache.mark(seq, n)
    with pytest.raises(InvalidArgument, match="priority"):
        cache.mark(seq, 1, priority=101)
    with pytest.raises(InvalidArgument, match="ttl"):
        cache.mark(seq, 1, ttl=-1)
    with pytest.raises(TypeError, match="ttl"):
        cache.mark(seq, 1, ttl="long")  # type: ignore[arg-type]


def test_pinned_prefixes_stay() -> None:
    clock = Clock()
    cache = make_cache(num_blocks=8, clock=clock)
    sample = Sample.random(cache, 40)
    seq, _ = compute(cache, sample)
    pin = cache.pin(seq, 32)
    assert pin.num_tokens == 32
    cache.free(seq)
    stats = cache.stats()
    assert stats["pinned"] == 2
    assert stats["free"] + stats["cached"] + stats["used"] == stats["total"]
    assert cache.num_free_blocks == 6
    clock.now += 1e6
    for seed in range(2, 10):
        keep(cache, seed, 48)
    assert cached(cache, sample.tokens) >= 32
    cache.reset_prefix_cache()
    assert cached(cache, sample.tokens) >= 32
    cache.unpin(pin)
    with pytest.raises(InvalidHandle):
        cache.unpin(pin)
    assert cache.stats()["pinned"] == 0
    assert_no_leak(cache)


def test_pinned_space_is_bounded() -> None:
    cache = make_cache(num_blocks=8, max_pinned_fraction=0.5)
    sample = Sample.random(cache, 96)
    seq, _ = compute(cache, sample)
    with pytest.raises(PinLimit, match="5 more to pin, 0 pinned, 4 allowed"):
        cache.pin(seq, 80)
    pins = [cache.pin(seq, 64), cache.pin(seq, 40)]  # the same blocks count once
    with pytest.raises(PinLimit):
        cache.pin(seq, 65)
    cache.free(seq)
    with pytest.raises(OutOfBlocks, match="5 needed, 4 available"):
        cache.plan([(cache.add(range(80)), 80)])
    for pin in pins:
        cache.unpin(pin)


def test_only_what_is_computed_can_be_pinned() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    cache.append(seq, [1, 2])
    for n in (0, 21, 23):
        with pytest.raises(InvalidArgument):
            cache.pin(seq, n)
    other = make_cache()
    with pytest.raises(InvalidHandle):
        other.unpin(cache.pin(seq))


def test_bad_settings_are_refused() -> None:
    for bad in ({"prefix_ttl": -1}, {"prefix_ttl": float("nan")}, {"max_pinned_fraction": 1.5},
                {"max_pinned_fraction": float("nan")}, {"min_prefix_tokens": -1}, {"max_rollback": -1},
                {"max_events": -1}, {"spill_bytes": 10**6}, {"spill_bytes": -1}):  # fmt: skip
        with pytest.raises(InvalidArgument, match=next(iter(bad))):
            make_cache(**bad)
    with pytest.raises(TypeError, match="prefix_ttl"):
        make_cache(prefix_ttl="long")


def test_what_is_written_over_for_want_of_a_block_was_evicted() -> None:
    cache = make_cache(num_blocks=2, max_events=100)
    tokens = keep(cache, 1, tokens=22)
    cache.events()
    # It shares 20 tokens and has no block to copy the last 4 of these into.
    seq = cache.add(tokens[:21].tolist())
    assert seq.num_cached_tokens == 20
    cache.plan([(seq, 1)])
    removed = [e["cause"] for e in cache.events()["events"] if e["type"] == "removed"]
    assert removed == ["lru"]
    assert cache.stats()["evicted_lru"] == 1
    cache.free(seq)
    assert_no_leak(cache)
