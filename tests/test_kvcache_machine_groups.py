"""Any order of calls over layers of all kinds, in all formats, with a second tier, in pools where blocks run out.

What is found after evictions depends on what was evicted in which group, so the model says at most how much is found,
and exactly how much until something was forgotten. What is exact all the time: every value that can be read, every bit
of attention (compared with a cache that computes the same tokens alone, cold and in one piece), the blocks that a
window keeps, and how far back a truncate may go.
"""

from __future__ import annotations

import hashlib
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

from kvcore import InvalidArgument, InvalidState, KVCache, KVGroup, OutOfBlocks, PinLimit, available_simd
from kvmodel import Clock, Key, Live, Pinned, Planned, common, digests_of, values
from kvtools import Floats, assert_bitwise, assert_no_leak, forced_simd

FULL, WINDOW, LATENT, CROSS, NONE = range(5)
MOST, B = 6, 16
FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "fp8_e4m3"},
    {"dtype": "fp8_e4m3", "scale_mode": "per_token_head"},
    {"dtype": "fp8_e5m2", "scale_mode": "per_token_head"},
    {"dtype": "int8"},
    {"dtype": "int4"},
]
SHAPES = {FULL: (2, 4, 4), WINDOW: (1, 6, 6), LATENT: (1, 8, 6), CROSS: (1, 4, 4)}
"""KV heads, width of K and of V."""
Q_HEADS = 2
LATENT_SCALE = 0.3

PROMPTS = st.builds(
    lambda road, length, tail: [*([5] * length if road else range(100, 100 + length)), *tail],
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([33, 17, 16, 32, 1, 21, 40, 49, 64]),
    st.sampled_from([(), (), (), (0,), (1,), (0, 0, 1), (0,) * 17]),
)
TAILS = st.sampled_from([(0,), (1,), (0, 1, 1), (0,) * 16, (1,) * 9, (0, 1) * 11])
SEQS = st.integers(0, MOST - 1)
TTLS = st.sampled_from([..., ..., ..., 5.0, 50.0, None])
PRIORITIES = st.sampled_from([None, None, 10, 90])
EXTRAS = st.sampled_from([b"song", b"song", b"song", b"talk", None])


