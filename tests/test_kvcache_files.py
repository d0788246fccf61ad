"""Sequences and prefixes in files, and the second tier."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import CheckpointError, InvalidHandle, InvalidState, KVCache, KVGroup, OutOfBlocks, Sequence
from kvtools import Sample, advance, assert_bitwise, assert_no_leak, compute, make_cache, run_python
from test_kvcache_groups import SHAPES, Rows, encoder_decoder, mixed, run

DTYPES = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    cache = make_cache(dtype=dtype, head_dim=32)
    sample = Sample.random(cache, 45)
    seq, _ = compute(cache, sample.first(37))
    cache.append(seq, sample.tokens[37:])
    cache.save(seq, tmp_path / "a.safetensors")
    _, expected = compute(make_cache(dtype=dtype, head_dim=32, enable_prefix_caching=False), sample)
    other = make_cache(dtype=dtype, head_dim=32)
    other._fill(1.0)
    loaded = other.load(tmp_path / "a.safetensors")
    assert list(other.token_ids(loaded)) == list(sample.tokens)
    assert other.num_computed_tokens(loaded) == 37
    (out,) = advance(other, (loaded, sample, 8))
    assert_bitwise(out, expected[:, 37:])
    # loaded blocks are shared like any others
    hit = other.add(sample.tokens)
    assert hit.num_cached_tokens == 44
    other.check()
    # and what is there already is shared, not loaded again
    used = other.stats()["used"]
    again = other.load(str(tmp_path / "a.safetensors"))
    assert other.stats()["used"] == used
    for layer in range(2):
        for got, want in zip(other.read(layer, again), cache.read(layer, seq), strict=True):
            assert_bitwise(got[:37], want)


def test_a_new_process_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    cache = make_cache(dtype="bfloat16")
    sample = Sample.random(cache, 40)
    seq, _ = compute(cache, sample.first(30))
    cache.append(seq, sample.tokens[30:])
    cache.save(seq, path)
    (expected,) = advance(cache, (seq, sample, 10))
    code = f"""
