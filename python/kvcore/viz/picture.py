"""What all pictures are: an SVG document that can be saved, and that notebooks show."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvcore.errors import InvalidArgument


@dataclass(frozen=True)
class Picture:
    """A picture. The last line of a notebook's cell shows it."""

    svg: str
    """The SVG document."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the SVG to a file whose name ends with .svg.

        Raises:
            InvalidArgument: another ending, by which others would take the file for what it is not.
        """
        if Path(path).suffix.lower() != ".svg":
            raise InvalidArgument(f"path: expected a name that ends with .svg, got {os.fspath(path)!r}")
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg}</div>'

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.svg)} characters of SVG)"
