"""Searching many held fields at once finds what searching one after the other finds."""

from __future__ import annotations

from typing import Any

import pytest

from planner.search.candidates import candidates
from planner.search.each import best_each, shares_space
from planner.search.search import best_with

HELD = (
    ("tp", 1), ("tp", 2), ("pp", 2), ("pp", 4), ("dp", 2), ("dp", 4), ("micro_batch", 2),
    ("zero", 1), ("zero", 3), ("vpp", 1), ("vpp", 2),
)  # fmt: skip


@pytest.mark.parametrize(
    "problem",
    [
        {"layer_kinds": (0,) * 8, "num_gpus": 8},
        {"layer_kinds": (0,) * 8, "num_gpus": 8, "capacity": 30.0},
        {"layer_kinds": (0,) + (1,) * 7, "num_gpus": 8, "capacity": 14.0},
        {"layer_kinds": (0, 1) * 4, "num_gpus": 4, "capacity": 900.0},
        {"layer_kinds": (0,) * 6, "num_gpus": 4, "capacity": 0.5},
    ],
)
def test_same_as_one_by_one(toy: Any, problem: dict[str, Any]) -> None:
    provider = toy(**problem)
    values = provider.space().values
    held = [(f, v) for f, v in HELD if f == "dp" or v in values.get(f, ())]
    assert len(held) >= 5
    together = best_each(provider, held)
    assert len(together) == len(held)
    for (field, value), found in zip(held, together, strict=True):
        alone = best_with(provider, {field: value})
        assert (found.best is None) == (alone.best is None)
        if found.best is None or alone.best is None:
            assert found.nearest == alone.nearest
            assert (found.counts.legal == 0) == (alone.counts.legal == 0)
            continue
        assert getattr(found.best.layout, field) == value
        assert found.best.time_s == pytest.approx(alone.best.time_s, rel=2e-9)
        assert sum(sum(stage.layers) for stage in found.best.stages) == len(problem["layer_kinds"])


def test_stage_that_means_nothing_on_one_rank_is_searched_alone(toy: Any) -> None:
    """ZeRO 1 over one rank is left out beside stage 0, and not where it is all there is."""
    table = candidates(toy(layer_kinds=(0,) * 8, num_gpus=4))
    assert (table.cells.dp * table.cells.cp == 1).any()
    assert not shares_space(table, "zero", 1)
    assert shares_space(table, "zero", 0)
    assert shares_space(table, "tp", 2)
