"""The house: who may import whom, where unsafe code and intrinsics may stand, and that no file knows a machine.

docs/architecture.md explains the rules. The imports are measured by scripts/house.py, which draws them as well.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import house  # noqa: E402

RUST = {
    "error": set(),
    "paging": {"error"},
    "threads": {"error", "simd"},
    "formats": {"error"},
    "simd": {"error", "formats"},
    "storage": {
        "error",
        "formats",
        "paging",
        "simd",
        "threads",
    },  # of paging the names of blocks, nothing else: see below
    "attention": {"error", "paging", "storage", "simd", "threads"},
    "shape": {"error"},
    "ops": {"error", "shape", "simd", "threads"},
    "linear": {"error", "shape", "ops", "simd", "threads"},
    "cache": {"error", "paging", "storage", "simd", "threads", "attention"},
    "kvcore-py": {"error", "paging", "storage", "simd", "threads", "attention", "ops", "linear", "cache"},
}
"""Whom each module of the Rust core may import."""

PYTHON = {
    "errors": set(),
    "_kvcore": {"errors"},
    "text": {"errors"},
    "checkpoint": {"errors"},
    "engine": {"errors"},
    "models": {"errors", "_kvcore", "checkpoint"},
    "memory": set(),
    "viz": {"errors"},  # it draws snapshots: dicts, whoever took them
    "outputs": {"engine"},
    "reply": {"errors", "engine", "outputs", "prompts", "text"},
    "loading": {"errors", "memory", "_kvcore", "engine", "models", "checkpoint", "text"},
    "dispatch": {"errors", "engine", "reply", "text"},
    "progress": set(),
    "audio": {"errors"},
    "transcription": {"errors", "audio", "checkpoint", "engine", "llm"},
    "prompts": {"errors", "engine", "text"},
    "prompt_caching": {"errors", "engine"},
    "structured": {"errors", "engine", "text"},
    "lora": {"errors", "checkpoint"},
    "llm": {
        "lora",
        "errors",
        "engine",
        "checkpoint",
        "text",
        "outputs",
        "reply",
        "dispatch",
        "progress",
        "prompts",
        "prompt_caching",
        "structured",
        "loading",
    },
    "async_llm": {"errors", "engine", "lora", "outputs", "prompts", "reply", "llm"},
    "session": {"errors", "engine", "outputs", "prompts", "llm"},
    "live": set(),
    "metrics": {"errors", "live"},
    "plan": {"errors", "checkpoint", "models"},
    "bench": {"errors", "_kvcore", "engine", "outputs", "models", "llm", "plan", "progress"},
    "cli": {"audio", "transcription", "errors", "engine", "outputs", "checkpoint", "llm", "live", "plan", "bench"},
    "kvcore": {"errors", "_kvcore", "engine", "outputs", "llm", "lora", "async_llm", "session", "transcription", "viz"},
    "__main__": {"cli"},
}
"""Whom each module of the Python package may import, also inside of functions."""

UNSAFE_ALLOWED = ("simd/", "linear/buffer.rs", "storage/arena.rs", "threads/pool.rs")
UNSAFE_BELOW = ("lib.rs", "simd/mod.rs", "linear/mod.rs", "storage/mod.rs", "threads/mod.rs")
"""Parents of modules that may be unsafe: `forbid` in them would reach their children."""

INTRINSICS = re.compile(
    r"\b(?:std|core)::arch\b|\bis_\w+_feature_detected!|\btarget_feature\b|\b(?:global_)?asm!|\b_mm\d*_|\bv\w+q_f32\b"
)


@pytest.mark.parametrize("allowed", [RUST, PYTHON], ids=["rust", "python"])
def test_imports_run_downwards(allowed: dict[str, set[str]]) -> None:
    edges = house.rust_edges() if allowed is RUST else house.python_edges()
    assert set(allowed) >= {who for who, _ in edges}, "a module that this table does not know"
    wrong = {edge for edge in edges if edge[1] not in allowed[edge[0]]} - house.KNOWN_CIRCLES
    assert not wrong, f"imports that are not allowed (who, whom): {sorted(wrong)}"
    house.floors(edges)  # raises if there is a circle
    known = set(edges) & house.KNOWN_CIRCLES
    assert allowed is PYTHON or known == house.KNOWN_CIRCLES, "mended: take it out of house.KNOWN_CIRCLES"


def test_types_do_not_import_upwards_either() -> None:
    """Imports for type checkers only make no circle, but they show what a module knows of."""
    order = [name for floor in reversed(house.floors(house.python_edges())) for name in floor]
    for (who, whom), _ in house.python_edges().items():
        assert order.index(whom) < order.index(who), f"{who} knows of {whom}"


def test_storage_knows_the_names_of_blocks_only() -> None:
    """Storage is told which block to write or copy; it never asks who owns it."""
    for module, path in house.rust_files(house.RUST):
        if module == "storage":
            names = re.findall(r"crate::paging::(\{[^}]*\}|\w+)", house.rust_code(path))
            known = {name for group in names for name in re.findall(r"\w+", group)}
            assert known <= {"BlockId", "BlockCopy"}, f"{path.name}: {known}"


def test_the_core_knows_nothing_of_python() -> None:
    for _, path in house.rust_files(house.RUST):
        assert not re.search(r"\b(?:pyo3|numpy)::", house.rust_code(path)), path


def test_the_engine_sees_the_cache_and_the_model_as_protocols() -> None:
    """It runs on anything that looks like them, mocks included: no import of the native module, nor of a model."""
    for module, path in house.python_files():
        if module == "engine":
            assert {whom for whom, _ in house.python_imports(path)} <= {"engine", "errors"}, path


def test_families_are_data() -> None:
    """A family turns a configuration into a spec: it knows neither caches nor batches nor the native module."""
    for path in (house.PYTHON / "models" / "families").glob("*.py"):
        assert {whom for whom, _ in house.python_imports(path)} <= {"models", "checkpoint", "errors"}, path
        assert "models.decoder" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("root", [house.RUST, house.BINDINGS], ids=["core", "bindings"])
def test_unsafe_code_is_forbidden_but_in_few_places(root: Path) -> None:
    for path in sorted(root.rglob("*.rs")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        forbids = re.search(r"^#!\[forbid\(unsafe_code\)\]$", text, re.MULTILINE) is not None
        if root == house.RUST and name.startswith(UNSAFE_ALLOWED):
            continue
        if root == house.RUST and name in UNSAFE_BELOW:
            assert not re.search(r"\bunsafe\b", house.rust_code(path)), f"{name}: unsafe"
            continue
        assert forbids, f"{name}: expected #![forbid(unsafe_code)] at the top"
        head = re.split(r"^#!\[forbid\(unsafe_code\)\]$", text, maxsplit=1, flags=re.MULTILINE)[0]
        assert all(line.startswith("//!") or not line.strip() for line in head.splitlines()), f"{name}: not at the top"


def test_every_unsafe_block_says_why() -> None:
    """Clippy denies others, where it looks: it never sees the code of other CPUs than this one."""
    for path in sorted(house.RUST.rglob("*.rs")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bunsafe \{", line.split("//")[0]):
                above = number
                while above > 0 and "SAFETY:" not in lines[above] and number - above < 6:
                    above -= 1
                assert "SAFETY:" in lines[above], f"{path.name}:{number + 1}: unsafe without a SAFETY comment"


def test_simd_is_the_only_home_of_intrinsics() -> None:
    for root in (house.RUST, house.BINDINGS):
        for path in sorted(root.rglob("*.rs")):
            if not path.relative_to(root).as_posix().startswith("simd/"):
                found = INTRINSICS.search(house.rust_code(path))
                assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def project_files() -> list[Path]:
    """The text files that are under version control, or, outside of a repository, those that would be."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        paths = [ROOT / name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        skipped = {".venv", "target", "dist", ".git"}
        paths = [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]
    binary = {".safetensors", ".gguf", ".so", ".pyd", ".pyc", ".png"}
    return [p for p in paths if p.suffix not in binary and p.exists()]


def test_no_file_mentions_a_path_of_a_machine() -> None:
    place = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|work|mnt|opt|srv)/[\w.-]+|\b[A-Z]:\\\\?[Uu]sers")
    example = re.compile(r"/home/me\b|/Users/me\b")
    for path in project_files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            found = [match for match in place.findall(line) if not example.match(match)]
            assert not found, f"{path.relative_to(ROOT)}:{number}: {found}"


def test_no_lock_file_mentions_another_registry() -> None:
    """Dependencies are named and hashed; where they are fetched from is each machine's own business."""
    cargo = (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    sources = set(re.findall(r'^source = "(.*)"$', cargo, re.MULTILINE))
    assert sources <= {"registry+https://github.com/rust-lang/crates.io-index"}
    for path in (ROOT / "requirements").glob("*"):
        assert not re.search(r"--(?:extra-)?index-url|--find-links|https?://", path.read_text(encoding="utf-8")), path
