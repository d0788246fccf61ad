"""Attention maps as pictures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kvcore import InvalidArgument
from kvcore.viz import attention_map
from kvcore.viz.attention_map import LEVELS

SVG = "{http://www.w3.org/2000/svg}"


def cells(svg: str) -> int:
    return sum(path.get("d", "").count("z") for path in ElementTree.fromstring(svg).iter(SVG + "path"))


def test_a_small_map(tmp_path: Path) -> None:
    weights = np.array([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]])
    picture = attention_map(weights, rows=["le <chat>", "noir"], columns=["the", "black", "cat"], title="a & b")
    root = ElementTree.fromstring(picture.svg)
    texts = [text.text for text in root.iter(SVG + "text")]
    assert {"le <chat>", "noir", "the", "black", "cat", "a & b"} <= set(texts)
    assert cells(picture.svg) == 4
    description = root.find(SVG + "desc")
    assert description is not None
    assert description.text is not None
    assert "le <chat>: the, noir: black" in description.text
    picture.save(tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text(encoding="utf-8") == picture.svg == picture._repr_svg_()
    assert repr(picture).startswith("AttentionMap(")
    assert attention_map(weights, rows=["le <chat>", "noir"], columns=["the", "black", "cat"], title="a & b") == picture


def test_many_columns_are_added_up() -> None:
    weights = np.zeros((2, 1500))
    weights[0, 700:704] = 0.25
    weights[1] = 1 / 1500
    svg = attention_map(weights, columns={0: "0 s", 1499: "30 s"}, max_columns=100).svg
    assert 100 < cells(svg) <= 102  # the even row, and one or two of the other
    assert len(svg) < 20_000
    fills = set(re.findall(r'<path d="[^"]*" fill="(#\w+)"', svg))
    assert 1 <= len(fills) <= LEVELS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": np.zeros(3)}, "weights: expected"),
        ({"weights": np.zeros((0, 3))}, "weights: expected"),
        ({"weights": np.zeros((1000, 3))}, "at most 448 rows"),
        ({"weights": [[np.nan]]}, "finite"),
        ({"weights": [[-1.0]]}, "at least 0"),
        ({"weights": [[1.0]], "rows": []}, "rows: expected 1 labels, got 0"),
        ({"weights": [[1.0]], "columns": ["a", "b"]}, "columns"),
        ({"weights": [[1.0]], "columns": {1: "a"}}, "columns"),
        ({"weights": [[1.0]], "max_columns": 0}, "max_columns"),
        ({"weights": [[1.0]], "max_columns": 10**6}, "max_columns"),
    ],
)
def test_what_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        attention_map(**arguments)