from kvtools import *
cache = make_cache(dtype="bfloat16")
sample = Sample.random(cache, 40)
seq = cache.load({str(path)!r})
(out,) = advance(cache, (seq, sample, 10))
print(out.tobytes().hex())
"""
    assert bytes.fromhex(run_python(code).strip()) == expected.tobytes()


def test_all_kinds_of_layers_come_back(tmp_path: Path) -> None:
    rows = Rows(100)
    _, whole = run(mixed(enable_prefix_caching=False), rows, [])
    for n in (1, 15, 16, 33, 70):
        for caching in (True, False):
            cache = mixed()
            seq = cache.add(rows.tokens)
            cuts = [c for c in (10, 30, 50, n) if c <= n]
            part = Rows(n)
            seq, _ = run(cache, part, cuts)
            cache.append(seq, rows.tokens[n:])
            cache.save(seq, tmp_path / "a")
            other = mixed(enable_prefix_caching=caching)
            other._fill(float("nan"))
            loaded = other.load(tmp_path / "a")
            assert other.num_computed_tokens(loaded) == n
            other.check()
            _, out = run(other, rows, [], loaded)
            for layer in SHAPES:
                assert_bitwise(out[layer], whole[layer][n:], f"layer {layer} from {n}")
            if caching:
                hit, again = run(other, rows, [], other.add(rows.tokens))
                for layer in SHAPES:
                    assert_bitwise(again[layer], whole[layer][hit.num_cached_tokens :])
            other.check()


def test_an_encoders_memory_comes_back(tmp_path: Path) -> None:
    cache = encoder_decoder()
    seq = cache.add([1, 2, 3], extra="song.wav")
    x = np.random.default_rng(0).standard_normal((21, 2, 8)).astype(np.float32)
    cache.write_cross(2, seq, x, x + 1)
    cache.save(seq, tmp_path / "a")
    other = encoder_decoder()
    loaded = other.load(tmp_path / "a")
    for got, want in zip(other.read(2, loaded), (x, x + 1), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(InvalidState, match="not written"):
        other.read(3, loaded)
    other.write_cross(3, loaded, x, x)
    other.free(loaded)
    assert_no_leak(other)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"head_dim": 16}, "group.0"),
        ({"num_layers": 3}, "num_layers|group.0"),
        ({"block_size": 32}, "block_size"),
        ({"fingerprint": "another model"}, "model"),
    ],
)
def test_a_file_of_another_cache_is_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    cache = make_cache(dtype="bfloat16")
    seq, _ = compute(cache, Sample.random(cache, 20))
    cache.save(seq, tmp_path / "a")
    cache.save_prefixes(tmp_path)
    other = make_cache(**({"dtype": "bfloat16"} | changes))
    for load, path in ((other.load, tmp_path / "a"), (other.load_prefixes, tmp_path)):
        with pytest.raises(CheckpointError, match=field):
            load(path)
    assert other.stats()["num_sequences"] == 0
    assert_no_leak(other)


def test_scales_are_part_of_what_must_be_equal(tmp_path: Path) -> None:
    cache = make_cache(dtype="fp8_e4m3", k_scale=0.5)
    seq, _ = compute(cache, Sample.random(cache, 20))
    cache.save(seq, tmp_path / "a")
    with pytest.raises(CheckpointError, match="scales"):
        make_cache(dtype="fp8_e4m3", k_scale=0.25).load(tmp_path / "a")
    make_cache(dtype="fp8_e4m3", k_scale=0.5).load(tmp_path / "a")


def test_damage_is_found_and_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 20))
    cache.save(seq, tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    rng = np.random.default_rng(0)
    other = make_cache()
    for at in rng.integers(0, len(whole), 60):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (tmp_path / "b").write_bytes(damaged)
            with pytest.raises(CheckpointError, match="b"):
                other.load(tmp_path / "b")
    for bad in (tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError):
            other.load(bad)
    assert other.stats()["num_sequences"] == 0
    assert_no_leak(other)


def test_no_room_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 100))
    cache.save(seq, tmp_path / "a")
    small = make_cache(num_blocks=3)
    with pytest.raises(OutOfBlocks, match="7 needed, 3 available"):
        small.load(tmp_path / "a")
    assert_no_leak(small)
    cache.free(seq)
    with pytest.raises(InvalidHandle):
        cache.save(seq, tmp_path / "a")


def test_other_tenants_tokens_do_not_get_into_a_file(tmp_path: Path) -> None:
    """Slots behind the last token may hold what somebody else wrote."""
    for dtype in DTYPES:
        files = []
        for fill in (1.0, 5.0):
            cache = make_cache(dtype=dtype, head_dim=32)
            cache._fill(fill)
            seq, _ = compute(cache, Sample.random(cache, 21))
            cache.save(seq, tmp_path / "a")
            cache.save_prefixes(tmp_path)
            files.append([(tmp_path / name).read_bytes() for name in ("a", "prefixes.safetensors")])
        assert files[0] == files[1], dtype


def test_prefixes_come_back_as_cached_ones(tmp_path: Path) -> None:
    cache = make_cache(num_blocks=64)
    samples = [Sample.random(cache, n, seed=n) for n in (20, 33, 48, 70)]
    for i, sample in enumerate(samples):
        if i:
            sample.tokens[:18] = samples[0].tokens[:18]
            sample.k[:, :18], sample.v[:, :18] = samples[0].k[:, :18], samples[0].v[:, :18]
        seq, _ = compute(cache, sample, salt="x" if i == 2 else None, ttl=None if i == 3 else 300.0, priority=10 * i)
        cache.free(seq)
    saved = cache.save_prefixes(tmp_path / "new" / "folder")
    assert saved == cache.stats()["cached"]
    other = make_cache(num_blocks=64)
    other._fill(float("nan"))
    assert other.load_prefixes(tmp_path / "new" / "folder") == saved
    other.check()
    assert other.stats()["cached"] == saved
    assert other.load_prefixes(tmp_path / "new" / "folder") == 0
    for i, sample in enumerate(samples):
        hit, _ = compute(other, sample, salt="x" if i == 2 else None)
        assert hit.num_cached_tokens == len(sample) - 1
        for layer in range(2):
            np.testing.assert_array_equal(other.read(layer, hit)[0], sample.k[layer])
    tiny = make_cache(num_blocks=3)
    assert 0 < tiny.load_prefixes(tmp_path / "new" / "folder") <= 3
    tiny.check()
    off = make_cache(enable_prefix_caching=False)
    with pytest.raises(InvalidState):
        off.load_prefixes(tmp_path / "new" / "folder")


def test_prefixes_of_all_kinds_of_layers(tmp_path: Path) -> None:
    rows = Rows(100)
    cache = mixed()
    seq, whole = run(cache, rows, [30, 60])
    cache.free(seq)
    cache.save_prefixes(tmp_path)
    other = mixed()
    other._fill(float("nan"))
    other.load_prefixes(tmp_path)
    other.check()
    hit, out = run(other, rows, [])
    assert hit.num_cached_tokens == 99
    for layer in SHAPES:
        assert_bitwise(out[layer], whole[layer][99:])


def test_evicted_prefixes_go_to_disk_and_come_back(tmp_path: Path) -> None:
    cache = make_cache(num_blocks=6, spill_dir=tmp_path, spill_bytes=10**6, dtype="bfloat16")
    cold = make_cache(dtype="bfloat16")
    samples = [Sample.random(cache, 40, seed) for seed in range(6)]
    for sample in samples:
        seq, _ = compute(cache, sample)
        cache.free(seq)
    assert cache.stats()["spilled"] > 0
    assert list(tmp_path.iterdir()) == [] or os.name != "posix"
    for sample in samples:
        seq, out = compute(cache, sample)
        assert seq.num_cached_tokens == 39
        reference, expected = compute(cold, sample)
        assert_bitwise(out, expected[:, expected.shape[1] - out.shape[1] :])
        for layer in range(2):
            for got, want in zip(cache.read(layer, seq), cold.read(layer, reference), strict=True):
                assert_bitwise(got, want)
        cache.free(seq)
        cold.free(reference)
        cache.check()
    stats = cache.stats()
    assert stats["fetches"] > 0
    assert stats["free"] + stats["cached"] + stats["used"] == stats["total"]
    cache.save_prefixes(tmp_path / "saved")
    big = make_cache(num_blocks=64, dtype="bfloat16")
    assert big.load_prefixes(tmp_path / "saved") == 18
    cache.close()
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_the_second_tier_is_bounded(tmp_path: Path) -> None:
    cache = make_cache(num_blocks=3, spill_dir=tmp_path, spill_bytes=2 * 16 * make_cache().bytes_per_token)
    for seed in range(8):
        seq, _ = compute(cache, Sample.random(cache, 40, seed))
        cache.free(seq)
        assert cache.stats()["spilled"] <= 2
        cache.check()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="spill_dir"):
        make_cache(spill_dir=tmp_path / "file", spill_bytes=10**6)
    with pytest.raises(ValueError, match="spill_bytes"):
        make_cache(spill_dir=tmp_path, spill_bytes=10)


def test_windows_and_the_second_tier(tmp_path: Path) -> None:
    groups = [KVGroup("full", [0], num_kv_heads=1, head_dim=4), KVGroup("sliding_window", [1], window=20,
              num_kv_heads=1, head_dim=4)]  # fmt: skip
    cache = KVCache(groups=groups, num_blocks=7, dtype="float32", num_threads=1, spill_dir=tmp_path, spill_bytes=10**6)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 1000, 60) for _ in range(5)]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            seq = cache.add(prompt)
            assert turn == 0 or seq.num_cached_tokens == 59
            batch = cache.plan([(seq, 60 - seq.num_cached_tokens)])
            x = (number * 100 + batch.positions[:, None, None]).astype(np.float32).repeat(4, 2)
            for layer in range(2):
                cache.write(layer, batch, x, x)
            cache.commit(batch)
            k, _ = cache.read(1, seq)
            np.testing.assert_array_equal(k[:, 0, 0], number * 100 + np.arange(60 - len(k), 60))
            cache.free(seq)
            cache.check()


def fill_and_free(cache: KVCache, first: int) -> None:
    """A prompt of four blocks whose K and V are its first token."""
    seq = cache.add(range(first, first + 64))
    batch = cache.plan([(seq, 64)])
    x = np.full((64, 2, 64), first, np.float32)
    cache.write(0, batch, x, x)
    cache.commit(batch)
    cache.free(seq)
    cache.check()


def ask(cache: KVCache, first: int) -> int:
    """How much of that prompt is found; none of it may be wrong."""
    seq = cache.add(range(first, first + 64))
    for array in cache.read(0, seq):
        assert (array == first).all()
    cache.free(seq)
    cache.check()
    return seq.num_cached_tokens


def small_cache(spill_dir: Path) -> KVCache:
    return KVCache(num_layers=1, num_kv_heads=2, head_dim=64, num_blocks=4, dtype="float32", num_threads=1,
                   spill_dir=spill_dir, spill_bytes=1 << 20)  # fmt: skip


def counts(cache: KVCache, *names: str) -> list[int]:
    return [cache.stats()[name] for name in names]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE")
def test_a_full_disk_is_an_eviction_and_costs_nothing_else(tmp_path: Path) -> None:
    code = f"""
