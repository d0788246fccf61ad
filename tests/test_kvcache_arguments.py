"""What a KVCache says of arguments that it does not take: by name, what was expected, and what came."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import InvalidArgument, InvalidState, KVCache, KVGroup, Linear
from kvtools import Sample, compute, make_cache, run_python

ENDLESS: dict[str, str] = {
    "add a range": "cache.add(range(2**31))",
    "add forever": "cache.add(itertools.repeat(1))",
    "add a broadcast array": "cache.add(np.broadcast_to(np.int64(1), (2**30,)))",
    "add as many as may be": "cache.add(range(2**27))",
    "add an array of as many as may be": "cache.add(np.broadcast_to(np.int16(1), (2**27,)))",
    "append forever": "cache.append(s, itertools.count())",
    "plan forever": "cache.plan(itertools.repeat((s, 1)))",
    "reorder parents forever": "cache.reorder([s], itertools.repeat(0))",
    "reorder sequences forever": "cache.reorder(itertools.repeat(s), [0])",
    "groups forever": 'KVCache(groups=itertools.repeat(KVGroup("none", [0])), num_layers=1)',
    "large groups forever": 'KVCache(groups=itertools.repeat(KVGroup("none", range(2**16))), num_layers=1)',
    "layers forever": 'KVGroup("none", itertools.repeat(0))',
    "forks of a long sequence": "cache.fork(long, 2**16)",
    "beams of a long sequence": "cache.reorder([long], [0] * 2**16)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize("call", ENDLESS.values(), ids=ENDLESS.keys())
def test_arguments_that_no_memory_holds(call: str) -> None:
    """With 800 MB more than there are: an error that says what is too much, and nothing has changed."""
    run_python(
        f"""
import itertools, resource
import numpy as np
from kvcore import InvalidArgument, KVCache, KVGroup, OutOfMemory
from kvtools import make_cache

cache = make_cache()
s, long = cache.add([1, 2, 3]), cache.add(range(10**5))
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (800 << 20), used + (800 << 20)))
try:
    {call}
except (OutOfMemory, InvalidArgument) as error:
    assert any(word in str(error) for word in ("at most", "cannot reserve", "fewer than", "from 0 to")), error
else:
    raise SystemExit("no error")
assert cache.num_tokens(s) == 3
assert cache.stats()["num_sequences"] == 2
cache.check()
cache.append(s, [4])
""",
        timeout=60,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
def test_ctrl_c_while_ids_are_read() -> None:
    """An iterator in C gives Python no occasion to look for it."""
    run_python(
        """
import itertools, signal, time
from kvtools import make_cache

cache = make_cache()
seq = cache.add([1])
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.3)
begin = time.monotonic()
try:
    cache.append(seq, itertools.repeat(1))
except KeyboardInterrupt:
    assert time.monotonic() - begin < 1.3
else:
    raise SystemExit("read to the end")
