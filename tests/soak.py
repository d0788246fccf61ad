"""A soak: random operations on one small cache with everything on, in which memory must stay flat.

    python tests/soak.py --operations 1000000 --seed 0

K and V of a token follow from everything that may decide about sharing: the key and all tokens up to it. So a read
proves that nothing was mixed up. ``check()`` runs every so many operations, and resident memory is measured beside it:
after the first fifth it may not grow.

An operation is a function below with ``@operation``. One that needs what this build's KVCache does not have is left out
(and named in the report).
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvcore
from kvcore import InvalidArgument, InvalidHandle, InvalidState, KVCache, KvcoreError, OutOfBlocks, Sequence, StaleBatch

MOST_SEQUENCES, MOST_TOKENS = 10, 150
HAS_GROUPS = hasattr(kvcore, "KVGroup")
PIN_LIMIT: type[KvcoreError] = getattr(kvcore, "PinLimit", InvalidState)
Q_HEADS = 2


@dataclass(frozen=True)
class Layer:
    """A layer of the cache, and what its rows look like."""

    kind: str
    heads: int
    k_dim: int
    v_dim: int

    @property
    def is_paged(self) -> bool:
        return self.kind in ("full", "sliding_window", "latent")


@dataclass(eq=False)
class Live:
    """What is known of a live sequence."""

    handle: Sequence
    key: tuple[Any, ...]
    tokens: list[int]
    digests: list[int]
    cross: int = 0
    """Tokens of its encoder."""

    def extend(self, tokens: list[int]) -> None:
        digest = self.digests[-1] if self.digests else zlib.crc32(repr(self.key).encode())
        for token in tokens:
            digest = (digest * 6364136223846793005 + 2 * token + 1) % 2**64
            self.tokens.append(token)
            self.digests.append(digest)


@dataclass
class Clock:
    """Seconds, as the soak says."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Soak:
    """A cache, what is known of it, and the folder that it may use."""

    def __init__(self, seed: int, folder: Path, dtype: str = "bfloat16") -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.clock = Clock()
        self.dtype = dtype
        self.cache, self.layers = make_cache(folder, dtype, self.clock)
        self.live: list[Live] = []
        self.pins: list[Any] = []
        self.freed: list[Sequence] = []
        self.roads = [[self.random.randrange(1000) for _ in range(MOST_TOKENS)] for _ in range(3)]

    # What operations share

    def pick(self) -> Live | None:
        return self.random.choice(self.live) if self.live else None

    def waiting(self, seq: Live) -> int:
        return len(seq.tokens) - self.cache.num_computed_tokens(seq.handle)

    def rows(self, seq: Live, layer: int, start: int, end: int) -> tuple[Any, Any]:
        """K and V of these positions: small whole numbers, which most formats hold exactly."""
        shape = self.layers[layer]
        digests = np.array(seq.digests[start:end], np.uint64)[:, None]
        lanes = np.arange(1, shape.heads * max(shape.k_dim, shape.v_dim) + 1, dtype=np.uint64) + np.uint64(100 * layer)
        mixed = (digests >> np.uint64(20)) * lanes + (digests >> np.uint64(44))
        values = ((mixed % np.uint64(15)).astype(np.float32) - 7).reshape(
            end - start, shape.heads, max(shape.k_dim, shape.v_dim)
        )
        return values[..., : shape.k_dim].copy(), -values[..., : shape.v_dim].copy()

    def compute(self, items: list[tuple[Live, int]]) -> None:
        """Plan, write, attend and commit; raises OutOfBlocks before anything was changed."""
        cache = self.cache
        starts = [cache.num_computed_tokens(seq.handle) for seq, _ in items]
        batch = cache.plan([(seq.handle, n) for seq, n in items])
        total = batch.num_tokens
        for i, layer in enumerate(self.layers):
            if layer.is_paged:
                parts = [self.rows(seq, i, at, at + n) for (seq, n), at in zip(items, starts, strict=True)]
                k, v = (np.concatenate(part) for part in zip(*parts, strict=True))
                if layer.kind == "latent":
                    cache.write(i, batch, k)
                else:
                    cache.write(i, batch, k, v)
            elif layer.kind != "cross" or not all(seq.cross for seq, _ in items):
                continue
            if self.random.random() < 0.3:
                q = np.ones((total, layer.heads * Q_HEADS, layer.k_dim), np.float32)
                scale = layer.k_dim**-0.5 if layer.kind == "latent" else None
                if not np.isfinite(cache.attend(i, batch, q, scale)).all():
                    raise AssertionError(f"layer {i}: attention is not finite")
        cache.commit(batch)

    def verify(self, seq: Live) -> None:
        """What is stored of a sequence is what was written."""
        if self.cache.token_ids(seq.handle).tolist() != seq.tokens:
            raise AssertionError("other tokens")
        end = self.cache.num_computed_tokens(seq.handle)
        exact = 1 if self.dtype == "int8" else 8 if self.dtype == "int4" else 0
        for i, layer in enumerate(self.layers):
            if layer.kind in ("full", "latent"):  # of a window, only what is still there can be read
                k, v = self.rows(seq, i, 0, end)
                got_k, got_v = self.cache.read(i, seq.handle)
                np.testing.assert_allclose(got_k, k, rtol=0, atol=exact / 15)
                if layer.kind == "full":
                    np.testing.assert_allclose(got_v, v, rtol=0, atol=exact / 15)

    def drop(self, seq: Live) -> None:
        self.live.remove(seq)
        self.cache.free(seq.handle)
        self.freed = [*self.freed[-3:], seq.handle]

    def make_room(self) -> None:
        while len(self.live) >= MOST_SEQUENCES:
            self.drop(self.random.choice(self.live))


