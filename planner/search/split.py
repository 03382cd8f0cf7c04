"""The best split of one layout into stages, exactly and without a solver.

At the optimum the slowest stage M and the largest step cost E are values of columns. With caps on
both, what is left is the smallest sum of stages: a shortest path over "layers placed so far". Caps
rise from the smallest possible bottleneck until a bound says that no later one can win:

    for M in column times >= Mmin, for E in column step costs:
        stop if (m - beta) M + beta S_lb + E_lb + C >= best
        S = shortest path over columns with t <= M and e <= E
        best = min(best, T recomputed from the chosen columns)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.layout import RECOMPUTE, StageLayout
from planner.results import Array
from planner.search.bounds import (
    MARGIN,
    RowBound,
    Window,
    largest_stage,
    min_bottleneck,
    stage_columns,
    window,
)
from planner.search.columns import Stages, best_mixes
from planner.search.orders import LayerOrder, Pattern
from planner.search.positions import Positions, position_columns

Index = NDArray[np.int64]
Chosen = tuple[Index, Index, Index]


@dataclass(frozen=True, slots=True)
class Split:
    """A decided split: step time [s] and the layers per kind of every stage, (S, K)."""

    time_s: float
    counts: Index


@dataclass(frozen=True, slots=True)
class Path:
    """Columns of one split problem of one layout.

    `times` and `steps` are (S, X, W): stage s ends with x of `length` units placed, of which it
    placed j (X is 1 where that does not depend on x). `counts` gives the layers of a stage,
    ``counts(s, x, j) -> (K,)``. `slowest` is the smallest possible bottleneck [s].
    """

    times: Array
    steps: Array
    length: int
    slowest: float
    counts: Index  # (S, X, W, K)


def step_time(table: Stages, times: Array, steps: Array) -> float:
    """T of one layout from its stages' times and step costs [s]."""
    costs = table.costs
    m, beta = float(costs.num_microbatches[0]), float(costs.beta[0])
    return float(
        (m - beta) * times.max() + beta * times.sum() + steps.max() + float(costs.constant_s[0])
    )


def best_split(
    table: Stages,
    found: tuple[Pattern, ...] | Positions,
    order: LayerOrder,
    bound: RowBound,
    limit_s: float,
) -> Split | None:
    """Best split of one layout (a table of one row) that is faster than `limit_s`, or None.

    The window of columns is first cut for a limit just above the layout's own bound, then widened:
    a split found below a limit is the best of all, since what the window drops is slower than it.
    """
    start = float(bound.time_s[0])
    for factor in (1.01, 1.06, 1.4, 4.0):
        limit = start * factor
        if limit >= limit_s:
            break
        split = _within(table, found, order, bound, limit)
        if split is not None:
            return split
    return _within(table, found, order, bound, limit_s)


def paths(
    table: Stages,
    found: tuple[Pattern, ...] | Positions,
    order: LayerOrder,
    bound: RowBound,
    limit_s: float,
) -> list[Path]:
    """The split problems of one layout, with the columns that a split below `limit_s` may use."""
    most_s = largest_stage(table.costs, bound, np.array([limit_s]))
    result = []
    for relaxed in _relaxed_paths(table, found, order, most_s):
        # Fractional mixes say which columns are worth an integer mix.
        path = _trim(table, relaxed, bound, limit_s)
        if path is not None:
            path = _trim(table, _exact(table, path, order), bound, limit_s)
        if path is not None:
            path = _raise_bottleneck(path)
        if path is not None:
            result.append(path)
    return sorted(result, key=lambda path: path.slowest)


def _relaxed_paths(
    table: Stages, found: tuple[Pattern, ...] | Positions, order: LayerOrder, most_s: Array
) -> list[Path]:
    if isinstance(found, Positions):
        columns = position_columns(table, found, order, most_s, "fractional")
        slowest = columns.min_bottleneck()
        if not np.isfinite(slowest[0]):
            return []
        times, steps, by_end = columns.by_end()
        return [Path(times[0], steps[0], order.num_layers, float(slowest[0]), by_end)]
    part: Window = window(table, found, most_s, order.main)
    if part.row.size == 0:
        return []
    times, steps, counts = stage_columns(table, found, part, order.main, most_s, "fractional")
    totals = np.array([found[p].total for p in part.pattern])
    bottleneck = min_bottleneck(times, part.lo, totals)
    result = []
    for i in np.flatnonzero(np.isfinite(bottleneck)):
        width = int((part.hi[i] - part.lo[i]).max()) + 1
        result.append(
            Path(
                times[i, :, None, :width],
                steps[i, :, None, :width],
                int(totals[i] - part.lo[i].sum()),
                float(bottleneck[i]),
                counts[i, :, None, :width],
            )
        )
    return result


