"""Actions and durations -> when everything runs.

Every rank runs its actions in their order and each as soon as what it needs is there, so the times
are the longest paths of a fixed graph and do not depend on the order in which they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from planner.errors import LayoutError
from planner.results import Action, Timeline

__all__ = ["critical_path", "simulate"]

Span = tuple[Action, float, float]


def simulate(
    actions: Sequence[Sequence[Action]],
    forward_s: ArrayLike,
    backward_input_s: ArrayLike,
    weight_s: ArrayLike,
    p2p_s: ArrayLike = 0.0,
    *,
    p2p_exposed: bool = False,
) -> Timeline:
    """When every action of a pipeline schedule runs.

    F of stage s needs F of stage s - 1, B needs B of stage s + 1 and its own F, W needs its own B,
    all of the same micro-batch. A B without a W takes ``backward_input_s + weight_s``.

    Parameters
    ----------
    actions
        Per pipeline rank, in the order it runs them (`planner.schedules.build_schedule`).
    forward_s, backward_input_s, weight_s
        Seconds per micro-batch of every virtual stage.
    p2p_s
        Seconds from a stage to its neighbour, one number or one per pair (s, s + 1); 0 between two
        chunks of one rank.
    p2p_exposed
        Whether the sender waits until what it sent has arrived; otherwise it computes on.

    >>> from planner.schedules import build_schedule
    >>> timeline = simulate(build_schedule("gpipe", 2, 1, 3), [1, 1], [1, 1], [1, 1])
    >>> timeline.total_s, timeline.bubble_fraction  # (m + p - 1) (F + B), (p - 1) / (m + p - 1)
    (12.0, 0.25)
    """
    forward = _durations("forward_s", forward_s)
    backward_input = _durations("backward_input_s", backward_input_s, len(forward))
    weight = _durations("weight_s", weight_s, len(forward))
    num_stages = len(forward)
    rank_of_stage, m, split = _read(actions, num_stages)
    hop_s = _hops(p2p_s, rank_of_stage)

    num_cells = num_stages * m
    forward_end, backward_end = [-1.0] * num_cells, [-1.0] * num_cells
    forward_waiter, backward_waiter = [-1] * num_cells, [-1] * num_cells
    pp = len(actions)
    position, clock = [0] * pp, [0.0] * pp
    busy, alive, peak = [0.0] * pp, [0] * pp, [0] * pp
    spans: list[list[Span]] = [[] for _ in range(pp)]
    runnable = list(range(pp))
    while runnable:
        rank = runnable.pop()
        mine, out = actions[rank], spans[rank]
        now, i, held = clock[rank], position[rank], alive[rank]
        for i in range(i, len(mine)):  # noqa: B020 - goes on where the rank stopped
            action = mine[i]
            op, s = action.op, action.stage
            k = s * m + action.microbatch
            start = now
            if op == "F":
                if s:
                    ready = forward_end[k - m]
                    if ready < 0:
                        forward_waiter[k - m] = rank
                        break
                    start = max(now, ready + hop_s[s - 1])
                end = start + forward[s]
                forward_end[k] = end
                now = end + hop_s[s] if p2p_exposed else end
                held += 1
                if held > peak[rank]:
                    peak[rank] = held
                waiter = forward_waiter[k]
            elif op == "B":
                if forward_end[k] < 0:
                    break  # its own F comes later: nobody can help
                if s + 1 < num_stages:
                    ready = backward_end[k + m]
                    if ready < 0:
                        backward_waiter[k + m] = rank
                        break
                    start = max(now, ready + hop_s[s])
                end = start + backward_input[s]
                if not split[k]:
                    end += weight[s]
                    held -= 1
                backward_end[k] = end
                now = end + hop_s[s - 1] if p2p_exposed and s else end
                waiter = backward_waiter[k]
            else:
                if backward_end[k] < 0:
                    break
                now = end = start + weight[s]
                held -= 1
                waiter = -1
            busy[rank] += end - start
            out.append((action, start, end))
            if waiter >= 0:
                runnable.append(waiter)
        else:
            i = len(mine)
        clock[rank], position[rank], alive[rank] = now, i, held

    _refuse_deadlock(actions, position)
    total_s = max((rank_spans[-1][2] for rank_spans in spans if rank_spans), default=0.0)
    chunks = [max(1, rank_of_stage.count(rank)) for rank in range(pp)]
    return Timeline(
        spans=tuple(tuple(rank_spans) for rank_spans in spans),
        total_s=total_s,
        bubble_fraction=max(0.0, 1.0 - sum(busy) / (pp * total_s)) if total_s > 0 else 0.0,
        peak_in_flight=tuple(n / c for n, c in zip(peak, chunks, strict=True)),
    )


def critical_path(
    timeline: Timeline, p2p_s: ArrayLike = 0.0, *, p2p_exposed: bool = False
) -> list[tuple[int, Action, float, float]]:
    """The chain of actions that decides the step time: (rank, action, start_s, end_s), by time.

    `p2p_s` and `p2p_exposed` as they were given to `simulate`. Where two chains are equally long,
    the one that stays on a rank is taken.

    >>> from planner.schedules import build_schedule
    >>> timeline = simulate(build_schedule("1f1b", 2, 1, 1), [1, 1], [1, 1], [1, 1])
    >>> [(rank, action.op) for rank, action, _, _ in critical_path(timeline)]
    [(0, 'F'), (1, 'F'), (1, 'B'), (0, 'B')]
    """
    where = {
        (action.op, action.stage, action.microbatch): (rank, i)
        for rank, rank_spans in enumerate(timeline.spans)
        for i, (action, _, _) in enumerate(rank_spans)
    }
    if not where:
        return []
    num_stages = 1 + max(stage for _, stage, _ in where)
    rank_of_stage = [where["F", stage, 0][0] for stage in range(num_stages)]
    hop_s = _hops(p2p_s, rank_of_stage)

    def sent_s(action: Action) -> float:
        """Seconds that the sender of `action`'s result, or its reader, waits for the transfer."""
        if action.op == "F":
            return hop_s[action.stage]
        return hop_s[action.stage - 1] if action.op == "B" and action.stage else 0.0

    rank = max(
        (r for r, rank_spans in enumerate(timeline.spans) if rank_spans),
        key=lambda r: timeline.spans[r][-1][2],
    )
    i = len(timeline.spans[rank]) - 1
    path = []
    while True:
        action, start, end = timeline.spans[rank][i]
        path.append((rank, action, start, end))
        before: list[tuple[float, int, int]] = []  # (when it lets this one start, rank, position)
        if i:
            previous, _, previous_end = timeline.spans[rank][i - 1]
            wait_s = sent_s(previous) if p2p_exposed else 0.0
            before.append((previous_end + wait_s, rank, i - 1))
        step = {"F": -1, "B": 1}.get(action.op, 0)
        source = where.get((action.op, action.stage + step, action.microbatch)) if step else None
        if source is not None:
            sent, _, sent_end = timeline.spans[source[0]][source[1]]
            before.append((sent_end + sent_s(sent), *source))
        if not before:
            return path[::-1]
        _, rank, i = max(before, key=lambda candidate: candidate[0])