def make_cache(folder: Path, dtype: str, clock: Clock) -> tuple[KVCache, list[Layer]]:
    """Everything that this build has: groups of each kind, spill, a clock, events."""
    if not HAS_GROUPS:
        cache = KVCache(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=24, dtype=dtype, num_threads=1)
        return cache, [Layer("full", 2, 4, 4)] * 2
    group = kvcore.KVGroup
    cache = KVCache(
        groups=[
            group("full", [0, 4], num_kv_heads=2, head_dim=4, num_blocks=24),
            group("sliding_window", [1], num_kv_heads=1, head_dim=8, window=20, num_blocks=20),
            group("latent", [2], rank=16, rope_dim=8, num_blocks=24),
            group("cross", [3], num_kv_heads=1, head_dim=4, num_blocks=6),
            group("none", [5]),
        ],
        dtype=dtype,
        num_threads=1,
        prefix_ttl=50.0,
        max_rollback=24,
        max_events=64,
        spill_dir=str(folder / "spill"),
        spill_bytes=1 << 16,
        clock=clock,
    )
    full, window = Layer("full", 2, 4, 4), Layer("sliding_window", 1, 8, 8)
    latent, cross, none = Layer("latent", 1, 24, 16), Layer("cross", 1, 4, 4), Layer("none", 0, 0, 0)
    return cache, [full, window, latent, cross, full, none]


# -- the operations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """Something that may happen. ``run`` returns False if it was refused or there was nothing to do."""

    name: str
    weight: float
    needs: tuple[str, ...]
    run: Callable[[Soak], bool | None]

    @property
    def is_there(self) -> bool:
        return all(hasattr(KVCache, name) for name in self.needs)


OPERATIONS: list[Operation] = []


def operation(weight: float, *needs: str) -> Callable[[Callable[[Soak], bool | None]], Callable[[Soak], bool | None]]:
    """Register a function with its weight and the methods of KVCache that it needs."""

    def register(run: Callable[[Soak], bool | None]) -> Callable[[Soak], bool | None]:
        OPERATIONS.append(Operation(run.__name__, weight, needs, run))
        return run

    return register


