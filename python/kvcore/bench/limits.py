"""What the machine can do at most, as far as it can be seen from here. Neighbours move it: measure it in every round.

read bandwidth   the faster of two ways to read 256 MiB: the product of one row with a float32 matrix, and numpy's max
product rate     512 rows by a 4096 x 4096 matrix of the weights' format, in kvcore's own product: what can be reached,
                 not the most that the instructions could do (`cargo bench --bench linear` has that)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kvcore._kvcore import Arena, Linear
from kvcore.bench.work import Limits

if TYPE_CHECKING:
    from kvcore._kvcore import Threads

_READ = 256 << 20
_COLUMNS = 8192
_WIDTH, _ROWS = 4096, 512


def measure_limits(threads: Threads, weights: str, *, scale: float = 1.0) -> Limits:
    """Measure with these threads.

    Args:
        threads: the pool that the products run on.
        weights: the format of the product's matrix, as ``Linear`` has it.
        scale: of the sizes; tests are content with less.
    """
    return Limits(read_bandwidth(threads, int(_READ * scale)), product_rate(threads, weights, scale))


def read_bandwidth(threads: Threads, size: int) -> float:
    """Bytes a second of reading so many bytes of memory."""
    rows = max(size // (4 * _COLUMNS), 1)
    return max(_product_of_one_row(threads, rows), _numpy_max(threads.num_threads, rows * _COLUMNS))


def _product_of_one_row(threads: Threads, rows: int) -> float:
    matrix = Linear(np.zeros((rows, _COLUMNS), np.float32), threads=threads, arena=Arena())
    x = np.ones((1, _COLUMNS), np.float32)
    return matrix.nbytes / _seconds(lambda: matrix(x))


def _numpy_max(num_threads: int, count: int) -> float:
    parts = np.array_split(np.ones(count, np.float32), 4 * num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return 4 * count / _seconds(lambda: list(pool.map(np.max, parts)))


def product_rate(threads: Threads, weights: str, scale: float = 1.0) -> float:
    """Multiply-adds a second of many rows with a matrix of this format."""
    width, rows = max(int(_WIDTH * scale), 64), max(int(_ROWS * scale), 16)
    random = np.random.default_rng(0)
    matrix = Linear(random.standard_normal((width, width), np.float32), dtype=weights, threads=threads, arena=Arena())
    x = random.standard_normal((rows, width), np.float32)
    return rows * width * width / _seconds(lambda: matrix(x))


def _seconds(run: Callable[[], object], times: int = 5) -> float:
    """The median of some runs, behind one that is not counted."""
    run()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))