import resource, signal
from pathlib import Path
from test_kvcache_files import ask, counts, fill_and_free, small_cache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cache = small_cache(Path({str(tmp_path)!r}))
# Room for the first slot, of 16 KiB, alone.
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for i in range(4):
    fill_and_free(cache, 1000 * i)
spilled, spills, evictions, cached = counts(cache, "spilled", "spills", "evictions", "cached")
assert spilled <= 1 and spilled <= spills < 12 and spilled + evictions == 12 and cached == 4, cache.stats()
assert ask(cache, 3000) == 63
assert ask(cache, 0) == 0
assert counts(cache, "fetches", "evictions") == [0, evictions]
assert ask(cache, 3000) == 63
"""
    run_python(code)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_damaged_copy_is_lost_and_costs_nothing_else(tmp_path: Path) -> None:
    cache = small_cache(tmp_path)
    for i in range(3):
        fill_and_free(cache, 1000 * i)
    assert counts(cache, "spilled", "spills", "evictions") == [8, 8, 0]
    # The file has no name but that of its handle.
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    own = [link for link in links if os.path.lexists(link) and os.readlink(link).startswith(str(tmp_path))]
    with open(own[0], "r+b") as file:
        file.write(b"x" * 8 * 16384)
    # All of the first prompt depends on its first block.
    assert ask(cache, 0) == 0
    assert counts(cache, "fetches", "spilled", "evictions", "cached") == [0, 4, 4, 4]
    assert ask(cache, 2000) == 63
    # What cannot be read is left out of a file, too.
    assert cache.save_prefixes(tmp_path / "saved") == 4
    assert counts(cache, "spilled", "evictions") == [0, 8]
    assert ask(cache, 1000) == 0
    assert ask(cache, 2000) == 63


def test_a_load_that_finds_no_room_renews_nothing_and_moves_nothing(tmp_path: Path) -> None:
    now = 0.0
    groups = [KVGroup("full", [0], num_kv_heads=1, head_dim=8, num_blocks=8),
              KVGroup("cross", [1], num_kv_heads=1, head_dim=8, num_blocks=1)]  # fmt: skip
    cache = KVCache(groups=groups, dtype="float32", prefix_ttl=300.0, clock=lambda: now, num_threads=1,
                    spill_dir=tmp_path, spill_bytes=1 << 20, max_events=100)  # fmt: skip
    x = np.ones((112, 1, 8), np.float32)

    def computed(tokens: Iterable[int], extra: str) -> Sequence:
        seq = cache.add(tokens, extra=extra)
        cache.write_cross(1, seq, x[:4], x[:4])
        batch = cache.plan([(seq, cache.num_tokens(seq) - cache.num_computed_tokens(seq))])
        cache.write(0, batch, x[: batch.num_tokens], x[: batch.num_tokens])
        cache.commit(batch)
        return seq

    seq = computed(range(32), "a")
    cache.save(seq, tmp_path / "a")
    cache.free(seq)
    # The only cross block is held, and a part of the prefix is in the second tier.
    computed(range(100, 212), "b")
    now = 250.0
    assert cache.stats()["spilled"] == 1
    cache.events()
    before = cache.stats()
    for _ in range(3):
        with pytest.raises(OutOfBlocks):
            cache.load(tmp_path / "a")
    assert cache.stats() == before
    assert cache.events()["events"] == []
    now = 500.0
    assert cache.add([*range(32), 1], extra="a").num_cached_tokens == 0


def test_a_load_shares_all_that_is_cached(tmp_path: Path) -> None:
    """No token needs computing, so no block is needed beside those that are there."""
    for n, blocks in ((64, 4), (60, 4), (7, 1)):
        cache = make_cache(num_blocks=blocks)
        sample = Sample.random(cache, n)
        seq, _ = compute(cache, sample)
        cache.save(seq, tmp_path / "a")
        for kept in (True, False):
            loaded = cache.load(tmp_path / "a")
            assert not kept or cache.block_table(loaded) == cache.block_table(seq)
            assert (loaded.num_cached_tokens, cache.num_computed_tokens(loaded)) == (n, n)
            assert cache.stats()["used"] == blocks
            for layer in range(2):
                for got, want in zip(cache.read(layer, loaded), (sample.k[layer], sample.v[layer]), strict=True):
                    np.testing.assert_array_equal(got, want)
            cache.check()
            cache.free(loaded)
            if kept:
                cache.free(seq)
        assert_no_leak(cache)


def test_what_is_private_or_older_than_a_reset_is_loaded_as_private(tmp_path: Path) -> None:
    cache = make_cache()
    sample = Sample.random(cache, 40)
    for use_prefix in (True, False):
        seq = cache.add(sample.tokens, use_prefix=use_prefix)
        advance(cache, (seq, sample, 40))
        cache.reset_prefix_cache()
        cache.save(seq, tmp_path / "a")
        other = make_cache()
        loaded = other.load(tmp_path / "a")
        assert other.num_computed_tokens(loaded) == 40
        other.free(loaded)
        assert other.add(sample.tokens).num_cached_tokens == 0
