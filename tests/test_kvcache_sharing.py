"""Sharing to the token, keys, and the ways of branching: fork, reorder, truncate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import InvalidArgument, InvalidHandle, KVCache, OutOfBlocks
from kvtools import Sample, advance, assert_bitwise, assert_no_leak, compute, make_cache

B = 16


def cached(cache: KVCache, tokens: Any, **add: Any) -> int:
    seq = cache.add(tokens, **add)
    n = seq.num_cached_tokens
    cache.free(seq)
    return n


@pytest.mark.parametrize("first", [1, 5, 16, 17, 40, 48])
@pytest.mark.parametrize("common", [0, 1, 4, 15, 16, 17, 31, 33, 40])
def test_a_prompt_reuses_every_equal_token(first: int, common: int) -> None:
    cache = make_cache()
    sample = Sample.random(cache, first)
    compute(cache, sample)
    common = min(common, first)
    other = np.concatenate([sample.tokens[:common], np.arange(60_000, 60_005)])
    assert cached(cache, other) == common
    # the same prompt: all but its last token
    assert cached(cache, sample.tokens) == first - 1
    cache.check()


def test_the_longest_of_many_siblings_is_found() -> None:
    cache = make_cache(num_blocks=200)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 3, 12) for _ in range(100)]
    for prompt in prompts:
        sample = Sample.random(cache, len(prompt))
        sample.tokens = prompt
        seq, _ = compute(cache, sample)
        cache.free(seq)
    for _ in range(200):
        query = rng.integers(0, 3, 12)
        best = max(next((i for i in range(12) if p[i] != query[i]), 12) for p in prompts)
        assert cached(cache, query) == min(best, 11)
    assert_no_leak(cache)


def test_a_hit_in_the_middle_of_a_block_changes_no_bit() -> None:
    for dtype in ("float32", "bfloat16", "fp8_e4m3", "int8", "int4"):
        cache = make_cache(dtype=dtype, head_dim=32)
        cold = make_cache(dtype=dtype, head_dim=32, enable_prefix_caching=False)
        sample = Sample.random(cache, 45)
        seq, expected = compute(cold, sample)
        compute(cache, sample.first(37))
        hit, out = compute(cache, sample)
        assert hit.num_cached_tokens == 37
        assert_bitwise(out, expected[:, 37:])
        for layer in range(cache.num_layers):
            for got, want in zip(cache.read(layer, hit), cold.read(layer, seq), strict=True):
                assert_bitwise(got, want)


def test_the_holder_of_a_shared_block_goes_on_in_place() -> None:
    """A stranger who reuses the beginning of a block does not make its holder copy it."""
    cache = make_cache()
    sample = Sample.random(cache, 30)
    seq, _ = compute(cache, sample.first(20))
    table = cache.block_table(seq)
    stranger = cache.add([*sample.tokens[:18], 7, 8])
    assert stranger.num_cached_tokens == 18
    cache.append(seq, [])
    cache.truncate(seq, 20)
    more = np.array(sample.tokens[20:30])
    cache.append(seq, more)
    advance(cache, (seq, sample, 10))
    assert cache.block_table(seq)[:2] == table[:2]
    assert cache.stats()["copies"] == 0
    batch = cache.plan([(stranger, 2)])
    assert cache.stats()["copies"] == 1
    assert cache.block_table(stranger)[0] == table[0]
    assert cache.block_table(stranger)[1] != table[1]
    del batch
    cache.check()


def test_a_conversation_goes_on_in_its_last_block_without_a_copy() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 40)
    seq, _ = compute(cache, sample.first(20))
    table = cache.block_table(seq)
    cache.free(seq)
    again, _ = compute(cache, sample)
    assert again.num_cached_tokens == 20
    assert cache.block_table(again)[:2] == table
    assert cache.stats()["copies"] == 0


def test_a_minimum_below_which_nothing_is_reused() -> None:
    cache = make_cache(min_prefix_tokens=20)
    sample = Sample.random(cache, 40)
    compute(cache, sample)
    for common, expected in ((19, 0), (20, 20), (33, 33)):
        assert cached(cache, [*sample.tokens[:common], 60_000]) == expected
    assert cached(cache, [*sample.tokens[:19], 60_000], min_prefix_tokens=0) == 19
    assert cached(cache, [*sample.tokens[:33], 60_000], min_prefix_tokens=34) == 0


def test_trap_3_every_part_of_the_key_counts() -> None:
    cache = make_cache(num_blocks=200)
    keys: list[dict[str, Any]] = [{part: value} for part in ("salt", "adapter", "extra") for value in (b"", b"X", b"Y")]
    keys += [{}, {"salt": "X", "adapter": "Y"}, {"salt": "XY"}, {"salt": "Y", "adapter": "X"}]
    sample = Sample.random(cache, 40)
    for i, key in enumerate(keys):
        for other in keys[i:]:
            assert cached(cache, sample.tokens, **other) == 0
        seq, _ = compute(cache, sample, **key)
        cache.free(seq)
        assert cached(cache, sample.tokens, **key) == 39
    # a second adapter under the first one's name: another identity
    assert cached(cache, sample.tokens, adapter="X#2") == 0


@pytest.mark.parametrize("part", ["salt", "adapter", "extra"])
def test_keys_are_text_or_bytes(part: str) -> None:
    cache = make_cache()
    with pytest.raises(TypeError, match=f"{part}: expected str, bytes or None"):
        cache.add([1], **{part: 5})
    assert cache.stats()["num_sequences"] == 0


def test_fork_makes_as_many_as_asked_for() -> None:
    cache = make_cache(num_blocks=64)
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    children = cache.fork(seq, 5)
    assert len(children) == 5
    assert all(cache.block_table(child) == cache.block_table(seq) for child in children)
    assert cache.fork(seq, 0) == []
    cache.check()
    with pytest.raises(InvalidArgument, match="n:"):
        cache.fork(seq, -1)
    with pytest.raises(InvalidArgument, match="n:"):
        cache.fork(seq, 1 << 40)
    cache.free(seq)
    for child in children:
        cache.free(child)
    with pytest.raises(InvalidHandle):
        cache.fork(seq, 2)
    assert_no_leak(cache)


def test_reorder_is_a_step_of_beam_search() -> None:
    cache = make_cache(num_blocks=64)
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    beams = [seq, *cache.fork(seq, 2)]
    for i, beam in enumerate(beams):
        cache.append(beam, [100 + i])
    batch = cache.plan([(beam, 1) for beam in beams])
    x = np.zeros((3, 2, 8), np.float32)
    for layer in range(2):
        cache.write(layer, batch, x, x)
    cache.commit(batch)
    new = cache.reorder(beams, [2, 2, 0])
    assert [list(cache.token_ids(beam))[-1] for beam in new] == [102, 102, 100]
    with pytest.raises(InvalidHandle):
        cache.num_tokens(beams[1])
    used = cache.stats()["used"]
    assert used == 1 + 2  # the common block, and the last blocks of two different beams
    with pytest.raises(InvalidArgument, match="parents"):
        cache.reorder(new, [])
    for beam in new:
        cache.free(beam)
    assert_no_leak(cache)


def test_reorder_takes_all_or_nothing() -> None:
    cache = make_cache()
    sample = Sample.random(cache, 20)
    seq, _ = compute(cache, sample)
    other = cache.fork(seq)
    for seqs, parents in (([seq, other], [0, 2]), ([seq, seq], [0, 1])):
        with pytest.raises(InvalidArgument):
            cache.reorder(seqs, parents)
    with pytest.raises(TypeError):
        cache.reorder([seq, 3], [0])  # type: ignore[list-item]
    assert cache.stats()["num_sequences"] == 2
    cache.free(other)
    with pytest.raises(InvalidHandle):
        cache.reorder([seq, other], [0, 0])
    assert cache.num_tokens(seq) == 20


def test_a_lone_sequence_never_needs_more_than_its_blocks() -> None:
    """Truncated into a published block, in a pool without a block to spare: it is taken over, not copied."""
    cache = make_cache(num_blocks=2)
    sample = Sample.random(cache, 32)
    seq, _ = compute(cache, sample)
    cache.truncate(seq, 20)
    cache.append(seq, range(70_000, 70_012))
    advance(cache, (seq, sample, 12))
    cache.free(seq)
    assert_no_leak(cache)


def test_a_borrowed_block_that_cannot_be_copied_is_an_error_that_changes_nothing() -> None:
    cache = make_cache(num_blocks=2)
    sample = Sample.random(cache, 24)
    seq, _ = compute(cache, sample)
    stranger = cache.add([*sample.tokens[:20], 1, 2])
    assert stranger.num_cached_tokens == 20
    with pytest.raises(OutOfBlocks, match="1 needed, 0 available"):
        cache.plan([(stranger, 2)])
    assert cache.num_computed_tokens(stranger) == 20
    cache.free(seq)
    batch = cache.plan([(stranger, 2)])
    assert batch.num_tokens == 2
    cache.check()
