"""End to end: prefill and decode rates of a model, one request and a batch, beside the machine's read bandwidth.

    python benches/endtoend.py [--model smollm2] [--dtype bfloat16] [--quantization auto] [--kv-cache-dtype auto]
                               [--rounds 5] [--json]

Prompts are random token ids, greedy, end of sequence ignored, prefix cache off. Every figure is the median of several
rounds, and the bandwidth is measured in each round as well, since neighbours on a shared machine move it. A decode step
reads all weights and the request's cache, so bandwidth / bytes is the most that decode can reach.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvcore import LLM, SamplingParams, __version__

PROMPTS = (90, 871, 3430)
NEW_TOKENS = 65
BATCH, BATCH_PROMPT = 32, 220


def read_bandwidth(num_threads: int, size: int = 256 << 20) -> float:
    """GB/s (10^9) of num_threads threads that each sum their own part of a buffer larger than any cache."""
    parts = np.array_split(np.ones(size // 4, np.float32), 4 * num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(np.max, parts))
        start = time.perf_counter()
        list(pool.map(np.max, parts))
        return size / (time.perf_counter() - start) / 1e9


def one_request(llm: LLM, rng: np.random.Generator, tokens: int) -> tuple[float, float]:
    """Tokens/s of prefill and of decode."""
    prompt = rng.integers(100, 40_000, tokens).tolist()
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    metrics = llm.generate([prompt], params)[0].metrics
    assert metrics.ttft
    assert metrics.tpot
    return tokens / metrics.ttft, 1 / metrics.tpot


def batch(llm: LLM, rng: np.random.Generator) -> float:
    """Decode tokens/s of a whole batch, once all prompts are in."""
    prompts = [rng.integers(100, 40_000, BATCH_PROMPT).tolist() for _ in range(BATCH)]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    # The request that got its first token last decoded beside all others, with no prefill left between its steps.
    tpot = max((o.metrics for o in outputs), key=lambda m: m.first_token_time or 0.0).tpot
    assert tpot
    return BATCH / tpot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    start = time.perf_counter()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        num_threads=args.num_threads,
        enable_prefix_caching=False,
    )
    load = time.perf_counter() - start
    threads = llm.cache.threads
    rng = np.random.default_rng(0)
    one_request(llm, rng, PROMPTS[0])
    rates: dict[int, list[tuple[float, float]]] = {n: [] for n in PROMPTS}
    batches, bandwidths = [], []
    for _ in range(args.rounds):
        bandwidths.append(read_bandwidth(threads.num_threads))
        for n in PROMPTS:
            rates[n].append(one_request(llm, rng, n))
        batches.append(batch(llm, rng))
    bandwidth = statistics.median(bandwidths)
    weights = llm.weight_bytes
    rows = []
    for n in PROMPTS:
        prefill = statistics.median(r[0] for r in rates[n])
        decode = statistics.median(r[1] for r in rates[n])
        read = weights + (n + NEW_TOKENS // 2) * llm.cache.bytes_per_token
        limit = bandwidth * 1e9 / read
        rows.append({"prompt": n, "prefill": prefill, "decode": decode, "decode_limit": limit, "ratio": decode / limit})
    result = {
        "version": __version__,
        "model": args.model,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": llm.cache.dtype,
        "simd": threads.simd,
        "num_threads": threads.num_threads,
        "load_seconds": load,
        "read_bandwidth": bandwidth,
        "one_request": rows,
        "batch": {"size": BATCH, "prompt": BATCH_PROMPT, "decode": statistics.median(batches)},
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(
        f"kvcore {__version__}, {args.model}: weights {args.dtype}, KV {llm.cache.dtype}, {threads.simd}, "
        f"{threads.num_threads} threads; load {load:.2f} s; read bandwidth {bandwidth:.1f} GB/s"
    )
    print("prompt tokens | prefill tokens/s | decode tokens/s | of the bandwidth's limit")
    for row in rows:
        print(f"{row['prompt']:13} | {row['prefill']:16.0f} | {row['decode']:15.1f} | {row['ratio']:.2f}")
    print(f"{BATCH} requests of {BATCH_PROMPT} tokens: decode {result['batch']['decode']:.0f} tokens/s")


if __name__ == "__main__":
    main()
