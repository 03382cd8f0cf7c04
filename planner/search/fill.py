"""The cheapest integer mix of recompute policies for some layers within some bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.results import Array

Index = NDArray[np.int64]
Numbers = NDArray[Any]  # whole numbers, as integers or floats


def fill_away(
    number: Numbers,
    room: Array,
    seconds: Array,
    num_bytes: Array,
    allowed: NDArray[np.bool_],
    away_policy: int,
    most_away: Array,
) -> tuple[Array, Index]:
    """`fill` with at most `most_away` layers under the policy that sends activations away.

    Where host memory has room for some of the layers, every number of them is tried.
    """
    limited = np.zeros(number.shape, dtype=bool)
    if away_policy >= 0:
        limited = allowed[:, away_policy] & (most_away < number)
    if not limited.any():
        return fill(number, room, seconds, num_bytes, allowed)
    without = allowed.copy()
    without[limited, away_policy] = False
    time, mix = fill(number, room, seconds, num_bytes, without)
    index = np.flatnonzero(limited & (most_away >= 1))
    if index.size == 0:
        return time, mix
    most = most_away[index].astype(np.int64)
    entry = np.repeat(index, most)
    sent = np.arange(entry.size) - np.repeat(np.cumsum(most) - most, most) + 1
    rest_s, rest = fill(
        number[entry] - sent,
        room[entry] - sent * num_bytes[entry, away_policy],
        seconds[entry],
        num_bytes[entry],
        without[entry],
    )
    rest_s = rest_s + sent * seconds[entry, away_policy]
    rest[:, away_policy] += sent
    order = np.lexsort((sent, rest_s, entry))
    first = order[np.unique(entry[order], return_index=True)[1]]
    better = first[rest_s[first] < time[entry[first]]]
    time[entry[better]], mix[entry[better]] = rest_s[better], rest[better]
    return time, mix


def fill(
    number: Numbers, room: Array, seconds: Array, num_bytes: Array, allowed: NDArray[np.bool_]
) -> tuple[Array, Index]:
    """Cheapest integer mix of `number` layers within `room` bytes, per entry.

    Policies are sorted by time and dominated ones dropped; then more time means fewer bytes. Counts
    of all but the two fastest are tried; between those two the least count of the leaner one has a
    closed form.
    """
    entries, num_policies = seconds.shape
    cost = np.where(allowed, seconds, np.inf)
    order = np.lexsort((np.where(allowed, num_bytes, np.inf), cost), axis=1)
    cost = np.take_along_axis(cost, order, 1)
    size = np.where(np.isfinite(cost), np.take_along_axis(num_bytes, order, 1), np.inf)
    lean = np.minimum.accumulate(size, axis=1)
    useful = np.isfinite(cost)
    useful[:, 1:] &= size[:, 1:] < lean[:, :-1]
    rank = np.argsort(~useful, axis=1, kind="stable")
    order = np.take_along_axis(order, rank, 1)
    num_useful = useful.sum(axis=1)
    dropped = ~np.take_along_axis(useful, rank, 1)
    cost = np.where(dropped, np.inf, np.take_along_axis(cost, rank, 1))
    size = np.where(dropped, np.inf, np.take_along_axis(size, rank, 1))
    time = np.full(entries, np.inf)
    mix = np.zeros((entries, num_policies), dtype=np.int64)
    none = np.flatnonzero((number == 0) & (room >= 0))
    time[none] = 0.0
    fast = (number > 0) & (num_useful > 0)
    with np.errstate(invalid="ignore"):
        fast &= number * size[:, 0] <= room
    time[fast] = number[fast] * cost[fast, 0]
    mix[fast, order[fast, 0]] = number[fast].astype(np.int64)
    tight = (number > 0) & (num_useful > 1) & ~fast
    for n, useful_policies in sorted(
        set(zip(number[tight].astype(int).tolist(), num_useful[tight].tolist(), strict=True))
    ):
        index = np.flatnonzero(tight & (number == n) & (num_useful == useful_policies))
        grid = _grid(n, useful_policies - 2)  # (G, useful - 2)
        block = max(1, 400_000 // len(grid))
        for start in range(0, index.size, block):
            part = index[start : start + block]
            _fill_tight(part, n, grid, room, cost, size, order, time, mix)
    return time, mix


def _fill_tight(
    index: Index,
    number: int,
    grid: Index,
    room: Array,
    cost: Array,
    size: Array,
    order: Index,
    time: Array,
    mix: Index,
) -> None:
    slow = grid.shape[1]
    cost, size = cost[index], size[index]
    rest = number - grid.sum(axis=1)  # (G,) layers under the two fastest
    missing = rest * size[:, :1] + size[:, 2 : 2 + slow] @ grid.T - room[index][:, None]
    count = np.ceil(missing / (size[:, :1] - size[:, 1:2]) - 1e-9).clip(min=0)
    total = rest * cost[:, :1] + count * (cost[:, 1:2] - cost[:, :1])
    total = total + cost[:, 2 : 2 + slow] @ grid.T
    total = np.where(count <= rest, total, np.inf)
    at = total.argmin(axis=1)
    lane = np.arange(index.size)
    value = total[lane, at]
    good = np.isfinite(value)
    index, at, lane = index[good], at[good], lane[good]
    time[index] = value[good]
    second = count[lane, at].astype(np.int64)
    chosen = np.zeros((index.size, order.shape[1]), dtype=np.int64)
    chosen[:, 0] = rest[at] - second
    chosen[:, 1] = second
    chosen[:, 2 : 2 + slow] = grid[at]
    out = np.zeros_like(chosen)
    np.put_along_axis(out, order[index], chosen, 1)
    mix[index] = out


@lru_cache(maxsize=512)
def _grid(most: int, dimensions: int) -> Index:
    """All count vectors of `dimensions` entries with sum at most `most`."""
    if dimensions == 0:
        return np.zeros((1, 0), dtype=np.int64)
    axes = np.meshgrid(*[np.arange(most + 1)] * dimensions, indexing="ij")
    table = np.stack([a.reshape(-1) for a in axes], axis=1).astype(np.int64)
    kept: Index = table[table.sum(axis=1) <= most]
    return kept
