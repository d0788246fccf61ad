"""benches/throughput.py: what paging brings to the engine, on a clock that the steps set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import throughput  # noqa: E402
from lengths import sharegpt  # noqa: E402
from throughput import Load, Server, replay  # noqa: E402

SERVER = Server()


@pytest.fixture(scope="module")
def first() -> Any:
    return sharegpt(0, 2048, 120).conversations


def test_pages_answer_at_least_twice_as_many_requests(first: Any) -> None:
    load = Load("sharegpt", "first exchanges", first, 8.0)
    results = {way: replay(load, way, SERVER) for way in ("max", "pow2", "oracle", "paged")}
    rates = {way: result.requests_per_second for way, result in results.items()}
    assert rates["max"] < rates["pow2"] < rates["oracle"] < rates["paged"]
    assert rates["paged"] > 2 * rates["max"]
    assert results["max"].running < 16_384 / 2048 + 0.01
    assert [r.preemptions for way, r in results.items() if way != "paged"] == [0, 0, 0]
    assert replay(load, "paged", SERVER) == results["paged"]


def test_what_is_shared_is_held_and_computed_once(first: Any) -> None:
    short = [turns for turns in first if turns[0].total <= 1500][:50]
    behind = Load("instruction", "behind an instruction", short, 8.0, front=512)
    alone, shared = (replay(behind, way, SERVER) for way in ("paged", "shared"))
    assert alone.found == 0
    assert shared.found > 0.5
    assert shared.requests_per_second > 1.3 * alone.requests_per_second
    samples = Load("parallel", "samples", first[:40], 8.0, samples=4)
    beams = Load("beams", "beams", first[:40], 8.0, beams=4)
    for load in (samples, beams):
        apart, together = (replay(load, way, SERVER) for way in ("max", "paged"))
        assert together.tokens_per_second > 2 * apart.tokens_per_second


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end -->\nafter\n")
    picture = tmp_path / "figure.svg"
    argv = ["--quick", "--workloads", "beams 4", "--json", "--svg", str(picture), "--table", str(page)]
    assert throughput.main(argv) == 0
    values = json.loads(capsys.readouterr().out)
    assert set(values["workloads"]["beams 4"]) == set(throughput.WAYS)
    assert picture.read_text().startswith("<svg")
    text = page.read_text()
    assert text.startswith("before\n<!-- table -->\n4 beams")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    for bad in (["--slots", "100"], ["--rate", "0"], ["--workloads", "nothing"]):
        with pytest.raises(SystemExit) as info:
            throughput.main(bad)
        assert info.value.code == 2
    capsys.readouterr()
