"""The tree as the house tests see it: its files, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("hwprofiles", "planner", "executor", "reports")
SKIPPED = {"__pycache__", ".git", ".venv", "build", "dist", "shardwise.egg-info"}


class Import(NamedTuple):
    """One import: the file and line, the module, and whether it runs when the file is imported."""

    path: Path
    line: int
    module: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def python_files(*folders: str) -> list[Path]:
    """Python files under the folders, in order."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not SKIPPED & set(path.relative_to(ROOT).parts)
    )


def imports(path: Path) -> list[Import]:
    """Every import in a file; those under ``if TYPE_CHECKING`` count as not at the top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(walk(path, tree, at_top=True))


def walk(path: Path, node: ast.AST, *, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(path, child.lineno, name.name, at_top)
        elif isinstance(child, ast.ImportFrom):
            for module in imported_modules(path, child):
                yield Import(path, child.lineno, module, at_top)
        else:
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(path, child, at_top=at_top and not deferred and not typing_only)


def imported_modules(path: Path, node: ast.ImportFrom) -> list[str]:
    """Modules of ``from a import b``: ``a.b`` where b is a module of ours, else ``a``."""
    base = node.module or ""
    if node.level:
        parents = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
        base = ".".join([*parents, *([node.module] if node.module else [])])
    found = []
    for name in node.names:
        inner = ROOT.joinpath(*base.split("."), name.name)
        is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
        found.append(f"{base}.{name.name}" if is_module else base)
    return found