class KVGroupsMachine(RuleBasedStateMachine):
    @initialize(
        form=st.sampled_from(FORMATS),
        blocks=st.tuples(*[st.sampled_from([8, 5, 12, 4])] * 3),
        window=st.sampled_from([20, 7, 33, 16, 1]),
        rollback=st.sampled_from([0, 0, 5, 20]),
        kinds=st.sampled_from(["full window", "full window latent", "window", "full window latent cross", "latent"]),
        spill_blocks=st.sampled_from([0, 3, 8]),
        least=st.sampled_from([0, 0, 0, 20]),
        equal_hashes=st.booleans(),
        level=st.sampled_from(available_simd()),
    )
    def start(
        self,
        form: dict[str, Any],
        blocks: tuple[int, ...],
        window: int,
        rollback: int,
        kinds: str,
        spill_blocks: int,
        least: int,
        equal_hashes: bool,
        level: str,
    ) -> None:
        self.clock, self.folder = Clock(), Path(tempfile.mkdtemp())
        self.form = form
        self.window, self.rollback, self.least = window, rollback, least
        order = [kind for kind in (FULL, WINDOW, LATENT) if ("full", "window", "latent")[kind] in kinds]
        self.has_cross = "cross" in kinds
        # Layers by kind: they are numbered in the order of the groups.
        self.layers = {kind: layer for layer, kind in enumerate([*order, CROSS] if self.has_cross else order)}
        self.paged = order
        self.num_blocks = {kind: blocks[kind] for kind in order}
        spill = {"spill_dir": self.folder, "spill_bytes": spill_blocks * 4 * 4096} if spill_blocks else {}
        with forced_simd(level):
            self.cache = KVCache(
                groups=self.groups(self.num_blocks, 5), num_blocks=8, num_threads=1, clock=self.clock,
                max_rollback=rollback, min_prefix_tokens=least, max_events=1 << 20, _equal_hashes=equal_hashes,
                **form, **spill)  # fmt: skip
            self.cold = KVCache(
                groups=self.groups(dict.fromkeys(order, 16), 4), num_threads=1, enable_prefix_caching=False,
                **form)  # fmt: skip
        for cache in (self.cache, self.cold):
            self.calibrate(cache)
        if form["dtype"] not in ("int8", "int4"):
            self.cache._fill(float("nan"))
            self.cold._fill(1e30 if form["dtype"] in ("float32", "bfloat16") else 5.0)
        self.live: list[Live] = []
        self.planned: list[Planned] = []
        self.pins: list[Pinned] = []
        self.published: list[tuple[Key, list[int]]] = []
        self.rows_seen: dict[tuple[int, bytes], tuple[Floats, Floats]] = {}
        self.encoders: dict[bytes, tuple[Floats, Floats]] = {}
        self.forgot = False
        self.era = 0
        self.nonces = count(1)

    def groups(self, num_blocks: dict[int, int], cross_blocks: int) -> list[KVGroup]:
        heads, dim, _ = SHAPES[FULL]
        makers = {
            FULL: lambda at, n: KVGroup("full", [at], num_kv_heads=heads, head_dim=dim, num_blocks=n),
            WINDOW: lambda at, n: KVGroup("sliding_window", [at], num_kv_heads=1, head_dim=6, window=self.window,
                                          num_blocks=n),
            LATENT: lambda at, n: KVGroup("latent", [at], rank=6, rope_dim=2, num_blocks=n),
        }  # fmt: skip
        groups = [makers[kind](at, num_blocks[kind]) for at, kind in enumerate(self.paged)]
        if self.has_cross:
            groups.append(KVGroup("cross", [len(groups)], num_kv_heads=1, head_dim=4, num_blocks=cross_blocks))
        return [*groups, KVGroup("none", [len(groups)])]

    def calibrate(self, cache: KVCache) -> None:
        """Scales from the data, where the format has such; the same in every cache."""
        if self.form == {"dtype": "fp8_e4m3"}:
            cache.calibrate(lambda: self.sample(cache))

    def sample(self, cache: KVCache) -> None:
        seq = cache.add([1, 2, 3])
        batch = cache.plan([(seq, 3)])
        for kind in self.paged:
            k, v, _ = self.rows_at([b"1", b"2", b"3"], kind)
            cache.write(self.layers[kind], batch, k, None if kind == LATENT else v)
        cache.commit(batch)
        cache.free(seq)

    # Rows of the model

    def rows_at(self, digests: list[bytes], kind: int) -> tuple[Floats, Floats, Floats]:
        """K, V and Q of the tokens with these digests, as they are given to the cache."""
        heads, k_dim, v_dim = SHAPES[kind]
        sizes = [heads * k_dim, heads * v_dim, Q_HEADS * k_dim]
        rows = [values(digest, kind, sum(sizes)) for digest in digests]
        joint = np.reshape(rows, (len(digests), sum(sizes))).astype(np.float32)
        k, v, q = np.split(joint, np.cumsum(sizes)[:2], axis=1)
        n = len(digests)
        return k.reshape(n, heads, k_dim), v.reshape(n, heads, v_dim), q.reshape(n, Q_HEADS, k_dim)

    def encoder_rows(self, encoder: bytes) -> tuple[Floats, Floats]:
        """K and V of an encoder's 5 to 36 tokens."""
        k, v, _ = self.rows_at(digests_of((encoder, None, None), range(5 + encoder[0] % 32)), CROSS)
        return k, v

    def scale(self, kind: int) -> float | None:
        return LATENT_SCALE if kind == LATENT else None

    def write(self, cache: KVCache, planned: Planned) -> None:
        digests = [d for seq, start, n in planned.items for d in seq.digests[start : start + n]]
        for kind in self.paged:
            k, v, _ = self.rows_at(digests, kind)
            cache.write(self.layers[kind], planned.batch, k, None if kind == LATENT else v)

    def attend(self, cache: KVCache, planned: Planned) -> dict[int, Floats]:
        digests = [d for seq, start, n in planned.items for d in seq.digests[start : start + n]]
        return {
            kind: cache.attend(layer, planned.batch, self.rows_at(digests, kind)[2], self.scale(kind))
            for kind, layer in self.layers.items()
        }

    # Which sequences

    def pick(self, i: int) -> Live:
        return self.live[i % len(self.live)]

    def some_live(self) -> bool:
        return bool(self.live)

    def room(self) -> bool:
        return len(self.live) < MOST

    def with_open_tokens(self) -> list[Live]:
        return [seq for seq in self.live if seq.computed < len(seq.tokens)]

    def table(self, seq: Live, kind: int) -> list[int]:
        return self.cache.block_table(seq.handle, self.paged.index(kind))

    def passed(self, seq: Live) -> int:
        """Blocks that the window of a sequence has passed and given back."""
        return self.table(seq, WINDOW).count(-1)

    def publishes(self, seq: Live) -> bool:
        return seq.shares and seq.era == self.era

    def sync(self) -> None:
        told = self.cache.events()
        assert told["dropped"] == 0
        self.forgot |= any(e["type"] == "removed" and e["cause"] != "replaced" for e in told["events"])
        assert not any(e["type"] == "removed" and e["cause"] == "failed" for e in told["events"])

    # Rules

    @precondition(room)
    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from([None] * 4 + ["", "a"]),
        extra=EXTRAS,
        use_prefix=st.sampled_from([True] * 6 + [False]),
        least=st.sampled_from([None, None, None, 0, 34]),
        ttl=TTLS,
        priority=PRIORITIES,
        then_compute=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        prompt: list[int],
        salt: str | None,
        extra: bytes | None,
        use_prefix: bool,
        least: int | None,
        ttl: Any,
        priority: int | None,
        then_compute: bool,
    ) -> None:
        extra = extra if self.has_cross else None
        handle = self.cache.add(prompt, salt, extra=extra, use_prefix=use_prefix, min_prefix_tokens=least, ttl=ttl,
                                priority=priority)  # fmt: skip
        shares = use_prefix and not (self.has_cross and extra is None)
        seq = Live(handle, [], (salt, None, extra), shares, next(self.nonces), self.era, math.inf)
        seq.extend(prompt, seq.family)
        self.admit(seq, self.least if least is None else least)
        if self.has_cross:
            self.write_cross(seq)
        if not seq.freed and then_compute:
            self.compute_all(seq)

    def admit(self, seq: Live, least: int | None = None, most: int | None = None) -> None:
        """Without ``least`` less than there is may be taken: a file fills whole blocks."""
        most = len(seq.tokens) - 1 if most is None else most
        seq.computed = seq.begun = seq.reach = seq.handle.num_cached_tokens
        self.sync()
        known = max((common(tokens, seq.tokens) for key, tokens in self.published if key == seq.key), default=0)
        found = min(known, most) if seq.shares else 0
        assert seq.computed <= found
        if not self.forgot and least is not None:
            assert seq.computed == (found if found >= least else 0)
        self.live.append(seq)

    def write_cross(self, seq: Live) -> None:
        """What the encoder says of this sequence's input; without room for it the sequence ends."""
        what = repr(seq.key[2]) if seq.shares else f"{seq.family}"
        seq.encoder = hashlib.blake2b(what.encode(), digest_size=16).digest()
        k, v = self.encoder_rows(seq.encoder)
        layer = self.layers[CROSS]
        try:
            self.cache.write_cross(layer, seq.handle, k, v)
        except OutOfBlocks:
            seq.encoder = b""
            self.end(seq)
            return
        with pytest.raises(InvalidState):
            self.cache.write_cross(layer, seq.handle, k, v)

    @precondition(some_live)
    @rule(i=SEQS, tokens=TAILS, then_compute=st.booleans())
    def append(self, i: int, tokens: tuple[int, ...], then_compute: bool) -> None:
        seq = self.pick(i)
        if len(seq.tokens) > 150:
            return
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
            return
        self.planned = [*self.planned[-2:], planned]
        if then == "spoil":
            for kind in self.paged:
                heads, k_dim, v_dim = SHAPES[kind]
                n = planned.batch.num_tokens
                v = np.full((n, heads, v_dim), -1e9, np.float32)
                k = np.full((n, heads, k_dim), np.nan, np.float32)
                self.cache.write(self.layers[kind], planned.batch, k, None if kind == LATENT else v)

    def plan(self, items: dict[Live, int]) -> Planned | None:
        """All or nothing; refused only if a group may lack blocks (which copies are needed is the other machine's)."""
        pairs = [(seq.handle, n) for seq, n in items.items()]
        before = [[self.table(seq, kind) for seq in self.live] for kind in self.paged]
        counts = self.cache.stats()
        try:
            planned = Planned(self.cache.plan(pairs), [(seq, seq.computed, n) for seq, n in items.items()])
        except OutOfBlocks:
            assert [[self.table(seq, kind) for seq in self.live] for kind in self.paged] == before
            assert self.cache.stats()["used"] == counts["used"]
            short = False
            for group, kind in enumerate(self.paged):
                free = (
                    counts["groups"][group]["free"]
                    + counts["groups"][group]["cached"]
                    - counts["groups"][group]["pinned"]
                )
                most = sum(-(-(seq.computed + n) // B) - len(self.table(seq, kind)) + 1 for seq, n in items.items())
                short |= most > free
            assert short, "refused although there are blocks"
            return None
        self.sync()
        for seq, start, n in planned.items:
            seq.open = planned
            seq.reach = start
            if start == 0:
                seq.era = self.era
            for kind in self.paged:
                assert len(self.table(seq, kind)) == -(-(start + n) // B)
            if WINDOW in self.paged:
                assert self.passed(seq) >= max(0, max(0, start - self.rollback) + 1 - self.window) // B
        return planned

    def compute(self, planned: Planned) -> None:
        """Write, attend and commit; compare attention with a cold run."""
        self.write(self.cache, planned)
        outs = self.attend(self.cache, planned)
        self.cache.commit(planned.batch)
        self.sync()
        again = self.attend(self.cache, planned)
        for kind, out in outs.items():
            assert_bitwise(again[kind], out, "after the commit")
        row = 0
        for seq, start, n in planned.items:
            seq.computed = seq.reach = start + n
            if self.publishes(seq):
                self.published.append((seq.key, seq.tokens[: start + n]))
            cold = self.run_cold(seq)
            for kind, out in outs.items():
                assert_bitwise(out[row : row + n], cold[kind][start:], f"kind {kind}: cold, alone and whole")
            row += n

    def run_cold(self, seq: Live) -> dict[int, Floats]:
        """The same tokens alone and in one piece: attention, and (noted) what is stored of each token."""
        end = seq.computed
        handle = self.cold.add(seq.tokens[:end])
        if seq.encoder:
            self.cold.write_cross(self.layers[CROSS], handle, *self.encoder_rows(seq.encoder))
            self.encoders[seq.encoder] = self.cold.read(self.layers[CROSS], handle)
        planned = Planned(self.cold.plan([(handle, end)]), [(seq, 0, end)])
        self.write(self.cold, planned)
        out = self.attend(self.cold, planned)
        self.cold.commit(planned.batch)
        for kind in self.paged:
            k, v = self.cold.read(self.layers[kind], handle)
            for at, digest in enumerate(seq.digests[:end]):
                self.rows_seen[kind, digest] = (k[at], v[at])
        self.cold.free(handle)
        return out

    @precondition(lambda self: self.planned)
    @rule(i=st.integers(0, 2))
    def finish(self, i: int) -> None:
        """Come back to a plan that was left open."""
        planned = self.planned.pop(i % len(self.planned))
        if not planned.is_stale():
            self.compute(planned)

    @precondition(lambda self: self.live and self.room())
    @rule(i=SEQS, n=st.sampled_from([1, 1, 2, 3]), tokens=st.one_of(st.none(), TAILS))
    def fork(self, i: int, n: int, tokens: tuple[int, ...] | None) -> None:
        seq = self.pick(i)
        children = self.cache.fork(seq.handle, min(n, MOST - len(self.live)))
        seq.open = None
        self.live += [seq.branch(child) for child in children]
        for child in children:
            for group in range(len(self.paged)):
                assert self.cache.block_table(child, group) == self.cache.block_table(seq.handle, group)
        if tokens is not None:
            self.append(len(self.live) - 1, tokens, then_compute=True)

    @precondition(some_live)
    @rule(beams=st.sets(SEQS, min_size=1, max_size=3), parents=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def reorder(self, beams: set[int], parents: list[int]) -> None:
        seqs = list({self.pick(i): None for i in beams})
        parents = [parent % len(seqs) for parent in parents][: MOST - len(self.live) + len(seqs)]
        handles = self.cache.reorder([seq.handle for seq in seqs], parents)
        kept: set[int] = set()
        for parent, handle in zip(parents, handles, strict=True):
            if parent in kept:
                seqs[parent].open = None
                self.live.append(seqs[parent].branch(handle))
            kept.add(parent)
        for number, seq in enumerate(seqs):
            if number not in kept:
                self.live.remove(seq)
                seq.freed = True

    @precondition(some_live)
    @rule(i=SEQS, n=st.integers(0, 200), back=st.booleans())
    def truncate(self, i: int, n: int, back: bool) -> None:
        """Refused exactly when the window has given back what the next token would see."""
        seq = self.pick(i)
        n = max(1, len(seq.tokens) - n % 24) if back else 1 + n % len(seq.tokens)
        gone = self.passed(seq) if WINDOW in self.paged else 0
        least = gone * B + self.window - 1 if gone else 0
        if min(n, seq.computed) < least:
            # A hit or a file brings back only what is needed to go on: the promise is about tokens computed since.
            assert n < seq.reach - self.rollback or n < seq.begun + self.rollback
            with pytest.raises(InvalidArgument, match="max_rollback"):
                self.cache.truncate(seq.handle, n)
            return
        self.cache.truncate(seq.handle, n)
        self.forgot |= n < seq.computed
        seq.cut(n)

    @precondition(lambda self: len(self.live) > 1)
    @rule(i=SEQS)
    def free(self, i: int) -> None:
        self.end(self.pick(i))

    def end(self, seq: Live) -> None:
        self.live.remove(seq)
        self.cache.free(seq.handle)
        seq.freed = True

    @precondition(lambda self: len(self.published) > 4)
    @rule()
    def reset(self) -> None:
        self.cache.reset_prefix_cache()
        # A pin keeps whole blocks: what others published in them stays, too.
        kept = [(p.key, tuple(tokens[: -(-len(p.tokens) // B) * B])) for p in self.pins
                for key, tokens in self.published if key == p.key and common(tokens, p.tokens)]  # fmt: skip
        # Each once: several pins keep the same, and every reset would multiply them.
        self.published = [(key, list(tokens)) for key, tokens in dict.fromkeys(kept)]
        self.era += 1
        self.forgot = self.forgot or bool(self.pins)
        self.sync()

    @rule(seconds=st.sampled_from([1.0, 11.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(some_live)
    @rule(i=SEQS, n=st.integers(0, 200), ttl=TTLS, priority=PRIORITIES)
    def mark(self, i: int, n: int, ttl: Any, priority: int | None) -> None:
        seq = self.pick(i)
        n = 1 + n % len(seq.tokens)
        if seq.shares:
            self.cache.mark(seq.handle, n, ttl=ttl, priority=priority)
        else:
            with pytest.raises(InvalidState):
                self.cache.mark(seq.handle, n, ttl=ttl, priority=priority)

    @precondition(lambda self: any(seq.computed for seq in self.live))
    @rule(i=SEQS, n=st.integers(0, 200))
    def pin(self, i: int, n: int) -> None:
        able = [seq for seq in self.live if seq.computed]
        seq = able[i % len(able)]
        n = seq.computed - n % min(3, seq.computed)
        try:
            pin = self.cache.pin(seq.handle, n)
        except InvalidState:
            # A window's blocks of the prefix may be gone, or its first tokens may be others' that were forgotten.
            assert not self.publishes(seq) or self.forgot or WINDOW in self.paged
            return
        except PinLimit:
            return
        assert self.publishes(seq)
        self.published.append((seq.key, seq.tokens[:n]))
        self.pins.append(Pinned(pin, seq.key, seq.tokens[:n], []))

    @precondition(lambda self: self.pins)
    @rule(i=st.integers(0, 9))
    def unpin(self, i: int) -> None:
        self.cache.unpin(self.pins.pop(i % len(self.pins)).pin)

    @precondition(lambda self: self.pins)
    @rule(i=st.integers(0, 9))
    def a_pinned_prefix_is_found(self, i: int) -> None:
        pinned = self.pins[i % len(self.pins)]
        salt, _, extra = pinned.key
        handle = self.cache.add([*pinned.tokens, 77], salt, extra=extra, min_prefix_tokens=0)
        assert handle.num_cached_tokens == len(pinned.tokens)
        self.cache.free(handle)

    # Files

    @precondition(lambda self: self.live and self.room())
    @rule(i=SEQS)
    def save_and_load(self, i: int) -> None:
        seq = self.pick(i)
        self.cache.save(seq.handle, self.folder / "sequence")
        # What was private, or is older than the last reset, stays private.
        shares = seq.shares and (seq.era == self.era or not seq.computed)
        before = self.cache.stats()
        try:
            handle = self.cache.load(self.folder / "sequence")
        except OutOfBlocks:
            assert self.cache.stats() == before
            return
        copy = Live(handle, [*seq.tokens], seq.key, shares, seq.family, self.era, math.inf, [*seq.digests],
                    encoder=seq.encoder)  # fmt: skip
        self.admit(copy, most=max(seq.computed, len(seq.tokens) - 1))
        copy.computed = copy.begun = max(copy.computed, seq.computed)
        if shares:
            self.published.append((copy.key, copy.tokens[: copy.computed]))

    @precondition(lambda self: len(self.published) > 2)
    @rule(here=st.booleans())
    def save_and_load_prefixes(self, here: bool) -> None:
        """What is read back from a file is right; here (where most is known already) and in an empty cache."""
        self.cache.save_prefixes(self.folder)
        other = self.cache
        if not here:
            other = KVCache(groups=self.groups(self.num_blocks, 5), num_threads=1, clock=self.clock,
                            max_rollback=self.rollback, **self.form)  # fmt: skip
            self.calibrate(other)
        other.load_prefixes(self.folder)
        other.check()
        self.sync()
        for key, tokens in self.published[-4:]:
            self.look(other, key, tokens)
        if other is not self.cache:
            assert_no_leak(other)

    def look(self, cache: KVCache, key: Key, tokens: list[int]) -> None:
        """What a prompt finds is right."""
        salt, _, extra = key
        handle = cache.add([*tokens, 77], salt, extra=extra)
        n = handle.num_cached_tokens
        known = max((common(known, tokens) for of, known in self.published if of == key), default=0)
        assert n <= known
        self.compare(cache, handle, digests_of(key, tokens[:n]))
        cache.free(handle)

    # Laws

    def compare(self, cache: KVCache, handle: Any, digests: list[bytes]) -> None:
        """What is stored of a sequence is what was written."""
        for kind in self.paged:
            got = cache.read(self.layers[kind], handle)
            last = digests[len(digests) - len(got[0]) :]
            if kind != WINDOW:
                assert len(got[0]) == len(digests)
            else:
                assert len(got[0]) >= min(len(digests), self.window - 1)
            if last:
                for which in range(2):
                    expected = np.stack([self.rows_seen[kind, digest][which] for digest in last])
                    assert_bitwise(got[which], expected, f"kind {kind}: read() is what was written")

    @invariant()
    def law_4(self) -> None:
        for seq in self.live:
            assert self.cache.num_computed_tokens(seq.handle) == seq.computed
            assert self.cache.token_ids(seq.handle).tolist() == seq.tokens
            self.compare(self.cache, seq.handle, seq.digests[: seq.computed])
            if seq.encoder in self.encoders:
                for got, want in zip(self.cache.read(self.layers[CROSS], seq.handle), self.encoders[seq.encoder],
                                     strict=True):  # fmt: skip
                    assert_bitwise(got, want, "the encoder's memory")

    @invariant()
    def laws_2_and_3(self) -> None:
        self.cache.check()
        self.sync()
        stats = self.cache.stats()
        for group, kind in enumerate(self.paged):
            of = stats["groups"][group]
            assert of["free"] + of["cached"] + of["used"] == of["total"] == self.num_blocks[kind]
            holders: dict[int, list[tuple[Live, int]]] = {}
            for seq in self.live:
                for at, block in enumerate(self.table(seq, kind)):
                    if block >= 0:
                        holders.setdefault(block, []).append((seq, at))
            assert of["used"] == len(holders)
            for (first, at), *others in holders.values():
                for other, index in others:
                    end = min(first.computed, other.computed, (index + 1) * B)
                    assert index == at
                    assert first.digests[:end] == other.digests[:end]
        assert stats["num_sequences"] == len(self.live)
        if WINDOW in self.paged:
            for seq in self.live:
                self.check_window(seq)

    def check_window(self, seq: Live) -> None:
        table, gone = self.table(seq, WINDOW), self.passed(seq)
        assert all(block >= 0 for block in table[gone:])
        assert gone * B <= max(0, seq.computed + 1 - self.window)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for pinned in self.pins:
                self.cache.unpin(pinned.pin)
            for seq in self.live:
                self.cache.free(seq.handle)
            assert_no_leak(self.cache)
            assert_no_leak(self.cold)
            self.cache.reset_prefix_cache()
            stats = self.cache.stats()
            assert (stats["free"], stats["spilled"], stats["pinned"]) == (stats["total"], 0, 0)
            self.cache.close()
            shutil.rmtree(self.folder)


class TestKVGroupsMachine(KVGroupsMachine.TestCase):
    settings = settings(max_examples=4 * settings.default.max_examples,
                        stateful_step_count=settings.default.stateful_step_count + 10)  # fmt: skip
