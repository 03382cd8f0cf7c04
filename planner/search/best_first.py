"""Best-first over layouts, from cheap bounds to exact splits.

What is expanded, bounded or split next is what has the least bound, and what a bound keeps at or
above the limit is never touched. The limit follows from the layouts kept so far: the best few
within a distance of the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.layout import Layout
from planner.results import Array, StageCosts
from planner.search.bounds import RowBound, host_share, largest_stage, row_bound, split_bound
from planner.search.candidates import Candidates, expand, rows
from planner.search.columns import SLACK, Stages, stages
from planner.search.found import Counts, Solved
from planner.search.orders import LayerOrder, Pattern, layer_order, patterns
from planner.search.positions import Positions, position_columns, positions
from planner.search.provider import CostProvider
from planner.search.split import Split, best_split, stage_layouts

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
TIE = 1e-9  # relative; times closer than this are the same
CHUNK = 50_000  # rows expanded at a time: they stay in cache
FIRST_CHUNK = 8_000
BATCHES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
SPLITS = 1  # exact splits of a batch before its other bounds are tightened
SIMPLEST = (
    "pp", "cp", "ep", "etp", "tp", "vpp", "offload", "zero", "schedule", "cp_kind", "shard",
    "micro_batch",
)  # fmt: skip


@dataclass(slots=True)
class Kept:
    cell: int
    local: int
    split: Split
    layout: Layout


class BestFirst:
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
        self.kept: list[Kept] = []
        self.counts = Counts(enumerated=table.enumerated, legal=table.num_legal)
        self.deadline: float | None = None
        self.first_only = False  # stop at the first layout that fits
        self._row_s = 0.0

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

    def floors(self, layouts: Layout, cell: Index) -> tuple[RowBound, Mask]:
        """Bound of rows, and whether their memory floors are within capacity."""
        costs, bound = self._costs(layouts, cell)
        fits = bound.floor_bytes <= costs.capacity_bytes * (1 + 2 * SLACK)
        if costs.host is not None:
            share = host_share(costs, self.order, np.asarray(layouts.pp))
            fits &= share <= 1 + 2 * SLACK
        return bound, fits

    def expand_rows(self, cells: Index, limit: float) -> tuple[Index, Index, Array]:
        """Rows of cells that pass the row bound: cell, local index, bound [s]."""
        begin = time.perf_counter()
        cell, local = expand(self.table, cells)
        parts = []
        for start in range(0, cell.size, CHUNK):
            part = slice(start, start + CHUNK)
            layouts = rows(self.table, cell[part], local[part])
            bound, fits = self.floors(layouts, cell[part])
            legal = np.ones(fits.shape, dtype=bool)
            if self.table.refused:  # some rows are not legal: they are not to be counted
                legal = self.provider.legal(layouts)
            good = np.flatnonzero(fits & legal & (bound.time_s < limit))
            self._tally(built=int(legal.sum()), fits=int((fits & legal).sum()))
            parts.append((cell[part][good], local[part][good], bound.time_s[good]))
        self._row_s += time.perf_counter() - begin
        cell, local, value = (np.concatenate(column) for column in zip(*parts, strict=True))
        legal = self.provider.legal(rows(self.table, cell, local)) if cell.size else cell > 0
        return cell[legal], local[legal], value[legal]

    def staged(self, cell: Index, local: Index) -> list[Group]:
        """Rows in groups of one pp, vpp and placement, with their stages told apart."""
        layouts = rows(self.table, cell, local)
        costs, bound = self._costs(layouts, cell)
        pp, vpp = np.asarray(layouts.pp), np.asarray(layouts.vpp)
        head = self.provider.head_stage(layouts)
        # Chunks and their V only change which patterns a row has, except for mixed orders.
        shape = vpp * 2 + ((head == 0) & (pp > 1))
        key = pp * (int(shape.max()) + 1) + shape if self.order.form == "any" else pp
        groups = []
        for value in sorted(set(key.tolist())):
            index = np.flatnonzero(key == value)
            num_stages = int(pp[index[0]])
            own = layouts.take(index)
            in_flight = self.provider.in_flight(own, np.arange(num_stages)[None, :])
            in_flight = np.broadcast_to(in_flight, (index.size, num_stages)).astype(float)
            table = stages(costs.take(index), in_flight, head[index])
            splits, allowed = self._splits(num_stages, shape[index])
            groups.append(Group(index, table, bound.take(index), splits, allowed))
        return groups

    def _splits(
        self, num_stages: int, shape: Index
    ) -> tuple[tuple[Pattern, ...] | Positions, Mask]:
        """The patterns of all rows of a group, and which each row has (its `shape`)."""
        if self.order.form == "any" and shape[0] < 4:
            return self.positions, np.zeros((shape.size, 0), dtype=bool)
        found: list[Pattern] = []
        owner: list[int] = []
        for value in sorted(set(shape.tolist())):
            own = patterns(self.order, num_stages, value // 2, bool(value % 2))
            found += own
            owner += [value] * len(own)
        return tuple(found), shape[:, None] == np.array(owner, dtype=np.int64)

    def bound_splits(self, group: Group, limit: float | Array, mix: str) -> Array:
        """Bound of every row of a group [s]; inf where no split is below `limit`."""
        table, bound, splits = group.table, group.bound, group.splits
        if not isinstance(splits, Positions):
            return split_bound(table, splits, self.order, bound, limit, mix, group.allowed)
        return _position_bound(table, splits, self.order, bound, limit, mix)

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
            if not least < limit or (self.first_only and self.kept):
                break
            if self.deadline is not None and time.perf_counter() > self.deadline:
                return float(least)
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
        self, groups: list[Group], entry: tuple[float, int, int, int], cell: Index, local: Index
    ) -> None:
        value, position, g, i = entry
        limit = self.limit_s()
        if not value < limit:
            return
        self._tally(solved=1)
        one = groups[g].one(i)
        split = best_split(one.table, one.splits, self.order, one.bound, limit)
        if split is None:
            return
        at = np.array([position])
        layout = rows(self.table, cell[at], local[at]).take(0)
        self.kept.append(Kept(int(cell[position]), int(local[position]), split, layout))
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
        best: list[Kept] = []
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

    def _group_of(self, kept: Kept) -> Group:
        return self.staged(np.array([kept.cell]), np.array([kept.local]))[0]

    def problems(
        self,
    ) -> list[tuple[Stages, tuple[Pattern, ...] | Positions, LayerOrder, RowBound]]:
        """The split problems of the kept layouts, for the mixed integer program."""
        groups = [self._group_of(kept) for kept in self.kept]
        return [(g.table, g.splits, self.order, g.bound) for g in groups]


@dataclass(frozen=True, slots=True)
class Group:
    index: Index  # position of each row in its batch
    table: Stages
    bound: RowBound
    splits: tuple[Pattern, ...] | Positions
    allowed: Mask  # (N, P) which patterns a row has

    def take(self, index: Index) -> Group:
        return Group(
            self.index[index],
            self.table.take(index),
            self.bound.take(index),
            self.splits,
            self.allowed[index],
        )

    def one(self, i: int) -> Group:
        """Row i alone, with the patterns that it has."""
        group = self.take(np.array([i]))
        if isinstance(self.splits, Positions):
            return group
        own = np.flatnonzero(self.allowed[i])
        return replace(
            group, splits=tuple(self.splits[p] for p in own), allowed=group.allowed[:, own]
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
    limit_s: float | Array,
    mix: str,
) -> Array:
    total = table.in_flight.shape[0]
    result = np.full(total, np.inf)
    num_stages = table.in_flight.shape[1]
    if order.num_layers < num_stages:
        return result
    size = max(1, 1_000_000 // (num_stages * order.num_layers * 32))
    for start in range(0, total, size):
        index = np.arange(start, min(start + size, total))
        part, own = table.take(index), bound.take(index)
        most_s = largest_stage(part.costs, own, np.broadcast_to(limit_s, (total,))[index])
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
    raised: Array = np.maximum(result, bound.time_s)
    return raised
