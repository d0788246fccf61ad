"""End to end: prefill and decode rates of a model, one request and a batch, beside the machine's limits.

    python benches/endtoend.py [--model smollm2] [--dtype bfloat16] [--quantization none] [--kv-cache-dtype auto]
                               [--rounds 5] [--json]
    python benches/endtoend.py --formats [--model smollm2] [--rounds 5] [--json] [--table FILE] [--svg FILE]

The first is `kvcore bench` with the settings that docs/performance.md names: prompts of 90, 871 and 3,430 random token
ids and 32 of 220, greedy, end of sequence ignored. The second goes through the formats of weights and cache one after
the other, and makes that page's table and picture.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcore.bench import Settings, as_text, run_bench
from kvcore.errors import KvcoreError

FORMATS = [("bfloat16", "none", "auto"), ("bfloat16", "int8", "auto"), ("bfloat16", "int4", "fp8")]
"""dtype, quantization and kv_cache_dtype of the table's lines."""
TABLE = re.compile(r"(?<=<!-- endtoend -->\n).*?(?=<!-- end -->)", re.DOTALL)


def markdown(results: list[dict[str, Any]]) -> str:
    """The table of docs/performance.md."""
    head = ["weights, KV", "prompt", "prefill tokens/s", "of limit", "decode tokens/s", "of limit", "load"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for values in results:
        title, load = f"{values['weights']}, {values['kv_cache_dtype']}", f"{values['load_seconds']:.1f} s"
        for row in values["results"]:
            prompt = f"{row['prompt']:,}" if row["requests"] == 1 else f"{row['requests']} x {row['prompt']:,}"
            rates = [f"{row['prefill_tokens_per_second']:,.0f}", f"{row['prefill_of_limit']:.2f}"]
            rates += [f"{row['decode_tokens_per_second']:,.1f}", f"{row['decode_of_limit']:.2f}"]
            lines.append([title, prompt, *rates, load])
            title = load = ""
    limits = "; ".join(
        f"{values['weights']}: reading {values['limits']['read_bandwidth'] / 1e9:.1f} GB/s, "
        f"products {values['limits']['product_rate'] / 1e9:.0f} GMAC/s"
        for values in results
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nLimits of these runs: {limits}.\n"


def draw(results: list[dict[str, Any]]) -> str:
    """An SVG: what each case reaches of its limit."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from draw_docs import INK, LINE, SOFT, STRONG, Canvas

    left, width, row_height = 170, 480, 24
    cases = sum(len(values["results"]) for values in results)
    canvas = Canvas(1000, 90 + len(results) * 46 + 2 * cases * row_height, "Rates beside the machine's limits")
    canvas.text(24, 36, "What a model reaches of the machine's limits", 18, weight="bold")
    canvas.text(24, 56, f"{results[0]['model']}, {results[0]['num_threads']} threads, {results[0]['simd']}", 13, SOFT)
    y = 74.0
    for values in results:
        canvas.text(24, y + 18, f"weights {values['weights']}, KV {values['kv_cache_dtype']}", 15, weight="bold")
        y += 28
        for what, ink in (("prefill", LINE), ("decode", STRONG)):
            for row in values["results"]:
                share, tokens = row[f"{what}_of_limit"], row[f"{what}_tokens_per_second"]
                name = f"{what} {row['requests']} x {row['prompt']:,}"
                canvas.text(left - 10, y + 14, name, 12, anchor="end")
                canvas.rect(left, y, width * min(share, 1.3), row_height - 6, ink, INK)
                label = f"{share:.2f}   {tokens:,.0f} tokens/s"
                canvas.text(left + width * min(share, 1.3) + 8, y + 14, label, 12)
                y += row_height
        y += 18
    return canvas.finish()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", action="store_true", help="all formats, one after the other")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="with --formats: replace the table of a Markdown page"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --formats: draw the figure")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if (args.table or args.svg) and not args.formats:
        parser.error("--table, --svg: expected --formats beside them")
    page = args.table.read_text(encoding="utf-8") if args.table is not None else ""
    if args.table is not None and not TABLE.search(page):
        parser.error(f"--table: expected lines <!-- endtoend --> and <!-- end --> in {args.table}")
    results: list[dict[str, Any]] = []
    code = 0
    try:
        settings = Settings(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            num_threads=args.num_threads,
            rounds=args.rounds,
            new_tokens=65,
        )
        formats = FORMATS if args.formats else [(args.dtype, args.quantization, args.kv_cache_dtype)]
        for dtype, quantization, kv_cache_dtype in formats:
            run_bench(
                replace(settings, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype), results.append
            )
    except KvcoreError as error:
        print(f"endtoend: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # complete rounds count
        print("interrupted", file=sys.stderr)
        code = 130
        if not results:
            return code
    if args.svg is not None:
        args.svg.write_text(draw(results), encoding="utf-8")
    if args.table is not None:
        args.table.write_text(TABLE.sub(lambda _: markdown(results), page), encoding="utf-8")
    if args.json:
        print(json.dumps(results if args.formats else results[0], indent=1))
    else:
        print("\n\n".join(map(as_text, results)))
    return code


if __name__ == "__main__":
    sys.exit(main())
