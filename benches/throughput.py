"""How many requests a second the engine answers from the same KV memory, by the way in which memory is given.

    python benches/throughput.py [--quick] [--json] [--svg FILE] [--table FILE]

Requests with the lengths of real conversations (lengths.py) arrive at random (Poisson) and are answered by kvcore's own
engine and cache, in these ways:

    max       blocks of the longest length are set aside for each request
    pow2      those of the next power of two of its final length
    oracle    those of its final length, as if it were known
    paged     blocks are taken as tokens come; whoever is last gives its blocks back when they run out
    shared    the same, and requests share the front that they have in common

The first three are contiguous memory as its servers reserve it, without the holes that it would have as well
(utilisation.py counts those), so they look better here than they are.

Workloads:

    sharegpt      first exchanges
    chat          conversations turn after turn, each with its history, one turn a second after the answer before it
    instruction   first exchanges, with the same 512 tokens in front of each
    parallel N    N samples of each prompt; contiguous memory shares nothing, so these are N requests there
    beams N       N beams for each prompt, replies cut to 64 tokens; N requests there

Only the model is not real: it says nothing and takes the time that one would. A step of Llama 3 8B in bfloat16 on a
server with matrix units, 200 GB/s and 32 TFLOP/s, takes 80 ms to read the weights, 0.5 ms of arithmetic for each token,
and 0.66 us to read K and V of each token of context. So seconds are those of a clock that the steps set, the same in
every run.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcore import BeamSearchParams, KVCache, SamplingParams, __version__
from kvcore.engine.engine import Engine
from lengths import Request, chat, sharegpt

WAYS = {
    "max": "maximum length",
    "pow2": "next power of two",
    "oracle": "known length",
    "paged": "paged",
    "shared": "paged, shared",
}
RESERVATIONS = {
    "max": "max_model_len",
    "pow2": "power_of_two",
    "oracle": "max_tokens",
    "paged": "known",
    "shared": "known",
}
CONTIGUOUS = ("max", "pow2", "oracle")
BEAM_TOKENS = 64
THINKING = 1.0
"""Seconds between an answer and the next turn of its conversation."""


@dataclass(frozen=True)
class Server:
    """What all ways have in common: slots of the memory, most tokens of a request, and what a step takes in seconds."""

    slots: int = 16_384
    block_size: int = 16
    max_length: int = 2048
    max_num_seqs: int = 512
    step: float = 0.080
    token: float = 0.0005
    context: float = 0.66e-6


@dataclass(frozen=True)
class Load:
    """Requests and how each is to be answered.

    Attributes:
        conversations: requests of one conversation; a later one comes when the one before has its answer.
        rate: conversations that begin in a second, on average.
        samples, beams: of each prompt.
        front: tokens that all prompts begin with, beside their own.
    """

    name: str
    title: str
    conversations: list[list[Request]]
    rate: float
    samples: int = 1
    beams: int = 0
    front: int = 0


@dataclass
class Result:
    """What a replay came to.

    Attributes:
        requests_per_second, tokens_per_second: prompts answered and tokens generated, from first arrival to last end.
        running: sequences at once, mean over steps.
        normalized_latency: seconds from arrival to end for each token of the answer, mean over requests (of queue and
            all, as the PagedAttention paper has it).
        ttft: seconds to the first token, median.
        found: prompt tokens that were found in the cache, of all.
        recomputed: token positions computed again, of all that were computed.
        preemptions, steps, seconds: of the whole replay.
    """

    requests_per_second: float
    tokens_per_second: float
    running: float
    normalized_latency: float
    ttft: float
    found: float
    recomputed: float
    preemptions: int
    steps: int
    seconds: float


class Silence:
    """A model without weights: writes zeros, and says token 0 or, for beams, anything."""

    def __init__(self, cache: KVCache, *, beams: bool) -> None:
        self.cache = cache
        self.spec = SimpleNamespace(vocab_size=1 << 31)
        self.context = 0
        self.rows = 0
        self._beams = beams
        self._random = np.random.default_rng(0)
        self._layer = np.zeros((0, 1, 2), np.float32)

    def context_len(self, prompt_len: int, length: int, /) -> int:
        """Always the prompt's."""
        return prompt_len

    def prompt_salt(self, context_len: int, /) -> bytes | None:
        """Nothing."""
        return None

    def forward(self, batch: Any, token_ids: Any, positions: Any, prompt_lens: Any, logit_rows: Any, /) -> Any:
        """Logits float32 [rows, 32]."""
        self.rows = len(token_ids)
        self.context = int(positions.sum()) + self.rows
        if len(self._layer) < self.rows:
            self._layer = np.zeros((self.rows, 1, 2), np.float32)
        self.cache.write(0, batch, self._layer[: self.rows], self._layer[: self.rows])
        if self._beams:
            return self._random.standard_normal((len(logit_rows), 32)).astype(np.float32)
        logits = np.zeros((len(logit_rows), 2), np.float32)
        logits[:, 0] = 1.0
        return logits


