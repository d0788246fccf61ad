"""An LLM's counts and times for Prometheus, with vLLM's names under ``kvcore:`` (``kvcore[metrics]``).

    from prometheus_client import start_http_server
    start_http_server(8000, registry=kvcore.metrics.registry(llm))

Nothing is counted twice: whenever the metrics are asked for, they are read from ``LLM.stats()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvcore.errors import InvalidState, KvcoreError
from kvcore.live import Watched

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Times that a request had to give its blocks back"),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of prompts"),
    "generation_tokens": ("num_generation_tokens", "Tokens generated"),
    "computed_tokens": ("num_computed_tokens", "Token positions that went through the model"),
    "recomputed_tokens": ("num_recomputed_tokens", "Those computed again after a preemption"),
    "cached_tokens": ("num_cached_tokens", "Prompt tokens that were found in the prefix cache"),
    "engine_steps": ("num_steps", "Forward passes"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Drafts of speculative decoding"),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens of drafts"),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted"),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft", "Seconds from arrival to the first token"),
    "inter_token_latency_seconds": ("inter_token_latency", "Seconds from one token to the next"),
    "request_time_per_output_token_seconds": ("tpot", "Mean seconds for each token after the first, by request"),
    "e2e_request_latency_seconds": ("e2e_time", "Seconds from arrival to the end"),
    "request_queue_time_seconds": ("queue_time", "Seconds from arrival to the first batch"),
    "request_prompt_tokens": ("prompt_tokens", "Tokens of a request's prompt"),
    "request_generation_tokens": ("generation_tokens", "Tokens generated for a request"),
}


def registry(llm: Watched, *, model_name: str | None = None) -> CollectorRegistry:
    """A registry that prometheus_client can expose.

    Args:
        llm: whose metrics.
        model_name: the label ``model_name``; None: the LLM's name.

    Raises:
        KvcoreError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise KvcoreError(
            "metrics: expected the package prometheus_client, which is not there: pip install 'kvcore[metrics]'"
        ) from error
    result = CollectorRegistry()
    result.register(Collector(llm, model_name or llm.name))
    return result


class Collector:
    """Reads an LLM's stats as metric families; ``CollectorRegistry.register`` takes it."""

    def __init__(self, llm: Watched, model_name: str) -> None:
        self._llm = llm
        self._label = model_name

    def describe(self) -> list[Any]:
        """Nothing: names are known when they are collected."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics of now; none after ``LLM.close``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        try:
            stats, labels = self._llm.stats(), [self._label]
        except InvalidState:  # closed
            return
        cache = stats["cache"]

        def one(kind: Any, name: str, text: str, value: float) -> Any:
            family = kind(f"kvcore:{name}", text, labels=["model_name"])
            family.add_metric(labels, value)
            return family

        yield one(GaugeMetricFamily, "num_requests_running", "Sequences that run", stats["num_running"])
        yield one(GaugeMetricFamily, "num_requests_waiting", "Sequences that wait", stats["num_waiting"])
        usage = cache["used"] / cache["total"]
        yield one(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the blocks that sequences hold, 0 to 1", usage)
        for name, key in (("prefix_cache_queries", "query_tokens"), ("prefix_cache_hits", "hit_tokens")):
            yield one(CounterMetricFamily, name, f"Prefix cache: {key.replace('_', ' ')}", cache.get(key, 0))
        for name, (key, text) in _COUNTERS.items():
            yield one(CounterMetricFamily, name, text, stats[key])
        success = CounterMetricFamily(
            "kvcore:request_success", "Requests that have ended", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats["num_finished"].items():
            success.add_metric([self._label, reason], count)
        yield success
        for name, (key, text) in _HISTOGRAMS.items():
            histogram = stats["histograms"][key]
            family = HistogramMetricFamily(f"kvcore:{name}", text, labels=["model_name"])
            buckets = [
                ("+Inf" if bound == float("inf") else str(bound), n) for bound, n in histogram["buckets"].items()
            ]
            family.add_metric(labels, buckets, histogram["sum"])
            yield family
