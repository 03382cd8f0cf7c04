"""What the search asks of the cost model: legality facts and arrays of costs, nothing else.

The search owns enumeration. A *cell* fixes the coarse axes (`CELL_AXES`; dp follows from them), a
*row* adds the fine ones: *state* options (zero, shard, offload) and *pipeline* options (schedule,
vpp). Given a legal cell, a state option is legal or not by the fields `state_key` alone and a
pipeline option by `pipe_key` and the row's ZeRO stage, so that legal rows of a cell = legal state
options x legal pipeline options, less those that their stage refuses: a closed form. Rows that pass
the bounds are checked with `legal` once more, and refused ones dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.layout import Layout
from planner.results import Array, StageCosts

CELL_AXES = ("pp", "tp", "cp", "cp_kind", "ep", "etp", "micro_batch")
STATE_AXES = ("zero", "shard", "offload")
PIPE_AXES = ("schedule", "vpp")
ALL_AXES = (*CELL_AXES, "dp", *STATE_AXES, *PIPE_AXES)
STATE_KEY = ("dp", "cp", "pp")
PIPE_KEY = ("pp", "dp", "cp", "micro_batch")


@dataclass(frozen=True, slots=True)
class Space:
    """The values that every axis may take, before legality.

    Attributes
    ----------
    num_gpus, global_batch_size
        GPUs of the job; sequences per step.
    values
        Allowed values by field name for `CELL_AXES`, `STATE_AXES` and `PIPE_AXES` (and dp, where it
        is restricted). An axis that is left out takes its default in `Layout`, except shard: left
        out, every divisor of ``dp * cp`` is tried. Values that do not divide num_gpus or the batch
        are dropped by the enumeration.
    """

    num_gpus: int
    global_batch_size: int
    values: Mapping[str, tuple[int, ...]]


class CostProvider(Protocol):
    """The cost model as the search sees it.

    Attributes
    ----------
    num_kinds, layer_kinds
        Number of layer kinds; the kind of every layer in order.
    policies
        Recompute policies in the order of axis P of `StageCosts` (names of `RECOMPUTE`); one that a
        row may not use has infinite layer_s.
    state_key, pipe_key
        Fields that the legality of state and pipeline options depends on: usually `STATE_KEY` and
        `PIPE_KEY`.
    """

    @property
    def num_kinds(self) -> int: ...

    @property
    def layer_kinds(self) -> tuple[int, ...]: ...

    @property
    def policies(self) -> tuple[str, ...]: ...

    @property
    def state_key(self) -> tuple[str, ...]: ...

    @property
    def pipe_key(self) -> tuple[str, ...]: ...

    def space(self) -> Space:
        """Allowed values of every axis, fixed ones (``--fix``) and largest degrees applied."""
        ...

    def legal_cells(self, cells: Layout) -> NDArray[np.bool_]:
        """Which cells can be legal with some state and pipeline option (a mask, one per cell)."""
        ...

    def legal(self, rows: Layout) -> NDArray[np.bool_]:
        """Which full layouts are legal (recompute is not looked at)."""
        ...

    def cell_costs(self, cells: Layout) -> tuple[StageCosts, Array]:
        """Costs with every field at (or below) its least over all legal completions of each cell.

        Step time and memory rise with every field, hence bounds of these costs are bounds of the
        completions. Least: no exposed step traffic that some option hides, smallest beta, fullest
        sharding, optimizer offloaded. Second, the least in-flight count of any stage, (R,).
        """
        ...

    def stage_costs(self, rows: Layout, cell: NDArray[np.int64] | None = None) -> StageCosts:
        """Costs of full rows. `cell` is the index of each row's cell in the table that
        `cell_costs` saw last among all cells (None: unknown), so that terms which depend on the
        cell alone may be gathered instead of computed."""
        ...

    def in_flight(self, rows: Layout, stage: Any) -> Array:
        """Micro-batches in flight on rank `stage`: (R,) for an int or an (R,) array, (R, S) for an
        (1, S) or (R, S) array. Monotone in the stage (least at the first or the last rank)."""
        ...

    def head_stage(self, rows: Layout) -> NDArray[np.int64]:
        """Rank that holds the head: pp - 1, or 0 where the chunks lie in a V; (R,)."""
        ...