@operation(14)
def add(soak: Soak) -> None:
    rng = soak.random
    soak.make_room()
    tokens = [*rng.choice(soak.roads)[: rng.randrange(1, 100)], *(rng.randrange(3) for _ in range(rng.randrange(20)))]
    salt = rng.choice([None, None, None, "", "tenant"])
    options: dict[str, Any] = {}
    if rng.random() < 0.1:
        options["use_prefix"] = False
    if hasattr(KVCache, "mark"):  # the retention that came with it
        options |= rng.choice(
            [{}, {}, {}, {"adapter": "a"}, {"extra": b"picture"}, {"ttl": None}, {"ttl": 5.0}, {"priority": 90},
             {"min_prefix_tokens": 40}]
        )  # fmt: skip
    handle = soak.cache.add(tokens, salt, **options)
    nonce = rng.random() if "use_prefix" in options else 0
    seq = Live(handle, (salt, options.get("adapter"), options.get("extra"), nonce), [], [])
    seq.extend(tokens)
    soak.live.append(seq)
    assert handle.num_cached_tokens < len(tokens)


@operation(40)
def step(soak: Soak) -> bool:
    """The next tokens of one to three sequences; a new one for those that have all."""
    rng = soak.random
    items: list[tuple[Live, int]] = []
    for seq in rng.sample(soak.live, min(len(soak.live), rng.randrange(1, 4))):
        if not soak.waiting(seq) and len(seq.tokens) < MOST_TOKENS:
            token = rng.randrange(3)
            soak.cache.append(seq.handle, [token])
            seq.extend([token])
        left = soak.waiting(seq)
        if left:
            items.append((seq, rng.choice([left, left, rng.randrange(1, left + 1)])))
    if not items:
        return False
    try:
        soak.compute(items)
    except OutOfBlocks:
        soak.drop(rng.choice(soak.live))
        return False
    return True