@dataclass
class Prompt:
    """A request on its way: what it was for, when it came, and the sequences that answer it."""

    conversation: int
    turn: int
    arrival: float
    tokens: int
    first: float | None = None
    open: int = 0
    sequences: list[Any] = field(default_factory=list)


def replay(load: Load, way: str, server: Server, progress: Callable[[int, int], None] | None = None) -> Result:
    """Answer all requests, in the time that the steps take."""
    cache = KVCache(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        dtype="float32",
        num_blocks=server.slots // server.block_size,
        block_size=server.block_size,
        enable_prefix_caching=way == "shared",
        num_threads=1,
    )
    model = Silence(cache, beams=load.beams > 0)
    engine = Engine(
        model,
        max_model_len=server.max_length,
        max_num_seqs=server.max_num_seqs,
        reservation=RESERVATIONS[way],
        enable_prefix_caching=way == "shared",
    )
    token_ids = [_token_ids(turns) for turns in load.conversations]
    front = list(range((1 << 31) - load.front, 1 << 31))
    arrivals = _arrivals(load)
    total = sum(map(len, load.conversations))
    prompts: dict[str, Prompt] = {}
    now, ended, generated, running, steps = 0.0, 0, 0, 0, 0
    latencies, firsts = [], []
    while arrivals or prompts:
        if not engine.has_unfinished and arrivals:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            arrival, conversation, turn = heapq.heappop(arrivals)
            request = load.conversations[conversation][turn]
            prompt = Prompt(
                conversation, turn, arrival, min(request.reply, BEAM_TOKENS) if load.beams else request.reply
            )
            for name, params in _requests(load, way, prompt, f"{conversation}/{turn}"):
                prompts[name] = prompt
                prompt.open += 1
                ids = front + token_ids[conversation][: request.prompt]
                prompt.sequences.append(engine.add_request(name, ids, params))
        outputs = engine.step()
        steps += 1
        running += len(engine._scheduler.running)
        now += server.step + server.token * model.rows + server.context * model.context
        for output in outputs:
            prompt = prompts[output.request_id]
            prompt.first = now if prompt.first is None else prompt.first
        for name in [output.request_id for output in outputs if output.finish_reason]:
            if name not in prompts or name in engine._requests:
                continue
            prompt = prompts.pop(name)
            prompt.open -= 1
            if prompt.open:
                continue
            ended += 1
            answers = [s for first in prompt.sequences for s in [first, *first.siblings]]
            generated += prompt.tokens * max(load.samples, load.beams, 1)
            latencies.append((now - prompt.arrival) / prompt.tokens)
            assert prompt.first is not None
            assert answers
            firsts.append(prompt.first - prompt.arrival)
            if prompt.turn + 1 < len(load.conversations[prompt.conversation]):
                heapq.heappush(arrivals, (now + THINKING, prompt.conversation, prompt.turn + 1))
            if progress is not None:
                progress(ended, total)
    stats = engine.stats()
    cache.check()
    cache.close()
    prompt_tokens = stats["num_prompt_tokens"]
    return Result(
        requests_per_second=ended / now,
        tokens_per_second=generated / now,
        running=running / steps,
        normalized_latency=statistics.fmean(latencies),
        ttft=statistics.median(firsts),
        found=stats["num_cached_tokens"] / prompt_tokens,
        recomputed=stats["num_recomputed_tokens"] / stats["num_computed_tokens"],
        preemptions=stats["num_preemptions"],
        steps=steps,
        seconds=now,
    )


