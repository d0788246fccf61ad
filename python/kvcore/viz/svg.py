"""An SVG that grows, element by element: the few shapes that the pictures need, escaped and written the same way
always.

Nothing in it has an id or a style sheet, so that several of them may stand in one page without touching each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

INK, SOFT, LINE, PAPER, PALE = "#1f2328", "#57606a", "#d0d7de", "#ffffff", "#f6f8fa"


class Svg:
    """The elements so far. The picture has a background of its own, so that it reads on light and dark pages."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """What is drawn inside has this title: shown when pointed at, read aloud by screen readers."""
        self._parts.append(f"<g><title>{clean(title)}</title>")
        yield
        self._parts.append("</g>")

    def __len__(self) -> int:
        return len(self._parts)

    def insert_rect(
        self, at: int, x: float, y: float, w: float, h: float, fill: str, stroke: str, *, radius: float
    ) -> None:
        """A rectangle behind what was drawn since the picture had ``at`` elements."""
        self.rect(x, y, w, h, fill, stroke, radius=radius)
        self._parts.insert(at, self._parts.pop())

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "", *, width: float = 1,
        radius: float = 0, dash: str = "", title: str = "",
    ) -> None:  # fmt: skip
        """A rectangle."""
        more = f' rx="{_n(radius)}"' if radius else ""
        if stroke:
            more += f' stroke="{stroke}"' + (f' stroke-width="{_n(width)}"' if width != 1 else "")
        if dash:
            more += f' stroke-dasharray="{dash}"'
        end = f"><title>{clean(title)}</title></rect>" if title else "/>"
        self._parts.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}"{more}{end}')

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], fill: str, stroke: str = "") -> None:
        """Many rectangles (x, y, w, h) as one element."""
        path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes)
        if path:
            more = f' stroke="{stroke}" stroke-width="0.75"' if stroke else ""
            self._parts.append(f'<path d="{path}" fill="{fill}"{more}/>')

    def strokes(self, lines: Iterable[tuple[float, float, float, float]], stroke: str, width: float = 1) -> None:
        """Many straight lines (x1, y1, x2, y2) as one element."""
        path = "".join(f"M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" for x1, y1, x2, y2 in lines)
        if path:
            self._parts.append(f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}"/>')

    def path(self, d: str, *, fill: str = "none", stroke: str = "none", width: float = 1) -> None:
        """A path in SVG's own words."""
        self._parts.append(f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{_n(width)}"/>')

    def text(
        self, x: float, y: float, words: str, size: float = 12, fill: str = INK, anchor: str = "start", *,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """A line of text; y is its base line."""
        more = (f' text-anchor="{anchor}"' if anchor != "start" else "") + (' font-weight="bold"' if bold else "")
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{fill}"{more}>{clean(words)}</text>'
        )

    def finish(self, width: float, height: float, title: str, description: str) -> str:
        """The whole picture."""
        label = clean(title).replace('"', "&quot;")
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}"'
            f' height="{_n(height)}" font-family="Helvetica, Arial, sans-serif" role="img" aria-label="{label}">'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" fill="{PAPER}"'
            f' stroke="{LINE}" rx="8"/>'
        )
        words = [f"<title>{clean(title)}</title>", f"<desc>{clean(description)}</desc>"]
        return "\n".join([head, *words, card, *self._parts, "</svg>", ""])


def clean(words: str) -> str:
    """Text that can be neither markup nor a character that XML or a reader stumbles on (controls, lone surrogates)."""
    if not words.isprintable():
        words = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in words)
    return escape(words)


def shorten(words: str, most: int) -> str:
    """At most this many characters."""
    return words if len(words) <= most else words[: most - 1] + "…"


def _n(x: float) -> str:
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