def _durations(name: str, given: ArrayLike, num_stages: int | None = None) -> list[float]:
    array = np.asarray(given, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or num_stages not in (None, array.size):
        wanted = "one number" if num_stages is None else f"{num_stages} numbers, as forward_s: one"
        raise LayoutError(
            f"{name} has shape {array.shape}; it wants {wanted} per virtual stage",
            values={name: array.tolist()},
            legal={"length": [num_stages]} if num_stages else {},
        )
    if not np.all(np.isfinite(array) & (array >= 0)):
        raise LayoutError(
            f"{name}={array.tolist()} holds a value that is not a finite number of seconds >= 0",
            values={name: array.tolist()},
        )
    return [float(x) for x in array]


def _hops(p2p_s: ArrayLike, rank_of_stage: Sequence[int]) -> list[float]:
    """Seconds from stage s to s + 1, a 0 behind the last stage."""
    num_hops = len(rank_of_stage) - 1
    array = np.asarray(p2p_s, dtype=np.float64)
    if array.ndim > 1 or (array.ndim == 1 and array.size != num_hops):
        raise LayoutError(
            f"p2p_s has shape {array.shape}; it wants one number, or one for each of the "
            f"{num_hops} pairs of neighbouring virtual stages",
            values={"p2p_s": array.tolist()},
            legal={"length": [num_hops]},
        )
    if not np.all(np.isfinite(array) & (array >= 0)):
        raise LayoutError(
            f"p2p_s={array.tolist()} holds a value that is not a finite number of seconds >= 0",
            values={"p2p_s": array.tolist()},
        )
    hops = np.broadcast_to(array, num_hops).tolist()
    return [
        hop if rank_of_stage[s] != rank_of_stage[s + 1] else 0.0 for s, hop in enumerate(hops)
    ] + [0.0]


def _read(actions: Sequence[Sequence[Action]], num_stages: int) -> tuple[list[int], int, bytearray]:
    """Rank of every stage, number of micro-batches, and which backwards are split; or a refusal."""
    m = 1 + max((action.microbatch for mine in actions for action in mine), default=-1)
    rank_of_stage = [-1] * num_stages
    seen = {op: bytearray(num_stages * m) for op in "FBW"}
    for rank, mine in enumerate(actions):
        for action in mine:
            s, i, op = action.stage, action.microbatch, action.op
            if op not in seen or not 0 <= s < num_stages or i < 0:
                raise LayoutError(
                    f"action {op} of stage {s}, micro-batch {i} on rank {rank}: op must be F, B or "
                    f"W and the stage one of the {num_stages} that durations are given for",
                    values={"op": op, "stage": s, "microbatch": i, "rank": rank},
                    legal={"op": ["F", "B", "W"], "stage": [0, num_stages - 1]},
                )
            if rank_of_stage[s] not in (-1, rank):
                raise LayoutError(
                    f"stage {s} runs on ranks {rank_of_stage[s]} and {rank}; it may be on one only",
                    values={"stage": s, "ranks": [rank_of_stage[s], rank]},
                )
            rank_of_stage[s] = rank
            k = s * m + i
            if seen[op][k]:
                raise LayoutError(
                    f"{op} of stage {s}, micro-batch {i} is scheduled twice on rank {rank}",
                    values={"op": op, "stage": s, "microbatch": i, "rank": rank},
                )
            seen[op][k] = 1
    for op in "FB":
        k = seen[op].find(0)
        if k >= 0 or m == 0:
            s, i = divmod(max(k, 0), max(m, 1))
            raise LayoutError(
                f"{op} of stage {s}, micro-batch {i} is not scheduled; every stage runs F and B of "
                f"each of the {m} micro-batches",
                values={"op": op, "stage": s, "microbatch": i},
            )
    return rank_of_stage, m, seen["W"]


def _refuse_deadlock(actions: Sequence[Sequence[Action]], position: Sequence[int]) -> None:
    stuck = [(rank, actions[rank][i]) for rank, i in enumerate(position) if i < len(actions[rank])]
    if not stuck:
        return
    waits = "; ".join(
        f"rank {rank} at {a.op} of stage {a.stage}, micro-batch {a.microbatch}"
        for rank, a in stuck[:4]
    )
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    raise LayoutError(
        f"the schedule deadlocks: {waits}{more} wait for actions that are ordered behind them",
        values={
            "waiting": [
                {"rank": rank, "op": a.op, "stage": a.stage, "microbatch": a.microbatch}
                for rank, a in stuck
            ]
        },
    )
