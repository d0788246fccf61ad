"""A short soak; ``python tests/soak.py`` is the long one."""

from __future__ import annotations

from kvtools import run_python


def test_memory_stays_flat() -> None:
    """In a process of its own, whose memory nobody else uses."""
    print(
        run_python(
            """
import soak

report = soak.run(30_000, seed=1, check_every=200)
print(report)
assert report.done["step"] > 4_000, report
assert report.done["add"] > 2_000, report
assert report.growth < 2 * 2**20, report
""",
            timeout=300,
        )
    )


def test_a_seed_gives_the_same_run() -> None:
    import soak

    first, second = (soak.run(1500, seed=5, check_every=100) for _ in range(2))
    assert (first.done, first.refused) == (second.done, second.refused)
    assert set(first.done) | set(first.refused) | set(first.left_out) >= {"add", "step", "fork", "reorder", "pin"}


def test_a_leak_would_show() -> None:
    from collections import Counter

    import soak

    def report(resident: list[int]) -> soak.Report:
        return soak.Report(1, 1.0, Counter(), Counter(), [], resident)

    mib = 2**20
    assert report([10 * mib + 1000 * n for n in range(10_000)]).growth > 5 * mib
    assert report([mib, 10 * mib, *[50 * mib] * 98]).growth == 0  # what is taken at first is no leak
    assert report([mib]).growth == 0
