"""Any order of calls, in pools so small that blocks run out, against a naive model.

The model (``kvmodel.py``) keeps, for each live sequence, its tokens and for each computed token the K and V that were
written; and for each published block its prefix, which it learns from the events. After every step:

* law 2: free + cached + used = total, and ``used`` is what the live tables name; tokens and slots are counted right;
* law 3: a block in two tables stands at the same place, behind equal tokens and keys;
* law 4: every live sequence reads back what it wrote;
* law 5: a plan is refused exactly when blocks are missing, and then nothing has changed;
* law 6: everything that was committed can be found, to the token, until an event says why not; pinned prefixes always;
* law 1: attention is bitwise that of the same tokens computed alone, cold and in one piece.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore import InvalidHandle, InvalidState, KVCache, OutOfBlocks, PinLimit, StaleBatch, available_simd
from kvmodel import KEYS, Clock, Entry, Index, Key, Live, Pinned, Planned, digests_of, values
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
MOST = 6
"""Sequences at once."""

# Prompts with common beginnings: some way along one of two roads, mostly a block or more, then a few other tokens.
PROMPTS = st.builds(
    lambda road, length, tail: [*([5] * length if road else range(100, 100 + length)), *tail],
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([33, 17, 16, 32, 1, 15, 21, 27, 47, 49, 64, 70]),
    st.sampled_from([(), (), (), (0,), (1,), (0, 0, 1), (0,) * 17, (1,) * 31]),
)
TAILS = st.sampled_from([(0,), (1,), (0, 1, 1), (0,) * 16, (1,) * 9, (0, 1) * 11])
SEQS = st.integers(0, MOST - 1)
TTLS = st.sampled_from([..., ..., ..., 5.0, 50.0, None])
PRIORITIES = st.sampled_from([None, None, 10, 90])


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(
        dtype=st.sampled_from(DTYPES),
        num_blocks=st.sampled_from([6, 9, 4, 12, 3, 2]),
        block_size=st.sampled_from([16, 16, 32]),
        heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
        head_dim=st.sampled_from([2, 4, 18]),
        caching=st.sampled_from([True] * 7 + [False]),
        least=st.sampled_from([0, 0, 0, 20]),
        ttl=st.sampled_from([300.0, 10.0]),
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
        least: int,
        ttl: float,
        equal_hashes: bool,
        level: str,
    ) -> None:
        scales = {"k_scale": 0.5, "v_scale": 2.0} if dtype == "fp8_e4m3" else {}
        self.clock = Clock()
        self.sizes = dict(num_layers=LAYERS, num_kv_heads=heads[0], head_dim=head_dim, num_blocks=num_blocks,
                          block_size=block_size, dtype=dtype, clock=self.clock, **scales)  # fmt: skip
        with forced_simd(level):
            self.cache: KVCache = make_cache(
                **self.sizes, enable_prefix_caching=caching, min_prefix_tokens=least, prefix_ttl=ttl,
                max_events=1 << 20, _equal_hashes=equal_hashes)  # fmt: skip
            self.cold: KVCache = make_cache(**self.sizes, enable_prefix_caching=False)
        self.cache._fill(float("nan"))
        self.cold._fill(1e30)
        self.num_q_heads = heads[1]
        self.caching, self.least, self.ttl = caching, least, ttl
        self.live: list[Live] = []
        self.planned: list[Planned] = []
        self.pins: list[Pinned] = []
        self.unpinned: list[Any] = []
        self.index = Index(block_size)
        self.tables: dict[Live, list[int]] = {}
        self.filled: dict[int, int] = {}
        self.hits = [0, 0]
        self.copies = 0
        self.forever = False
        self.era = 0
        self.nonces = count(1)
        self.folder = Path(tempfile.mkdtemp())

    # Rows of the model

    def rows_at(self, digests: list[bytes], layer: int) -> tuple[Floats, Floats, Floats]:
        """K, V and Q of the tokens with these digests, as they are given to the cache."""
        heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        size = (2 * heads + self.num_q_heads) * dim
        rows = [values(digest, layer, size) for digest in digests]
        joint = np.reshape(rows, (len(digests), 2 * heads + self.num_q_heads, dim)).astype(np.float32)
        return joint[:, :heads], joint[:, heads : 2 * heads], joint[:, 2 * heads :]

    def stored(self, digests: list[bytes], layer: int) -> tuple[Floats, Floats]:
        k, v, _ = self.rows_at(digests, layer)
        dtype = self.cache.dtype
        return rounded(k, dtype, self.cache.k_scale), rounded(v, dtype, self.cache.v_scale)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)

    def pick(self, i: int) -> Live:
        return self.live[i % len(self.live)]

    def some_live(self) -> bool:
        return bool(self.live)

    def room(self) -> bool:
        return len(self.live) < MOST

    def with_open_tokens(self) -> list[Live]:
        return [seq for seq in self.live if seq.computed < len(seq.tokens)]

    def refs(self, block: int) -> int:
        return sum(block in table for table in self.tables.values())

    def pinned_blocks(self) -> set[int]:
        return {block for pinned in self.pins for block in pinned.blocks}

    # What the events say

    def sync(self) -> None:
        """Learn from events and tables what can be found now. After every call that may change it."""
        before = self.tables
        self.tables = {seq: self.cache.block_table(seq.handle) for seq in self.live}
        holders: dict[int, list[tuple[Live, int]]] = {}
        for tables in (self.tables, before):
            for seq, table in tables.items():
                for at, block in enumerate(table):
                    holders.setdefault(block, []).append((seq, at))
        known = dict(self.index.entries)
        told = self.cache.events()
        assert told["dropped"] == 0
        for event in told["events"]:
            if event["type"] == "copied":
                self.copies += 1
            elif event["type"] == "stored":
                # Whoever has computed so much of it: of several holders all have the same tokens then.
                size, n = self.cache.block_size, event["num_tokens"]
                seq, end = next((seq, at * size + n) for seq, at in holders[event["block"]]
                                if seq.computed >= at * size + n)  # fmt: skip
                tokens = seq.tokens[:end]
                self.index.entries[event["block"]] = Entry(seq.key, tuple(tokens), seq.ttl)
            else:
                self.removed(event, known)
        for block, entry in self.index.entries.items():
            if self.refs(block) or block in self.pinned_blocks():
                entry.released = self.clock.now

    def removed(self, event: dict[str, Any], known: dict[int, Entry]) -> None:
        block = event["block"]
        entry = self.index.entries.pop(block)
        assert block not in self.pinned_blocks()
        if event["cause"] != "expired":
            return
        # Retention may be longer than the model knows, so this is what must hold and not all that can be said.
        size = self.cache.block_size
        above = [(b, e) for b, e in known.items() if e.key == entry.key and entry.tokens[: len(e.tokens)] == e.tokens
                 and (e is entry or len(e.tokens) % size == 0)]  # fmt: skip
        over = [b for b, e in above if e.released + e.ttl <= self.clock.now]
        assert over, "a prefix expired too early"

    # Rules

    @precondition(room)
    @rule(
        prompt=PROMPTS,
        key=st.sampled_from(KEYS),
        use_prefix=st.sampled_from([True] * 5 + [False]),
        least=st.sampled_from([None, None, None, 0, 34]),
        ttl=TTLS,
        priority=PRIORITIES,
        then_compute=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        prompt: list[int],
        key: Key,
        use_prefix: bool,
        least: int | None,
        ttl: Any,
        priority: int | None,
        then_compute: bool,
    ) -> None:
        salt, adapter, extra = key
        shares = use_prefix and self.caching
        found = self.findable(prompt, key, self.least if least is None else least) if shares else 0
        handle = self.cache.add(prompt, salt, adapter=adapter, extra=extra, use_prefix=use_prefix,
                                min_prefix_tokens=least, ttl=ttl, priority=priority)  # fmt: skip
        assert handle.num_cached_tokens == found
        seq = Live(handle, [], key, shares, next(self.nonces), self.era, self.seconds(ttl))
        seq.extend(prompt, seq.family)
        seq.computed, seq.borrowed = found, found % self.cache.block_size != 0
        self.admit(seq)
        if ttl is not ... or priority is not None:
            for block in self.tables[seq]:
                self.renew(block, seq.ttl)
        if then_compute:
            self.compute_all(seq)

    def findable(self, prompt: list[int], key: Key, least: int) -> int:
        """Tokens of a prompt that are cached now."""
        self.cache.stats()  # what has expired goes first
        self.sync()
        found = min(self.index.longest(key, prompt), len(prompt) - 1)
        return found if found >= least else 0

    def admit(self, seq: Live) -> None:
        self.live.append(seq)
        if seq.shares:
            self.hits = [self.hits[0] + seq.handle.num_cached_tokens, self.hits[1] + len(seq.tokens)]
        self.sync()

    def seconds(self, ttl: Any) -> float:
        self.forever |= ttl is None
        return self.ttl if ttl is ... else math.inf if ttl is None else ttl

    def renew(self, block: int, ttl: float) -> None:
        if block in self.index.entries:
            for at in self.index.ancestry(block):
                entry = self.index.entries[at]
                entry.ttl = max(entry.ttl, ttl)

    @precondition(some_live)
    @rule(i=SEQS, tokens=TAILS, then_compute=st.booleans())
    def append(self, i: int, tokens: tuple[int, ...], then_compute: bool) -> None:
        seq = self.pick(i)
        self.cache.append(seq.handle, tokens)
        seq.extend(tokens, next(self.nonces))
        if then_compute:
            self.compute_all(seq)

    def compute_all(self, seq: Live) -> None:
        planned = self.plan({seq: len(seq.tokens) - seq.computed})
        if planned is not None:
            self.compute(planned)

    @precondition(lambda self: self.with_open_tokens())
    @rule(
        wanted=st.lists(st.tuples(SEQS, st.integers(0, 60)), min_size=1, max_size=3),
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

    def demand(self, items: dict[Live, int]) -> tuple[int, int]:
        """Blocks that a plan needs, and those that it can have."""
        size = self.cache.block_size
        needed, available = 0, self.cache.num_free_blocks
        writers: dict[int, list[Live]] = {}
        for seq, n in items.items():
            have, want = len(self.tables[seq]), self.blocks_for(seq.computed + n)
            needed += max(0, want - have)
            available += max(0, have - want)
            if seq.computed % size:
                writers.setdefault(self.tables[seq][seq.computed // size], []).append(seq)
        for block, seqs in writers.items():
            refs, filled = self.refs(block), self.filled[block]
            borrows = sum(seq.borrowed and block == table[-1] for seq, table in self.tables.items() if table)
            for seq in seqs:
                slot = seq.computed % size
                lone_writer = refs - borrows - (not seq.borrowed) == 0
                unseen = refs == 1 and (self.index.published(block) <= slot or block not in self.pinned_blocks())
                if (lone_writer and filled <= slot) or unseen:
                    filled = min(filled, slot)
                else:
                    needed, refs = needed + 1, refs - 1
                borrows -= seq.borrowed
        return needed, available

    def plan(self, items: dict[Live, int]) -> Planned | None:
        self.cache.stats()  # what has expired goes first
        self.sync()
        needed, available = self.demand(items)
        pairs = [(seq.handle, n) for seq, n in items.items()]
        before, tables = self.cache.stats(), self.tables
        if needed > available:
            with pytest.raises(OutOfBlocks, match=f"{needed} needed, {available} available"):
                self.cache.plan(pairs)
            self.sync()
            assert self.cache.stats() == before
            assert self.tables == tables
            return None
        planned = Planned(self.cache.plan(pairs), [(seq, seq.computed, n) for seq, n in items.items()])
        self.sync()
        size = self.cache.block_size
        for seq, start, n in planned.items:
            seq.open, seq.borrowed = planned, False
            if start == 0:
                seq.era = self.era
            table = self.tables[seq]
            assert len(table) == self.blocks_for(start + n)
            assert table[: start // size] == tables[seq][: start // size]
            for at in range(start // size, len(table)):
                self.filled[table[at]] = max(0, start - at * size)
        positions = [p for _, start, n in planned.items for p in range(start, start + n)]
        np.testing.assert_array_equal(planned.batch.positions, positions)
        return planned

    def rows_of(self, planned: Planned, layer: int) -> tuple[Floats, Floats, Floats]:
        return self.rows_at([d for seq, start, n in planned.items for d in seq.digests[start : start + n]], layer)

    def compute(self, planned: Planned) -> None:
        """Write, attend and commit; compare attention with the oracle and with a cold run."""
        outs = []
        for layer in range(LAYERS):
            k, v, q = self.rows_of(planned, layer)
            self.cache.write(layer, planned.batch, k, v)
            outs.append(self.cache.attend(layer, planned.batch, q))
        self.cache.commit(planned.batch)
        self.committed(planned.items)
        for layer in range(LAYERS):
            again = self.cache.attend(layer, planned.batch, self.rows_of(planned, layer)[2])
            assert_bitwise(again, outs[layer], "after the commit")
        row = 0
        for seq, start, n in planned.items:
            self.compare(seq, start, n, [out[row : row + n] for out in outs])
            row += n

    def committed(self, items: list[tuple[Live, int, int]]) -> None:
        """All that was written can be found."""
        size = self.cache.block_size
        for seq, start, n in items:
            seq.computed = start + n
        self.sync()
        for seq, start, n in items:
            table, end = self.tables[seq], start + n
            for at in range(start // size, len(table)):
                self.filled[table[at]] = min(size, end - at * size)
            last = self.index.entries.get(table[-1])
            # It grows, unless another block has these tokens and it was kept for a pin only.
            if last is not None and self.publishes(seq) and self.index.longest(seq.key, seq.tokens[:end]) < end:
                last.tokens = tuple(seq.tokens[:end])
        # Only now: of two branches in one commit the longer may have replaced the shorter.
        for seq, start, n in items:
            if self.publishes(seq):
                assert self.index.longest(seq.key, seq.tokens[: start + n]) == start + n

    def publishes(self, seq: Live) -> bool:
        return seq.shares and seq.era == self.era

    def compare(self, seq: Live, start: int, n: int, outs: list[Floats]) -> None:
        end = start + n
        handle = self.cold.add(seq.tokens[:end])
        batch = self.cold.plan([(handle, end)])
        for layer, out in enumerate(outs):
            k, v, q = self.rows_at(seq.digests[:end], layer)
            self.cold.write(layer, batch, k, v)
            assert_bitwise(out, self.cold.attend(layer, batch, q)[start:], "cold, alone and whole")
            k, v = self.stored(seq.digests[:end], layer)
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

    @precondition(lambda self: self.live and self.room())
    @rule(i=SEQS, n=st.sampled_from([None, None, 1, 2, 3]), tokens=st.one_of(st.none(), TAILS))
    def fork(self, i: int, n: int | None, tokens: tuple[int, ...] | None) -> None:
        seq = self.pick(i)
        n = n and min(n, MOST - len(self.live))
        children = [self.cache.fork(seq.handle)] if n is None else self.cache.fork(seq.handle, n)
        assert len(children) == (1 if n is None else n)
        seq.open = None
        self.live += [seq.branch(child) for child in children]
        self.sync()
        for child in self.live[-len(children) :]:
            assert self.tables[child] == self.tables[seq]
            assert child.handle.num_cached_tokens == seq.handle.num_cached_tokens
        if tokens is not None:
            self.append(len(self.live) - 1, tokens, then_compute=True)

    @precondition(some_live)
    @rule(beams=st.sets(SEQS, min_size=1, max_size=3), parents=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def reorder(self, beams: set[int], parents: list[int]) -> None:
        """A step of beam search: the first that continues a parent keeps its handle, unused ones end."""
        seqs = list({self.pick(i): None for i in beams})
        parents = [parent % len(seqs) for parent in parents]
        if len(self.live) - len(seqs) + len(parents) > MOST:
            parents = parents[: len(seqs)]
        handles = self.cache.reorder([seq.handle for seq in seqs], parents)
        kept: dict[int, Live] = {}
        for parent, handle in zip(parents, handles, strict=True):
            if parent not in kept:
                kept[parent] = seqs[parent]
                assert self.cache.token_ids(handle).tolist() == seqs[parent].tokens
            else:
                seqs[parent].open = None
                self.live.append(seqs[parent].branch(handle))
        for number, seq in enumerate(seqs):
            if number not in kept:
                self.forget(seq)
        self.sync()

    def forget(self, seq: Live) -> None:
        self.live.remove(seq)
        seq.freed = True
        with pytest.raises(InvalidHandle):
            self.cache.num_tokens(seq.handle)

    @precondition(some_live)
    @rule(i=SEQS, n=st.integers(0, 200))
    def truncate(self, i: int, n: int) -> None:
        seq = self.pick(i)
        n = 1 + n % len(seq.tokens)
        self.cache.truncate(seq.handle, n)
        size, held = self.cache.block_size, self.blocks_for(seq.computed)
        seq.cut(n)
        self.sync()
        seq.borrowed &= self.blocks_for(seq.computed) == held and seq.computed % size != 0
        if seq.computed % size and not seq.borrowed:
            last = self.tables[seq][-1]
            if self.refs(last) == 1 and last not in self.index.entries:
                self.filled[last] = seq.computed % size

    @precondition(lambda self: len(self.live) > 1)
    @rule(i=SEQS)
    def free(self, i: int) -> None:
        seq = self.pick(i)
        self.cache.free(seq.handle)
        self.forget(seq)
        self.sync()

    @precondition(lambda self: self.live and not self.cache.num_free_blocks)
    @rule(spared=SEQS)
    def free_all_but_one(self, spared: int) -> None:
        for _ in range(len(self.live) - 1):
            self.free(0 if self.pick(spared) is self.live[-1] else len(self.live) - 1)

    @precondition(lambda self: len(self.index.entries) > 3)
    @rule()
    def reset(self) -> None:
        """All goes but what is pinned, and what comes before it."""
        self.cache.reset_prefix_cache()
        kept = {b for block in self.pinned_blocks() for b in self.index.ancestry(block)}
        self.era += 1
        self.sync()
        assert set(self.index.entries) == kept

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 400.0, 1e6]))
    def wait(self, seconds: float) -> None:
        """Time goes by: what nobody holds expires, unless it is pinned or has no end."""
        self.clock.now += seconds
        self.cache.stats()
        self.sync()
        if seconds == 1e6 and not self.forever:
            kept = self.pinned_blocks()
            for block in self.index.entries:
                assert all(self.refs(b) or b in kept for b in self.index.ancestry(block)), "it should have expired"

    @precondition(some_live)
    @rule(i=SEQS, n=st.integers(0, 200), ttl=TTLS, priority=PRIORITIES)
    def mark(self, i: int, n: int, ttl: Any, priority: int | None) -> None:
        seq = self.pick(i)
        n = 1 + n % len(seq.tokens)
        if not seq.shares:
            with pytest.raises(InvalidState):
                self.cache.mark(seq.handle, n, ttl=ttl, priority=priority)
            return
        self.cache.mark(seq.handle, n, ttl=ttl, priority=priority)
        self.sync()
        ttl = self.seconds(ttl)
        if self.publishes(seq):
            for block in self.tables[seq][: min(n, seq.computed) // self.cache.block_size]:
                self.renew(block, ttl)

    @precondition(lambda self: any(seq.computed for seq in self.live))
    @rule(i=SEQS, n=st.integers(0, 200))
    def pin(self, i: int, n: int) -> None:
        """A prefix stays, or there is an error with the right numbers."""
        able = [seq for seq in self.live if seq.computed]
        seq = able[i % len(able)]
        n = 1 + n % seq.computed
        try:
            pin = self.cache.pin(seq.handle, n)
        except InvalidState:
            assert not self.publishes(seq)
            return
        except PinLimit as error:
            pin, message = None, str(error)
        assert self.publishes(seq)
        self.sync()
        blocks = self.index.path(seq.key, seq.tokens[: seq.computed], n, self.tables[seq])
        kept = self.pinned_blocks()
        assert len(blocks) == self.blocks_for(n)
        more, limit = len({*blocks} - kept), self.cache.num_blocks // 2
        if pin is None:
            assert more + len(kept) > limit
            assert f"{more} more to pin, {len(kept)} pinned, {limit} allowed" in message
        else:
            assert more + len(kept) <= limit
            assert pin.num_tokens == n
            self.pins.append(Pinned(pin, seq.key, seq.tokens[:n], blocks))

    @precondition(lambda self: self.pins)
    @rule(i=st.integers(0, 9))
    def unpin(self, i: int) -> None:
        pinned = self.pins.pop(i % len(self.pins))
        self.cache.unpin(pinned.pin)
        with pytest.raises(InvalidHandle):
            self.cache.unpin(pinned.pin)
        self.sync()

    # Files

    @precondition(lambda self: self.live and self.room())
    @rule(i=SEQS)
    def save_and_load(self, i: int) -> None:
        """A sequence from a file is like one that was computed again."""
        seq = self.pick(i)
        self.cache.save(seq.handle, self.folder / "sequence")
        # What was private, or is older than the last reset, stays private.
        shares = seq.shares and (seq.era == self.era or not seq.computed)
        cached = self.findable([*seq.tokens, 77], seq.key, 0) if shares else 0
        if cached < seq.computed:
            # Whole blocks come from the file.
            cached -= cached % self.cache.block_size
        elif cached > seq.computed:
            cached = max(seq.computed, min(cached, len(seq.tokens) - 1))
        before = self.cache.stats()
        try:
            handle = self.cache.load(self.folder / "sequence")
        except OutOfBlocks:
            self.sync()
            assert self.cache.stats() == before
            assert self.cache.num_free_blocks < self.blocks_for(seq.computed - cached) + self.blocks_for(cached)
            return
        assert handle.num_cached_tokens == cached
        copy = Live(handle, [*seq.tokens], seq.key, shares, seq.family, self.era, self.ttl, [*seq.digests])
        copy.computed = max(seq.computed, cached)
        copy.borrowed = cached >= seq.computed and cached % self.cache.block_size != 0
        self.live.append(copy)
        self.sync()
        if cached < seq.computed:
            self.committed([(copy, cached, seq.computed - cached)])

    @precondition(lambda self: self.caching and len(self.index.entries) > 2)
    @rule()
    def save_and_load_prefixes(self) -> None:
        """Another cache of the same size finds all that can be found here, and nothing else."""
        saved = self.cache.save_prefixes(self.folder)
        self.sync()
        assert saved == len(self.index.entries)
        other = make_cache(**self.sizes)
        other._fill(float("nan"))
        # A pinned block may have been left behind by one that has its tokens and more: that is of no use elsewhere.
        left = sum(self.index.is_left_behind(block) for block in self.index.entries)
        assert saved - left <= other.load_prefixes(self.folder) <= saved
        assert other.stats()["cached"] == saved - left
        other.check()
        for entry in self.index.entries.values():
            salt, adapter, extra = entry.key
            seq = other.add([*entry.tokens, 77], salt, adapter=adapter, extra=extra)
            assert seq.num_cached_tokens == len(entry.tokens)
            for got, want in zip(other.read(1, seq), self.stored(digests_of(entry.key, entry.tokens), 1), strict=True):
                assert_bitwise(got, want, "from a file of prefixes")
            other.free(seq)
        assert other.load_prefixes(self.folder) == 0
        assert_no_leak(other)

    # Laws

    @invariant()
    def laws_2_and_3(self) -> None:
        cache, size = self.cache, self.cache.block_size
        cache.check()
        self.sync()
        stats = cache.stats()
        assert stats["free"] + stats["cached"] + stats["used"] == stats["total"] == cache.num_blocks
        assert stats["num_sequences"] == len(self.live)
        held = {block for table in self.tables.values() for block in table}
        idle_pins = self.pinned_blocks() - held
        assert stats["used"] == len(held)
        assert stats["free"] + stats["cached"] - len(idle_pins) == cache.num_free_blocks
        assert stats["cached"] == len((set(self.index.entries) | idle_pins) - held)
        assert stats["pinned"] == len(self.pinned_blocks())
        assert stats["slots"] == len(held) * size
        assert stats["tokens"] == sum(self.filled[block] for block in held)
        assert [stats["hit_tokens"], stats["query_tokens"]] == self.hits
        assert stats["copies"] == self.copies
        holders: dict[int, list[tuple[Live, int]]] = {}
        for seq, table in self.tables.items():
            assert len(set(table)) == len(table)
            planned = [start + n for s, start, n in seq.open.items if s is seq] if seq.open else []
            assert len(table) == self.blocks_for(max(seq.computed, *planned, 0))
            for index, block in enumerate(table):
                holders.setdefault(block, []).append((seq, index))
        for held_by in holders.values():
            self.check_shared(held_by)

    def check_shared(self, held: list[tuple[Live, int]]) -> None:
        (first, at), *others = held
        size = self.cache.block_size
        for other, index in others:
            assert index == at
            end = min(first.computed, other.computed, (index + 1) * size)
            assert end > index * size, "an unwritten block is shared"
            assert first.tokens[:end] == other.tokens[:end]
            assert first.key == other.key
            assert (first.shares and other.shares) or first.family == other.family
        writers = [seq for seq, index in held if self.is_writing(seq, index)]
        assert len(writers) <= 1
        if others and writers:
            # Borrowers read only what is before the slots that are written.
            start = next(start for s, start, _ in writers[0].open.items if s is writers[0])  # type: ignore[union-attr]
            assert all(seq.borrowed and seq.computed <= start for seq, _ in held if seq is not writers[0])

    def is_writing(self, seq: Live, index: int) -> bool:
        """Whether a plan waits that writes into this block of its table."""
        size = self.cache.block_size
        return seq.open is not None and any(
            s is seq and s.computed == start and start < (index + 1) * size and index * size < start + n
            for s, start, n in seq.open.items
        )

    @invariant()
    def law_4(self) -> None:
        for seq in self.live:
            assert self.cache.num_tokens(seq.handle) == len(seq.tokens)
            assert self.cache.num_computed_tokens(seq.handle) == seq.computed
            assert self.cache.token_ids(seq.handle).tolist() == seq.tokens
            for layer in range(LAYERS):
                stored = self.stored(seq.digests[: seq.computed], layer)
                for got, expected in zip(self.cache.read(layer, seq.handle), stored, strict=True):
                    assert_bitwise(got, expected, "read() is what was written")

    @invariant()
    def law_6(self) -> None:
        self.index.check()
        for pinned in self.pins:
            assert self.index.longest(pinned.key, pinned.tokens) == len(pinned.tokens), "a pinned prefix is gone"

    @invariant()
    def the_snapshot_is_true(self) -> None:
        shot = self.cache.snapshot()
        (group,) = shot["groups"]
        told = {seq["id"]: seq for seq in shot["sequences"]}
        assert sorted(seq["tables"][0] for seq in told.values()) == sorted(self.tables.values())
        kept = self.pinned_blocks()
        for block in range(self.cache.num_blocks):
            refs = self.refs(block)
            assert group["refs"][block] == refs
            state = 1 if refs else 3 if block in kept else 2 if block in self.index.entries else 0
            assert group["state"][block] == state
            if refs:
                assert group["filled"][block] == self.filled[block]

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for pinned in self.pins:
                self.cache.unpin(pinned.pin)
            for seq in self.live:
                self.cache.free(seq.handle)
            assert_no_leak(self.cache)
            assert_no_leak(self.cold)
            self.cache.reset_prefix_cache()
            assert self.cache.stats()["free"] == self.cache.num_blocks
            shutil.rmtree(self.folder)


class TestKVCacheMachine(KVCacheMachine.TestCase):
    # With the machine of all groups more than 10,000 steps.
    settings = settings(max_examples=4 * settings.default.max_examples,
                        stateful_step_count=settings.default.stateful_step_count + 10)  # fmt: skip
