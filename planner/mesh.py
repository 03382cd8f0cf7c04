"""Where every rank sits: the mesh of a layout, as axis sizes and, when small, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from planner.layout import Layout

MAX_TABLE_RANKS = 64
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
FORMULA = "coordinate of axis i = rank // product(sizes[:i]) % sizes[i]"


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Axes, fastest first, and their sizes."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The meshes of dense and of expert layers over the same ranks.

    `formula` says how a rank's coordinates follow from the sizes. `ranks[r]` lists them for rank r,
    dense axes then expert axes; it is empty above `MAX_TABLE_RANKS` ranks.
    """

    dense: AxisSizes
    expert: AxisSizes
    formula: str
    ranks: tuple[tuple[int, ...], ...]


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a rank on axes of the given sizes, fastest axis first.

    >>> coordinates(13, (4, 1, 2, 2))  # 13 = 1 + 4 * (0 + 1 * (1 + 2 * 1))
    (1, 0, 1, 1)
    """
    return tuple(rank // prod(sizes[:i]) % size for i, size in enumerate(sizes))


def mesh_of(layout: Layout) -> MeshPlan:
    """The mesh that a layout prescribes.

    >>> mesh_of(Layout(dp=2, tp=2)).ranks[3]
    (1, 0, 1, 0, 0, 0, 3, 0)
    """
    dense = AxisSizes(DENSE_AXES, tuple(int(getattr(layout, axis)) for axis in DENSE_AXES))
    expert = AxisSizes(EXPERT_AXES, tuple(int(getattr(layout, axis)) for axis in EXPERT_AXES))
    listed = layout.num_gpus if layout.num_gpus <= MAX_TABLE_RANKS else 0
    return MeshPlan(
        dense=dense,
        expert=expert,
        formula=FORMULA,
        ranks=tuple(
            coordinates(rank, dense.sizes) + coordinates(rank, expert.sizes)
            for rank in range(listed)
        ),
    )