def _exact(table: Stages, path: Path, order: LayerOrder) -> Path:
    """The same columns with integer mixes."""
    at = np.nonzero(np.isfinite(path.times))
    entries = np.concatenate([at[0][:, None], path.counts[at]], axis=1)
    distinct, index = np.unique(entries, axis=0, return_inverse=True)
    value, _, _ = best_mixes(
        table,
        np.zeros(len(distinct), dtype=np.int64),
        distinct[:, 0],
        distinct[:, 1:],
        order.main,
    )
    times = np.full(path.times.shape, np.inf)
    times[at] = value[index.reshape(-1)]
    return replace(path, times=times)


def _raise_bottleneck(path: Path) -> Path | None:
    """The smallest cap on times under which a split exists, by bisection; None: no split."""
    caps = _distinct(path.times[np.isfinite(path.times)])
    # The relaxed bottleneck bounds it from below, up to rounding.
    low, high = int(np.searchsorted(caps, path.slowest * (1 - MARGIN))), caps.size
    while low < high:
        middle = (low + high) // 2
        if _shortest(path, float(caps[middle]), np.inf) is None:
            low = middle + 1
        else:
            high = middle
    return None if low == caps.size else replace(path, slowest=float(caps[low]))


def _distinct(values: Array) -> Array:
    """Distinct values in rising order. np.unique would import numpy.ma, which takes longer."""
    ordered = np.sort(values)
    return ordered[np.concatenate([[True], ordered[1:] > ordered[:-1]])] if values.size else values


def _trim(table: Stages, path: Path, bound: RowBound, limit_s: float) -> Path | None:
    """Drop columns that no split below `limit_s` uses: the least sum through each is known from
    the shortest paths to it and from it, and M is at least its own time. None: nothing is left."""
    costs = table.costs
    m, beta = float(costs.num_microbatches[0]), float(costs.beta[0])
    steps = np.where(np.isfinite(path.times), path.steps, np.inf)
    least_step = max(float(bound.step_s[0]), float(steps.min(axis=(1, 2)).max()))
    fixed = least_step + float(costs.constant_s[0])
    num_stages, ends, width = path.times.shape
    size = path.length + 1
    # before[s]: least sum with x placed by stages 0 .. s - 1, padded on the left.
    before = np.full((num_stages + 1, width - 1 + size), np.inf)
    before[0, width - 1] = 0.0
    source = _sources(size, width)
    for s in range(num_stages):
        before[s + 1, width - 1 :] = (before[s][source] + path.times[s]).min(axis=1)
    # after[s]: least sum of stages s .. from x placed on, padded on the right.
    after = np.full((num_stages + 1, size + width - 1), np.inf)
    after[-1, size - 1] = 0.0
    lane = np.arange(size)[:, None] + np.arange(width)  # where a column from x ends
    end = np.minimum(lane, size - 1)
    length = np.arange(width)
    for s in range(num_stages - 1, -1, -1):
        times = path.times[s] if ends == 1 else path.times[s][end, length]
        after[s, :size] = (after[s + 1][lane] + times).min(axis=1)
    through = before[:-1, source] + path.times + after[1:, :size, None]
    if ends == 1:
        through = through.min(axis=1, keepdims=True)
    keep = np.isfinite(through)
    sums = np.maximum(np.where(keep, through, 0.0), float(bound.sum_s[0]))
    slowest = np.maximum(np.where(keep, path.times, 0.0), path.slowest)
    keep &= ((m - beta) * slowest + beta * sums + fixed) * (1 - MARGIN) < limit_s
    if not keep.any(axis=(1, 2)).all():
        return None
    return replace(path, times=np.where(keep, path.times, np.inf))


def _within(
    table: Stages,
    found: tuple[Pattern, ...] | Positions,
    order: LayerOrder,
    bound: RowBound,
    limit_s: float,
) -> Split | None:
    best: Split | None = None
    for path in paths(table, found, order, bound, limit_s):
        split = _solve(table, path, bound, best.time_s if best else limit_s)
        if split is not None:
            best = split
    return best


