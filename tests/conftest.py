"""Fixtures and hypothesis profiles of all tests.

HYPOTHESIS_PROFILE=long (or pytest --hypothesis-profile=long) searches for longer than CI does.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvcore import available_simd
from kvtools import SIMD_ENV

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that: tests of Ctrl-C would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: the machine may be busy, and the first call of a kernel touches cold code and memory.
settings.register_profile(
    "ci", deadline=None, max_examples=50, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("ci"), max_examples=1000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what fetches hundreds of megabytes, unless `-m` names it (`make test-models`)."""
    if "real" not in config.getoption("-m"):
        left_out = [item for item in items if item.get_closest_marker("real")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M file, fetched if it is not there yet."""
    from kvcore.checkpoint.pull import pull

    return pull("smollm2", progress=False)


@pytest.fixture(params=available_simd())
def simd_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once on every SIMD level of this CPU: what is constructed in it uses that level."""
    monkeypatch.setenv(SIMD_ENV, request.param)
    return request.param
