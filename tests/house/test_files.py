"""Files are small, complete in the distribution, and free of one machine's paths."""

import fnmatch
import re
import tomllib
from pathlib import Path

from tests.house.house import ROOMS, ROOT, SKIPPED, python_files

# Above 400 lines a file should be split; a tenth more lets a thought be finished.
MAX_LINES = 440
MACHINE_PATH = re.compile(r"/(?:work|root|home|opt|tmp)/\w")


def test_files_are_short_enough_to_read() -> None:
    files = [*python_files(*ROOMS, "tests"), ROOT / "shardwise.py"]
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [str(p) for p in python_files(*ROOMS) if p.name in drawers] == []


def room_files() -> list[Path]:
    return [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and not SKIPPED & set(path.relative_to(ROOT).parts)
    ]


def test_every_data_file_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["*"]
    lost = [
        str(path.relative_to(ROOT))
        for path in room_files()
        if path.suffix not in (".py", ".pyc")
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
    ]
    assert lost == []


def test_every_room_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"]["include"] == [f"{room}*" for room in sorted_rooms()]


def sorted_rooms() -> list[str]:
    return ["hwprofiles", "planner", "reports", "executor"]


def test_no_file_names_a_path_of_one_machine() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in room_files()
        if path.suffix in (".py", ".toml", ".md", ".json")
        and (found := MACHINE_PATH.search(path.read_text(encoding="utf-8")))
    ]
    assert named == []


def test_the_checks_run_what_the_readme_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("python -m pytest -q -n 2", "ruff check .", "ruff format --check .", "mypy"):
        assert command in readme
        assert command in steps
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_targets_of_the_makefile_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint", "bench"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
