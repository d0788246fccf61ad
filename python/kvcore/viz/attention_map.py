"""Which input each output looks at: softmax weights as a grid, a row for each output and a column for each input.

    weights [rows, columns] --columns side by side added up, until they fit--> shades, up to each row's largest

A row is drawn relative to its largest weight: a head that spreads over 1500 rows of sound has small ones throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import InvalidArgument
from kvcore.viz.picture import Picture
from kvcore.viz.svg import INK, LINE, SOFT, Svg, shorten

WIDTH, MARGIN, TOP, ROW, FONT = 960, 24, 64, 18, 11
LEVELS = 12
LABEL = 16
"""The most characters of a label."""

MAX_ROWS, MAX_COLUMNS = 448, 300
_PALE, _DEEP = (255, 255, 255), (10, 60, 140)


class AttentionMap(Picture):
    """A picture of attention."""


def attention_map(
    weights: Any,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | Mapping[int, str] | None = None,
    title: str = "Attention",
    max_columns: int = 240,
) -> AttentionMap:
    """Draw weights.

    Args:
        weights: [rows, columns], finite and at least 0: of one head, or the mean of several
            (``LLM.attention_map(...)[layer].mean(axis=0)``).
        rows: a label for each row.
        columns: a label for each column, or for some of them by index.
        title: what it is.
        max_columns: more columns than these, at most 300, are added up in groups.

    Raises:
        InvalidArgument: another shape, or labels that do not fit.
    """
    values = _checked(weights)
    if rows is not None and len(rows) != len(values):
        raise InvalidArgument(f"rows: expected {len(values)} labels, got {len(rows)}")
    labels = dict(enumerate(columns)) if isinstance(columns, Sequence) else dict(columns or {})
    count = values.shape[1]
    if (isinstance(columns, Sequence) and len(columns) != count) or any(not 0 <= at < count for at in labels):
        raise InvalidArgument(f"columns: expected labels for {count} columns, got {len(labels)}")
    if not 1 <= max_columns <= MAX_COLUMNS:
        raise InvalidArgument(f"max_columns: expected 1 to {MAX_COLUMNS}, got {max_columns}")
    return AttentionMap(_draw(values, rows, labels, title, max_columns))


def _checked(weights: Any) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.asarray(weights, np.float64)
    if values.ndim != 2 or not values.size or len(values) > MAX_ROWS:
        raise InvalidArgument(
            f"weights: expected [rows, columns], at least one of each and at most {MAX_ROWS} rows, "
            f"got shape {list(values.shape)}"
        )
    if not np.isfinite(values).all() or (values < 0).any():
        raise InvalidArgument("weights: expected finite numbers of at least 0, got others")
    return values


def _draw(
    values: npt.NDArray[np.float64], rows: Sequence[str] | None, labels: dict[int, str], title: str, most: int
) -> str:
    group = -(-values.shape[1] // most)
    sums = np.add.reduceat(values, np.arange(0, values.shape[1], group), axis=1)
    left = MARGIN + (LABEL * FONT * 0.62 if rows is not None else 0)
    width = min((WIDTH - MARGIN - left) / sums.shape[1], 40.0)
    height = len(sums) * ROW
    svg = Svg()
    svg.text(MARGIN, 32, title, 15, INK, bold=True)
    svg.text(MARGIN, 50, "each row's shades go from 0 to its largest weight", FONT, SOFT)
    shades = np.rint(sums / np.maximum(sums.max(axis=1, keepdims=True), 1e-300) * LEVELS).astype(int)
    for level in range(1, LEVELS + 1):
        cells = np.argwhere(shades == level)
        svg.boxes([(left + x * width, TOP + y * ROW, width, ROW) for y, x in cells.tolist()], _shade(level / LEVELS))
    svg.rect(left, TOP, width * sums.shape[1], height, "none", LINE)
    for index, label in enumerate(rows or ()):
        svg.text(left - 6, TOP + index * ROW + 13, shorten(label, LABEL), FONT, INK, "end")
    bottom = TOP + height
    for at, label in sorted(labels.items()):
        x = left + (at / group + 0.5 / group) * width
        svg.strokes([(x, bottom, x, bottom + 4)], SOFT)
        svg.text(x, bottom + 16, shorten(label, LABEL), FONT, SOFT, "middle")
    peaks = [f"{rows[y] if rows else y}: {labels.get(int(x), x)}" for y, x in enumerate(values.argmax(axis=1).tolist())]
    description = f"{len(values)} rows over {values.shape[1]} columns. Where each row looks most: " + ", ".join(peaks)
    return svg.finish(WIDTH, bottom + 32, title, description)


def _shade(share: float) -> str:
    mixed = (round(pale + (deep - pale) * share) for pale, deep in zip(_PALE, _DEEP, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
