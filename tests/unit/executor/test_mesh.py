"""Coordinates of the executor are those of the plan, and shards lie as the planner costs them."""

import pytest

pytest.importorskip("torch")

from executor.mesh import axis_sizes, coordinates
from planner.layout import Layout
from planner.mesh import DENSE_AXES, EXPERT_AXES, mesh_of

LAYOUTS = [
    Layout(dp=2, tp=2, cp=2),
    Layout(dp=4, tp=2, pp=2, zero=3, shard=2),
    Layout(dp=2, tp=2, cp=2, pp=2, ep=4, zero=1, shard=4),
    Layout(dp=8, ep=4, zero=3, shard=4),
    Layout(cp=4, dp=2, zero=2, shard=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_sit_where_the_plan_says(layout: Layout) -> None:
    for rank, planned in enumerate(mesh_of(layout).ranks):
        found = coordinates(layout, rank)
        dense = tuple(found[axis] for axis in DENSE_AXES)
        expert = tuple(0 if axis == "etp" else found[axis] for axis in EXPERT_AXES)
        assert dense + expert == planned


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_number_every_rank_once(layout: Layout) -> None:
    sizes = axis_sizes(layout)
    for axes in (
        ("pp", "replicate", "shard", "tp"),
        ("pp", "dp", "cp", "tp"),
        ("pp", "edp_replicate", "edp_shard", "ep"),
    ):
        seen = {
            tuple(coordinates(layout, rank)[axis] for axis in axes)
            for rank in range(layout.num_gpus)
        }
        assert len(seen) == layout.num_gpus
        for place, axis in enumerate(axes):
            assert {at[place] for at in seen} == set(range(sizes[axis])), axis


def test_a_shard_is_of_neighbours_on_the_joined_axis() -> None:
    layout = Layout(dp=4, cp=2, tp=2, zero=3, shard=4)
    group = [r for r in range(16) if coordinates(layout, r)["replicate"] == 0 and r % 2 == 0]
    assert group == [0, 2, 4, 6]  # stride tp, both context ranks of two replicas
