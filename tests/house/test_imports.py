"""Who may import whom: hwprofiles <- planner <- {executor, reports} <- shardwise.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.house import ROOMS, ROOT, Import, imports, python_files

MAY_IMPORT = {
    "hwprofiles": {"hwprofiles"},
    "planner": {"hwprofiles", "planner"},
    "reports": {"hwprofiles", "planner", "reports"},
    "executor": {"hwprofiles", "planner", "executor"},
}
# The executor takes the vocabulary, the forms of files and the names in traces, and never a cost.
WORDS = "specs layout results plan errors mesh stages codec files trace version"
VOCABULARY = {f"planner.{name}" for name in WORDS.split()}
# Slow to import, or absent without an extra: inside functions only.
LATE = {"pandas", "networkx", "matplotlib", "jinja2", "rich", "scipy"}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def wrong_arrows(room: str, found: list[Import]) -> list[str]:
    ours = [i for i in found if room_of(i.module) in (*ROOMS, "shardwise", "tests")]
    wrong = [i for i in ours if room_of(i.module) not in MAY_IMPORT[room]]
    if room == "executor":
        wrong += [i for i in ours if room_of(i.module) == "planner" and i.module not in VOCABULARY]
    return [str(i) for i in wrong]


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_point_one_way(room: str) -> None:
    assert [w for path in python_files(room) for w in wrong_arrows(room, imports(path))] == []


def test_a_wrong_arrow_is_found() -> None:
    path = ROOT / "executor" / "x.py"
    found = [Import(path, 1, name, True) for name in ("planner.specs", "planner.memory", "reports")]
    assert len(wrong_arrows("executor", found)) == 2
    assert wrong_arrows("planner", [Import(path, 1, "executor.mesh", False)])


@pytest.mark.parametrize("room", ["hwprofiles", "planner", "reports"])
def test_torch_is_the_executors_alone(room: str) -> None:
    found = [
        i for path in python_files(room) for i in imports(path) if room_of(i.module) == "torch"
    ]
    assert [str(i) for i in found] == []


@pytest.mark.parametrize("room", ["hwprofiles", "planner"])
def test_slow_libraries_are_imported_where_they_are_used(room: str) -> None:
    found = [
        i
        for path in python_files(room)
        for i in imports(path)
        if i.at_top and room_of(i.module) in LATE
    ]
    # Fitting commands are run by hand and may take their time.
    assert [str(i) for i in found if not i.path.name.startswith("fit")] == []


def loaded(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(' '.join({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_commands_module_loads_nothing_slow() -> None:
    slow = {"torch", "pulp", "highspy", "pydantic", *LATE}
    assert loaded("import planner.cli") & slow == set()


def test_help_loads_no_room() -> None:
    rooms = {*ROOMS, "numpy", "typer", "rich"}
    assert loaded("import shardwise; shardwise.main(['--help'])") & rooms == set()


def test_walk_tells_late_imports_from_early_ones(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text("import numpy\ndef f():\n    import pandas\n")
    assert [(i.module, i.at_top) for i in imports(path)] == [("numpy", True), ("pandas", False)]