def _arrivals(load: Load) -> list[tuple[float, int, int]]:
    """When each conversation begins: (seconds, conversation, turn), a heap."""
    rng, now = random.Random(0), 0.0
    arrivals = []
    for conversation in range(len(load.conversations)):
        arrivals.append((now, conversation, 0))
        now += rng.expovariate(load.rate)
    return arrivals


def _token_ids(turns: list[Request]) -> list[int]:
    """The tokens of a conversation: ids that no other has, but the model's own replies, which are zeros."""
    conversation = turns[0].conversation
    tokens = [1 + conversation * 4096 + position for position in range(turns[-1].prompt)]
    for turn in turns[:-1]:
        tokens[turn.prompt : turn.prompt + turn.reply] = [0] * turn.reply
    return tokens


def _requests(load: Load, way: str, prompt: Prompt, name: str) -> list[tuple[str, Any]]:
    """What the engine is asked for: one request, or in contiguous memory one for each answer."""
    answer = SamplingParams(temperature=0.0, max_tokens=prompt.tokens, ignore_eos=True)
    answers = max(load.samples, load.beams, 1)
    if way in CONTIGUOUS or answers == 1:
        return [(f"{name}.{i}", answer) for i in range(answers)]
    if load.beams:
        return [(name, BeamSearchParams(beam_width=load.beams, max_tokens=prompt.tokens, ignore_eos=True))]
    # top_k=1 draws nothing: all samples are equal, which their blocks do not know
    return [(name, SamplingParams(n=load.samples, top_k=1, max_tokens=prompt.tokens, ignore_eos=True))]


