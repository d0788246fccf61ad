"""Draw the pictures of the documentation: ``python scripts/draw_docs.py`` writes docs/img/*.svg.

With ``--models`` those that need a real model, too, which is fetched:

    attention_speech.svg   what Whisper hears while it says each token

    block_tables.svg   block tables and the pool of a real KVCache, step by step
    tiles.svg          where K and V lie, by the formulas of rust/kvcore/src/storage/layout.rs
    positions.svg      token positions that a real run processes in each round, with and without the cache
    house.svg          who imports whom, read from the code
    block_map.svg      what kvcore.viz.block_map shows of a small real cache

Nothing in them is typed in by hand but words: a test draws them again and compares. They have a background of their
own, so that they can be read on light and dark pages.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import house

import kvcore
from kvcore import LLM, KVCache, SamplingParams, Sequence
from kvcore.audio import load_wav, log_mel
from kvcore.viz import attention_map, block_map

ROOT = house.ROOT
IMAGES = ROOT / "docs" / "img"
REFERENCE = ROOT / "tests" / "data" / "reference" / "llama_gqa"

INK, SOFT, LINE, PAPER, PALE = "#1f2328", "#57606a", "#d0d7de", "#ffffff", "#f6f8fa"
HOLDERS = {"A": "#9ecbff", "B": "#ffc680", "C": "#c9b6f2"}
CACHED, STRONG, WARM = "#b7d7b9", "#0a5bb5", "#c4500b"


class Canvas:
    """An SVG that grows."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, PAPER, LINE, radius=8)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str = "none",
        *,
        radius: float = 0,
        dash: str = "",
    ) -> None:
        """A rectangle."""
        more = (f' rx="{_n(radius)}"' if radius else "") + (f' stroke-dasharray="{dash}"' if dash else "")
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}" stroke="{stroke}"{more}/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 13, fill: str = INK, anchor: str = "start", weight: str = ""
    ) -> None:
        """A line of text; y is its base line."""
        more = f' font-weight="{weight}"' if weight else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}" text-anchor="{anchor}"{more}>'
            f"{escape(words)}</text>"
        )

    def slanted_text(self, x: float, y: float, words: str) -> None:
        """A line of text that rises to the right."""
        self._parts.append(
            f'<text transform="translate({_n(x)} {_n(y)}) rotate(-55)" font-size="12" fill="{INK}">'
            f"{escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, width: float = 1) -> None:
        """A straight line."""
        self._parts.append(
            f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"'
            f' stroke="{stroke}" stroke-width="{_n(width)}"/>'
        )

    def outline(self, points: list[tuple[float, float]], stroke: str) -> None:
        """A line through several points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"/>')

    def area(self, points: list[tuple[float, float]], fill: str) -> None:
        """A filled polygon."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" fill="{fill}"/>')

    def circle(self, x: float, y: float, r: float, fill: str, stroke: str = "none") -> None:
        """A circle."""
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}" fill="{fill}" stroke="{stroke}"/>')

    def finish(self) -> str:
        """The file's content."""
        return "\n".join([*self._parts, "</svg>", ""])


