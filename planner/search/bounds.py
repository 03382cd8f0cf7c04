"""Lower bounds on the step time of layouts whose stage split is not decided.

    T = (m - beta) M + beta S + E + C      M = max t_s,  S = sum t_s,  E = max e_s

T rises with M, S and E (S >= M), so that lower bounds on the three give one on T. `row_bound`
looks at a row without its stages; `split_bound` at its stages with fractional or integer recompute
mixes. Each holds for every split and mix: nothing that is dropped by it can be better.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.results import Array, StageCosts
from planner.search.columns import Stages, exact_times, least, mix_lines, relaxed_times
from planner.search.orders import LayerOrder, Pattern

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
BLOCK = 300_000  # (problem, stage, q) entries of one pass
MARGIN = 1e-9  # relative; windows are cut this much later than their bound says


@dataclass(frozen=True, slots=True)
class RowBound:
    """Bounds that need no stage axis, (R,): step time, sum of stages, exposed step cost [s], and
    the least bytes that the fullest rank must hold."""

    time_s: Array
    sum_s: Array
    step_s: Array
    floor_bytes: Array

    def take(self, index: Index) -> RowBound:
        return RowBound(
            self.time_s[index], self.sum_s[index], self.step_s[index], self.floor_bytes[index]
        )


def row_bound(
    costs: StageCosts, order: LayerOrder, pp: Array, vpp: Array, in_flight: Array
) -> RowBound:
    """Bounds of rows by averages and by the pigeonhole principle.

    Some rank holds at least ``ceil(n_k / pp)`` layers of kind k, and M >= S / pp. Every rank holds
    at least vpp layers. `in_flight` is the least of any rank.
    """
    layer_s, act, working = least(costs)
    counts = order.counts
    kinds = [k for k, number in enumerate(counts) if number]
    per_layer = costs.layer_static_bytes + in_flight[:, None] * act
    work = working[:, kinds].min(axis=1)
    few_s = vpp * layer_s[:, kinds].min(axis=1)
    few_bytes = vpp * per_layer[:, kinds].min(axis=1)
    few_step = vpp * costs.layer_step_s[:, kinds].min(axis=1)

    sum_s = pp * costs.stage_s + costs.first_s + costs.head_s
    step = costs.first_step_s + costs.head_step_s
    held = costs.first_bytes + costs.head_bytes + in_flight * costs.first_act_bytes
    slowest = np.maximum(costs.first_s, costs.head_s) + few_s
    most_step = np.maximum(costs.first_step_s, costs.head_step_s) + few_step
    fullest = few_bytes + np.maximum(
        costs.first_bytes + in_flight * costs.first_act_bytes, costs.head_bytes
    )
    for k in kinds:
        share = np.ceil(counts[k] / pp)
        sum_s = sum_s + counts[k] * layer_s[:, k]
        step = step + counts[k] * costs.layer_step_s[:, k]
        held = held + counts[k] * per_layer[:, k]
        slowest = np.maximum(slowest, share * layer_s[:, k])
        most_step = np.maximum(most_step, share * costs.layer_step_s[:, k])
        fullest = np.maximum(fullest, share * per_layer[:, k])
    slowest = np.maximum(slowest + costs.stage_s, sum_s / pp)
    most_step = np.maximum(most_step, step / pp)
    fullest = np.maximum(fullest, held / pp) + work + costs.fixed_bytes
    time = (
        (costs.num_microbatches - costs.beta) * slowest
        + costs.beta * sum_s
        + most_step
        + costs.constant_s
    )
    return RowBound(time, sum_s, most_step, fullest)


def host_share(costs: StageCosts, order: LayerOrder, pp: Array) -> Array:
    """Least share of its room that the fullest rank's offloaded state takes, (R,); above 1: no
    split fits. By averages and the pigeonhole principle, as in `row_bound`."""
    host = costs.host
    if host is None:
        return np.zeros(np.shape(pp))
    held = host.first + host.head
    fullest = np.maximum(host.first, host.head)
    for k, number in enumerate(order.counts):
        held = held + number * host.layer[:, k]
        fullest = np.maximum(fullest, np.ceil(number / pp) * host.layer[:, k])
    most = np.maximum(fullest, held / pp)
    return np.where(most > 0, most / np.maximum(host.state_capacity, 1e-300), 0.0)


def largest_stage(costs: StageCosts, bound: RowBound, limit_s: Array) -> Array:
    """Largest M that a layout no slower than `limit_s` can have [s], (R,)."""
    spare = limit_s - bound.step_s - costs.constant_s
    spread = costs.num_microbatches - costs.beta
    with np.errstate(divide="ignore", invalid="ignore"):
        by_sum = np.where(spread > 0, (spare - costs.beta * bound.sum_s) / spread, np.inf)
    most: Array = np.minimum(by_sum, spare / costs.num_microbatches) * (1 + MARGIN)
    return most


@dataclass(frozen=True, slots=True)
class Window:
    """Problems (row, pattern) with the layers that each stage may take, (M, S) unless said.

    Stage s takes ``lo + j`` layers of the free kind, ``0 <= j <= hi - lo``.
    """

    row: Index  # (M,)
    pattern: Index  # (M,)
    lo: Index
    hi: Index

    def take(self, index: Index) -> Window:
        return Window(self.row[index], self.pattern[index], self.lo[index], self.hi[index])


def window(
    table: Stages,
    found: tuple[Pattern, ...],
    most_s: Array,
    main: int,
    allowed: Mask | None = None,
) -> Window:
    """Ranges of layers per stage that fit in memory and in `most_s` (N,), with fractional mixes
    where the free layers are of the main kind; problems that have none are left out.

    `allowed` (N, P) says which patterns a row has; None: all.
    """
    rows = np.arange(table.in_flight.shape[0])
    if not found:
        none = np.zeros((0, table.in_flight.shape[1]), dtype=np.int64)
        return Window(none[:, 0], none[:, 0], none, none)
    if allowed is None:
        allowed = np.ones((rows.size, len(found)), dtype=bool)
    if allowed.sum() > rows.size:
        # Without the given layers all patterns are one: rows that fail here fail in each.
        first = found[0]
        bare = Pattern(
            first.base * 0, first.lo * 0, first.hi * 0 + first.total, first.free, first.total
        )
        one = np.zeros(rows.size, dtype=np.int64)
        rows = _ranges(table, (bare,), rows, one, most_s, main).row
        table, most_s, allowed = table.take(rows), most_s[rows], allowed[rows]
    row, number = np.nonzero(allowed)
    part = _ranges(table, found, row, number, most_s, main)
    return Window(rows[part.row], part.pattern, part.lo, part.hi)


def _ranges(
    table: Stages,
    found: tuple[Pattern, ...],
    row: Index,
    number: Index,
    most_s: Array,
    main: int,
) -> Window:
    """`window` of problems, each a row with a pattern; patterns have one free kind."""
    costs = table.costs
    layer_s, act, working = least(costs)
    lines = mix_lines(costs, main)
    rows = np.arange(table.in_flight.shape[0])
    base_act = costs.layer_act_bytes[rows, main, costs.layer_s[:, main].argmin(axis=1)]
    if not np.array_equal(row, rows):
        table, costs = table.take(row), costs.take(row)
        layer_s, act, working, base_act = layer_s[row], act[row], working[row], base_act[row]
        lines = [(slope[row], offset[row]) for slope, offset in lines]
        most_s = most_s[row]
    base, fewest, most = (
        np.stack([getattr(pattern, name) for pattern in found])[number]
        for name in ("base", "lo", "hi")
    )
    total = np.array([pattern.total for pattern in found])[number][:, None]
    free = found[0].free
    per_layer = costs.layer_static_bytes[:, None, :] + table.in_flight[:, :, None] * act[:, None]
    room = table.room_bytes - working.min(axis=1)[:, None]
    given_s = table.time_s
    given: Array = np.zeros(room.shape)
    if base.any():
        given_s = given_s + np.where(base > 0, base * layer_s[:, None, :], 0.0).sum(axis=2)
        given = np.where(base > 0, base * per_layer, 0.0).sum(axis=2)
        room = room - given
    free_s, free_bytes = layer_s[:, free, None], per_layer[:, :, free]
    with np.errstate(divide="ignore", invalid="ignore"):
        by_time = np.floor((most_s[:, None] - given_s) / free_s + MARGIN)
        by_memory = np.floor(room / free_bytes + MARGIN)
    if free == main and not base[:, :, main].any():
        # Time and memory together: what does not fit must be saved, and saving takes time.
        over = costs.layer_static_bytes[:, main, None] / table.in_flight + base_act[:, None]
        for slope, offset in ((w[:, None], o[:, None]) for w, o in lines):
            left = most_s[:, None] - given_s + slope * room / table.in_flight
            with np.errstate(divide="ignore", invalid="ignore"):
                both = np.floor(left / (free_s + offset + slope * over) + MARGIN)
            by_time = np.fmin(by_time, both)
    by_time = np.where(free_s > 0, by_time, np.where(given_s <= most_s[:, None], np.inf, -1))
    by_memory = np.where(free_bytes > 0, by_memory, np.where(room >= 0, np.inf, -1))
    hi = np.minimum(np.minimum(by_time, by_memory), most).clip(-1).astype(np.int64)
    # A stage without free layers can still be too slow or too full.
    tight = (given_s > most_s[:, None] * (1 + MARGIN)) | (room < -MARGIN * np.abs(given))
    hi = np.where(tight, -1, hi)
    lo = np.maximum(fewest, total - (hi.sum(axis=1, keepdims=True) - hi))
    good = (hi >= lo).all(axis=1) & (hi.sum(axis=1) >= total[:, 0])
    good &= (hi >= fewest).all(axis=1)
    hi = np.minimum(hi, total - (lo.sum(axis=1, keepdims=True) - lo))
    return Window(row[good], number[good], lo[good], hi[good])


def stage_columns(
    table: Stages,
    found: tuple[Pattern, ...],
    part: Window,
    main: int,
    most_s: Array,
    mix: str,
) -> tuple[Array, Array, Index]:
    """Times and step costs [s], (M, S, W), and counts (M, S, W, K) of the problems in `part`.

    Infinite where a stage does not fit, is slower than `most_s` (per row), or outside of the
    window.
    """
    width = int((part.hi - part.lo).max(initial=0)) + 1
    bases = np.stack([pattern.base for pattern in found])
    free = np.array([pattern.free for pattern in found])[part.pattern]
    j = np.arange(width)
    counts = np.repeat(bases[part.pattern][:, :, None, :], width, axis=2)
    problem = np.arange(part.row.size)
    counts[problem, :, :, free] += part.lo[:, :, None] + j
    own = table.take(part.row)
    limit = most_s[part.row]
    if mix == "fractional":
        times = relaxed_times(own, counts, main)
        times[times > limit[:, None, None]] = np.inf
    else:
        times = exact_times(own, counts, main, limit)
    times[j > (part.hi - part.lo)[:, :, None]] = np.inf
    steps = own.step_s[:, :, None] + np.einsum("mswk,mk->msw", counts, own.costs.layer_step_s)
    return times, steps, counts


def min_bottleneck(columns: Array, lo: Index, total: Array) -> Array:
    """Smallest v with ``sum_s max{q : columns[s, q] <= v} >= total``, per problem (M,).

    `columns` (M, S, W) rise along the last axis, whose entry j stands for ``lo + j`` layers. The
    answer is the least possible maximum over stages, inf if there is none. By bisection over the
    sorted values.

    >>> c = np.array([[[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]])  # 1, 2, 3 layers on two stages
    >>> min_bottleneck(c, np.array([[1, 1]]), np.array([4]))  # 3 + 1: 3 s; 2 + 2: 4 s
    array([3.])
    """
    problems, num_stages = columns.shape[:2]
    values = np.sort(columns.reshape(problems, -1), axis=1)
    low = np.zeros(problems, dtype=np.int64)
    high = np.full(problems, values.shape[1])  # one past the last: infeasible
    lane = np.arange(problems)
    need = total - lo.sum(axis=1) + num_stages
    while (open_ := low < high).any():
        middle = (low + high) // 2
        at = values[lane, np.minimum(middle, values.shape[1] - 1)]
        count = ((columns <= at[:, None, None]) & np.isfinite(columns)).sum(axis=2)
        enough = (count.min(axis=1) >= 1) & (count.sum(axis=1) >= need)
        high = np.where(open_ & enough, middle, high)
        low = np.where(open_ & ~enough, middle + 1, low)
    padded = np.concatenate([values, np.full((problems, 1), np.inf)], axis=1)
    smallest: Array = padded[lane, high]
    return smallest


def sum_bound(columns: Array, lo: Index, total: Array) -> Array:
    """Lower bound on the sum of stages: all at their least, plus the smallest increments, (M,)."""
    problems = columns.shape[0]
    start = columns[:, :, 0].sum(axis=1)
    with np.errstate(invalid="ignore"):
        steps = np.diff(columns, axis=2)
    steps = np.where(np.isfinite(steps), steps, np.inf).reshape(problems, -1)
    rest = (total - lo.sum(axis=1)).astype(np.int64)
    steps = np.sort(steps, axis=1)
    totals = np.concatenate([np.zeros((problems, 1)), np.cumsum(steps, axis=1)], axis=1)
    beyond = rest >= totals.shape[1]
    value: Array = start + totals[np.arange(problems), np.minimum(rest, totals.shape[1] - 1)]
    return np.where(beyond, np.inf, value)


def split_bound(
    table: Stages,
    found: tuple[Pattern, ...],
    order: LayerOrder,
    bound: RowBound,
    limit_s: float | Array,
    mix: str,
    allowed: Mask | None = None,
) -> Array:
    """Lower bound on T of N rows with one pp, each valid up to its `limit_s`; inf: no split below
    it. `allowed` (N, P): patterns of a row; None: all."""
    rows = table.in_flight.shape[0]
    costs = table.costs
    result = np.full(rows, np.inf)
    most_s = largest_stage(costs, bound, np.broadcast_to(limit_s, (rows,)))
    every = window(table, found, most_s, order.main, allowed)
    if every.row.size == 0:
        return result
    totals = np.array([pattern.total for pattern in found])
    widths = (every.hi - every.lo).max(axis=1) + 1
    for index in _blocks(widths, every.lo.shape[1]):
        part = every.take(index)
        times, steps, _ = stage_columns(table, found, part, order.main, most_s, mix)
        total = totals[part.pattern]
        slowest = min_bottleneck(times, part.lo, total)
        good = np.flatnonzero(np.isfinite(slowest))
        if good.size == 0:
            continue
        part, times, total, slowest = part.take(good), times[good], total[good], slowest[good]
        sum_s = sum_bound(times, part.lo, total)
        step = min_bottleneck(np.where(np.isfinite(times), steps[good], np.inf), part.lo, total)
        own = costs.take(part.row)
        value = (
            (own.num_microbatches - own.beta) * slowest
            + own.beta * np.maximum(sum_s, bound.sum_s[part.row])
            + np.maximum(step, bound.step_s[part.row])
            + own.constant_s
        )
        np.minimum.at(result, part.row, value)
    raised: Array = np.maximum(result, bound.time_s)
    return raised


def _blocks(widths: Index, num_stages: int) -> list[Index]:
    """Indices in blocks of near-equal width: one wide problem does not widen the others."""
    order = np.argsort(widths, kind="stable")
    classes = np.ceil(np.log2(widths[order])).astype(np.int64)
    blocks = []
    for value in sorted(set(classes.tolist())):
        same = order[classes == value]
        size = max(1, BLOCK // (num_stages * int(widths[same].max())))
        blocks += [same[i : i + size] for i in range(0, same.size, size)]
    return blocks