def _solve(table: Stages, path: Path, bound: RowBound, limit_s: float) -> Split | None:
    costs = table.costs
    m, beta = float(costs.num_microbatches[0]), float(costs.beta[0])
    constant = float(costs.constant_s[0])
    finite = np.isfinite(path.times)
    steps = np.where(finite, path.steps, np.inf)
    least_step = max(float(bound.step_s[0]), float(steps.min(axis=(1, 2)).max()))
    caps = _distinct(path.times[finite & (path.times >= path.slowest)])
    step_caps = _distinct(steps[finite])
    free = _shortest(path, np.inf, np.inf)
    if free is None:
        return None
    sum_s = max(float(bound.sum_s[0]), float(path.times[free].sum()) * (1 - 1e-12))
    best: Split | None = None
    best_s = limit_s
    for cap in caps:
        if (m - beta) * cap + beta * sum_s + constant + least_step >= best_s:
            break
        # Without a cap on step costs first: the least sum under this cap on times.
        chosen = _shortest(path, float(cap), np.inf)
        if chosen is None:
            continue
        at_least = (
            (m - beta) * cap + beta * float(path.times[chosen].sum()) * (1 - 1e-12) + constant
        )
        step_cap = float(path.steps[chosen].max())
        others = step_caps[step_caps < step_cap]
        for step_cap in (np.inf, *others):
            if step_cap < np.inf:
                if at_least + max(step_cap, least_step) >= best_s:
                    break
                chosen = _shortest(path, float(cap), float(step_cap))
                if chosen is None:
                    continue
            value = step_time(table, path.times[chosen], path.steps[chosen])
            if value < best_s:
                best_s, best = value, Split(value, path.counts[chosen])
    return best


@lru_cache(maxsize=64)
def _sources(size: int, width: int) -> Index:
    """Where x - j lies in a row of sums that is padded by width - 1 on the left, (size, width)."""
    return width - 1 + np.arange(size)[:, None] - np.arange(width)


def _shortest(path: Path, cap: float, step_cap: float) -> Chosen | None:
    """Columns (s, x, j) of the smallest sum under both caps."""
    num_stages, ends, width = path.times.shape
    times = np.where((path.times <= cap) & (path.steps <= step_cap), path.times, np.inf)
    best = np.full(path.length + 1, np.inf)
    best[0] = 0.0
    back = np.zeros((num_stages, path.length + 1), dtype=np.int64)
    padded = np.full(path.length + width, np.inf)
    lane = np.arange(path.length + 1)
    source = _sources(path.length + 1, width)
    for s in range(num_stages):
        padded[width - 1 :] = best
        # reach[x, j]: least sum with x - j placed before this stage.
        reach = padded[source] + times[s]
        back[s] = reach.argmin(axis=1)
        best = reach[lane, back[s]]
    if not np.isfinite(best[path.length]):
        return None
    end = np.zeros(num_stages, dtype=np.int64)
    taken = np.zeros(num_stages, dtype=np.int64)
    x = path.length
    for s in range(num_stages - 1, -1, -1):
        taken[s] = back[s, x]
        end[s] = x if ends > 1 else 0
        x -= taken[s]
    return np.arange(num_stages), end, taken


def stage_layouts(
    table: Stages, split: Split, order: LayerOrder, policies: tuple[str, ...]
) -> tuple[StageLayout, ...]:
    """Layers per kind and policy of every stage of a decided split."""
    num_stages, num_kinds = split.counts.shape
    _, mix, other = best_mixes(
        table,
        np.zeros(num_stages, dtype=np.int64),
        np.arange(num_stages),
        split.counts,
        order.main,
    )
    column = [RECOMPUTE.index(name) for name in policies]
    result = []
    for s in range(num_stages):
        by_kind = []
        for k in range(num_kinds):
            numbers = [0] * len(RECOMPUTE)
            if k == order.main:
                for p, code in enumerate(column):
                    numbers[code] = int(mix[s, p])
            else:
                numbers[column[int(other[s])]] = int(split.counts[s, k])
            by_kind.append(tuple(numbers))
        result.append(StageLayout(tuple(int(n) for n in split.counts[s]), tuple(by_kind)))
    return tuple(result)


__all__ = ["MARGIN", "Path", "Split", "best_split", "paths", "stage_layouts", "step_time"]
