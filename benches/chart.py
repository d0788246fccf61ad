"""The figure: a stacked bar for each workload and way, with the helpers of scripts/draw_docs.py."""

from __future__ import annotations

import sys
from pathlib import Path

from replay import Result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from draw_docs import CACHED, INK, LINE, PAPER, SOFT, STRONG, Canvas

PARTS = {
    "tokens": ("tokens", STRONG),
    "reserved": ("reserved for tokens to come", "#9ecbff"),
    "internal": ("never used", "#c4500b"),
    "external": ("holes that are too small", "#ffc680"),
    "cached": ("cached for later requests", CACHED),
    "tail": ("too little for the next request", PAPER),
}
"""Attributes of a Result from left to right: what the legend says, and the colour."""

LEFT, WIDTH, ROW, BAR = 190, 590, 30, 22


def draw(results: dict[str, dict[str, Result]], titles: dict[str, str], ways: dict[str, str], slots: int) -> str:
    """An SVG.

    Args:
        results: by workload and way.
        titles: of the workloads.
        ways: what each way is called.
        slots: of the memory.
    """
    height = 130 + sum(58 + ROW * len(by_way) for by_way in results.values())
    canvas = Canvas(1000, height, "What the KV memory is used for")
    canvas.text(24, 36, "What the KV memory is used for", 18, weight="bold")
    canvas.text(
        24, 56, f"{slots:,} slots, by how they are given to requests; means while requests wait for memory.", 13, SOFT
    )
    x = 24.0
    for words, color in PARTS.values():
        canvas.rect(x, 72, 14, 14, color, INK if color == PAPER else color)
        canvas.text(x + 20, 84, words, 12)
        x += 40 + 5.9 * len(words)
    y = 104.0
    for name, by_way in results.items():
        canvas.text(24, y + 22, titles[name], 15, weight="bold")
        canvas.text(LEFT + WIDTH + 62, y + 22, "tokens", 12, SOFT, "end")
        canvas.text(LEFT + WIDTH + 190, y + 22, "requests at once", 12, SOFT, "end")
        y += 34
        for way, result in by_way.items():
            canvas.text(LEFT - 10, y + 16, ways[way], 13, anchor="end")
            start = float(LEFT)
            for part, (_, color) in PARTS.items():
                width = WIDTH * getattr(result, part)
                if width > 0:
                    canvas.rect(start, y, width, BAR, color)
                start += width
            canvas.rect(LEFT, y, WIDTH, BAR, "none", INK)
            canvas.text(LEFT + WIDTH + 62, y + 16, f"{result.tokens:.1%}", 14, STRONG, "end", "bold")
            canvas.text(LEFT + WIDTH + 190, y + 16, f"{result.running:.1f}", 14, anchor="end", weight="bold")
            y += ROW
        y += 24
    for percent in range(0, 101, 20):
        tick = LEFT + WIDTH * percent / 100
        canvas.line(tick, y - 18, tick, y - 12, LINE if percent % 100 else INK)
        canvas.text(tick, y + 2, f"{percent}%", 12, SOFT, "middle")
    return canvas.finish()
