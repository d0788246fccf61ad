"""The documentation names what is there: pictures as the script draws them now, links, files and tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import draw_docs  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", draw_docs.PICTURES)
def test_pictures_are_as_drawn_now(name: str) -> None:
    committed = (ROOT / "docs" / "img" / name).read_text(encoding="utf-8")
    assert committed == draw_docs.PICTURES[name](), f"{name} is out of date: python scripts/draw_docs.py"


def test_no_other_pictures() -> None:
    # By benches; tests/test_utilisation.py compares the first with the numbers of its page.
    measured = {
        "endtoend.svg",
        "utilisation.svg",
        "throughput.svg",
        "roofline_avx512bf16_1.svg",
        "roofline_avx512bf16_2.svg",
    }
    drawn = set(draw_docs.PICTURES | draw_docs.MODEL_PICTURES)
    assert {path.name for path in (ROOT / "docs" / "img").iterdir()} == drawn | measured


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?://", target):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in slugs, f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_are_there(page: Path) -> None:
    """`path/to/file.py` and `file.rs::name`: the name of a test is looked for in its file."""
    text = page.read_text(encoding="utf-8")
    everywhere = {
        p.name: p for root in ("rust", "tests", "python", "scripts", "benches") for p in (ROOT / root).rglob("*.*")
    }
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|rs|sh|md|toml))(?:::(\w+))?`", text)
    assert named
    planned = set(re.findall(r"`([\w./-]+)` \(planned\)", text))
    for path, test in named:
        if path in planned:
            continue
        candidates = [ROOT / path, ROOT / "rust/kvcore/src" / path, ROOT / "python/kvcore" / path, ROOT / "docs" / path]
        if "/" not in path and path in everywhere:
            candidates.append(everywhere[path])
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        assert found is not None, f"{page.name}: no file {path}"
        if test:
            defined = re.search(rf"\b(?:def|fn|class) {test}\b", found.read_text(encoding="utf-8"))
            assert defined, f"{page.name}: no {test} in {path}"


def test_the_family_that_is_shown_is_the_real_one() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8"), re.DOTALL)
    families = ROOT / "python/kvcore/models/families"
    assert shown[0] == (families / "olmo2.py").read_text(encoding="utf-8")
    body = "".join(f"    {line}\n" for line in shown[1].splitlines())
    assert body in (families / "phi3.py").read_text(encoding="utf-8")
