"""The best layout with one field held, for many fields and values at once.

What `best_with` finds value by value: here the values share one table of candidates, its cell
bounds, the rows that several of them want, and the passes over arrays that bound their splits. A
row is worth a look as long as its bound is below the time of the best layout so far of some value
that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.layout import Layout
from planner.results import Array
from planner.search.best_first import TIE, BestFirst, Group, Index, Mask
from planner.search.candidates import Candidates, candidates, expand, rows
from planner.search.found import Found, Solved
from planner.search.provider import CELL_AXES, CostProvider
from planner.search.search import best_with
from planner.search.split import Split, best_split, stage_layouts

Held = tuple[str, int]
FIRST_ROWS = 2_000  # expanded for every value at first, then four times as many each time
MOST_ROWS = 50_000
FIRST_BATCH = 32  # rows of every value whose splits are bounded at first, then twice as many
MOST_BATCH = 4_096
BLOCK = 24  # rows of every value whose bounds are tightened at a time


@dataclass(slots=True)
class Best:
    """The best layout so far of one value."""

    layout: Layout
    group: Group
    split: Split


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows to look at, by their bound: `has` (R, V) says which values a row has."""

    cell: Index
    local: Index
    value: Array
    has: Mask

    def take(self, index: Index | Mask) -> Pool:
        return Pool(self.cell[index], self.local[index], self.value[index], self.has[index])

    def merged(self, other: Pool) -> Pool:
        """Both, in the order of bound, cell, local index."""
        pool = Pool(
            np.concatenate([self.cell, other.cell]),
            np.concatenate([self.local, other.local]),
            np.concatenate([self.value, other.value]),
            np.concatenate([self.has, other.has]),
        )
        return pool.take(np.lexsort((pool.local, pool.cell, pool.value)))


def best_each(provider: CostProvider, held: Sequence[Held]) -> list[Found]:
    """`best_with` of every (field, value), in their order.

    `Found` tells the best layout, and otherwise why there is none; its counts are those of the
    whole space. Values that leave nothing, or that open options which the whole space leaves out,
    are searched by themselves.
    """
    if not held:
        return []
    table = candidates(provider)
    together = [one for one in held if shares_space(table, *one)]
    best = dict(zip(together, Each(provider, table, together).run(), strict=True))
    return [best.get(one) or best_with(provider, dict([one])) for one in held]


def shares_space(table: Candidates, field: str, value: int) -> bool:
    """Whether the layouts of the whole space with that value are those of a space of its own."""
    if field in ("vpp", "dp", *CELL_AXES):
        return True
    # Over one rank nothing is sharded: a ZeRO stage is left out there as long as stage 0 is in.
    alone = bool((np.asarray(table.cells.dp) * table.cells.cp == 1).any())
    return field == "zero" and not (value > 0 and alone)


