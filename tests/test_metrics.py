"""What is counted and timed: of requests, over an LLM's life, for Prometheus and for terminals."""

from __future__ import annotations

import sys
import time

import prometheus_client
import pytest

from kvcore import SamplingParams
from kvcore.engine.metrics import Histogram, RequestMetrics
from kvcore.errors import KvcoreError
from kvcore.live import View, lines, live_view
from kvcore.metrics import registry
from test_llm import make

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_request_times() -> None:
    metrics = RequestMetrics(10.0)
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.e2e_time) == (None,) * 4
    metrics.first_scheduled_time = 11.0
    for now in (12.0, 12.5, 14.0):
        metrics.token(now)
    metrics.finished_time = 14.0
    assert (metrics.queue_time, metrics.ttft, metrics.tpot, metrics.e2e_time) == (1.0, 2.0, 1.0, 4.0)
    assert metrics.inter_token_latencies == [0.5, 1.5]


def test_histograms() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    assert histogram.mean is None
    for value in (0.5, 1.0, 1.5, 5.0, 9.0, None):
        histogram.add(value)
    assert histogram.snapshot() == {
        "buckets": {1.0: 2, 2.0: 3, 5.0: 4, float("inf"): 5},
        "count": 5,
        "sum": 17.0,
    }
    assert histogram.mean == 3.4


def test_stats_are_a_snapshot() -> None:
    llm = make()
    before = llm.stats()
    outputs = llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    stats = llm.stats()
    assert before["num_requests"] == before["histograms"]["ttft"]["count"] == 0
    for name in ("queue_time", "ttft", "tpot", "e2e_time"):
        histogram = stats["histograms"][name]
        assert histogram["count"] == 2
        assert histogram["sum"] == pytest.approx(sum(getattr(o.metrics, name) for o in outputs))
    assert stats["histograms"]["inter_token_latency"]["count"] == 10
    assert stats["histograms"]["prompt_tokens"]["sum"] == 5
    assert stats["histograms"]["generation_tokens"]["sum"] == 12
    assert [len(o.metrics.inter_token_latencies) for o in outputs] == [5, 5]


def test_prometheus() -> None:
    llm = make()
    source = registry(llm, model_name="tiny")
    for expected in (0, 2):
        text = prometheus_client.generate_latest(source).decode()
        assert f'kvcore:request_success_total{{finished_reason="length",model_name="tiny"}} {expected}.0' in text
        assert f'kvcore:generation_tokens_total{{model_name="tiny"}} {6 * expected}.0' in text
        assert f'kvcore:time_to_first_token_seconds_count{{model_name="tiny"}} {expected}.0' in text
        llm.generate([[1, 2, 3], [4, 5]], GREEDY)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
    ):
        assert f"kvcore:{name}{{" in text, name
    families = {family.name for family in source.collect()}
    assert len(families) > 15
    llm.close()
    assert prometheus_client.generate_latest(source) == b""


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(KvcoreError, match=r"pip install 'kvcore\[metrics\]'"):
        registry(make())


def test_the_live_view(capfd: pytest.CaptureFixture[str]) -> None:
    llm = make()
    empty = dict(lines(llm.stats(), (0.0, 0.0)))
    assert (empty["TTFT"], empty["prefix hits"]) == ("-", "-")
    llm._decoder.fail = lambda: time.sleep(0.001)
    with live_view(llm):
        llm.generate([[1], [2]], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    shown = capfd.readouterr()
    assert shown.out == ""
    for word in ("blocks", "0 running, 0 waiting, 2 ended", "preemptions", "TTFT", "TPOT", "of 200"):
        assert word in shown.err
    view = View(llm)
    view.table()
    before = llm.stats()
    time.sleep(0.11)
    llm.generate([[3] * 9], GREEDY)
    view.table()
    assert view._rates[1] > 0
    assert llm.stats()["num_generation_tokens"] == before["num_generation_tokens"] + 6
