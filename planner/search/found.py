"""What a search answers: layouts, counts, proof. No algorithm lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.layout import Layout, StageLayout
from planner.search.nearest import Nearest


@dataclass(frozen=True, slots=True)
class Solved:
    """One layout with its best split: step time [s] and what each rank holds."""

    layout: Layout
    stages: tuple[StageLayout, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """How the space was dealt with, in layouts.

    `enumerated` before legality, `legal` after; `fits` the legal ones seen whose memory floor is
    within capacity (of those built); `excluded_by_bound` legal ones that a bound showed to be
    slower than the answer (or not to fit) without splitting them; `solved` split exactly. `built`
    were expanded to rows, `bounded` had their stages looked at. legal = excluded_by_bound + solved.
    """

    enumerated: int = 0
    legal: int = 0
    built: int = 0
    fits: int = 0
    bounded: int = 0
    excluded_by_bound: int = 0
    solved: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a search.

    `status` is ``optimal`` (proven to 1e-7 relative), ``feasible`` (stopped by the time limit:
    nothing is faster than `bound_s`) or ``infeasible`` (`nearest` says what misses least; None
    where no layout is legal). `near` holds the best layouts within the asked distance, best first,
    which is the answer. `gap` is ``1 - bound_s / best.time_s``. `layouts_per_second` is measured:
    rows built, costed and bounded on one core. `milp` reports the mixed integer program.
    """

    status: str
    near: tuple[Solved, ...]
    bound_s: float
    counts: Counts
    wall_s: float
    layouts_per_second: float
    nearest: Nearest | None = None
    milp: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Solved | None:
        return self.near[0] if self.near else None

    @property
    def gap(self) -> float:
        return 0.0 if not self.near else max(0.0, 1.0 - self.bound_s / self.near[0].time_s)
