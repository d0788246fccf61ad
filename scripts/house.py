"""Measure who imports whom: the house as it is built, for its picture and its test.

    Rust     `crate::module` (in `use` and in expressions) in rust/kvcore/src, `kvcore::module` in the bindings
    Python   every import statement and every literal module name, in python/kvcore

A module here is a file or folder directly below these roots. Rust's unit tests and doc comments do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUST = ROOT / "rust" / "kvcore" / "src"
BINDINGS = ROOT / "rust" / "kvcore-py" / "src"
PYTHON = ROOT / "python" / "kvcore"

Edges = dict[tuple[str, str], str]
"""(who, whom) to how: "import", in Python also "lazy" (inside of a function) or "types" (for type checkers only)."""

_RANK = {"import": 0, "lazy": 1, "types": 2}


def rust_code(path: Path) -> str:
    """A Rust file without comments and without its unit tests."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^#\[cfg\(test\)\]\nmod tests \{.*?^\}", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(re.sub(r"//.*", "", line) for line in text.splitlines())


def rust_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(module, file) of all files that are not unit tests."""
    for path in sorted(root.rglob("*.rs")):
        if path.name != "tests.rs":
            top = path.relative_to(root).parts[0].removesuffix(".rs")
            yield top, path


def rust_edges() -> Edges:
    """The core's modules; the bindings are one module, "kvcore-py"."""
    modules = {module for module, _ in rust_files(RUST)} - {"lib"}
    edges: Edges = {}
    for who, path in rust_files(RUST):
        if who == "lib":
            continue
        for whom in _paths(rust_code(path), "crate"):
            whom = whom if whom in modules else "error"  # `crate::Error` and `crate::Result` are re-exports
            if whom != who:
                edges[who, whom] = "import"
    for _, path in rust_files(BINDINGS):
        for whom in _paths(rust_code(path), "kvcore"):
            edges["kvcore-py", whom if whom in modules else "error"] = "import"
    return edges


def _paths(code: str, root: str) -> Iterator[str]:
    """First segments behind ``root::``, those in braces included."""
    for match in re.finditer(rf"(?<![\w:]){root}::(?:(\w+)|(?=\{{))", code):
        if match[1]:
            yield match[1]
            continue
        depth = 0
        for token in re.finditer(r"[{},]|[\w:]+", code[match.end() :]):
            if token[0] == "{":
                depth += 1
            elif token[0] == "}":
                depth -= 1
                if depth == 0:
                    break
            elif token[0] != "," and depth == 1:
                yield token[0].split("::")[0]


def python_module(path: Path) -> str:
    """ "llm" for llm.py, "engine" for everything in engine/, "kvcore" for the package's own __init__.py."""
    top = path.relative_to(PYTHON).parts[0].removesuffix(".py")
    return "kvcore" if top == "__init__" else top


def python_files() -> Iterator[tuple[str, Path]]:
    """(module, file) of the package."""
    for path in sorted(PYTHON.rglob("*.py")):
        yield python_module(path), path


def python_edges() -> Edges:
    """The package's modules; the native one is "_kvcore"."""
    edges: Edges = {("_kvcore", "errors"): "import"}  # import_exception! in the bindings' error.rs
    for who, path in python_files():
        for whom, how in python_imports(path):
            if whom != who:
                known = edges.get((who, whom))
                edges[who, whom] = how if known is None else min(known, how, key=_RANK.__getitem__)
    return edges


def python_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module of kvcore, how) for each import in a file."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")), "import")


def _imports(node: ast.AST, how: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
        if node.module == "kvcore":
            names = [f"kvcore.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"kvcore(\.\w+)+", node.value):
        names, how = [node.value], "lazy"
    else:
        names = []
    for name in names:
        if name.startswith("kvcore."):
            yield name.split(".")[1], how
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        for inside in node.body:
            yield from _imports(inside, "types")
        for outside in node.orelse:
            yield from _imports(outside, how)
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        how = "lazy"
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, how)


KNOWN_CIRCLES: frozenset[tuple[str, str]] = frozenset()
"""Imports that go upwards and are to be mended."""


def floors(edges: Edges) -> list[list[str]]:
    """Modules by floor, the highest first: each stands above all that it imports.

    Imports for type checkers only and ``KNOWN_CIRCLES`` do not count.

    Raises:
        ValueError: there is a circle; names it.
    """
    needs: dict[str, set[str]] = {name: set() for edge in edges for name in edge}
    for (who, whom), how in edges.items():
        if how != "types" and (who, whom) not in KNOWN_CIRCLES:
            needs[who].add(whom)
    found: list[list[str]] = []
    placed: set[str] = set()
    while len(placed) < len(needs):
        floor = sorted(name for name in needs if name not in placed and needs[name] <= placed)
        if not floor:
            raise ValueError(f"a circle among {', '.join(sorted(set(needs) - placed))}")
        found.append(floor)
        placed.update(floor)
    return found[::-1]