class Each:
    """State of one search over many values; an axis V runs over them."""

    def __init__(self, provider: CostProvider, table: Candidates, held: Sequence[Held]) -> None:
        self.base = BestFirst(provider, table, 1, 0.0, None)
        self.table, self.held = table, held
        self.best: list[Best | None] = [None] * len(held)
        self.limit_s = np.full(len(held), np.inf)

    def run(self) -> list[Found | None]:
        """The best of every value; None where there is none."""
        if not self.held:
            return []
        bound, _ = self.base.cell_bounds()
        cells = np.argsort(bound, kind="stable")
        cells = cells[np.isfinite(bound[cells])]
        bound = bound[cells]
        sizes = self.table.counts[cells]
        wanted = self.cells_with(cells)  # (C, V), less what is expanded
        none = np.zeros(0, dtype=np.int64)
        pool = Pool(none, none, np.zeros(0), np.zeros((0, len(self.held)), dtype=bool))
        chunk, batch = FIRST_ROWS, FIRST_BATCH
        while True:
            least_cell = first_of(wanted, bound)
            least_row = first_of(pool.has, pool.value)
            open_ = np.minimum(least_cell, least_row) < self.limit_s
            if not open_.any():
                break
            grow = np.flatnonzero(open_ & (least_cell <= least_row))
            if grow.size:
                chosen = np.zeros(cells.size, dtype=bool)
                for v in grow:
                    at = np.flatnonzero(wanted[:, v] & (bound < self.limit_s[v]))
                    enough = 1 + int(np.searchsorted(np.cumsum(sizes[at]), chunk))
                    chosen[at[:enough]] = True
                index = np.flatnonzero(chosen)
                pool = pool.merged(self.expanded(cells[index], open_))
                wanted[index] = False
                chunk = min(4 * chunk, MOST_ROWS)
                least_cell, least_row = first_of(wanted, bound), first_of(pool.has, pool.value)
            # As long as a value has no layout, rows come before more cells.
            ready = least_row < self.limit_s
            ready &= (least_row < least_cell) | np.isinf(self.limit_s)
            chosen = np.zeros(pool.value.size, dtype=bool)
            for v in np.flatnonzero(ready):
                at = np.flatnonzero(pool.has[:, v] & (pool.value < self.limit_s[v]))
                chosen[at[:batch]] = True
            if chosen.any():
                self.solve(pool.take(chosen))
                pool = pool.take(~chosen)
                worth = (pool.has & (pool.value[:, None] < self.limit_s)).any(axis=1)
                pool = pool.take(np.flatnonzero(worth))
                batch = min(2 * batch, MOST_BATCH)
        return [self.found(best) for best in self.best]

    def cells_with(self, cells: Index) -> Mask:
        """Which values the layouts of a cell may have, (C, V)."""
        table = self.table
        options = {
            **{name: (c, table.state_start, table.state_count) for name, c in table.state.items()},
            **{name: (c, table.pipe_start, table.pipe_count) for name, c in table.pipe.items()},
        }
        columns = []
        for field, value in self.held:
            if field in options:
                column, start, count = options[field]
                before = np.concatenate([[0], np.cumsum(column == value)])
                columns.append(before[(start + count)[cells]] > before[start[cells]])
            else:
                columns.append(np.asarray(getattr(table.cells, field))[cells] == value)
        return np.stack(columns, axis=1)

    def values_of(self, layouts: Layout) -> Mask:
        """Which values layouts have, (R, V)."""
        return np.stack([np.asarray(getattr(layouts, f)) == v for f, v in self.held], axis=1)

    def expanded(self, cells: Index, open_: Mask) -> Pool:
        """Rows of cells that have an open value and pass its limit."""
        limit = np.where(open_, self.limit_s, -np.inf)
        cell, local = expand(self.table, cells)
        parts = []
        for start in range(0, cell.size, MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            own_cell, own_local = cell[part], local[part]
            layouts = rows(self.table, own_cell, own_local)
            has = self.values_of(layouts) & open_
            some = np.flatnonzero(has.any(axis=1))
            if some.size < own_cell.size:
                own_cell, own_local, has = own_cell[some], own_local[some], has[some]
                layouts = layouts.take(some)
            bound, fits = self.base.floors(layouts, own_cell)
            most = np.where(has, limit, -np.inf).max(axis=1, initial=-np.inf)
            good = np.flatnonzero(fits & (bound.time_s < most))
            legal = good[self.base.provider.legal(layouts.take(good))] if good.size else good
            parts.append(Pool(own_cell[legal], own_local[legal], bound.time_s[legal], has[legal]))
        pool = parts[0]
        for other in parts[1:]:
            pool = pool.merged(other)
        return pool

    def solve(self, batch: Pool) -> None:
        """Bound the splits of some rows, and split exactly what the bounds leave."""
        groups = self.base.staged(batch.cell, batch.local)
        value = self.bounds(groups, batch, np.arange(batch.value.size), "fractional")
        left = np.argsort(value, kind="stable")
        left = left[np.isfinite(value[left])]
        place = {
            int(i): (g, n) for g, group in enumerate(groups) for n, i in enumerate(group.index)
        }
        # The most promising row of every value first: it moves the limit most.
        for v in range(len(self.held)):
            mine = left[batch.has[left, v]]
            if mine.size and value[mine[0]] < self.limit_s[v]:
                self.split(groups, place[int(mine[0])], batch, int(mine[0]))
                left = left[left != mine[0]]
        size = BLOCK * len(self.held)
        while True:
            left = left[value[left] < self.limits(batch.has[left])]
            if not left.size:
                break
            block, left = left[:size], left[size:]
            tight = self.bounds(groups, batch, block, "integer")
            for i in block[np.argsort(tight[block], kind="stable")]:
                if tight[i] < self.limits(batch.has[i]):
                    self.split(groups, place[int(i)], batch, int(i))

    def limits(self, has: Mask) -> Array:
        """Rows with these values are not worth a look from here on."""
        most: Array = np.where(has, self.limit_s, -np.inf).max(axis=-1)
        return most

    def bounds(self, groups: Sequence[Group], batch: Pool, index: Index, mix: str) -> Array:
        """Bounds of the rows `index` of a batch, inf for the others."""
        result = np.full(batch.value.size, np.inf)
        for group in groups:
            some = np.flatnonzero(np.isin(group.index, index))
            if some.size:
                own = group.take(some) if some.size < group.index.size else group
                limit = self.limits(batch.has[own.index])
                value = self.base.bound_splits(own, limit, mix)
                result[own.index] = np.where(value < limit, value, np.inf)
        return result

    def split(self, groups: Sequence[Group], place: tuple[int, int], batch: Pool, i: int) -> None:
        """Split one row exactly; it may be the best of several values."""
        has = batch.has[i]
        one = groups[place[0]].one(place[1])
        limit = float(self.limits(has))
        split = best_split(one.table, one.splits, self.base.order, one.bound, limit)
        if split is None:
            return
        at = np.array([i])
        layout = rows(self.table, batch.cell[at], batch.local[at]).take(0)
        for v in np.flatnonzero(has & (split.time_s < self.limit_s)):
            self.best[v] = Best(layout, one, split)
            self.limit_s[v] = split.time_s * (1 - TIE)

    def found(self, best: Best | None) -> Found | None:
        """The answer of one value."""
        if best is None:
            return None
        policies = self.base.provider.policies
        stages = stage_layouts(best.group.table, best.split, self.base.order, policies)
        time_s = best.split.time_s
        return Found(
            "optimal", (Solved(best.layout, stages, time_s),), time_s, self.base.counts, 0.0, 0.0
        )


def first_of(has: Mask, value: Array) -> Array:
    """The first value of each column, which are in rising order; inf where it has none, (V,)."""
    if not value.size:
        return np.full(has.shape[1], np.inf)
    at = has.argmax(axis=0)
    return np.where(has[at, np.arange(has.shape[1])], value[at], np.inf)
