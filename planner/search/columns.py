"""Stage columns: the least time of a stage for given layers, over all recompute mixes that fit.

A stage with layers ``n[k]`` of kind k under policies p takes

    t = stage_s + [first] first_s + [head] head_s + sum n[k,p] layer_s[k,p]

and must hold its bytes (`planner.results.StageCosts`). Layers of the main kind mix policies
freely, all layers of other kinds in one stage share one policy. Memory couples nothing across
stages, and step time rises with every t, so that the least t is all that a search over splits
needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.results import Array, StageCosts
from planner.search.fill import fill_away

Index = NDArray[np.int64]
Numbers = NDArray[Any]  # whole numbers, as integers or floats
STAGE_COLUMNS = ("in_flight", "first", "head", "time_s", "step_s", "room_bytes", "away_bytes")
SLACK = 1e-12  # of the capacity: rounding never decides whether a stage fits


@dataclass(frozen=True, slots=True)
class Stages:
    """Costs of N layouts of one pp with their stages told apart, (N, S) unless said.

    `first` and `head` are 0 or 1. `costs` are the rows, N long. `away_bytes` is the state of
    embedding and head that is offloaded.
    """

    costs: StageCosts
    in_flight: Array
    first: Array
    head: Array
    time_s: Array  # without layers
    step_s: Array
    room_bytes: Array  # capacity less what does not depend on layers
    away_bytes: Array

    def take(self, index: Index) -> Stages:
        return Stages(
            self.costs.take(index),
            *(getattr(self, name)[index] for name in STAGE_COLUMNS),
        )


def stages(costs: StageCosts, in_flight: Array, head_stage: Index) -> Stages:
    """Tell the stages of rows with one pp apart; `in_flight` is (N, S)."""
    num_stages = in_flight.shape[1]
    position = np.arange(num_stages)
    first = np.broadcast_to((position == 0).astype(float), in_flight.shape)
    head = (position == head_stage[:, None]).astype(float)
    room = (
        costs.capacity_bytes * (1.0 + SLACK)
        - costs.fixed_bytes[:, None]
        - first * costs.first_bytes[:, None]
        - head * costs.head_bytes[:, None]
        - first * in_flight * costs.first_act_bytes[:, None]
    )
    return Stages(
        costs=costs,
        in_flight=in_flight,
        first=first,
        head=head,
        time_s=costs.stage_s[:, None]
        + first * costs.first_s[:, None]
        + head * costs.head_s[:, None],
        step_s=first * costs.first_step_s[:, None] + head * costs.head_step_s[:, None],
        room_bytes=room,
        away_bytes=np.zeros(in_flight.shape)
        if costs.host is None
        else first * costs.host.first[:, None] + head * costs.host.head[:, None],
    )


def least(costs: StageCosts) -> tuple[Array, Array, Array]:
    """Per kind, over its allowed policies: least seconds, activation bytes, working bytes, (R,
    K)."""
    seconds = costs.layer_s[:, :, 0]
    act, working = (np.full(seconds.shape, np.inf) for _ in range(2))
    # A loop over the few policies: numpy reduces short axes slowly.
    for p in range(costs.layer_s.shape[2]):
        own = costs.layer_s[:, :, p]
        seconds = np.minimum(seconds, own)
        allowed = np.isfinite(own)
        act = np.where(allowed, np.minimum(act, costs.layer_act_bytes[:, :, p]), act)
        working = np.where(allowed, np.minimum(working, costs.working_bytes[:, :, p]), working)
    return seconds, act, working


def mix_lines(costs: StageCosts, kind: int) -> list[tuple[Array, Array]]:
    """Lines below the cost of saving memory in layers of one kind, as (slope, offset) per row.

    Points (bytes saved, seconds added) per policy, against the fastest, span a lower convex hull:
    the maximum over slopes w of ``w x + min_p (added_p - w saved_p)``, where x is the bytes to
    save per layer and unit in flight. Every slope gives a bound, those between two points give the
    hull.
    """
    seconds = costs.layer_s[:, kind]
    allowed = np.isfinite(seconds)
    act = np.where(allowed, costs.layer_act_bytes[:, kind], np.inf)
    base = seconds.argmin(axis=1)[:, None]
    saved = np.where(allowed, np.take_along_axis(act, base, 1) - act, -np.inf)
    added = np.where(allowed, seconds - np.take_along_axis(seconds, base, 1), np.inf)
    lines = []
    for i, j in combinations(range(seconds.shape[1]), 2):
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = (added[:, j] - added[:, i]) / (saved[:, j] - saved[:, i])
        slope = np.where(np.isfinite(slope) & (slope > 0), slope, 0.0)
        if slope.any():
            with np.errstate(invalid="ignore"):
                points = np.where(allowed, added - slope[:, None] * saved, np.inf)
            lines.append((slope, points.min(axis=1)))
    return lines


def relaxed_times(table: Stages, counts: Numbers, main: int) -> Array:
    """Lower bound on the time of stages with `counts` (N, S, Q, K) layers [s], inf: cannot fit.

    The mix of the main kind is fractional (`mix_lines`), working bytes are at their least, and host
    memory has room for all activations that are sent there.

    >>> costs = _example()
    >>> table = stages(costs, np.array([[1.0]]), np.array([0]))
    >>> relaxed_times(table, np.full((1, 1, 1, 1), 4.0), 0)  # 4 layers of 1 s; 4 of 8 units missing
    array([[[6.]]])
    """
    costs = table.costs
    _, _, working = least(costs)
    seconds = costs.layer_s[:, main]  # (N, P)
    allowed = np.isfinite(seconds)
    act = np.where(allowed, costs.layer_act_bytes[:, main], np.inf)
    base = seconds.argmin(axis=1)[:, None]
    base_act = np.take_along_axis(act, base, 1)
    base_s = np.take_along_axis(seconds, base, 1)
    saved = np.where(allowed, base_act - act, -np.inf)
    lines = [(w[:, None, None], o[:, None, None]) for w, o in mix_lines(costs, main)]
    in_flight = table.in_flight[:, :, None]
    own = counts[..., main]
    static = np.einsum("nsqk,nk->nsq", counts, costs.layer_static_bytes)
    room = table.room_bytes[:, :, None] - static
    best = np.full(own.shape, np.inf)
    for other_s, other_act, other_work in _other_policies(table, counts, main):
        charged = np.where(
            own > 0, np.maximum(other_work, working[:, main, None, None]), other_work
        )
        need = (own * base_act[:, :, None] + other_act) * in_flight + charged - room
        x = need / in_flight
        extra = np.zeros(own.shape)
        for slope, offset in lines:
            np.maximum(extra, slope * x + offset * own, out=extra)
        most = saved.max(axis=1)[:, None, None]
        fits = need <= own * most * in_flight + 1e-9 * np.abs(room)
        np.minimum(best, np.where(fits, other_s + extra, np.inf), out=best)
    if costs.host is not None:
        away = np.einsum("nsqk,nk->nsq", counts, costs.host.layer) + table.away_bytes[:, :, None]
        best[away > costs.host.state_capacity[:, None, None] * (1 + SLACK)] = np.inf
    time: Array = table.time_s[:, :, None] + own * base_s[:, :, None] + best
    return time


def _other_policies(
    table: Stages, counts: Numbers, main: int
) -> list[tuple[Array | float, Array | float, Array | float]]:
    """Seconds, activation bytes and working bytes of the other kinds' layers, per shared policy."""
    costs = table.costs
    num_kinds, num_policies = costs.layer_s.shape[1:]
    others = [k for k in range(num_kinds) if k != main and counts[..., k].any()]
    if not others:
        return [(0.0, 0.0, 0.0)]
    found: list[tuple[Array | float, Array | float, Array | float]] = []
    for p in range(num_policies):
        seconds = np.zeros(counts.shape[:3])
        act = np.zeros(counts.shape[:3])
        work = np.zeros(counts.shape[:3])
        for k in others:
            number = counts[..., k]
            layer_s = costs.layer_s[:, k, p][:, None, None]
            used = number > 0
            with np.errstate(invalid="ignore"):
                seconds += np.where(used, number * layer_s, 0.0)
            act += number * costs.layer_act_bytes[:, k, p][:, None, None]
            work = np.where(
                used, np.maximum(work, costs.working_bytes[:, k, p][:, None, None]), work
            )
        found.append((seconds, act, work))
    return found


