"""Every example of the README and of docs/ runs and prints what the page says.

    ```python          code; the blocks of one section (##) go on from each other, and on some pages from the first one
    ```python model    code that needs the SmolLM2 file
    ```text            right behind a python block: what it prints
    ```console         commands behind "$ ", each with what it prints; `console model` needs the file

"..." in what is printed stands for anything, and times and rates count as equal.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECONDS = 300

GOES_ON_FROM = {"cache.md": "Quickstart", "encoder-decoder.md": "Prompts"}
"""Pages on which every section goes on from the first one."""


@dataclass
class Block:
    """A fenced block."""

    kind: str
    needs_model: bool
    code: str
    line: int
    expected: str | None = None


@dataclass
class Section:
    """A section with its blocks."""

    page: str
    title: str
    blocks: list[Block] = field(default_factory=list)

    def needs_model(self, kind: str) -> bool:
        return any(block.needs_model for block in self.blocks if block.kind == kind)


def sections(page: Path) -> Iterator[Section]:
    """The sections (## and ###) and their blocks. What goes on from the first script is one section with it."""
    text = page.read_text(encoding="utf-8")
    section = Section(page.name, "first screen")
    fence = re.compile(r"^```(\w+)( model)?\n(.*?)^```$|^(##+) ([^\n]+)$", re.MULTILINE | re.DOTALL)
    last_end = -1
    for match in fence.finditer(text):
        kind, needs_model, code, heading, title = match.groups()
        if heading:
            if title not in ("Language models", "Sampling"):  # these go on from what is before them
                yield section
                section = Section(page.name, title)
        elif kind == "text" and text[last_end : match.start()].strip() == "" and section.blocks:
            if section.blocks[-1].kind == "python":
                section.blocks[-1].expected = code
        else:
            line = text.count("\n", 0, match.start(3)) + 1
            section.blocks.append(Block(kind, bool(needs_model), code, line))
        last_end = match.end()
    yield section


SECTIONS = [section for page in PAGES for section in sections(page)]


def cases(kind: str) -> list[Any]:
    found = [section for section in SECTIONS if any(block.kind == kind for block in section.blocks)]
    return [
        pytest.param(
            section,
            id=f"{section.page}: {section.title}",
            marks=[
                *([pytest.mark.model] if section.needs_model(kind) else []),
            ],
        )
        for section in found
    ]


def assert_prints(expected: str, got: str, where: str) -> None:
    """Equal but for what "..." stands for, times, rates and trailing spaces."""

    def normal(text: str) -> str:
        text = re.sub(r"\d+(\.\d+)? (ms|tokens/s)", r"# \2", text)
        return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"

    flags = doctest.ELLIPSIS
    checker = doctest.OutputChecker()
    assert checker.check_output(normal(expected), normal(got), flags), f"{where}: expected\n{expected}\ngot\n{got}"


def test_the_readme_has_examples() -> None:
    kinds = [block.kind for section in SECTIONS if section.page == "README.md" for block in section.blocks]
    assert kinds.count("python") >= 8
    assert kinds.count("console") >= 2
    unknown = {block.kind for section in SECTIONS for block in section.blocks} - {"python", "console", "sh", "text"}
    assert not unknown, f"blocks that nobody runs: {unknown}"


@pytest.mark.parametrize("section", cases("python"))
def test_python(section: Section) -> None:
    values: dict[str, Any] = {"__name__": "readme"}
    first = GOES_ON_FROM.get(section.page)
    before = [s for s in SECTIONS if s.page == section.page and s.title == first and s is not section]
    for block in [block for s in [*before, section] for block in s.blocks]:
        if block.kind != "python":
            continue
        printed = io.StringIO()
        # The line numbers of errors are those of the page.
        code = compile("\n" * (block.line - 1) + block.code, section.page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, values)
        assert_prints(block.expected or "", printed.getvalue(), f"{section.page}:{block.line}")


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are written for a POSIX shell")
@pytest.mark.parametrize("section", cases("console"))
def test_commands(section: Section) -> None:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    environment.pop("PYTEST_CURRENT_TEST", None)
    for block in section.blocks:
        if block.kind != "console":
            continue
        for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            done = subprocess.run(
                command,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                encoding="utf-8",
                check=False,
            )
            assert_prints(expected, done.stdout, f"{section.page}:{block.line}: {command}")


def test_every_make_target_is_there() -> None:
    makefile = ROOT / "Makefile"
    if not makefile.exists():
        pytest.skip("no Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile.read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, re.MULTILINE))
    assert named
    assert named <= targets, f"not in the Makefile: {named - targets}"


def test_options_are_those_of_the_command() -> None:
    from typer.main import get_command

    from kvcore.cli import app

    command = get_command(app)
    options = {name for sub in command.commands.values() for p in sub.params for name in p.opts}  # type: ignore[attr-defined]
    section = next(section for section in SECTIONS if section.title == "Command line")
    text = README.split(f"## {section.title}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"--[a-z-]+", text)) - {"--help"}
    assert named <= options, f"no such options: {named - options}"


def test_the_table_of_errors_is_complete() -> None:
    from kvcore import errors

    text = README.split("\n## Errors\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)`(?: \(an? `(\w+)`\))? \|", text, re.MULTILINE))
    assert set(rows) == set(errors.__all__) - {"KvcoreError"}
    for name, base in rows.items():
        assert not base or base in [c.__name__ for c in getattr(errors, name).__mro__]