@operation(4)
def plan_and_leave(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None or not soak.waiting(seq):
        return False
    try:
        batch = soak.cache.plan([(seq.handle, soak.waiting(seq))])
    except OutOfBlocks:
        return False
    if soak.random.random() < 0.5:
        k, v = soak.rows(seq, 0, 0, 1)
        rows = batch.num_tokens
        soak.cache.write(0, batch, np.repeat(k, rows, 0) * np.nan, np.repeat(v, rows, 0) * np.nan)
    if soak.random.random() < 0.3:
        soak.cache.truncate(seq.handle, len(seq.tokens))
        try:
            soak.cache.commit(batch)
        except StaleBatch:
            return True
        raise AssertionError("a batch outlived a truncate")
    return True


@operation(4)
def fork(soak: Soak) -> bool:
    soak.make_room()
    seq = soak.pick()
    if seq is None:
        return False
    soak.live.append(Live(soak.cache.fork(seq.handle), seq.key, [*seq.tokens], [*seq.digests], seq.cross))
    return True


@operation(2, "reorder")
def fork_many(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None or len(soak.live) > MOST_SEQUENCES - 3:
        return False
    for handle in soak.cache.fork(seq.handle, 3):
        soak.live.append(Live(handle, seq.key, [*seq.tokens], [*seq.digests], seq.cross))
    return True


@operation(3, "reorder")
def reorder(soak: Soak) -> bool:
    rng = soak.random
    seqs = rng.sample(soak.live, min(len(soak.live), rng.randrange(1, 5)))
    if not seqs:
        return False
    parents = [rng.randrange(len(seqs)) for _ in seqs]
    handles = soak.cache.reorder([seq.handle for seq in seqs], parents)
    for seq in seqs:
        soak.live.remove(seq)
    for handle, parent in zip(handles, parents, strict=True):
        old = seqs[parent]
        soak.live.append(Live(handle, old.key, [*old.tokens], [*old.digests], old.cross))
    return True


@operation(6)
def truncate(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None:
        return False
    keep = max(1, len(seq.tokens) - soak.random.choice([0, 1, 2, 5, 20, 60]))
    try:
        soak.cache.truncate(seq.handle, keep)
    except (InvalidArgument, InvalidState):
        if not HAS_GROUPS:
            raise
        return False  # deeper than a window can be rolled back
    del seq.tokens[keep:], seq.digests[keep:]
    return True


@operation(10)
def free(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None:
        return False
    soak.drop(seq)
    return True


@operation(1)
def use_a_freed_handle(soak: Soak) -> bool:
    if not soak.freed:
        return False
    handle = soak.random.choice(soak.freed)
    for call in (soak.cache.free, soak.cache.fork, soak.cache.num_tokens, lambda h: soak.cache.plan([(h, 1)])):
        try:
            call(handle)
        except InvalidHandle:
            continue
        raise AssertionError("a freed handle was taken")
    return True


@operation(4)
def read(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None:
        return False
    soak.verify(seq)
    return True


@operation(2)
def look(soak: Soak) -> None:
    stats = soak.cache.stats()
    assert stats["num_sequences"] == len(soak.live)
    for seq in soak.live:
        assert soak.cache.num_tokens(seq.handle) == len(seq.tokens)


@operation(1, "snapshot")
def look_closely(soak: Soak) -> None:
    assert len(soak.cache.snapshot()["sequences"]) == len(soak.live)


@operation(1, "events")
def read_events(soak: Soak) -> None:
    soak.cache.events()


@operation(0.1)
def reset_prefixes(soak: Soak) -> None:
    soak.cache.reset_prefix_cache()


@operation(4, "mark")
def move_the_clock(soak: Soak) -> None:
    soak.clock.now += soak.random.choice([0.01, 1, 6, 60])


@operation(2, "mark")
def mark(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None:
        return False
    rng = soak.random
    n = rng.randrange(1, len(seq.tokens) + 1)
    try:
        soak.cache.mark(seq.handle, n, ttl=rng.choice([None, 3.0, 100.0]), priority=rng.choice([0, 50, 100]))
    except InvalidState:  # it shares no prefixes
        assert seq.key[3] or seq.key[2] is None  # cross layers share by `extra` alone
    return True


@operation(2, "pin")
def pin(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None or not soak.cache.num_computed_tokens(seq.handle) or len(soak.pins) > 5:
        return False
    try:
        soak.pins.append(
            soak.cache.pin(seq.handle, soak.random.randrange(1, soak.cache.num_computed_tokens(seq.handle) + 1))
        )
    except (PIN_LIMIT, InvalidArgument, InvalidState):  # the last two: prefixes that a window or a reset took away
        return False
    return True


@operation(3, "unpin")
def unpin(soak: Soak) -> bool:
    if not soak.pins:
        return False
    soak.cache.unpin(soak.pins.pop(soak.random.randrange(len(soak.pins))))
    return True


@operation(2, "write_cross")
def write_cross(soak: Soak) -> bool:
    """The encoder's K and V, once for each sequence, before any of its forks."""
    seq = soak.pick()
    if seq is None or seq.cross:
        return False
    tokens = soak.random.randrange(1, 40)
    try:
        for i, layer in enumerate(soak.layers):
            if layer.kind == "cross":
                rows = np.ones((tokens, layer.heads, layer.k_dim), np.float32)
                soak.cache.write_cross(i, seq.handle, rows, rows)
    except OutOfBlocks:
        return False
    seq.cross = tokens
    return True


@operation(0.05, "save", "load")
def save_and_load(soak: Soak) -> bool:
    seq = soak.pick()
    if seq is None or not soak.cache.num_computed_tokens(seq.handle):
        return False
    soak.make_room()
    if seq not in soak.live:
        return False
    path = soak.folder / "sequence.safetensors"
    soak.cache.save(seq.handle, path)
    try:
        handle = soak.cache.load(path)
    except OutOfBlocks:
        return False
    loaded = Live(handle, seq.key, [], [], seq.cross)
    loaded.extend(soak.cache.token_ids(handle).tolist())
    assert loaded.tokens == seq.tokens[: len(loaded.tokens)]
    soak.live.append(loaded)
    soak.verify(loaded)
    return True


@operation(0.02, "save_prefixes", "load_prefixes")
def save_and_load_prefixes(soak: Soak) -> None:
    path = soak.folder / "prefixes"
    soak.cache.save_prefixes(path)
    if soak.random.random() < 0.5:
        soak.cache.reset_prefix_cache()
    soak.cache.load_prefixes(path)


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was done, and the memory that it took."""

    operations: int
    seconds: float
    done: Counter[str]
    refused: Counter[str]
    left_out: list[str]
    resident: list[int] = field(default_factory=list)
    """Bytes, sampled at each check."""

    @property
    def growth(self) -> int:
        """Bytes by which the last fifth of the samples is above the second one; 0 where it cannot be measured."""
        fifth = len(self.resident) // 5
        if not fifth:
            return 0
        return int(np.median(self.resident[-fifth:]) - np.median(self.resident[fifth : 2 * fifth]))

    def __str__(self) -> str:
        lines = [
            f"{self.operations:,} operations in {self.seconds:.1f} s: {self.operations / self.seconds:,.0f} a second"
        ]
        for name in sorted(self.done | self.refused):
            lines.append(f"  {name:<24} {self.done[name]:>9,} done  {self.refused[name]:>9,} refused or nothing to do")
        if self.left_out:
            lines.append(f"  left out, since this build lacks them: {', '.join(self.left_out)}")
        if self.resident:
            lines.append(f"resident memory: {self.resident[-1] / 2**20:.1f} MiB, growth {self.growth / 2**20:+.2f} MiB")
        return "\n".join(lines)


def resident_bytes() -> int | None:
    """Resident memory of this process, where the system tells it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def run(
    operations: int, seed: int, *, check_every: int = 1000, dtype: str = "bfloat16", progress: bool = False
) -> Report:
    """Carry out so many random operations. Raises what a broken law raises."""
    there = [op for op in OPERATIONS if op.is_there]
    report = Report(operations, 0.0, Counter(), Counter(), [op.name for op in OPERATIONS if not op.is_there])
    folder = Path(tempfile.mkdtemp(prefix="kvcore-soak-"))
    begin = time.monotonic()
    try:
        soak = Soak(seed, folder, dtype)
        weights = [op.weight for op in there]
        for number in progress_bar(operations) if progress else range(operations):
            (op,) = soak.random.choices(there, weights)
            try:
                outcome = op.run(soak)
            except Exception as error:
                raise AssertionError(f"operation {number}, {op.name}, seed {seed}: {error!r}") from error
            (report.refused if outcome is False else report.done)[op.name] += 1
            if number % check_every == check_every - 1:
                soak.cache.check()
                gc.collect()
                sample = resident_bytes()
                if sample is not None:
                    report.resident.append(sample)
        finish(soak)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.monotonic() - begin
    return report


def finish(soak: Soak) -> None:
    """End everything: nothing may be left."""
    for seq in [*soak.live]:
        soak.verify(seq)
        soak.drop(seq)
    for handle in soak.pins:
        soak.cache.unpin(handle)
    soak.cache.check()
    stats = soak.cache.stats()
    assert stats["used"] == 0
    assert stats["num_sequences"] == 0
    assert stats["free"] + stats["cached"] == stats["total"]
    soak.cache.close()


def progress_bar(total: int) -> Iterator[int]:
    """Count to ``total`` and show how far it is, on stderr."""
    begin = time.monotonic()
    shown = 0.0
    for number in range(total):
        yield number
        now = time.monotonic()
        if now - shown > 0.5 or number + 1 == total:
            shown = now
            part = (number + 1) / total
            rate = (number + 1) / max(now - begin, 1e-9)
            left = (total - number - 1) / rate
            bar = "#" * int(30 * part)
            words = f"{number + 1:,} of {total:,}, {rate:,.0f} a second, {left:.0f} s left"
            print(f"\r[{bar:<30}] {words}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Random operations on a small KV cache; memory must stay flat.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=1000, help="operations from one check() to the next")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-growth-mib", type=float, default=4.0, help="growth of resident memory that is an error")
    options = parser.parse_args()
    report = run(
        options.operations, options.seed, check_every=options.check_every, dtype=options.dtype,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(report)
    if report.growth > options.max_growth_mib * 2**20:
        print(f"memory grew by more than {options.max_growth_mib} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
