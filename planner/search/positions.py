"""Stages as ranges of positions, for layers of several kinds in any order (vpp = 1).

The time of a stage depends on the layers of each kind in its range, and few different count vectors
occur (two per length for layers that alternate): columns are costed per vector and looked up by
(start, length).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.results import Array
from planner.search.columns import Stages, exact_times, least, relaxed_times
from planner.search.orders import LayerOrder

Index = NDArray[np.int64]
_TOO_LONG = -1


@dataclass(frozen=True, slots=True)
class Positions:
    """Marks a layout whose stages are ranges of positions; `prefix[i]` counts kinds before layer
    i."""

    prefix: Index  # (L + 1, K)


def positions(order: LayerOrder) -> Positions:
    """The ranges of a model."""
    one_hot = np.eye(len(order.counts), dtype=np.int64)[list(order.kinds)]
    zero = np.zeros((1, len(order.counts)), dtype=np.int64)
    return Positions(np.concatenate([zero, np.cumsum(one_hot, axis=0)]))


@dataclass(frozen=True, slots=True)
class PositionColumns:
    """Columns of N rows over U count vectors: `times`, `steps` (N, S, U), inf where none.

    `vector[i, n]` is the count vector of layers i .. i + n - 1, -1 where that is no range.
    """

    times: Array
    steps: Array
    vectors: Index  # (U, K)
    vector: Index  # (L + 1, W)

    def min_bottleneck(self) -> Array:
        """Lower bound on the slowest stage, (N,): every stage reaches as far as a cap lets it, and
        the least cap that reaches the end is found by bisection."""
        rows, num_stages, _ = self.times.shape
        length = self.vector.shape[0] - 1
        values = np.sort(self.times.reshape(rows, -1), axis=1)
        lane = np.arange(rows)
        low = np.zeros(rows, dtype=np.int64)
        high = np.full(rows, values.shape[1])
        while (open_ := low < high).any():
            middle = (low + high) // 2
            cap = values[lane, np.minimum(middle, values.shape[1] - 1)]
            position = np.zeros(rows, dtype=np.int64)
            for s in range(num_stages):
                index = self.vector[position]  # (N, W)
                time = np.take_along_axis(self.times[:, s], np.maximum(index, 0), 1)
                fits = (index >= 0) & (time <= cap[:, None]) & np.isfinite(time)
                # Furthest first: the last length that fits.
                far = fits.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
                position += np.where(fits.any(axis=1), far, 0)
            enough = position >= length
            high = np.where(open_ & enough, middle, high)
            low = np.where(open_ & ~enough, middle + 1, low)
        padded = np.concatenate([values, np.full((rows, 1), np.inf)], axis=1)
        least_cap: Array = padded[lane, high]
        return least_cap

    def by_end(self) -> tuple[Array, Array, Index]:
        """Times and steps by (row, stage, end, length), (N, S, L+1, W); counts (S, L+1, W, K)."""
        ends, width = self.vector.shape
        start = np.arange(ends)[:, None] - np.arange(width)
        index = np.where(start >= 0, self.vector[np.maximum(start, 0), np.arange(width)], _TOO_LONG)
        none = index < 0
        index = np.maximum(index, 0)
        times = np.where(none, np.inf, self.times[:, :, index])
        steps = self.steps[:, :, index]
        num_stages = self.times.shape[1]
        counts = np.broadcast_to(
            self.vectors[index], (num_stages, *index.shape, self.vectors.shape[1])
        )
        return times, steps, counts

    def min_sum(self) -> Array:
        """Smallest sum of stages, (N,): a shortest path over positions."""
        if self.times.shape[2] == 0:  # no range is short enough
            return np.full(self.times.shape[0], np.inf)
        times, _, _ = self.by_end()
        rows, num_stages, ends, width = times.shape
        best = np.full((rows, ends), np.inf)
        best[:, 0] = 0.0
        for s in range(num_stages):
            padded = np.concatenate([np.full((rows, width - 1), np.inf), best], axis=1)
            reach = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)[:, :, ::-1]
            best = (reach + times[:, s]).min(axis=2)
        last: Array = best[:, -1]
        return last


def position_columns(
    table: Stages, found: Positions, order: LayerOrder, most_s: Array, mix: str
) -> PositionColumns:
    """Columns of rows with one pp, for ranges no slower than `most_s` (N,)."""
    length = order.num_layers
    num_stages = table.in_flight.shape[1]
    longest = min(length - num_stages + 1, _longest(table, found, most_s))
    sizes = np.arange(longest + 1)
    start = np.arange(length + 1)[:, None]
    # What the other stages cannot take is left to each.
    shortest = max(1, length - (num_stages - 1) * longest)
    inside = (start + sizes <= length) & (sizes >= shortest)
    counts = found.prefix[np.minimum(start + sizes, length)] - found.prefix[start]
    vectors, index = np.unique(counts[inside], axis=0, return_inverse=True)
    vector = np.full(inside.shape, _TOO_LONG, dtype=np.int64)
    vector[inside] = index.reshape(-1)
    shape = (table.in_flight.shape[0], num_stages, *vectors.shape)
    wide = np.broadcast_to(vectors, shape)
    if mix == "fractional":
        times = relaxed_times(table, wide, order.main)
        times[times > most_s[:, None, None]] = np.inf
    else:
        times = exact_times(table, wide, order.main, most_s)
    steps = (
        table.step_s[:, :, None]
        + np.einsum("uk,nk->nu", vectors, table.costs.layer_step_s)[:, None, :]
    )
    return PositionColumns(times, steps, vectors, vector)


def _longest(table: Stages, found: Positions, most_s: Array) -> int:
    """Layers that the shortest range of some length still lets a stage take, over all rows."""
    layer_s, _, _ = least(table.costs)
    prefix = found.prefix @ np.where(np.isfinite(layer_s), layer_s, 0.0).T  # (L + 1, N)
    room = most_s - table.time_s.min(axis=1)
    length = prefix.shape[0] - 1
    best = 1
    for size in range(1, length + 1):
        shortest = (prefix[size:] - prefix[:-size]).min(axis=0)
        if not (shortest <= room).any():
            break
        best = size
    return best
