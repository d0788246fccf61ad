"""Report the time of `import kvcore` in a fresh process. Slow machines are slow: it warns and never fails."""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT = 0.3
"""Seconds."""

RUNS = 9
SNIPPET = "import time; t = time.perf_counter(); import kvcore; print(time.perf_counter() - t)"


def main() -> None:
    """Measure and print."""
    command = [sys.executable, "-c", SNIPPET]
    subprocess.run(command, check=True, capture_output=True)  # the first run reads the files from disk
    times = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(RUNS)]
    median = statistics.median(times)
    print(f"import kvcore: median of {RUNS} {median:.3f} s, best {min(times):.3f} s")
    if median >= LIMIT:
        print(f"warning: import kvcore takes {median:.3f} s, expected less than {LIMIT} s", file=sys.stderr)


if __name__ == "__main__":
    main()
