"""Examples in the executor's docstrings; it is not among pytest's own paths, for it needs torch."""

import doctest
import pkgutil
from importlib import import_module

import pytest

pytest.importorskip("torch")

import executor

NAMES = sorted(
    module.name
    for module in pkgutil.walk_packages(executor.__path__, "executor.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [t for n in NAMES for t in finder.find(import_module(n)) if t.examples]
    assert len(found) > 10
