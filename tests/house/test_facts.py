"""Every shipped fact has unit, kind and a source that resolves."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hwprofiles
from hwprofiles.facts import KINDS
from hwprofiles.units import UNITS

ROOT = Path(hwprofiles.__file__).parent
FILES = sorted(p for room in ("devices", "links", "clusters") for p in (ROOT / room).glob("*.toml"))
SOURCES = tomllib.loads((ROOT / "sources.toml").read_text())


def facts(table: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"{at}{key}", value
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict):
                    yield from facts(entry, f"{key}.")


def test_there_are_files() -> None:
    assert len(FILES) > 80


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_facts_have_unit_kind_and_source(path: Path) -> None:
    table = tomllib.loads(path.read_text())
    assert table["name"] == path.stem
    found = dict(facts(table))
    assert len(found) >= 4
    for name, fact in found.items():
        assert fact["unit"] in UNITS, name
        assert fact["kind"] in KINDS, name
        assert fact["source"] in SOURCES, name
        if fact["kind"] in ("derived", "assumed"):
            assert fact.get("note"), f"{name} does not say from what"
        if fact["source"] == "assumption":
            assert fact["kind"] == "assumed", name


def test_sources_say_what_they_are_and_are_used() -> None:
    used = {fact["source"] for path in FILES for _, fact in facts(tomllib.loads(path.read_text()))}
    for name, source in SOURCES.items():
        assert set(source) <= {"title", "publisher", "address", "date", "note"}, name
        assert all(source[key] for key in ("title", "publisher", "address", "date")), name
        assert source["address"].startswith(("https://", "file:///proc")), name
    assert set(SOURCES) - used == {"operating-system"}  # facts of the cluster `local`
