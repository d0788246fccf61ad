"""Does a long run stay as fast and as small as it began? And what does the engine cost beside the model?

    python benches/load.py [--requests 3000] [--seats 64]

Requests of random lengths, parameters, aborts and shared prefixes go through the engine on a small model with random
weights, whose KV pool is a twentieth of what they need together. Printed for each tenth: steps a second, resident
memory, preemptions. Then what a step with 64 running requests takes without a model: the scheduler with the cache's
plan, and everything.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore import LLM, KVCache, SamplingParams
from kvcore.engine.engine import Engine

CONFIG = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def resident_mib() -> float:
    """Resident memory now, or where only that is known the most so far."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10))


def run_load(requests: int, seats: int) -> None:
    rng = random.Random(0)
    fronts = [[rng.randrange(1000) for _ in range(64)] for _ in range(10)]
    asked = []
    for _ in range(requests):
        prompt = rng.choice(fronts)[: rng.choice([0, 32, 64])] + [
            rng.randrange(1000) for _ in range(rng.randrange(1, 200))
        ]
        sampling: dict[str, Any] = rng.choice([{"temperature": 0.0}, {"seed": 1}, {"top_p": 0.9}, {"n": 2}])
        asked.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 100), ignore_eos=True, **sampling)))
    needed = sum(params.n * -(-(len(prompt) + (params.max_tokens or 0)) // 16) for prompt, params in asked)
    blocks = min(needed // 20, seats * 6)
    llm = LLM.from_config(CONFIG, num_kv_blocks=blocks, max_num_seqs=seats, enable_prefix_caching=True)
    engine = llm._engine
    assert engine is not None
    print(f"{requests:,} requests of {needed:,} blocks together, {blocks:,} blocks, {seats} seats")
    print("requests   steps   steps/s   memory MiB   running   preempted")
    start, steps, running = time.perf_counter(), 0, 0
    preempted = 0
    for number, (prompt, params) in enumerate(asked):
        engine.add_request(str(number), prompt, params)
        if rng.random() < 0.05:
            engine.abort(str(number - rng.randrange(50)))
        while len(engine._requests) > 2 * seats or (number == requests - 1 and engine.has_unfinished):
            engine.step()
            steps += 1
            running += len(engine._scheduler.running)
        if (number + 1) % (requests // 10) == 0 and steps:
            seconds = time.perf_counter() - start
            new = engine.stats()["num_preemptions"] - preempted
            preempted += new
            rate, at_once = steps / seconds, running / steps
            print(
                f"{number + 1:8,}  {steps:6,}  {rate:8.1f}  {resident_mib():11.1f}  {at_once:8.1f}  {new:10,}",
                flush=True,
            )
            start, steps, running = time.perf_counter(), 0, 0
    llm.cache.check()
    stats = llm.stats()
    assert stats["cache"]["used"] == 0
    print("ended:", stats["num_finished"])


def run_overhead(seats: int) -> None:
    cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", num_blocks=100 * seats, num_threads=1)
    zeros, logits = np.zeros((2048, 1, 2), np.float32), np.zeros((seats, 2), np.float32)

    def forward(batch: Any, token_ids: Any, *_: Any) -> Any:
        n = len(token_ids)
        cache.write(0, batch, zeros[:n], zeros[:n])
        return logits

    model: Any = SimpleNamespace(
        cache=cache,
        spec=SimpleNamespace(vocab_size=1000),
        forward=forward,
        context_len=lambda n, _: n,
        prompt_salt=lambda n: None,
    )
    engine = Engine(model, max_num_seqs=seats)
    for i in range(seats + 100):  # some wait
        engine.add_request(str(i), [i] * 9, SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True))
    while len(engine._scheduler.running) < seats or engine._scheduler.running[-1].num_generated < 2:
        engine.step()
    schedule, schedules, whole = engine._scheduler.schedule, [], []

    def timed() -> Any:
        begin = time.perf_counter()
        items = schedule()
        schedules.append(time.perf_counter() - begin)
        return items

    engine._scheduler.schedule = timed  # type: ignore[method-assign]
    for _ in range(500):
        begin = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - begin)
    part, total = (1e6 * statistics.median(times) for times in (schedules, whole))
    print(
        f"a step of {seats} requests, 100 waiting: scheduler and plan {part:.0f} us, without the model {total:.0f} us"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="at least 10 (3000)")
    parser.add_argument("--seats", type=int, default=64, help="requests at once (64)")
    args = parser.parse_args(arguments)
    if args.requests < 10 or args.seats < 2:
        parser.error("expected at least 10 requests and 2 seats")
    try:
        run_load(args.requests, args.seats)
        run_overhead(args.seats)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
