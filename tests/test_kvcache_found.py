"""Mistakes that the machines, or a look at the code, have found: one small test each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore import KVCache, KVGroup, Sequence
from kvtools import assert_bitwise, assert_no_leak

Floats = npt.NDArray[np.float32]


def windowed(window: int = 64, window_blocks: int = 3, **changes: Any) -> KVCache:
    """A full layer and one with a window."""
    groups = [
        KVGroup("full", [0], num_kv_heads=1, head_dim=2),
        KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=2, window=window, num_blocks=window_blocks),
    ]
    sizes: dict[str, Any] = {"groups": groups, "num_blocks": 16, "dtype": "float32", "num_threads": 1}
    return KVCache(**(sizes | changes))


def advance(cache: KVCache, seq: Sequence, n: int | None = None, shift: float = 0) -> None:
    """Compute n tokens (None: all); K and V of each are its id."""
    start, tokens = cache.num_computed_tokens(seq), cache.token_ids(seq)
    end = len(tokens) if n is None else start + n
    if start == end:
        return
    batch = cache.plan([(seq, end - start)])
    x = (tokens[start:end, None, None] + shift).repeat(2, 2).astype(np.float32)
    for layer in range(cache.num_layers):
        cache.write(layer, batch, x, x)
    cache.commit(batch)


def computed(cache: KVCache, tokens: Any, shift: float = 0) -> Sequence:
    seq = cache.add(tokens)
    advance(cache, seq, shift=shift)
    return seq


def test_a_block_is_given_only_to_nodes_whose_tokens_it_holds() -> None:
    """The leftover of a truncated sequence is no K and V of another continuation."""
    cache = windowed()
    common, tail, other = [10, 11, 12, 13, 14], [25, 26, 27, 28, 29], [5, 6]
    seq = computed(cache, common + tail)
    cache.truncate(seq, 5)
    longer = computed(cache, [*common, *tail, 30, 31, 32])
    branch = computed(cache, common + other)
    cache.free(branch)
    cache.free(longer)
    evicting = computed(cache, range(100, 116))
    cache.pin(seq, 5)
    cache.free(evicting)
    hit = cache.add([*common, *other, 1])
    for layer in range(2):
        k, _ = cache.read(layer, hit)
        np.testing.assert_array_equal(k[:, 0, 0], (common + other)[: hit.num_cached_tokens])
    cache.check()


def test_load_changes_nothing_that_others_read(tmp_path: Path) -> None:
    """A file whose values differ in the last bits (another machine's) leaves those of running sequences alone."""
    writer = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=8, dtype="float32", num_threads=1)
    writer.save(computed(writer, range(40), shift=0.5), tmp_path / "a")
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=8, dtype="float32", num_threads=1)
    cache.free(computed(cache, range(20)))
    reader = cache.add([*range(18), 99])
    before = cache.read(0, reader)
    loaded = cache.load(tmp_path / "a")
    assert loaded.num_cached_tokens == 16  # the file's bytes go into whole blocks
    for got, want in zip(cache.read(0, reader), before, strict=True):
        assert_bitwise(got, want)


def test_load_needs_no_blocks_for_what_the_window_has_passed(tmp_path: Path) -> None:
    """What one cache held, an empty one of the same size can load."""
    cache = windowed(window=16)
    seq = cache.add(range(200))
    for _ in range(20):
        advance(cache, seq, 10)
    cache.save(seq, tmp_path / "a")
    other = windowed(window=16)
    loaded = other.load(tmp_path / "a")
    for layer in range(2):
        assert_bitwise(other.read(layer, loaded)[0][-16:], cache.read(layer, seq)[0][-16:])
    other.free(loaded)
    assert_no_leak(other)


def test_scales_of_one_cache_fit_another_of_the_same_groups() -> None:
    """What calibrate found can be given to the cache of the next process, whose files would be refused otherwise."""
    groups = [
        KVGroup("full", [0], num_kv_heads=2, head_dim=2),
        KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=2, window=16),
    ]
    cache = KVCache(groups=groups, num_blocks=4, dtype="fp8_e4m3", num_threads=1)

    def sample() -> None:
        seq = cache.add([1])
        batch = cache.plan([(seq, 1)])
        for layer, heads in ((0, 2), (1, 1)):
            x = np.arange(1, 2 * heads + 1, dtype=np.float32).reshape(1, heads, 2)
            cache.write(layer, batch, x, x)
        cache.commit(batch)
        cache.free(seq)

    cache.calibrate(sample)
    other = KVCache(groups=groups, num_blocks=4, dtype="fp8_e4m3", num_threads=1,
                    k_scale=cache.k_scale, v_scale=cache.v_scale)  # fmt: skip
    np.testing.assert_array_equal(other.k_scale, cache.k_scale)


def test_which_of_two_equal_blocks_is_borrowed_does_not_depend_on_chance() -> None:
    """Two continuations of a prefix are as good as each other: the same calls take the same one in every cache."""
    taken = set()
    for _ in range(20):
        cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=8, dtype="float32", num_threads=1)
        seqs = [computed(cache, [*range(10), 50 + tail]) for tail in range(3)]
        tables = [cache.block_table(seq) for seq in seqs]
        hit = cache.add([*range(10), 40, 41])
        assert hit.num_cached_tokens == 10
        taken.add(tables.index(cache.block_table(hit)))
    assert len(taken) == 1


def test_events_tell_of_a_block_whose_place_a_pinned_one_took() -> None:
    """What is stored and not removed is what can be found."""
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=4, dtype="float32", num_threads=1,
                    max_events=100)  # fmt: skip
    first = cache.add(range(16))
    advance(cache, first, 3)
    pin = cache.pin(first, 3)
    second = computed(cache, range(16))  # borrows the three tokens, and has a block of its own
    (other,) = cache.block_table(second)
    advance(cache, first)  # the same tokens in the pinned block, which stays
    cache.free(first)
    cache.free(second)
    found = set()
    for event in cache.events()["events"]:
        if event["type"] == "stored":
            found.add(event["block"])
        elif event["type"] == "removed":
            found.discard(event["block"])
    states = cache.snapshot()["groups"][0]["state"]
    assert {block for block in range(4) if states[block] in (2, 3)} == found, other
    cache.unpin(pin)