def exact_times(table: Stages, counts: Numbers, main: int, most_s: Array) -> Array:
    """Least time of stages with integer mixes [s], (N, S, Q); inf: none fits or above `most_s`
    (N,).

    Starts from `relaxed_times`: entries above `most_s` need no integer mix.
    """
    relaxed = relaxed_times(table, counts, main)
    wanted = np.isfinite(relaxed) & (relaxed <= most_s[:, None, None])
    times = np.full(relaxed.shape, np.inf)
    n, s, q = np.nonzero(wanted)
    if n.size:
        times[n, s, q] = best_mixes(table, n, s, counts[n, s, q], main)[0]
    return times


def best_mixes(
    table: Stages, row: Index, stage: Index, counts: Numbers, main: int
) -> tuple[Array, Index, Index]:
    """Least time [s] and its mix for E entries: stage `stage` of row `row` with `counts` (E, K).

    Returns times (inf: nothing fits), layers of the main kind per policy (E, P), and the policy of
    the other kinds' layers (E,). Of equal times the lowest other policy and the smallest cap on
    working bytes is taken.

    ``working_bytes`` is charged as a maximum over what is used: for each policy w of the main kind,
    allow the policies that work in no more bytes than w, and charge w. The best of these cases is
    exact, since the true mix is charged exactly in the case of its own largest.
    """
    costs = table.costs
    num_kinds, num_policies = costs.layer_s.shape[1:]
    others = [k for k in range(num_kinds) if k != main]
    own = counts[:, main]
    in_flight = table.in_flight[row, stage]
    room = table.room_bytes[row, stage] - (counts * costs.layer_static_bytes[row]).sum(axis=1)
    seconds = costs.layer_s[row, main]
    act = costs.layer_act_bytes[row, main] * in_flight[:, None]
    working = costs.working_bytes[row, main]
    best = np.full(row.size, np.inf)
    best_mix = np.zeros((row.size, num_policies), dtype=np.int64)
    best_other = np.zeros(row.size, dtype=np.int64)
    has_other = counts[:, others].sum(axis=1) > 0 if others else np.zeros(row.size, dtype=bool)
    away, away_policy = _away_room(table, row, stage, counts)
    for p in range(num_policies if has_other.any() else 1):
        other_s, other_bytes, other_work = _entry_others(costs, row, counts, others, p, in_flight)
        most_away = _most_away(costs, row, counts, main, away, p == away_policy, in_flight)
        for w in range(num_policies):
            cap = working[:, w]
            allowed = np.isfinite(seconds) & (working <= cap[:, None])
            # The same cap as an earlier policy's is the same case.
            earlier = np.isfinite(seconds[:, :w]) & (working[:, :w] == cap[:, None])
            repeated = earlier.any(axis=1)
            empty = own == 0
            charged = np.where(empty, other_work, np.maximum(cap, other_work))
            ask = np.isfinite(other_s) & np.isfinite(seconds[:, w]) & ~repeated
            ask |= empty & np.isfinite(other_s) & (w == 0)
            ask &= most_away >= 0
            if p:
                ask &= has_other
            index = np.flatnonzero(ask)
            if index.size == 0:
                continue
            left = (room - other_bytes - charged)[index]
            time, mix = fill_away(
                own[index],
                left,
                seconds[index],
                act[index],
                allowed[index],
                away_policy,
                most_away[index],
            )
            time = time + other_s[index]
            better = time < best[index]
            chosen = index[better]
            best[chosen] = time[better]
            best_mix[chosen] = mix[better]
            best_other[chosen] = p
    return best + table.time_s[row, stage], best_mix, best_other


