"""Every work that a docstring cites has an entry in planner/references.md."""

import ast
import re
from pathlib import Path

from tests.house.house import ROOT, python_files

KEY = re.compile(r"\b(?:[A-Z][A-Za-z]+(?:19|20)\d\d|DeepSeekV\d+|Nccl[A-Z][a-z]+)\b")
ENTRY = re.compile(r"^- \*\*(\w+)\*\*:", re.MULTILINE)
# What may stand in place of a work: a derivation of our own, or a file of facts with its sources.
OWN_SOURCE = re.compile(
    r"derived here|runtime file|calibrations/|megatron-core|sources\.toml", re.IGNORECASE
)


def entries() -> list[str]:
    return ENTRY.findall((ROOT / "planner" / "references.md").read_text(encoding="utf-8"))


def citations(path: Path) -> list[str]:
    """The paragraph after ``References:`` in every docstring of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, holders)]
    return [
        # DeepSeek's reports are cited by their own name as well as by key.
        re.sub(r"DeepSeek-V(\d)(?:\.(\d))?", r"DeepSeekV\1\2", paragraph.partition("\n\n")[0])
        for text in texts
        for paragraph in text.split("References:")[1:]
    ]


def all_citations() -> list[tuple[Path, str]]:
    return [(p, c) for p in python_files("planner", "hwprofiles", "reports") for c in citations(p)]


def test_cited_works_have_entries() -> None:
    known = set(entries())
    missing = [
        f"{path.relative_to(ROOT)} cites {key}"
        for path, text in all_citations()
        for key in KEY.findall(text)
        if key not in known
    ]
    assert missing == []


def test_every_citation_names_a_work_or_a_derivation() -> None:
    empty = [
        f"{path.relative_to(ROOT)}: {text[:60]!r}"
        for path, text in all_citations()
        if not KEY.search(text) and not OWN_SOURCE.search(text)
    ]
    assert empty == []


def test_entries_are_unique_and_found() -> None:
    keys = entries()
    assert len(keys) == len(set(keys))
    assert {"Korthikanti2022", "DeepSeekV3", "NcclTests"} <= set(keys)
    assert all(KEY.fullmatch(key) for key in keys)