def _n(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


# -- block tables -----------------------------------------------------------------------------------------------------


class Story:
    """A small cache, its sequences by name, and panels that show both."""

    BLOCKS, SIZE = 8, 16

    def __init__(self) -> None:
        self.cache = KVCache(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=self.BLOCKS, dtype="float32")
        self.live: dict[str, Sequence] = {}

    def compute(self, *names: str) -> None:
        """Give all tokens of these sequences K and V."""
        cache = self.cache
        missing = [
            (self.live[n], cache.num_tokens(self.live[n]) - cache.num_computed_tokens(self.live[n])) for n in names
        ]
        batch = cache.plan(missing)
        zeros = np.zeros((batch.num_tokens, 1, 2), np.float32)
        cache.write(0, batch, zeros, zeros)
        cache.commit(batch)
        cache.check()

    def blocks(self) -> list[tuple[list[str], int]]:
        """Of each block: who holds it, and how many of its tokens they have computed."""
        state: list[tuple[list[str], int]] = [([], 0) for _ in range(self.BLOCKS)]
        for name, seq in self.live.items():
            computed = self.cache.num_computed_tokens(seq)
            for i, block in enumerate(self.cache.block_table(seq)):
                holders, filled = state[block]
                state[block] = ([*holders, name], max(filled, min(computed - i * self.SIZE, self.SIZE)))
        return state

    def cached(self) -> dict[int, int]:
        """The blocks that are held by none and can be found, and how many tokens each has."""
        group = self.cache.snapshot()["groups"][0]
        return {i: int(group["filled"][i]) for i, state in enumerate(group["state"]) if state == 2}


def draw_block_tables() -> str:
    """Two prompts with one front, a fork, a copy before a write, and what stays when all have ended."""
    story = Story()
    cache, live = story.cache, story.live
    front = list(range(100, 132))
    width, height = 1000, 712
    canvas = Canvas(width, height, "Block tables of a KV cache, step by step")
    canvas.text(24, 36, "Block tables and the pool", 18, weight="bold")
    canvas.text(24, 56, "A pool of 8 blocks of 16 tokens. All numbers come from a KVCache.", 13, SOFT)
    legend = 520.0
    for name, color in [("A", HOLDERS["A"]), ("B", HOLDERS["B"]), ("C", HOLDERS["C"])]:
        canvas.rect(legend, 26, 16, 16, color, INK)
        canvas.text(legend + 22, 39, f"held by {name}")
        legend += 96
    canvas.rect(legend, 26, 16, 16, CACHED, INK)
    canvas.text(legend + 22, 39, "cached, held by none")
    canvas.text(520, 62, "two or more colours: shared; 8/16: tokens stored of 16", 13, SOFT)
    places = iter([(x, y) for y in (80, 288, 496) for x in (24, 512)])

    def panel(title: str, note: str) -> None:
        x, y = next(places)
        canvas.rect(x, y, 464, 196, PALE, LINE, radius=6)
        canvas.text(x + 14, y + 24, title, 14, weight="bold")
        canvas.text(x + 14, y + 43, note, 12, SOFT)
        for row, (name, seq) in enumerate(live.items()):
            top = y + 60 + 40 * row
            canvas.rect(x + 14, top, 26, 28, HOLDERS[name], INK, radius=4)
            canvas.text(x + 27, top + 19, name, 14, anchor="middle", weight="bold")
            for i, block in enumerate(cache.block_table(seq)):
                canvas.rect(x + 48 + 32 * i, top, 28, 28, PAPER, INK)
                canvas.text(x + 62 + 32 * i, top + 19, str(block), 14, anchor="middle")
            canvas.text(x + 148, top + 18, f"{cache.num_computed_tokens(seq)} tokens", 11, SOFT)
        if not live:
            canvas.text(x + 14, y + 84, "no sequences", 13, SOFT)
        cached = story.cached()
        state = story.blocks()
        for block, (holders, filled) in enumerate(state):
            left, top = x + 210 + 62 * (block % 4), y + 60 + 64 * (block // 4)
            if holders:
                for i, name in enumerate(holders):
                    canvas.rect(left + 54 * i / len(holders), top, 54 / len(holders), 56, HOLDERS[name])
            elif block in cached:
                canvas.rect(left, top, 54, 56, CACHED)
                filled = cached[block]
            canvas.rect(left, top, 54, 56, "none", INK if filled else LINE, dash="" if filled else "4 3")
            canvas.text(left + 27, top + 25, str(block), 16, INK if filled else SOFT, "middle", "bold")
            canvas.text(
                left + 27, top + 44, f"{filled}/16" if filled else "free", 12, INK if filled else SOFT, "middle"
            )
        stats = cache.stats()
        held = sum(bool(holders) for holders, _ in state)
        assert (held, len(cached)) == (stats["used"], stats["cached"])

    def found(name: str) -> int:
        return live[name].num_cached_tokens

    live["A"] = cache.add([*front, *range(8)])
    story.compute("A")
    panel("1. A: a prompt of 40 tokens", "three blocks, taken as they are needed")
    live["B"] = cache.add([*front, *range(50, 57)])
    story.compute("B")
    panel("2. B: the same first 32 tokens, then 7 others", f"{found('B')} tokens found in the cache, 7 computed")
    live["C"] = cache.fork(live["A"])
    panel("3. C: a fork of A", "C points at the blocks of A; nothing is copied")
    copies = cache.stats()["copies"]
    cache.append(live["A"], [7])
    cache.append(live["C"], [8])
    story.compute("C", "A")
    copies = cache.stats()["copies"] - copies
    panel(
        "4. A and C each get a token of their own",
        f"copies before the write: {copies}; the last holder writes in place",
    )
    cache.free(live.pop("A"))
    panel("5. A ends", "the block that only A held stays findable; B and C keep the front")
    cache.free(live.pop("B"))
    cache.free(live.pop("C"))
    panel("6. B and C end", "all stays findable until it expires or its space is needed")
    return canvas.finish()


# -- tiles ------------------------------------------------------------------------------------------------------------

TILE, STEP, HEAD_DIM = 16, 2, 16


def element_formula(name: str) -> Callable[[int, int], int]:
    """``Layout::k_element`` or ``v_element``, as the Rust source has it: (token, dim) to the place in the tile."""
    source = (house.RUST / "storage" / "layout.rs").read_text(encoding="utf-8")
    match = re.search(
        rf"fn {name}\(&self, token: usize, dim: usize\) -> usize \{{\s*let step = .*?;\s*(.+?)\s*\}}", source
    )
    if match is None:
        raise ValueError(f"layout.rs: no {name} in the form that this script reads")
    code = match[1].replace("/", "//").replace("self.width()", "width")
    compiled = compile(code, name, "eval")
    return lambda token, dim: int(
        eval(
            compiled, {"__builtins__": {}}, {"token": token, "dim": dim, "step": STEP, "TILE": TILE, "width": HEAD_DIM}
        )
    )


def draw_tiles() -> str:
    """K and V of 16 tokens of one head: bf16, head_dim 16."""
    canvas = Canvas(1030, 636, "K and V tiles")
    canvas.text(24, 36, "A block's K and V tiles", 18, weight="bold")
    canvas.text(
        24, 56, "One head of 16 dimensions, 16 tokens, bf16. A row is 64 bytes: one load of 16 lanes.", 13, SOFT
    )
    tokens, dims = ("t", "tokens"), ("d", "dimensions")
    _draw_tile(canvas, 78, "K tile", "k_element", across=tokens, down=dims, marked=2)
    canvas.text(110, 326, "scores[t] += k[t][d4] q[d4] + k[t][d5] q[d5]   for 16 tokens at once", 13, STRONG)
    canvas.text(620, 326, "q[d4], q[d5] are the same for all lanes", 13, SOFT)
    _draw_tile(canvas, 350, "V tile", "v_element", across=dims, down=tokens, marked=2)
    canvas.text(110, 598, "out[d] += v[t4][d] p[t4] + v[t5][d] p[t5]   for 16 dimensions at once", 13, WARM)
    canvas.text(620, 598, "p[t4], p[t5] are the same for all lanes", 13, SOFT)
    canvas.text(110, 618, "Both sums grow from row to row within a lane: no lane is ever added to another.", 13, SOFT)
    return canvas.finish()


def _draw_tile(
    canvas: Canvas, top: int, title: str, formula: str, *, across: tuple[str, str], down: tuple[str, str], marked: int
) -> None:
    place = element_formula(formula)
    at = {place(token, dim): (token, dim) for token in range(TILE) for dim in range(HEAD_DIM)}
    assert sorted(at) == list(range(TILE * HEAD_DIM)), f"{formula} leaves gaps"
    left, cell, row_height = 110, 56, 25
    canvas.text(24, top + 14, title, 15, weight="bold")
    canvas.text(left, top + 14, f"lanes: {across[1]}; rows: pairs of {down[1]}", 12, SOFT)
    lanes, tint = TILE, ("#dbeafe", STRONG) if formula == "k_element" else ("#ffe4cc", WARM)
    for row in range(TILE * HEAD_DIM // (lanes * STEP)):
        y = top + 24 + row_height * row
        is_marked = row == marked
        canvas.text(left - 10, y + 17, f"+{row * lanes * STEP * 2} bytes", 11, SOFT, "end")
        for lane in range(lanes):
            pair = [at[(row * lanes + lane) * STEP + i] for i in range(STEP)]
            token, dim = pair[0]
            same, run = (token, [d for _, d in pair]) if across[0] == "t" else (dim, [t for t, _ in pair])
            canvas.rect(left + cell * lane, y, cell, row_height, tint[0] if is_marked else PAPER, LINE)
            label = f"{across[0]}{same} {down[0]}{run[0]},{run[1]}"
            canvas.text(left + cell * (lane + 0.5), y + 16, label, 9, INK, "middle", "bold" if is_marked else "")
        if is_marked:
            canvas.rect(left, y, cell * lanes, row_height, "none", tint[1])


# -- positions --------------------------------------------------------------------------------------------------------


def count_positions(prompt_len: int, new_tokens: int) -> dict[bool, list[int]]:
    """Token positions that went through the model in each round, by ``use_cache``."""
    counts: dict[bool, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # The reference model, told that it may have longer sequences.
        config = json.loads((REFERENCE / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = 2 * (prompt_len + new_tokens)
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        shutil.copy(REFERENCE / "model.safetensors", folder)
        blocks = -(-(prompt_len + new_tokens) // 16)
        with LLM(folder, num_kv_blocks=blocks, enable_prefix_caching=False) as llm:
            prompt = [3 + i % (config["vocab_size"] - 3) for i in range(prompt_len)]
            params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            for use_cache in (False, True):
                total = [item.num_computed_tokens for item in llm.stream(prompt, params, use_cache=use_cache)]
                counts[use_cache] = [now - before for before, now in zip([0, *total], total, strict=False)]
    return counts


def draw_positions() -> str:
    """The article's example: a prompt of 1,000 tokens and an answer of 100."""
    prompt_len, new_tokens = 1000, 100
    counts = count_positions(prompt_len, new_tokens)
    canvas = Canvas(1000, 470, "Token positions processed in each round")
    canvas.text(24, 36, "Token positions processed in each round", 18, weight="bold")
    canvas.text(
        24,
        56,
        f"A prompt of {prompt_len:,} tokens and {new_tokens} new ones, counted by the engine in two real runs.",
        13,
        SOFT,
    )
    left, top, plot_width, plot_height, highest = 76, 84, 890, 320, 1200

    def x(round_: float) -> float:
        return left + plot_width * round_ / new_tokens

    def y(positions: float) -> float:
        return top + plot_height * (1 - positions / highest)

    for positions in range(0, highest + 1, 200):
        canvas.line(left, y(positions), left + plot_width, y(positions))
        canvas.text(left - 8, y(positions) + 4, f"{positions:,}", 12, SOFT, "end")
    for use_cache, color, tint in ((False, WARM, "#ffd9b8"), (True, STRONG, "#9ecbff")):
        rounds = counts[use_cache]
        corners = [(x(i + side), y(count)) for i, count in enumerate(rounds) for side in (0, 1)]
        canvas.area([(x(0), y(0)), *corners, (x(len(rounds)), y(0))], tint)
        canvas.outline(corners, color)
    canvas.line(left, y(0), left + plot_width, y(0), INK)
    for round_ in (1, 20, 40, 60, 80, 100):
        canvas.text(x(round_ - 0.5), y(0) + 18, str(round_), 12, SOFT, "middle")
    canvas.text(left + plot_width / 2, y(0) + 40, "round: each makes one token", 13, SOFT, "middle")
    for use_cache, words, height, color in ((False, "without", 640, WARM), (True, "with", 90, STRONG)):
        first, second, *_, last = rounds = counts[use_cache]
        terms = (
            f"{first:,} + {len(rounds) - 1} x {last}" if second == last else f"{first:,} + {second:,} + ... + {last:,}"
        )
        canvas.text(
            x(4), y(height), f"{words} the cache: {terms} = {sum(rounds):,} positions", 16, color, weight="bold"
        )
    canvas.text(x(4), y(40), "the first round is the prefill, the others are decode steps", 13, SOFT)
    return canvas.finish()


# -- the house --------------------------------------------------------------------------------------------------------


def draw_house() -> str:
    """Two tables, Rust and Python: who (rows) imports whom (columns)."""
    rust, python = house.rust_edges(), house.python_edges()
    rust_floors = house.floors(rust)
    python_floors = house.floors(python)
    size = 26
    rows = max(sum(map(len, rust_floors)), sum(map(len, python_floors)))
    height = 190 + size * rows + 60
    canvas = Canvas(1000, height, "Who imports whom")
    canvas.text(24, 36, "The house: a row imports the columns that are marked", 18, weight="bold")
    canvas.text(
        24, 56, "Read from the code. Whoever is above may import who is below, never the other way round.", 13, SOFT
    )
    _draw_matrix(canvas, 24, "Rust core and bindings", rust, rust_floors, size)
    _draw_matrix(canvas, 500, "Python package (kvcore: its __init__)", python, python_floors, size)
    base = height - 24
    keys = [
        ("import", STRONG, "at import"),
        ("lazy", STRONG, "when it is needed"),
        ("types", STRONG, "for type checkers only"),
        ("import", WARM, "upwards: to be mended"),
    ]
    x = 24.0
    for how, color, words in keys:
        if color == WARM and not house.KNOWN_CIRCLES:
            continue
        _mark(canvas, x + 6, base - 4, how, 5, color)
        canvas.text(x + 18, base, words, 12, SOFT)
        x += 40 + 7 * len(words)
    return canvas.finish()


def _draw_matrix(canvas: Canvas, left: int, title: str, edges: house.Edges, floors: list[list[str]], size: int) -> None:
    names = [name for floor in floors for name in floor]
    top, x0 = 176, left + 92
    canvas.text(left, 86, title, 15, weight="bold")
    for i, name in enumerate(names):
        x, y = x0 + size * i, top + size * i
        canvas.slanted_text(x + size / 2 + 4, top - 8, name)
        canvas.text(x0 - 8, y + size / 2 + 4, name, 12, anchor="end", weight="bold")
        for j in range(len(names)):
            below = j > i
            canvas.rect(x0 + size * j, y, size, size, PALE if below else PAPER, LINE)
        canvas.rect(x, y, size, size, LINE, LINE)
    edge = top
    for floor in floors:
        edge += size * len(floor)
        canvas.line(left, edge, x0 + size * len(names), edge, SOFT)
    for (who, whom), how in sorted(edges.items()):
        i, j = names.index(who), names.index(whom)
        _mark(
            canvas, x0 + size * (j + 0.5), top + size * (i + 0.5), how, 6, WARM if j < i and how != "types" else STRONG
        )


def _mark(canvas: Canvas, x: float, y: float, how: str, r: float, color: str = STRONG) -> None:
    if how == "import":
        canvas.circle(x, y, r, color)
    elif how == "lazy":
        canvas.circle(x, y, r - 0.5, PAPER, color)
        canvas.circle(x, y, r - 3.5, color)
    else:
        canvas.circle(x, y, r - 0.5, PAPER, SOFT)


# -- the block map ----------------------------------------------------------------------------------------------------


def take_snapshot() -> Any:
    """Two groups, one with a window: a prompt, another that equals it for 36 tokens, a fork, a pin, an old prompt."""
    cache = KVCache(
        groups=[
            kvcore.KVGroup("full", [0], num_kv_heads=1, head_dim=2, num_blocks=40),
            kvcore.KVGroup("sliding_window", [1], num_kv_heads=1, head_dim=2, window=32, num_blocks=12),
        ],
        dtype="float32",
        clock=lambda: 0.0,
    )

    def compute(seq: Sequence) -> None:
        n = cache.num_tokens(seq) - cache.num_computed_tokens(seq)
        batch = cache.plan([(seq, n)])
        zeros = np.zeros((n, 1, 2), np.float32)
        for layer in range(2):
            cache.write(layer, batch, zeros, zeros)
        cache.commit(batch)

    old = cache.add(range(200, 260))
    compute(old)
    cache.pin(old, 16)
    cache.free(old)
    first = cache.add(range(100, 172))
    compute(first)
    second = cache.add([*range(100, 136), *range(20)])
    compute(second)
    fork = cache.fork(first)
    cache.append(fork, [1, 2])
    compute(fork)
    cache.append(first, [3])
    cache.check()
    return cache.snapshot()


def draw_block_map() -> str:
    """A cache of two groups."""
    return block_map(take_snapshot()).svg


PICTURES: dict[str, Callable[[], str]] = {
    "block_tables.svg": draw_block_tables,
    "tiles.svg": draw_tiles,
    "positions.svg": draw_positions,
    "house.svg": draw_house,
    "block_map.svg": draw_block_map,
}


# -- what a speech recogniser looks at --------------------------------------------------------------------------------

SPEECH = ROOT / "tests" / "data" / "audio" / "espeak_16k.wav"
ALIGNED = ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6))
"""Layers and heads of whisper-base that follow the speech, as its generation_config.json names them."""


def draw_speech() -> str:
    """The mean of Whisper's heads that follow the speech, over a short recording."""
    samples = load_wav(SPEECH)
    with LLM("whisper-base", dtype="float32", kv_cache_dtype="float32", max_num_seqs=1) as llm:
        said = kvcore.transcribe(llm, samples, language="en").segments[0].token_ids
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        special = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
        prompt = [tokenizer.token_to_id(token) or 0 for token in special]
        weights = llm.attention_map([*prompt, *said], {"input_features": log_mel(samples)})
        # the row that reads a token has chosen the next one; a column is 0.02 s
        rows, columns = slice(len(prompt) - 1, -1), len(samples) // 320
        picked = np.mean([weights[layer, head, rows, :columns] for layer, head in ALIGNED], axis=0)
        words = [tokenizer.decode([token]).strip() for token in said]
    seconds = {50 * second: f"{second} s" for second in range(columns // 50 + 1)}
    title = "What Whisper looks at in 7.4 s of speech, for each token that it says"
    return attention_map(picked, rows=words, columns=seconds, title=title).svg


MODEL_PICTURES: dict[str, Callable[[], str]] = {"attention_speech.svg": draw_speech}


def main() -> None:
    """Draw all of them."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    pictures = PICTURES | (MODEL_PICTURES if "--models" in sys.argv[1:] else {})
    for name, draw in pictures.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
        print(IMAGES.relative_to(ROOT) / name)


if __name__ == "__main__":
    main()