assert cache.num_tokens(seq) == 1
"""
    )


@pytest.mark.parametrize(
    "kind", ["int8", "uint8", "int16", "uint16", ">i4", "int32", "uint32", "int64", ">u8", "uint64"]
)
def test_arrays_of_every_kind_of_integer(kind: str) -> None:
    cache = make_cache()
    ids = (np.arange(200_001) % 100).astype(kind)
    for array in (ids, ids[::-2], ids[:0:3]):
        seq = cache.add(array) if len(array) else cache.add([1])
        assert not len(array) or cache.token_ids(seq).tolist() == array.tolist()


Call = Callable[[KVCache, Any, Any], Any]

X = np.ones((5, 2, 8), np.float32)

MESSAGES: list[tuple[type[Exception], str, Call]] = [
    # Sizes
    (InvalidArgument, "block_size: expected a multiple of 16 from 16 to 1024, got 9223372036854775808",
     lambda c, s, b: make_cache(block_size=2**63)),
    (InvalidArgument, "block_size: expected a multiple of 16 from 16 to 1024, got 0",
     lambda c, s, b: make_cache(block_size=0)),
    (InvalidArgument, "block_size: expected a multiple of 16 from 16 to 1024, got -1",
     lambda c, s, b: make_cache(block_size=-1)),
    (InvalidArgument, "block_size: expected a multiple of 16 from 16 to 1024, got 24",
     lambda c, s, b: make_cache(block_size=24)),
    (TypeError, "block_size: expected an integer, got bool", lambda c, s, b: make_cache(block_size=True)),
    (TypeError, "block_size: expected an integer, got float", lambda c, s, b: make_cache(block_size=16.0)),
    # Text and paths
    *((InvalidArgument, rf"{name}: expected text without lone surrogates, got '\ud800'", call) for name, call in [
        ("dtype", lambda c, s, b: make_cache(dtype="\ud800")),
        ("scale_mode", lambda c, s, b: make_cache(scale_mode="\ud800")),
        ("fingerprint", lambda c, s, b: make_cache(fingerprint="\ud800")),
        ("spill_dir", lambda c, s, b: make_cache(spill_dir="\ud800", spill_bytes=1 << 20)),
        ("salt", lambda c, s, b: c.add([1], "\ud800")),
        ("adapter", lambda c, s, b: c.add([1], adapter="\ud800")),
        ("extra", lambda c, s, b: c.add([1], extra="\ud800")),
        ("path", lambda c, s, b: c.save(s, "\ud800")),
        ("path", lambda c, s, b: c.load("\ud800")),
        ("folder", lambda c, s, b: c.save_prefixes("\ud800")),
        ("folder", lambda c, s, b: c.load_prefixes("\ud800")),
        ("dtype", lambda c, s, b: c.read(0, s, "\ud800")),
        ("kind", lambda c, s, b: KVGroup("\ud800", [0])),
        ("dtype", lambda c, s, b: Linear(np.ones((2, 2), np.float32), dtype="\ud800")),
    ]),
    (InvalidArgument, "path: expected a path, got an empty one", lambda c, s, b: c.save(s, "")),
    (InvalidArgument, "path: expected a path, got an empty one", lambda c, s, b: c.load("")),
    (InvalidArgument, "folder: expected a path, got an empty one", lambda c, s, b: c.save_prefixes("")),
    (InvalidArgument, "folder: expected a path, got an empty one", lambda c, s, b: c.load_prefixes("")),
    (InvalidArgument, "path: expected a path without NUL", lambda c, s, b: c.save(s, "a\0b")),
    (InvalidArgument, "spill_dir: expected a path without NUL",
     lambda c, s, b: make_cache(spill_dir="a\0b", spill_bytes=1 << 20)),
    (TypeError, "path: expected a path (str or os.PathLike), got int", lambda c, s, b: c.save(s, 3)),
    (TypeError, "dtype: expected a str, got int", lambda c, s, b: make_cache(dtype=3)),
    (InvalidArgument, "spill_bytes: expected the size of the file beside spill_dir, got None",
     lambda c, s, b: make_cache(spill_dir="x")),
    (InvalidArgument, "spill_bytes: expected room for a block",
     lambda c, s, b: make_cache(spill_dir="x", spill_bytes=0)),
    # Numbers
    (InvalidArgument, "token_ids: expected ids from 0 to 4294967294, got 18446744073709551615",
     lambda c, s, b: c.add(np.array([2**64 - 1], np.uint64))),
    (InvalidArgument, "token_ids: expected ids from 0 to 4294967294, got -1",
     lambda c, s, b: c.append(s, np.array([-1]))),
    (InvalidArgument, "scale: expected a finite number in the range of float32 (up to 3.4e38), got 1e308",
     lambda c, s, b: c.attend(0, b, X, 1e308)),
    (InvalidArgument, "scale: expected a finite number in the range of float32 (up to 3.4e38), got inf",
     lambda c, s, b: c.attend(0, b, X, float("inf"))),
    (InvalidArgument, "clock(): expected a finite number of seconds from 0 to 1.8e19, got 1e308",
     lambda c, s, b: make_cache(clock=lambda: 1e308).add([1])),
    (InvalidArgument, "ttl: expected a finite number of seconds from 0 to 1.8e19, got -1.0",
     lambda c, s, b: c.add([1], ttl=-1)),
    (InvalidArgument,
     "k_scale: expected a number from 1.18e-38 to 8.5e37 (it and its inverse are normal float32 numbers), got 3e38",
     lambda c, s, b: make_cache(dtype="fp8", k_scale=3e38)),
    (InvalidArgument, "got 1e300", lambda c, s, b: make_cache(dtype="fp8", v_scale=1e300)),
    (InvalidArgument, "max_pinned_fraction: expected 0 to 1, got 1e308",
     lambda c, s, b: make_cache(max_pinned_fraction=1e308)),
    # True is no number
    *((TypeError, f"{name}: expected {what}, got bool", call) for name, what, call in [
        ("prefix_ttl", "seconds (a number)", lambda c, s, b: make_cache(prefix_ttl=True)),
        ("ttl", "seconds (a number)", lambda c, s, b: c.add([1], ttl=True)),
        ("ttl", "seconds (a number)", lambda c, s, b: c.mark(s, 1, ttl=True)),
        ("clock()", "seconds (a number)", lambda c, s, b: make_cache(clock=lambda: True).add([1])),
        ("k_scale", "a number or an array [num_layers, num_kv_heads]",
         lambda c, s, b: make_cache(dtype="fp8", k_scale=True)),
        ("max_pinned_fraction", "a number from 0 to 1", lambda c, s, b: make_cache(max_pinned_fraction=True)),
        ("scale", "a number or None", lambda c, s, b: c.attend(0, b, X, True)),
    ]),
    (TypeError, "scale: expected a number or None, got bool", lambda c, s, b: c.attend(0, b, X, np.bool_(True))),
    # Handles, flags, pairs
    *((TypeError, "seq: expected a Sequence, got NoneType", call) for call in [
        lambda c, s, b: c.free(None), lambda c, s, b: c.append(None, [1]), lambda c, s, b: c.num_tokens(None),
        lambda c, s, b: c.truncate(None, 1), lambda c, s, b: c.fork(None), lambda c, s, b: c.pin(None),
        lambda c, s, b: c.read(0, None), lambda c, s, b: c.save(None, "x"), lambda c, s, b: c.block_table(None),
    ]),
    (TypeError, "batch: expected a Batch, got Sequence", lambda c, s, b: c.commit(s)),
    (TypeError, "batch: expected a Batch, got int", lambda c, s, b: c.attend(0, 1, X)),
    (TypeError, "pin: expected a Pin, got NoneType", lambda c, s, b: c.unpin(None)),
    (TypeError, "use_prefix: expected True or False, got int", lambda c, s, b: c.add([1], use_prefix=1)),
    (TypeError, "enable_prefix_caching: expected True or False, got int",
     lambda c, s, b: make_cache(enable_prefix_caching=1)),
    (TypeError, "plan: expected a Sequence before the number of new tokens, got int", lambda c, s, b: c.plan([(1, 1)])),
    (TypeError, "plan: expected (sequence, new tokens) pairs, got Sequence", lambda c, s, b: c.plan([s])),
    (TypeError, "plan: expected (sequence, new tokens) pairs, got tuple of length 3",
     lambda c, s, b: c.plan([(s, 1, 1)])),
    (TypeError, "plan: expected a list of (sequence, new tokens) pairs, got int", lambda c, s, b: c.plan(3)),
    (InvalidArgument, "parents: expected indices from 0 to 0, got -1", lambda c, s, b: c.reorder([s], [-1])),
    (InvalidArgument, "parents: expected indices from 0 to 0, got 1", lambda c, s, b: c.reorder([s], [1])),
    (InvalidArgument, "parents: expected none, as there is nothing to point at, got 0",
     lambda c, s, b: c.reorder([], [0])),
    (TypeError, "seqs: expected a list of sequences, got int", lambda c, s, b: c.reorder(3, [0])),
    (InvalidArgument, "parents: expected at most 65536 indices, got 65537",
     lambda c, s, b: c.reorder([s], [0] * 65537)),
    # States
    (InvalidArgument, "nothing of the sequence is computed yet", lambda c, s, b: c.pin(s)),
    (InvalidArgument, "nothing of the sequence is computed yet", lambda c, s, b: c.pin(s, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), MESSAGES, ids=[str(i) for i in range(len(MESSAGES))])
def test_what_is_said(kind: type[Exception], message: str, call: Call) -> None:
    cache = make_cache()
    seq = cache.add(range(20))
    batch = cache.plan([(seq, 5)])
    with pytest.raises(kind) as raised:
        call(cache, seq, batch)
    assert message in str(raised.value)
    assert cache.num_tokens(seq) == 20
    cache.check()


def test_a_sequence_that_shares_nothing_has_nothing_to_mark_or_pin() -> None:
    cache = make_cache()
    seq, _ = compute(cache, Sample.random(cache, 20), use_prefix=False)
    for call in (cache.mark, cache.pin):
        with pytest.raises(InvalidState, match="does not share its prefix"):
            call(seq, 5)
    cache.check()


def test_paths_that_are_fine(tmp_path: Path) -> None:
    """Text, paths, and names that are no UTF-8 but the system's."""
    cache = make_cache(spill_dir=tmp_path / "spill", spill_bytes=1 << 20)
    seq, _ = compute(cache, Sample.random(cache, 20))
    names: list[Any] = ["a", Path("b")]
    if sys.platform == "linux":
        names.append(os.fsdecode(b"\xff"))
    for name in names:
        cache.save(seq, tmp_path / name)
        assert cache.num_tokens(cache.load(os.fspath(tmp_path / name))) == 20


def test_the_bounds_of_lists_are_no_hindrance() -> None:
    """Long lists, and iterators, are read as far as they go, and soon."""
    cache = make_cache()
    begin = time.monotonic()
    seq = cache.add(itertools.chain(range(10**6), itertools.repeat(7, 10**6)))
    cache.append(seq, iter(range(10**6)))
    assert cache.num_tokens(seq) == 3 * 10**6
    assert cache.plan(iter([(seq, 3)])).num_tokens == 3
    assert len(cache.reorder([seq], itertools.repeat(0, 100))) == 100
    assert time.monotonic() - begin < 30