def _entry_others(
    costs: StageCosts, row: Index, counts: Numbers, others: list[int], p: int, in_flight: Array
) -> tuple[Array, Array, Array]:
    seconds, num_bytes, work = (np.zeros(row.size) for _ in range(3))
    for k in others:
        number = counts[:, k]
        used = number > 0
        with np.errstate(invalid="ignore"):
            seconds += np.where(used, number * costs.layer_s[row, k, p], 0.0)
        num_bytes += number * costs.layer_act_bytes[row, k, p] * in_flight
        work = np.where(used, np.maximum(work, costs.working_bytes[row, k, p]), work)
    return seconds, num_bytes, work


def _away_room(table: Stages, row: Index, stage: Index, counts: Numbers) -> tuple[Array, int]:
    """Host bytes left for activations of E entries (negative: not even state fits), and the policy
    that sends them."""
    host = table.costs.host
    if host is None:
        return np.full(row.size, np.inf), -1
    state = (counts * host.layer[row]).sum(axis=1) + table.away_bytes[row, stage]
    room = host.act_capacity[row] * (1 + SLACK) - host.shared[row] * state
    held = state <= host.state_capacity[row] * (1 + SLACK)
    return np.where(held, room, -1.0), host.act_policy


def _most_away(
    costs: StageCosts,
    row: Index,
    counts: Numbers,
    main: int,
    room: Array,
    others_away: bool,
    in_flight: Array,
) -> Array:
    """Layers of the main kind whose activations host memory holds, (E,); negative: the rest does
    not fit. `others_away`: the other kinds' layers send theirs as well."""
    if costs.host is None or costs.host.act_policy < 0:
        return np.where(room >= 0, np.inf, -1.0)
    each = in_flight[:, None] * costs.host.act[row]
    if others_away:
        sent = counts * each
        room = room - sent.sum(axis=1) + sent[:, main]
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.floor(room / each[:, main] + 1e-9)
    return np.where(room < 0, -1.0, np.where(each[:, main] > 0, most, np.inf))


def _example() -> StageCosts:
    """One row: a policy of 1 s and 2 bytes a layer, one of 2 s and none but 1 byte; capacity 6."""
    one, zero = np.ones(1), np.zeros(1)
    return StageCosts(
        num_microbatches=one,
        beta=one,
        layer_s=np.array([[[1.0, 2.0]]]),
        layer_step_s=np.zeros((1, 1)),
        layer_static_bytes=np.zeros((1, 1)),
        layer_act_bytes=np.array([[[2.0, 1.0]]]),
        working_bytes=np.zeros((1, 1, 2)),
        stage_s=zero,
        first_s=zero,
        head_s=zero,
        first_step_s=zero,
        head_step_s=zero,
        fixed_bytes=zero,
        first_bytes=zero,
        head_bytes=zero,
        first_act_bytes=zero,
        constant_s=zero,
        capacity_bytes=6.0,
    )
