"""The exact search: the best layout of a space, with the proof that there is no better one.

Best-first over four bounds, from cheap to dear: cell (coarse axes), row (no stages), stages with
fractional recompute mixes, stages with integer mixes. What is expanded, bounded or split next is what
has the least bound; what a bound keeps above the incumbent is never touched. The last word has a mixed
integer program over the best few layouts (`planner.search.ilp`), which must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.layout import Layout, StageLayout
from planner.results import Array, StageCosts
from planner.search.bounds import RowBound, row_bound, split_bound
from planner.search.candidates import Candidates, candidates, expand, restrict, rows
from planner.search.columns import SLACK, Stages, stages
from planner.search.nearest import Nearest, nearest_row
from planner.search.orders import LayerOrder, Pattern, layer_order, patterns
from planner.search.positions import Positions, position_columns, positions
from planner.search.provider import CostProvider
from planner.search.split import Split, best_split, stage_layouts

Index = NDArray[np.int64]
TIE = 1e-9  # relative; times closer than this are the same
CHUNK = 50_000  # rows expanded at a time: they stay in cache
FIRST_CHUNK = 8_000
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SPLITS = 6  # exact splits of a batch before its other bounds are tightened
SIMPLEST = (
    "pp", "cp", "ep", "etp", "tp", "vpp", "offload", "zero", "schedule", "cp_kind", "shard",
    "micro_batch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Solved:
    """One layout with its best split: step time [s] and what each rank holds."""

    layout: Layout
    stages: tuple[StageLayout, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """How the space was dealt with, in layouts.

    `enumerated` before legality, `legal` after; `fits` the legal ones seen whose memory floor is within
    capacity (of those built); `excluded_by_bound` legal ones that a bound showed to be slower than
    the answer (or not to fit) without splitting them; `solved` split exactly. `built` were expanded to
    rows, `bounded` had their stages looked at. legal = excluded_by_bound + solved.
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

    `status` is ``optimal`` (proven within `TIE`), ``feasible`` (stopped by the time limit: nothing is
    faster than `bound_s`) or ``infeasible`` (`nearest` says what misses least). `near` holds the
    best layouts within the asked distance, the best first, which is the answer. `gap` is
    ``1 - bound_s / best.time_s``. Rates are measured: layouts costed and bounded per second, one core.
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