def loads(quick: bool, server: Server) -> list[Load]:
    """All workloads; more come than any way can answer."""
    first = sharegpt(0, server.max_length, 150 if quick else 1000).conversations
    turns = chat(0, server.max_length, 40 if quick else 250).conversations
    result = [
        Load("sharegpt", "ShareGPT, first exchanges", first, 8.0),
        Load("chat", "ShareGPT, turn after turn", turns, 4.0),
    ]
    short = [turns for turns in first if turns[0].total <= server.max_length - 512]
    result.append(Load("instruction", "Behind an instruction of 512 tokens", short[: len(short) // 2], 8.0, front=512))
    for n in (2, 4) if quick else (2, 4, 6):
        result.append(Load(f"parallel {n}", f"{n} samples of each prompt", first[: len(first) // n], 8.0, samples=n))
    for n in (2, 4) if quick else (2, 4, 6):
        result.append(Load(f"beams {n}", f"{n} beams for each prompt", first[: len(first) // n], 8.0, beams=n))
    return result


Results = dict[str, dict[str, Result]]

COLUMNS: list[tuple[str, Callable[[Result, Result], str]]] = [
    ("requests/s", lambda r, _: f"{r.requests_per_second:.2f}"),
    ("tokens/s", lambda r, _: f"{r.tokens_per_second:.0f}"),
    ("of maximum length", lambda r, base: f"{r.tokens_per_second / base.tokens_per_second:.2f}"),
    ("at once", lambda r, _: f"{r.running:.1f}"),
    ("latency / token", lambda r, _: f"{r.normalized_latency:.2f} s"),
    ("TTFT", lambda r, _: f"{r.ttft:.1f} s"),
    ("prompt found", lambda r, _: f"{r.found:.1%}"),
    ("preempted", lambda r, _: f"{r.preemptions:,}"),
    ("computed again", lambda r, _: f"{r.recomputed:.1%}"),
    ("steps", lambda r, _: f"{r.steps:,}"),
]
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


def rows(results: dict[str, Result]) -> list[list[str]]:
    """A table with its head: one row for each way."""
    head = ["way", *(name for name, _ in COLUMNS)]
    base = results["max"]
    return [head, *([WAYS[way], *(cell(result, base) for _, cell in COLUMNS)] for way, result in results.items())]


def markdown(results: Results, titles: dict[str, str]) -> str:
    """The tables of docs/engine.md."""
    parts = []
    for name, by_way in results.items():
        head, *body = rows(by_way)
        rule = ["---", *["---:"] * (len(head) - 1)]
        lines = "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))
        parts.append(f"{titles[name]}:\n\n{lines}\n")
    return "\n".join(parts)


def draw(results: Results, titles: dict[str, str], server: Server) -> str:
    """An SVG: tokens a second of each workload and way, beside those of the maximum length."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
    from draw_docs import INK, LINE, SOFT, STRONG, Canvas

    left, width, row = 190, 560, 26
    height = 100 + sum(44 + row * len(by_way) for by_way in results.values())
    canvas = Canvas(1000, height, "Tokens a second from the same KV memory")
    canvas.text(24, 36, "Tokens a second from the same KV memory", 18, weight="bold")
    note = f"{server.slots:,} slots; what a server of Llama 3 8B would take for the steps of kvcore's engine."
    canvas.text(24, 56, note, 13, SOFT)
    most = max(
        r.tokens_per_second / by_way["max"].tokens_per_second for by_way in results.values() for r in by_way.values()
    )
    y = 76.0
    for name, by_way in results.items():
        canvas.text(24, y + 18, titles[name], 15, weight="bold")
        y += 28
        for way, result in by_way.items():
            share = result.tokens_per_second / by_way["max"].tokens_per_second
            canvas.text(left - 10, y + 15, WAYS[way], 13, anchor="end")
            canvas.rect(left, y, width * share / most, 19, STRONG if way not in CONTIGUOUS else LINE, INK)
            label = f"{share:.2f} x   {result.tokens_per_second:,.0f} tokens/s, {result.running:.0f} at once"
            canvas.text(left + width * share / most + 8, y + 15, label, 12)
            y += row
        y += 16
    return canvas.finish()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="only those whose names begin so")
    parser.add_argument("--slots", type=int, default=Server.slots, help="tokens that the memory can hold (16384)")
    parser.add_argument("--rate", type=float, help="conversations that begin in a second, for all workloads")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figure")
    parser.add_argument("--table", type=Path, metavar="FILE", help="replace the tables of a Markdown page")
    args = parser.parse_args(arguments)
    if args.slots < Server.max_length or args.slots % Server.block_size:
        parser.error(
            f"--slots: expected a multiple of {Server.block_size} from {Server.max_length} on, got {args.slots}"
        )
    if args.rate is not None and not args.rate > 0:
        parser.error(f"--rate: expected more than 0, got {args.rate}")
    server = Server(slots=args.slots)
    wanted = tuple(args.workloads or ("",))
    chosen = [load for load in loads(args.quick, server) if load.name.startswith(wanted)]
    if not chosen:
        parser.error(f"--workloads: expected some of {', '.join(load.name for load in loads(True, server))}")
    results: Results = {}
    terminal = sys.stderr.isatty()
    try:
        for load in chosen:
            if args.rate is not None:
                load = Load(**{**vars(load), "rate": args.rate})
            results[load.name] = {}
            for way in WAYS:
                if way == "shared" and load.name == "sharegpt":
                    continue

                def show(ended: int, total: int, name: str = load.name, way: str = way) -> None:
                    if terminal and (ended % 10 == 0 or ended == total):
                        print(f"\r\x1b[K{name}, {way}: {ended:,} of {total:,}", end="", file=sys.stderr, flush=True)

                results[load.name][way] = replay(load, way, server, show)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    titles = {load.name: load.title for load in chosen}
    if args.svg is not None:
        args.svg.write_text(draw(results, titles, server), encoding="utf-8")
    if args.table is not None:
        page = args.table.read_text(encoding="utf-8")
        if not TABLE.search(page):
            parser.error(f"--table: expected lines <!-- table --> and <!-- end --> in {args.table}")
        args.table.write_text(TABLE.sub(lambda _: markdown(results, titles), page), encoding="utf-8")
    if args.json:
        values = {name: {way: asdict(result) for way, result in by_way.items()} for name, by_way in results.items()}
        print(json.dumps({"version": __version__, **asdict(server), "workloads": values}, indent=1))
        return 0
    for name, by_way in results.items():
        table = rows(by_way)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        print(f"\n{titles[name]}")
        for line in table:
            print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
