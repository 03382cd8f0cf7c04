"""Tests that need a GPU: marked so, and skipped where there is none."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("torch") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    if not own:
        return
    import torch

    missing = pytest.mark.skip(
        reason="compares results on a CUDA device, and torch finds none on this machine"
    )
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
