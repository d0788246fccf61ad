"""What the tests of the native cache share: an independent idea of rounding, whole sequences of K, V and Q, and runs
of Python in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvcore import KVCache, Sequence
from kvcore._kvcore import reference_attention

Floats = npt.NDArray[np.float32]

SIMD_ENV = "KVCORE_SIMD"
DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3")


@contextmanager
def forced_simd(level: str) -> Iterator[None]:
    """Objects that are constructed inside use this level."""
    before = os.environ.get(SIMD_ENV)
    os.environ[SIMD_ENV] = level
    try:
        yield
    finally:
        if before is None:
            del os.environ[SIMD_ENV]
        else:
            os.environ[SIMD_ENV] = before


def bits(x: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """float32 values as integers, so that == means bitwise."""
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def assert_bitwise(a: npt.ArrayLike, b: npt.ArrayLike, what: str = "") -> None:
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=what)


def rounded(x: npt.ArrayLike, dtype: str, scale: float = 1.0) -> Floats:
    """What a cache of this dtype gives back for ``x``, by ml_dtypes' conversions."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        if dtype == "float32":
            return x.copy()
        if dtype in ("float16", "bfloat16"):
            kind: Any = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
            y = x.astype(kind).astype(np.float32)
            # Finite values saturate, infinities stay.
            largest = np.float32(ml_dtypes.finfo(kind).max)
            return np.where(np.isinf(y) & np.isfinite(x), np.copysign(largest, x), y)
        assert dtype == "fp8_e4m3"
        quotient = np.clip(x / np.float32(scale), -448, 448)
        return quotient.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)


def expected_attention(q: Floats, k: Floats, v: Floats, dtype: str, scale: float | None = None) -> Floats:
    """The oracle over stored ``k`` and ``v``: bf16 and fp8 caches round queries to bf16."""
    if dtype in ("bfloat16", "fp8_e4m3"):
        q = q.astype(ml_dtypes.bfloat16).astype(np.float32)
    return reference_attention(np.ascontiguousarray(q), np.ascontiguousarray(k), np.ascontiguousarray(v), scale)


def tolerance(dtype: str, v: Floats) -> float:
    """How far attention may be from the oracle: bf16 and fp8 caches round each softmax weight to bf16."""
    largest = float(np.abs(v).max(initial=1e-3))
    return largest * (2.0**-8 if dtype in ("bfloat16", "fp8_e4m3") else 1e-5)


def make_cache(**changes: Any) -> KVCache:
    """A small cache on one thread."""
    sizes: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "num_blocks": 16, "dtype": "float32"}
    sizes |= changes
    if "threads" not in sizes:
        sizes.setdefault("num_threads", 1)
    return KVCache(**sizes)


@dataclass
class Sample:
    """A sequence's tokens, and its K, V [layers, tokens, kv heads, dim] and Q [layers, tokens, q heads, dim]."""

    tokens: npt.NDArray[np.int64]
    k: Floats
    v: Floats
    q: Floats

    @classmethod
    def random(cls, cache: KVCache, num_tokens: int, seed: int = 0, group: int = 2) -> Sample:
        rng = np.random.default_rng([num_tokens, seed])

        def values(heads: int, spread: float) -> Floats:
            shape = (cache.num_layers, num_tokens, heads, cache.head_dim)
            return (rng.standard_normal(shape) * spread).astype(np.float32)

        tokens = rng.integers(0, 50_000, num_tokens)
        return cls(tokens, values(cache.num_kv_heads, 1.0), values(cache.num_kv_heads, 1.0),
                   values(cache.num_kv_heads * group, 1.5))  # fmt: skip

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, n: int) -> Sample:
        return Sample(self.tokens[:n], self.k[:, :n], self.v[:, :n], self.q[:, :n])


def advance(cache: KVCache, *items: tuple[Sequence, Sample, int]) -> list[Floats]:
    """One step: plan, write, attend and commit the next n tokens of each (seq, sample, n).

    Returns, for each item, attention's output [layers, n, q heads, dim].
    """
    spans = []
    for seq, _, n in items:
        start = cache.num_computed_tokens(seq)
        spans.append(slice(start, start + n))
    batch = cache.plan([(seq, n) for seq, _, n in items])
    outs = []
    for layer in range(cache.num_layers):
        k, v, q = (
            np.concatenate(
                [getattr(sample, name)[layer, span] for (_, sample, _), span in zip(items, spans, strict=True)]
            )
            for name in "kvq"
        )
        cache.write(layer, batch, k, v)
        outs.append(cache.attend(layer, batch, q))
    cache.commit(batch)
    ends = np.cumsum([n for _, _, n in items])
    return np.split(np.stack(outs), ends[:-1], axis=1)


def compute(cache: KVCache, sample: Sample, cuts: tuple[int, ...] = (), **add: Any) -> tuple[Sequence, Floats]:
    """Add a sample and compute all of it, cut at these positions; the handle and the output of what was computed."""
    seq = cache.add(sample.tokens, **add)
    outs = []
    for end in (*cuts, len(sample)):
        n = end - cache.num_computed_tokens(seq)
        if n > 0:
            outs += advance(cache, (seq, sample, n))
    return seq, np.concatenate(outs, axis=1)


def assert_no_leak(cache: KVCache) -> None:
    """Law 2 once all sequences are freed."""
    cache.check()
    stats = cache.stats()
    assert stats["used"] == 0
    assert stats["free"] + stats["cached"] == stats["total"]
    assert stats["num_sequences"] == 0


def run_python(code: str, timeout: float = 60, **env: str) -> str:
    """Run code in a fresh interpreter that can import this module; its standard output."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])} | env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
