"""Pipeline schedules: in which order every rank runs its forwards and backwards.

`build_schedule` gives the order of one pipeline, `in_flight` and `bubble_beta` the closed forms of
its activation memory and its bubble for tables of layouts. The simulator (`planner.simulate`) is
the judge of both.

======================  ====================================================================
gpipe                   all forwards, then all backwards [Huang2019]
1f1b                    one forward, one backward after the warm-up [Narayanan2021]
interleaved             1f1b over `vpp` chunks a rank, in groups of about `pp` micro-batches
                        [Narayanan2021]
zero-bubble             ZB-H1: 1f1b with the weight gradient delayed into the cool-down [Qi2023]
dualpipe                DualPipeV: two chunks a rank, in a V [DeepSeek2025]
======================  ====================================================================

References: Huang2019 (GPipe, arXiv:1811.06965); Narayanan2021 (Megatron-LM, arXiv:2104.04473);
Qi2023 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241); DeepSeek2025 (the DualPipe repository,
github.com/deepseek-ai/DualPipe, and the DeepSeek-V3 report, arXiv:2412.19437).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import LayoutError
from planner.layout import SCHEDULES, Int
from planner.results import Action

__all__ = [
    "bubble_beta",
    "build_schedule",
    "check_schedule",
    "in_flight",
    "rank_of",
    "schedule_is_legal",
    "stage_of",
]

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, DUALPIPE = range(len(SCHEDULES))

# One cell before it becomes an Action: (chunk, op, micro-batch).
_Cell = tuple[int, str, int]


# --- which rank holds which virtual stage ---------------------------------------------------------


def stage_of(schedule: str, rank: Int, chunk: Int, pp: Int, vpp: Int) -> Int:
    """Virtual stage that is chunk `chunk` of rank `rank`.

    ``chunk * pp + rank``; in a V (dualpipe) rank r holds r and, on the way back, ``2 pp - 1 - r``.

    >>> [stage_of("interleaved", 1, chunk, pp=4, vpp=2) for chunk in (0, 1)]
    [1, 5]
    >>> [stage_of("dualpipe", 1, chunk, pp=4, vpp=2) for chunk in (0, 1)]
    [1, 6]
    """
    if schedule == "dualpipe":
        return rank + chunk * (vpp * pp - 1 - 2 * rank)
    return chunk * pp + rank


def rank_of(schedule: str, stage: Int, pp: Int, vpp: Int) -> Int:
    """Pipeline rank that holds virtual stage `stage`; the inverse of `stage_of`.

    >>> [rank_of("dualpipe", stage, pp=2, vpp=2) for stage in range(4)]
    [0, 1, 1, 0]
    """
    if schedule == "dualpipe":
        mirrored = vpp * pp - 1 - stage
        return np.minimum(stage, mirrored) if np.ndim(stage) else min(stage, mirrored)
    return stage % pp


# --- legality -------------------------------------------------------------------------------------


def schedule_is_legal(
    schedule_code: ArrayLike, pp: ArrayLike, vpp: ArrayLike, num_microbatches: ArrayLike
) -> NDArray[np.bool_]:
    """Whether `build_schedule` accepts these degrees, for tables of layouts.

    The rules are those of the schedules themselves; a runtime may want more (Megatron-Core: a
    multiple of `pp` micro-batches when interleaved).

    >>> schedule_is_legal([1, 2, 2, 4, 4], [4, 4, 1, 4, 4], [1, 2, 2, 2, 2], [1, 4, 4, 7, 8])
    array([ True,  True, False, False,  True])
    """
    code, p, v, m = np.broadcast_arrays(schedule_code, pp, vpp, num_microbatches)
    flat = (code == GPIPE) | (code == ONE_F_ONE_B) | (code == ZERO_BUBBLE)
    legal = np.where(flat, v == 1, v >= 2)
    legal &= np.where((code == GPIPE) | (code == ONE_F_ONE_B), p >= 1, p >= 2)
    legal &= np.where(code == DUALPIPE, (v == 2) & (m >= 2 * p), m >= 1)
    return np.asarray(legal & (code >= 0) & (code < len(SCHEDULES)), dtype=np.bool_)


def check_schedule(schedule: str, pp: int, vpp: int, num_microbatches: int) -> None:
    """Raise LayoutError when these degrees do not make a pipeline of this schedule."""
    values = {
        "schedule": schedule,
        "pp": pp,
        "vpp": vpp,
        "num_microbatches": num_microbatches,
    }

    def refuse(sentence: str, **legal: list[Any]) -> LayoutError:
        return LayoutError(sentence, values=values, legal=legal)

    if schedule not in SCHEDULES:
        near = get_close_matches(str(schedule), SCHEDULES, n=2, cutoff=0.4) or list(SCHEDULES)
        raise refuse(
            f"schedule={schedule!r} is not a pipeline schedule; legal: {', '.join(SCHEDULES)}",
            schedule=near,
        )
    for name, least in (("pp", 1), ("vpp", 1), ("num_microbatches", 1)):
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise refuse(f"{name}={value!r} is not a whole number of at least 1", **{name: [1]})
    if schedule in ("gpipe", "1f1b", "zero-bubble") and vpp != 1:
        raise refuse(
            f"schedule={schedule} with vpp={vpp}: it runs one chunk a rank; legal here: vpp=1, or "
            "schedule=interleaved",
            vpp=[1],
            schedule=["interleaved"],
        )
    if schedule in ("interleaved", "zero-bubble", "dualpipe") and pp < 2:
        raise refuse(
            f"schedule={schedule} with pp={pp}: it needs at least 2 pipeline ranks; legal here: "
            "pp=2, or schedule=1f1b",
            pp=[2],
            schedule=["1f1b"],
        )
    if schedule == "interleaved" and vpp < 2:
        raise refuse(
            f"schedule=interleaved with vpp={vpp}: it needs at least 2 chunks a rank; legal here: "
            "vpp=2, or schedule=1f1b",
            vpp=[2],
            schedule=["1f1b"],
        )
    if schedule == "dualpipe" and vpp != 2:
        raise refuse(
            f"schedule=dualpipe with vpp={vpp}: its V holds exactly 2 chunks a rank; legal here: "
            "vpp=2",
            vpp=[2],
        )
    if schedule == "dualpipe" and num_microbatches < 2 * pp:
        smaller = [num_microbatches // 2] if num_microbatches >= 4 else []
        raise refuse(
            f"schedule=dualpipe with pp={pp} and num_microbatches={num_microbatches}: it needs at "
            f"least as many micro-batches as virtual stages, 2 pp; legal here: "
            f"num_microbatches={2 * pp}" + (f" or pp={smaller[0]}" if smaller else ""),
            num_microbatches=[2 * pp],
            **({"pp": smaller} if smaller else {}),
        )


# --- the order of every rank ----------------------------------------------------------------------


def build_schedule(schedule: str, pp: int, vpp: int, num_microbatches: int) -> list[list[Action]]:
    """The actions of every pipeline rank, in the order the rank runs them.

    A backward whose weight gradient comes later is the pair B (for the input) and W; a B without a
    W is the whole backward.

    >>> [f"{a.op}{a.microbatch}" for a in build_schedule("1f1b", 2, 1, 3)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    check_schedule(schedule, pp, vpp, num_microbatches)
    order = {
        "gpipe": _gpipe,
        "1f1b": _interleaved,  # with one chunk the two are the same
        "interleaved": _interleaved,
        "zero-bubble": _zero_bubble,
        "dualpipe": _dualpipe,
    }[schedule]
    ranks = []
    for rank in range(pp):
        stages = [stage_of(schedule, rank, chunk, pp, vpp) for chunk in range(vpp)]
        cells = order(rank, pp, vpp, num_microbatches)
        ranks.append([Action(stages[chunk], op, microbatch) for chunk, op, microbatch in cells])
    return ranks


def _gpipe(rank: int, pp: int, vpp: int, m: int) -> list[_Cell]:
    return [(0, op, i) for op in "FB" for i in range(m)]


def _interleaved(rank: int, pp: int, vpp: int, m: int) -> list[_Cell]:
    """Micro-batches go in groups; a group passes all chunks before the next one starts."""
    forwards, backwards = [], []
    sizes = _group_sizes(pp, m)
    first = 0
    for size in sizes:
        group = range(first, first + size)
        forwards += [(chunk, "F", i) for chunk in range(vpp) for i in group]
        backwards += [(chunk, "B", i) for chunk in reversed(range(vpp)) for i in group]
        first += size
    # Two slots a rank further up the pipe when interleaved: a chunk's output has to travel to the
    # last rank and its gradient back while the others keep computing.
    away = pp - rank - 1
    warmup = min(m * vpp, away if vpp == 1 else 2 * away + (vpp - 1) * sizes[0])
    return forwards[:warmup] + _alternate(forwards[warmup:], backwards)


def _group_sizes(pp: int, m: int) -> list[int]:
    """Groups of pp micro-batches; what does not divide is spread over the groups, the first first.

    A small group at the end would deadlock: the last rank has too few forwards of it to run before
    the gradients it waits for. So torch and Megatron-Core have no group under pp either.

    >>> _group_sizes(4, 8), _group_sizes(4, 11), _group_sizes(4, 3)
    ([4, 4], [6, 5], [3])
    """
    num_groups = max(1, m // pp)
    size, larger = divmod(m, num_groups)
    return [size + (group < larger) for group in range(num_groups)]


def _alternate(forwards: list[_Cell], backwards: list[_Cell]) -> list[_Cell]:
    """F, B, F, B, ... and the backwards that remain."""
    steady = [cell for pair in zip(forwards, backwards, strict=False) for cell in pair]
    return steady + backwards[len(forwards) :]


def _zero_bubble(rank: int, pp: int, vpp: int, m: int) -> list[_Cell]:
    """1f1b in which W runs `rank` backwards late, so that every rank holds pp micro-batches."""
    cells: list[_Cell] = []
    weights = 0
    backwards = 0
    for cell in _interleaved(rank, pp, 1, m):
        cells.append(cell)
        if cell[1] == "B":
            backwards += 1
            if backwards - weights > rank:
                cells.append((0, "W", weights))
                weights += 1
    return cells + [(0, "W", i) for i in range(weights, m)]


def _dualpipe(rank: int, pp: int, vpp: int, m: int) -> list[_Cell]:
    """DualPipeV. Chunk 0 runs down the V, chunk 1 back up, so the last rank turns first."""
    cells: list[_Cell] = []
    done = {(chunk, op): 0 for chunk in (0, 1) for op in "FB"}
    owed: list[tuple[int, int]] = []  # weight gradients to do later, oldest first
    away = pp - rank - 1

    def run(op: str, chunk: int, *, weight_later: bool = False) -> None:
        i = done[chunk, op]
        done[chunk, op] = i + 1
        cells.append((chunk, op, i))
        if weight_later:
            owed.append((chunk, i))

    def run_weight() -> None:
        chunk, i = owed.pop(0)
        cells.append((chunk, "W", i))

    for _ in range(2 * away):  # fill the way down
        run("F", 0)
    for _ in range(rank + 1):  # both ways
        run("F", 0)
        run("F", 1)
    for _ in range(away):  # the first gradients are urgent for the rank below, W is not
        run("B", 1, weight_later=True)
        run_weight()
        run("F", 1)
    for _ in range(m - 2 * pp + rank + 1):  # steady: the pairs that DualPipe overlaps
        run("F", 0)
        run("B", 1)
        run("F", 1)
        run("B", 0)
    for _ in range(away):  # no more forwards on the way down
        run("B", 1)
        run("F", 1)
        run("B", 0)
    # Drain. From its middle on, weight gradients wait to fill the holes of the last phase.
    middle, split = (rank + 1) // 2, False
    for i in range(rank + 1):
        split = split or (i == middle and rank % 2 == 1)
        run("B", 1, weight_later=split)
        split = split or (i == middle and rank % 2 == 0)
        run("B", 0, weight_later=split)
    for _ in range(away):
        run_weight()
        run("B", 0, weight_later=True)
    while owed:
        run_weight()
    return cells


# --- closed forms for tables of layouts -----------------------------------------------------------


def in_flight(
    schedule_code: ArrayLike,
    pp: ArrayLike,
    vpp: ArrayLike,
    num_microbatches: ArrayLike,
    stage: ArrayLike,
) -> NDArray[np.float64]:
    """Peak activations that a pipeline rank holds [micro-batches on the whole rank].

    With p = pp, v = vpp, m = num_microbatches, r = stage (the pipeline rank, from 0), for legal
    degrees:

        gpipe         m
        1f1b          min(m, p - r)
        interleaved   min(m v, 2 (p - r - 1) + (v - 1) G + 1) / v
        zero-bubble   min(m, p)
        dualpipe      p + 1/2

    where G = ceil(m / max(1, m // p)) is the largest group of micro-batches, p when p divides m.
    A micro-batch on one of v chunks counts 1/v; it is held from the start of F to the end of its
    backward, of its W where that comes later. An upper bound there: what only the gradient for the
    input needs is free earlier.

    References: Narayanan2021 Section 2.2; Qi2023 Section 2 (ZB-H1 holds as much as 1f1b's first
    rank); DeepSeek2025, table of the README: PP + 1 chunks with PP = 2 p.

    >>> in_flight([1, 2, 3, 4], 4, [1, 2, 1, 2], 8, stage=1).tolist()
    [3.0, 4.5, 4.0, 4.5]
    """
    code, p, v, m, r = np.broadcast_arrays(schedule_code, pp, vpp, num_microbatches, stage)
    num_groups = np.maximum(1, m // p)
    group = -(-m // num_groups)
    return np.select(
        [code == GPIPE, code == ONE_F_ONE_B, code == INTERLEAVED, code == ZERO_BUBBLE],
        [
            m * 1.0,
            np.minimum(m, p - r) * 1.0,
            np.minimum(m * v, 2 * (p - r - 1) + (v - 1) * group + 1) / v,
            np.minimum(m, p) * 1.0,
        ],
        default=p + 0.5,
    )


def bubble_beta(
    schedule_code: ArrayLike,
    vpp: ArrayLike,
    forward_s: ArrayLike,
    backward_input_s: ArrayLike,
    weight_s: ArrayLike,
    *,
    pp: ArrayLike | None = None,
    num_microbatches: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """Share of the 1f1b bubble that a schedule leaves, in [0, 1].

    The time of p = pp ranks that need t_s seconds each for one of m micro-batches is

        T = m M + beta (S - M),   M = max t_s, S = sum t_s

    With F, B, W the seconds of one micro-batch on a whole rank for the forward, the gradient for
    the input and the gradient for the weights, t = F + B + W, v = vpp:

        gpipe, 1f1b   1
        interleaved   1/v + (1 - 1/v) max(0, p - m) / (p - 1)
        zero-bubble   max(F + B - W min(1, (m - 1) / (p - 1)), F, B) / t
        dualpipe      max(F + B - W, F, 2 F - W - min(B, W), 2 B - min(B, W) - F / (p - 1)) / (2 t)

    Without `num_microbatches` m >= p is taken, without `pp` the limit of a long pipeline.

    zero-bubble is Qi2023's F + B - W where W is the shortest of the three; a longer W finds no hole
    of its size. dualpipe is derived here, from the holes that the simulator shows. DeepSeek2025's
    (PP/2 - 1)(F&B + B' - 3 W') chunks (PP = 2 p, B' = B + W; with F&B = F + B' it is F + 2 B - W in
    our terms) lets the F and the B of a pair end together; here F goes first and the next rank
    need not wait for the B.

    Assumes stages of equal time and no transfers. Then it equals the simulator (zero-bubble with
    m < p and W > min(F, B): is below it). tests/oracles/test_bubbles.py proves that, and states the
    gap with uneven stages.

    References: Huang2019 Section 2.3; Narayanan2021 Sections 2.2.1 and 2.2.2; Qi2023 Table 2;
    DeepSeek2025, README.

    >>> bubble_beta([1, 2, 3, 4], [1, 2, 1, 2], 1.0, 1.0, 1.0).round(4).tolist()
    [1.0, 0.5, 0.3333, 0.1667]
    """
    code, v, f, b, w = np.broadcast_arrays(
        schedule_code, vpp, forward_s, backward_input_s, weight_s
    )
    # Ranks below the first, and the micro-batches that could keep them busy but are not there.
    below = np.inf if pp is None else np.maximum(np.asarray(pp) - 1.0, 1.0)
    if num_microbatches is None:
        missing = np.asarray(0.0)
    elif pp is None:
        raise ValueError("bubble_beta wants pp wherever it gets num_microbatches")
    else:
        missing = np.maximum(0.0, np.asarray(pp) - np.asarray(num_microbatches)) / below
    # A rank that does nothing has no bubble to share.
    whole = np.where(f + b + w > 0, f + b + w, 1.0)
    hole = np.minimum(b, w)
    zero_bubble_s = np.maximum(np.maximum(f, b), f + b - w * (1.0 - missing))
    dualpipe_s = np.maximum(
        np.maximum(f + b - w, f), np.maximum(2 * f - w - hole, 2 * b - hole - f / below)
    )
    code, one, interleaved, zero_bubble, dualpipe = np.broadcast_arrays(
        code, 1.0, 1 / v + (1 - 1 / v) * missing, zero_bubble_s / whole, dualpipe_s / (2 * whole)
    )
    return np.select(
        [code <= ONE_F_ONE_B, code == INTERLEAVED, code == ZERO_BUBBLE],
        [one, interleaved, zero_bubble],
        default=dualpipe,
    )
