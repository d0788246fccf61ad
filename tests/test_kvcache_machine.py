"""Any order of calls, in pools so small that blocks run out, against a naive model.

The model keeps, for each live sequence, its tokens and for each computed token the K and V that were written. K and V
are made from everything that may decide about sharing: the salt and all tokens so far (and a nonce for sequences that
must not share), so that a block shared wrongly, published too early, copied too late or written in place shows as a
wrong value. After every step:

* law 2: free + cached + used = total, and ``used`` is what the live tables name;
* law 3: a block in two tables stands at the same place, behind equal tokens and salts;
* law 4: every live sequence reads back what it wrote;
* law 5: a plan is refused exactly when blocks are missing, and then nothing has changed;
* law 1: attention is bitwise that of the same tokens computed alone, cold and in one piece.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore import Batch, KVCache, OutOfBlocks, Sequence, StaleBatch, available_simd
from kvtools import (
    DTYPES,
    Floats,
    assert_bitwise,
    assert_no_leak,
    expected_attention,
    forced_simd,
    make_cache,
    rounded,
    tolerance,
)

LAYERS = 2


@lru_cache(maxsize=1 << 16)
def values(digest: bytes, layer: int, size: int) -> Floats:
    """``size`` values, about -4 to 4, that belong to a digest and a layer."""
    raw = hashlib.shake_128(digest + bytes([layer])).digest(2 * size)
    return np.frombuffer(raw, np.int16).astype(np.float32) / 8192


@dataclass(eq=False)
class Live:
    """The model of one sequence."""

    handle: Sequence
    tokens: list[int]
    salt: str | None
    shares: bool
    """Whether it may share with strangers; else only with its forks."""
    family: int
    era: int
    digests: list[bytes] = field(default_factory=list)
    computed: int = 0
    open: Planned | None = None
    """Its latest plan, as long as nothing has outdated it."""
    freed: bool = False

    def extend(self, tokens: list[int], nonce: int) -> None:
        for token in tokens:
            before = self.digests[-1] if self.digests else repr((self.salt, 0 if self.shares else nonce)).encode()
            if not self.shares:
                before += nonce.to_bytes(8, "little")
            self.digests.append(hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=16).digest())
            self.tokens.append(token)


@dataclass(eq=False)
class Planned:
    batch: Batch
    items: list[tuple[Live, int, int]]

    def is_stale(self) -> bool:
        return any(seq.freed or seq.open is not self for seq, _, _ in self.items)


# Prompts with common beginnings: some way along one of two roads, mostly a block or more, then a few other tokens.
PROMPTS = st.builds(
    lambda road, length, tail: [*([5] * length if road else range(100, 100 + length)), *tail],
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([33, 17, 16, 32, 1, 15, 47, 49, 64, 70]),
    st.sampled_from([(), (), (), (0,), (1,), (0,) * 17, (1,) * 31]),
)
TAILS = st.sampled_from([(0,), (1,), (0,) * 16, (1,) * 9, (0, 1) * 11])


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        dtype=st.sampled_from(DTYPES),
        num_blocks=st.sampled_from([6, 9, 4, 12, 3, 2]),
        block_size=st.sampled_from([16, 16, 32]),
        heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
        head_dim=st.sampled_from([2, 4, 18]),
        caching=st.sampled_from([True] * 7 + [False]),
        equal_hashes=st.booleans(),
        level=st.sampled_from(available_simd()),
    )
    def start(
        self,
        dtype: str,
        num_blocks: int,
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        caching: bool,
        equal_hashes: bool,
        level: str,
    ) -> None:
        scales = {"k_scale": 0.5, "v_scale": 2.0} if dtype == "fp8_e4m3" else {}
        sizes = dict(num_layers=LAYERS, num_kv_heads=heads[0], head_dim=head_dim, num_blocks=num_blocks,
                     block_size=block_size, dtype=dtype, **scales)  # fmt: skip
        with forced_simd(level):
            self.cache: KVCache = make_cache(**sizes, enable_prefix_caching=caching, _equal_hashes=equal_hashes)
            self.cold: KVCache = make_cache(**sizes, enable_prefix_caching=False)
        self.cache._fill(float("nan"))
        self.cold._fill(1e30)
        self.num_q_heads = heads[1]
        self.caching = caching
        self.live: list[Live] = []
        self.planned: list[Planned] = []
        self.era = 0
        self.nonces = count(1)
        self.published: set[tuple[str | None, tuple[int, ...]]] = set()
        # Until a published block is written again: then what the cache forgets is its own business.
        self.forgets_nothing = True

    # Rows of the model

    def rows(self, seq: Live, layer: int, start: int, end: int) -> tuple[Floats, Floats, Floats]:
        """K, V and Q of these positions, as they are given to the cache."""
        heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        size = (2 * heads + self.num_q_heads) * dim
        rows = [values(digest, layer, size) for digest in seq.digests[start:end]]
        joint = np.reshape(rows, (end - start, 2 * heads + self.num_q_heads, dim)).astype(np.float32)
        return joint[:, :heads], joint[:, heads : 2 * heads], joint[:, 2 * heads :]

    def stored(self, seq: Live, layer: int, end: int) -> tuple[Floats, Floats]:
        k, v, _ = self.rows(seq, layer, 0, end)
        dtype = self.cache.dtype
        return rounded(k, dtype, self.cache.k_scale), rounded(v, dtype, self.cache.v_scale)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)

    def pick(self, i: int) -> Live:
        return self.live[i % len(self.live)]

    def some_live(self) -> bool:
        return bool(self.live)

    def with_open_tokens(self) -> list[Live]:
        return [seq for seq in self.live if seq.computed < len(seq.tokens)]

    # Rules

    @precondition(lambda self: len(self.live) < 6)
    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from([None] * 5 + ["", "a"]),
        use_prefix=st.sampled_from([True] * 5 + [False]),
        then_compute=st.sampled_from([True, True, False]),
    )
    def add(self, prompt: list[int], salt: str | None, use_prefix: bool, then_compute: bool) -> None:
        handle = self.cache.add(prompt, salt, use_prefix=use_prefix)
        seq = Live(handle, [], salt, use_prefix and self.caching, next(self.nonces), self.era)
        seq.extend(prompt, seq.family)
        seq.computed = handle.num_cached_tokens
        self.live.append(seq)
        size = self.cache.block_size
        assert seq.computed % size == 0
        assert seq.computed < len(prompt)
        found = [n for n in range(size, len(prompt), size) if (salt, tuple(prompt[:n])) in self.published]
        most = max(found, default=0) if seq.shares else 0
        assert seq.computed <= most
        if self.forgets_nothing and self.cache.stats()["evictions"] == 0:
            assert seq.computed == most
        if then_compute:
            self.compute_all(seq)

    @precondition(some_live)
    @rule(i=st.integers(0, 5), tokens=TAILS, then_compute=st.booleans())
    def append(self, i: int, tokens: tuple[int, ...], then_compute: bool) -> None:
        seq = self.pick(i)
        self.cache.append(seq.handle, tokens)
        seq.extend(list(tokens), next(self.nonces))
        if then_compute:
            self.compute_all(seq)

    def compute_all(self, seq: Live) -> None:
        planned = self.plan({seq: len(seq.tokens) - seq.computed})
        if planned is not None:
            self.compute(planned)

    @precondition(lambda self: self.with_open_tokens())
    @rule(
        wanted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=3),
        then=st.sampled_from(["commit", "commit", "commit", "commit", "spoil", "wait"]),
    )
    def step(self, wanted: list[tuple[int, int]], then: str) -> None:
        """Plan the next tokens of up to three sequences; then compute them, or write rubbish and leave them."""
        items: dict[Live, int] = {}
        waiting = self.with_open_tokens()
        for i, n in wanted:
            seq = waiting[i % len(waiting)]
            left = len(seq.tokens) - seq.computed
            items[seq] = left if n == 0 else 1 + n % left
        planned = self.plan(items)
        if planned is None:
            return
        if then == "commit":
            self.compute(planned)
        else:
            self.planned = [*self.planned[-2:], planned]
            if then == "spoil":
                for layer in range(LAYERS):
                    k, v, _ = self.rows_of(planned, layer)
                    self.cache.write(layer, planned.batch, k * np.nan, v * 0 - 1e9)

    def plan(self, items: dict[Live, int]) -> Planned | None:
        size = self.cache.block_size
        tables = {seq: self.cache.block_table(seq.handle) for seq in self.live}
        needed, available = 0, self.cache.num_free_blocks
        shared: list[int] = []
        for seq, n in items.items():
            have, want = len(tables[seq]), self.blocks_for(seq.computed + n)
            needed += max(0, want - have)
            available += max(0, have - want)
            if seq.computed % size:
                shared.append(tables[seq][seq.computed // size])
        for block in set(shared):
            holders = sum(block in table for table in tables.values())
            needed += min(shared.count(block), holders - 1)
        pairs = [(seq.handle, n) for seq, n in items.items()]
        before = self.cache.stats()
        if needed > available:
            with pytest.raises(OutOfBlocks, match=f"{needed} needed, {available} available"):
                self.cache.plan(pairs)
            assert self.cache.stats() == before
            assert {seq: self.cache.block_table(seq.handle) for seq in self.live} == tables
            return None
        batch = self.cache.plan(pairs)
        planned = Planned(batch, [(seq, seq.computed, n) for seq, n in items.items()])
        for seq, start, n in planned.items:
            seq.open = planned
            if start == 0:
                seq.era = self.era
            assert len(self.cache.block_table(seq.handle)) == self.blocks_for(start + n)
        positions = [p for _, start, n in planned.items for p in range(start, start + n)]
        np.testing.assert_array_equal(batch.positions, positions)
        return planned

    def rows_of(self, planned: Planned, layer: int) -> tuple[Floats, Floats, Floats]:
        parts = [self.rows(seq, layer, start, start + n) for seq, start, n in planned.items]
        k, v, q = (np.concatenate(part) for part in zip(*parts, strict=True))
        return k, v, q

    def compute(self, planned: Planned) -> None:
        """Write, attend and commit; compare attention with the oracle and with a cold run."""
        outs = []
        for layer in range(LAYERS):
            k, v, q = self.rows_of(planned, layer)
            self.cache.write(layer, planned.batch, k, v)
            outs.append(self.cache.attend(layer, planned.batch, q))
        self.cache.commit(planned.batch)
        for layer in range(LAYERS):
            again = self.cache.attend(layer, planned.batch, self.rows_of(planned, layer)[2])
            assert_bitwise(again, outs[layer], "after the commit")
        row = 0
        for seq, start, n in planned.items:
            self.compare(seq, start, n, [out[row : row + n] for out in outs])
            row += n
            seq.computed = start + n
            if seq.shares and seq.era == self.era:
                for end in range(self.cache.block_size, seq.computed + 1, self.cache.block_size):
                    self.published.add((seq.salt, tuple(seq.tokens[:end])))

    def compare(self, seq: Live, start: int, n: int, outs: list[Floats]) -> None:
        end = start + n
        handle = self.cold.add(seq.tokens[:end])
        batch = self.cold.plan([(handle, end)])
        for layer, out in enumerate(outs):
            k, v, q = self.rows(seq, layer, 0, end)
            self.cold.write(layer, batch, k, v)
            assert_bitwise(out, self.cold.attend(layer, batch, q)[start:], "cold, alone and whole")
            k, v = self.stored(seq, layer, end)
            expected = expected_attention(q[start:], k, v, self.cache.dtype)
            np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance(self.cache.dtype, v))
        self.cold.free(handle)

    @precondition(lambda self: self.planned)
    @rule(i=st.integers(0, 2))
    def finish(self, i: int) -> None:
        """Come back to a plan that was left open: it can be computed unless something has outdated it."""
        planned = self.planned.pop(i % len(self.planned))
        if planned.is_stale():
            heads, dim, rows = self.cache.num_kv_heads, self.cache.head_dim, planned.batch.num_tokens
            x = np.zeros((rows, heads, dim), np.float32)
            for call in (
                lambda: self.cache.write(0, planned.batch, x, x),
                lambda: self.cache.attend(0, planned.batch, x),
                lambda: self.cache.commit(planned.batch),
            ):
                with pytest.raises(StaleBatch):
                    call()
        else:
            self.compute(planned)

    @precondition(lambda self: 0 < len(self.live) < 6)
    @rule(i=st.integers(0, 5), tokens=st.one_of(st.none(), TAILS))
    def fork(self, i: int, tokens: tuple[int, ...] | None) -> None:
        seq = self.pick(i)
        handle = self.cache.fork(seq.handle)
        seq.open = None
        self.live.append(
            Live(handle, [*seq.tokens], seq.salt, seq.shares, seq.family, seq.era, [*seq.digests], seq.computed)
        )
        assert self.cache.block_table(handle) == self.cache.block_table(seq.handle)
        assert handle.num_cached_tokens == seq.handle.num_cached_tokens
        if tokens is not None:
            self.append(len(self.live) - 1, tokens, then_compute=True)

    @precondition(some_live)
    @rule(i=st.integers(0, 5), n=st.integers(0, 200))
    def truncate(self, i: int, n: int) -> None:
        seq = self.pick(i)
        n = 1 + n % len(seq.tokens)
        self.cache.truncate(seq.handle, n)
        size = self.cache.block_size
        if n < seq.computed // size * size and n % size:
            self.forgets_nothing = False
        del seq.tokens[n:], seq.digests[n:]
        seq.computed = min(seq.computed, n)
        seq.open = None

    @precondition(lambda self: len(self.live) > 1)
    @rule(i=st.integers(0, 5))
    def free(self, i: int) -> None:
        seq = self.pick(i)
        self.live.remove(seq)
        self.cache.free(seq.handle)
        seq.freed = True

    @precondition(lambda self: self.live and not self.cache.num_free_blocks)
    @rule(spared=st.integers(0, 5))
    def free_all_but_one(self, spared: int) -> None:
        for _ in range(len(self.live) - 1):
            self.free(0 if self.pick(spared) is self.live[-1] else len(self.live) - 1)

    @precondition(lambda self: len(self.published) > 3)
    @rule()
    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        self.published.clear()
        self.era += 1
        assert self.cache.stats()["cached"] == 0

    # Laws

    @invariant()
    def laws_2_and_3(self) -> None:
        cache, size = self.cache, self.cache.block_size
        cache.check()
        stats = cache.stats()
        assert stats["free"] + stats["cached"] + stats["used"] == stats["total"] == cache.num_blocks
        assert stats["free"] + stats["cached"] == cache.num_free_blocks
        assert stats["num_sequences"] == len(self.live)
        tables = [cache.block_table(seq.handle) for seq in self.live]
        assert stats["used"] == len({block for table in tables for block in table})
        holders: dict[int, list[tuple[Live, int]]] = {}
        for seq, table in zip(self.live, tables, strict=True):
            assert len(set(table)) == len(table)
            planned = [start + n for s, start, n in seq.open.items if s is seq] if seq.open else []
            assert len(table) == self.blocks_for(max(seq.computed, *planned, 0))
            for index, block in enumerate(table):
                holders.setdefault(block, []).append((seq, index))
        for held in holders.values():
            (first, at), *others = held
            for other, index in others:
                assert index == at
                end = min(first.computed, other.computed, (index + 1) * size)
                assert end > index * size, "an unwritten block is shared"
                assert first.tokens[:end] == other.tokens[:end]
                assert first.salt == other.salt
                assert (first.shares and other.shares) or first.family == other.family
            if others:
                for seq, index in held:
                    waiting = seq.open is not None and any(
                        s is seq and s.computed == start and start < (index + 1) * size and index * size < start + n
                        for s, start, n in seq.open.items
                    )
                    assert not waiting, "a block that is about to be written is shared"

    @invariant()
    def law_4(self) -> None:
        for seq in self.live:
            assert self.cache.num_tokens(seq.handle) == len(seq.tokens)
            assert self.cache.num_computed_tokens(seq.handle) == seq.computed
            assert self.cache.token_ids(seq.handle).tolist() == seq.tokens
            for layer in range(LAYERS):
                for got, expected in zip(
                    self.cache.read(layer, seq.handle), self.stored(seq, layer, seq.computed), strict=True
                ):
                    assert_bitwise(got, expected, "read() is what was written")

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in self.live:
                self.cache.free(seq.handle)
            assert_no_leak(self.cache)
            assert_no_leak(self.cold)


class TestKVCacheMachine(KVCacheMachine.TestCase):
    # Steps are cheap, and most machines die young.
    settings = settings(max_examples=3 * settings.default.max_examples)