def search(
    provider: CostProvider,
    *,
    keep: int = 10,
    near: float = 0.005,
    fixed: Mapping[str, Any] | None = None,
    milp: bool = True,
    time_limit_s: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Found:
    """Find the best layout of the provider's space, and the best `keep` within `near` of it.

    Parameters
    ----------
    provider
        The cost model.
    keep, near
        How many layouts to return, and how much slower than the best they may be (relative).
    fixed
        Fields of the layout held at a value (or a tuple of values).
    milp
        Whether the mixed integer program confirms the answer.
    time_limit_s
        Stop then with what there is; None: never.
    progress
        Called with (what, done, all), layouts.

    Raises
    ------
    LayoutError
        `fixed` names no axis, or a value that the space does not have.
    """
    started = time.perf_counter()
    space = provider.space()
    table = candidates(provider, restrict(space, fixed) if fixed else space)
    run = _Run(provider, table, keep, near, progress)
    run.deadline = None if time_limit_s is None else started + time_limit_s
    bound_s = run.best_first()
    counts = run.final_counts()
    if not run.kept:
        status = "infeasible" if np.isinf(bound_s) else "feasible"
        missing = nearest_row(provider, table, run.order) if status == "infeasible" else None
        return Found(
            status, (), bound_s, counts, time.perf_counter() - started, run.rate(), missing
        )
    answer = run.ranked()
    best_s = answer[0].time_s
    bound_s = min(bound_s, best_s)
    report: Mapping[str, Any] = {}
    if milp:
        from planner.search.ilp import confirm

        report = confirm(run.problems(), best_s)
        bound_s = min(bound_s, report["bound_s"])
    status = "optimal" if bound_s >= best_s * (1 - 1e-7) else "feasible"
    return Found(
        status,
        answer,
        bound_s,
        counts,
        time.perf_counter() - started,
        run.rate(),
        milp=report,
    )


def best_with(provider: CostProvider, fixed: Mapping[str, Any]) -> Found:
    """The best layout with some fields fixed: a search for one answer, for "why not"."""
    return search(provider, keep=1, near=0.0, fixed=fixed, milp=False)


def neighbours(provider: CostProvider, best: Layout, fields_: tuple[str, ...]) -> dict[str, Any]:
    """For each field the best layouts with its next lower and next higher value in the space.

    Returns ``{field: {value: Found}}``; a value with no legal layout has ``counts.legal == 0``.
    """
    space = provider.space()
    found: dict[str, Any] = {}
    for name in fields_:
        values = sorted(set(space.values.get(name, ())))
        if name == "dp":
            values = [d for d in range(1, space.num_gpus + 1) if space.num_gpus % d == 0]
        own = int(getattr(best, name))
        lower = [v for v in values if v < own][-1:]
        higher = [v for v in values if v > own][:1]
        found[name] = {v: best_with(provider, {name: v}) for v in (*lower, *higher)}
    return found


@dataclass(slots=True)
class _Kept:
    cell: int
    local: int
    split: Split
    layout: Layout


class _Run:
    """State of one search; methods are its steps."""

    def __init__(
        self,
        provider: CostProvider,
        table: Candidates,
        keep: int,
        near: float,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.provider = provider
        self.table = table
        self.keep = max(1, keep)
        self.near = near
        self.progress = progress
        self.order: LayerOrder = layer_order(provider.layer_kinds, provider.num_kinds)
        self.positions = positions(self.order)
        self.kept: list[_Kept] = []
        self.counts = Counts(enumerated=table.enumerated, legal=table.num_legal)
        self.deadline: float | None = None
        self._row_s = 0.0
        self._dropped = np.inf  # least bound of what was dropped for time

    # -- limits ---------------------------------------------------------------------------------

    def limit_s(self) -> float:
        """Nothing at or above this needs a look: too slow to be kept."""
        if not self.kept:
            return np.inf
        times = sorted(k.split.time_s for k in self.kept)
        limit = times[0] * (1 + self.near)
        if len(times) >= self.keep:
            limit = min(limit, times[self.keep - 1])
        return float(max(limit * (1 - TIE), times[0] * (1 - TIE)))

    def _tally(self, **more: int) -> None:
        self.counts = replace(
            self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()}
        )

    def rate(self) -> float:
        return self.counts.built / self._row_s if self._row_s else 0.0

    def final_counts(self) -> Counts:
        return replace(self.counts, excluded_by_bound=self.counts.legal - self.counts.solved)

    # -- bounds, from cheap to dear ---------------------------------------------------------------

    def cell_bounds(self) -> tuple[Array, Array]:
        """Bound [s] of every cell, inf where the memory floor is above capacity."""
        if self.table.num_cells == 0:
            return np.zeros(0), np.zeros(0)
        costs, in_flight = self.provider.cell_costs(self.table.cells)
        pp = np.asarray(self.table.cells.pp)
        bound = row_bound(costs, self.order, pp, np.ones_like(pp), in_flight)
        fits = bound.floor_bytes <= costs.capacity_bytes * (1 + 2 * SLACK)
        return np.where(fits, bound.time_s, np.inf), bound.floor_bytes

    def _costs(self, layouts: Layout, cell: Index) -> tuple[StageCosts, RowBound]:
        costs = self.provider.stage_costs(layouts, cell)
        pp = np.asarray(layouts.pp)
        in_flight = np.minimum(
            self.provider.in_flight(layouts, 0), self.provider.in_flight(layouts, pp - 1)
        )
        return costs, row_bound(costs, self.order, pp, np.asarray(layouts.vpp), in_flight)

    def expand_rows(self, cells: Index, limit: float) -> tuple[Index, Index, Array]:
        """Rows of cells that pass the row bound: cell, local index, bound [s]."""
        begin = time.perf_counter()
        cell, local = expand(self.table, cells)
        parts = []
        for start in range(0, cell.size, CHUNK):
            part = slice(start, start + CHUNK)
            layouts = rows(self.table, cell[part], local[part])
            costs, bound = self._costs(layouts, cell[part])
            fits = bound.floor_bytes <= costs.capacity_bytes * (1 + 2 * SLACK)
            good = np.flatnonzero(fits & (bound.time_s < limit))
            self._tally(built=int(fits.size), fits=int(fits.sum()))
            parts.append((cell[part][good], local[part][good], bound.time_s[good]))
        self._row_s += time.perf_counter() - begin
        cell, local, value = (np.concatenate(column) for column in zip(*parts, strict=True))
        legal = self.provider.legal(rows(self.table, cell, local)) if cell.size else cell > 0
        return cell[legal], local[legal], value[legal]

    def staged(self, cell: Index, local: Index) -> list[_Group]:
        """Rows in groups of one pp, vpp and placement, with their stages told apart."""
        layouts = rows(self.table, cell, local)
        costs, bound = self._costs(layouts, cell)
        pp, vpp = np.asarray(layouts.pp), np.asarray(layouts.vpp)
        head = self.provider.head_stage(layouts)
        v_shape = (head == 0) & (pp > 1)
        key = (pp * (int(vpp.max()) + 1) + vpp) * 2 + v_shape
        groups = []
        for value in np.unique(key):
            index = np.flatnonzero(key == value)
            first = index[0]
            num_stages = int(pp[first])
            own = layouts.take(index)
            in_flight = self.provider.in_flight(own, np.arange(num_stages)[None, :])
            in_flight = np.broadcast_to(in_flight, (index.size, num_stages)).astype(float)
            table = stages(costs.take(index), in_flight, head[index])
            splits: tuple[Pattern, ...] | Positions
            if self.order.form == "any" and vpp[first] == 1:
                splits = self.positions
            else:
                splits = patterns(self.order, num_stages, int(vpp[first]), bool(v_shape[first]))
            groups.append(_Group(index, table, bound.take(index), splits))
        return groups

    def bound_splits(self, group: _Group, limit: float, mix: str) -> Array:
        """Bound of every row of a group [s]; inf where no split is below `limit`."""
        if not isinstance(group.splits, Positions):
            return split_bound(group.table, group.splits, self.order, group.bound, limit, mix)
        return _position_bound(group.table, group.splits, self.order, group.bound, limit, mix)

    # -- the search -------------------------------------------------------------------------------

    def best_first(self) -> float:
        """Run to the proof; the lower bound on all that was not solved [s]."""
        bound, _ = self.cell_bounds()
        cells = np.argsort(bound, kind="stable")
        cells = cells[np.isfinite(bound[cells])]
        bound = bound[cells]
        sizes = self.table.counts[cells]
        at, chunk = 0, FIRST_CHUNK
        pool = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
        batch = 0
        while True:
            limit = self.limit_s()
            least_cell = bound[at] if at < cells.size else np.inf
            least_row = pool[2][0] if pool[2].size else np.inf
            least = min(least_cell, least_row)
            if not least < limit:
                break
            if self.deadline is not None and time.perf_counter() > self.deadline:
                return float(min(least, self._dropped))
            if least_cell <= least_row:
                end = at + max(1, int(np.searchsorted(np.cumsum(sizes[at:]), chunk)))
                end = min(end, max(at + 1, int(np.searchsorted(bound, limit))))
                new = self.expand_rows(cells[at:end], limit)
                at, chunk = end, CHUNK
                pool = _merge(pool, new, limit)
                if self.progress:
                    self.progress("built", self.counts.built, self.counts.legal)
                if self.kept:
                    continue
            size = BATCHES[min(batch, len(BATCHES) - 1)]
            take = min(size, int(np.searchsorted(pool[2], limit)))
            if take:
                self.solve_batch(pool[0][:take], pool[1][:take])
                pool = (pool[0][take:], pool[1][take:], pool[2][take:])
                batch += 1
                if self.progress:
                    self.progress("bounded", self.counts.bounded, self.counts.legal)
        best = min((k.split.time_s for k in self.kept), default=np.inf)
        return float(best)

    def solve_batch(self, cell: Index, local: Index) -> None:
        """Bound the splits of some rows, and split exactly what the bounds leave."""
        groups = self.staged(cell, local)
        self._tally(bounded=int(cell.size))
        left: list[tuple[float, int, int, int]] = []  # bound, position in batch, group, index
        limit = self.limit_s()
        for g, group in enumerate(groups):
            value = self.bound_splits(group, limit, "fractional")
            left += [
                (float(value[i]), int(group.index[i]), g, int(i))
                for i in np.flatnonzero(value < limit)
            ]
        left.sort()
        for entry in left[:SPLITS]:
            self._split(groups, entry, cell, local)
        left = left[SPLITS:]
        for start in range(0, len(left), 24):
            limit = self.limit_s()
            block = [e for e in left[start : start + 24] if e[0] < limit]
            tight = []
            for g in sorted({e[2] for e in block}):
                mine = [e for e in block if e[2] == g]
                index = np.array([e[3] for e in mine])
                value = self.bound_splits(groups[g].take(index), limit, "integer")
                tight += [(float(v), *e[1:]) for v, e in zip(value, mine, strict=True)]
            for entry in sorted(tight):
                self._split(groups, entry, cell, local)

    def _split(
        self, groups: list[_Group], entry: tuple[float, int, int, int], cell: Index, local: Index
    ) -> None:
        value, position, g, i = entry
        limit = self.limit_s()
        if not value < limit:
            return
        self._tally(solved=1)
        one = groups[g].take(np.array([i]))
        split = best_split(one.table, one.splits, self.order, one.bound, limit)
        if split is None:
            return
        at = np.array([position])
        layout = rows(self.table, cell[at], local[at]).take(0)
        self.kept.append(_Kept(int(cell[position]), int(local[position]), split, layout))
        self._trim()

    def _trim(self) -> None:
        """Forget what is no longer near."""
        self.kept.sort(key=lambda k: (k.split.time_s, _simplicity(k.layout)))
        best = self.kept[0].split.time_s
        self.kept = [k for k in self.kept[: self.keep] if k.split.time_s <= best * (1 + self.near)]

    # -- the answer -------------------------------------------------------------------------------

    def ranked(self) -> tuple[Solved, ...]:
        """Kept layouts, fastest first; equal times in the order of simplicity."""
        ordered = sorted(self.kept, key=lambda k: k.split.time_s)
        best: list[_Kept] = []
        while ordered:
            limit = ordered[0].split.time_s * (1 + TIE)
            same = [k for k in ordered if k.split.time_s <= limit]
            best += sorted(same, key=lambda k: _simplicity(k.layout))
            ordered = ordered[len(same) :]
        self.kept = best
        answer = []
        for kept in best:
            group = self._group_of(kept)
            answer.append(
                Solved(
                    kept.layout,
                    stage_layouts(group.table, kept.split, self.order, self.provider.policies),
                    kept.split.time_s,
                )
            )
        return tuple(answer)

    def _group_of(self, kept: _Kept) -> _Group:
        return self.staged(np.array([kept.cell]), np.array([kept.local]))[0]

    def problems(
        self,
    ) -> list[tuple[Stages, tuple[Pattern, ...] | Positions, LayerOrder, RowBound]]:
        """The split problems of the kept layouts, for the mixed integer program."""
        groups = [self._group_of(kept) for kept in self.kept]
        return [(g.table, g.splits, self.order, g.bound) for g in groups]


@dataclass(frozen=True, slots=True)
class _Group:
    index: Index  # position of each row in its batch
    table: Stages
    bound: RowBound
    splits: tuple[Pattern, ...] | Positions

    def take(self, index: Index) -> _Group:
        return _Group(
            self.index[index], self.table.take(index), self.bound.take(index), self.splits
        )


def _simplicity(layout: Layout) -> tuple[int, ...]:
    return tuple(int(getattr(layout, name)) for name in SIMPLEST)


def _merge(
    pool: tuple[Index, Index, Array], new: tuple[Index, Index, Array], limit: float
) -> tuple[Index, Index, Array]:
    """Join rows, in the order of bound, cell, local index."""
    kept = pool[2] < limit
    cell = np.concatenate([pool[0][kept], new[0]])
    local = np.concatenate([pool[1][kept], new[1]])
    value = np.concatenate([pool[2][kept], new[2]])
    order = np.lexsort((local, cell, value))
    return cell[order], local[order], value[order]


def _position_bound(
    table: Stages,
    found: Positions,
    order: LayerOrder,
    bound: RowBound,
    limit_s: float,
    mix: str,
) -> Array:
    from planner.search.bounds import largest_stage

    total = table.in_flight.shape[0]
    result = np.full(total, np.inf)
    num_stages = table.in_flight.shape[1]
    if order.num_layers < num_stages:
        return result
    size = max(1, 1_000_000 // (num_stages * order.num_layers * 32))
    for start in range(0, total, size):
        index = np.arange(start, min(start + size, total))
        part, own = table.take(index), bound.take(index)
        most_s = largest_stage(part.costs, own, np.full(index.size, limit_s))
        columns = position_columns(part, found, order, most_s, mix)
        slowest = columns.min_bottleneck()
        sum_s = np.maximum(columns.min_sum() * (1 - 1e-12), own.sum_s)
        possible = np.flatnonzero(np.isfinite(slowest) & np.isfinite(sum_s))
        costs = part.costs.take(possible)
        value = (
            (costs.num_microbatches - costs.beta) * slowest[possible]
            + costs.beta * sum_s[possible]
            + own.step_s[possible]
            + costs.constant_s
        )
        result[index[possible]] = value
    return np.maximum(result, bound.time_s)
