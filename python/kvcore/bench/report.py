"""Figures of a run: as a dict for JSON, and as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvcore._kvcore import __version__
from kvcore.bench.rounds import Case, Run
from kvcore.plan.sizes import format_size

NOTE = """\
"of limit": prefill beside its products at that rate; a decode step beside reading its weights and cache, or beside its
products, whichever takes longer. Limits are measured in every round: reading 256 MiB, the faster of a one-row product
and numpy's max; kvcore's own product of 512 rows with a 4096 x 4096 matrix in the weights' format: what can be reached,
not what the instructions could do at most."""

_COLUMNS: Final[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]] = (
    ("requests", lambda row: f"{row['requests']:,}"),
    ("prompt", lambda row: f"{row['prompt']:,}"),
    ("TTFT ms", lambda row: _milliseconds(row["ttft"])),
    ("cached TTFT ms", lambda row: _milliseconds(row["cached_ttft"])),
    ("prefill tokens/s", lambda row: _rate(row["prefill_tokens_per_second"])),
    ("GMAC/s", lambda row: f"{row['prefill_products_per_second'] / 1e9:.1f}"),
    ("of limit", lambda row: f"{row['prefill_of_limit']:.2f}"),
    ("TPOT ms", lambda row: _milliseconds(row["tpot"])),
    ("decode tokens/s", lambda row: _rate(row["decode_tokens_per_second"])),
    ("GB/s", lambda row: f"{row['decode_bytes_per_second'] / 1e9:.1f}"),
    ("of limit", lambda row: f"{row['decode_of_limit']:.2f}"),
)


def as_dict(run: Run) -> dict[str, Any]:
    """All figures; sizes in bytes, times in seconds, rates in bytes or multiply-adds a second."""
    llm, limits = run.llm, run.typical_limits
    threads = llm.cache.threads
    return {
        "version": __version__,
        "model": llm.name,
        "weights": llm._decoder.weight_format,
        "kv_cache_dtype": llm.cache.dtype,
        "simd": threads.simd,
        "num_threads": threads.num_threads,
        "rounds": run.rounds,
        "new_tokens": run.settings.new_tokens,
        "load_seconds": run.load,
        "resident_bytes": run.resident,
        "weight_bytes": llm.weight_bytes,
        "weight_bytes_of_a_step": llm._decoder.step_nbytes(1),
        "kv_cache_bytes": llm.cache.nbytes,
        "limits": {"read_bandwidth": limits.read_bandwidth, "product_rate": limits.product_rate},
        "results": [_row(run, case) for case in run.settings.cases],
    }


def as_text(values: dict[str, Any]) -> str:
    """A table of what ``as_dict`` gives."""
    resident = "not known" if values["resident_bytes"] is None else format_size(values["resident_bytes"])
    weights, read, cache = (
        format_size(values[name]) for name in ("weight_bytes", "weight_bytes_of_a_step", "kv_cache_bytes")
    )
    lines = [
        f"kvcore {values['version']}, {values['model']}: weights {values['weights']}, KV {values['kv_cache_dtype']}, "
        f"{values['simd']}, {_count(values['num_threads'], 'thread')}, {_count(values['rounds'], 'round')} of "
        f"{values['new_tokens']} new tokens",
        f"load {values['load_seconds']:.2f} s; memory {resident}: weights {weights} (a decode step reads {read}), "
        f"cache up to {cache}",
        f"limits: reading {values['limits']['read_bandwidth'] / 1e9:.1f} GB/s, "
        f"products {values['limits']['product_rate'] / 1e9:.1f} GMAC/s",
        "",
    ]
    cells = [[name for name, _ in _COLUMNS], *([show(row) for _, show in _COLUMNS] for row in values["results"])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, "", NOTE])


def _row(run: Run, case: Case) -> dict[str, Any]:
    sample, work, limits, n = run.typical(case), run.work, run.typical_limits, case.requests
    context = case.prompt + run.settings.new_tokens // 2
    prefill_least = n * work.prefill_seconds(case.prompt, limits)
    decode_least = work.decode_seconds(n, context, limits)
    read = work.decode_bytes(n, context)
    return {
        "requests": n,
        "prompt": case.prompt,
        "ttft": sample.ttft,
        "cached_ttft": sample.cached_ttft,
        "tpot": sample.tpot,
        "prefill_tokens_per_second": n * case.prompt / sample.prefill,
        "prefill_products_per_second": n * work.prefill_products(case.prompt) / sample.prefill,
        "prefill_of_limit": prefill_least / sample.prefill,
        "decode_tokens_per_second": n / sample.tpot,
        "decode_bytes_per_second": read / sample.tpot,
        "decode_bytes_of_a_step": read,
        "decode_of_limit": decode_least / sample.tpot,
        "decode_bound_by": "reading" if read / limits.read_bandwidth == decode_least else "products",
    }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f}"


def _rate(tokens: float) -> str:
    return f"{tokens:,.1f}" if tokens < 1000 else f"{tokens:,.0f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
