"""The exact search: the best layout of a space, with the proof that there is no better one.

Best-first over four bounds, from cheap to dear: cell (coarse axes), row (no stages), stages with
fractional recompute mixes, stages with integer mixes. What is expanded, bounded or split next is
what has the least bound; what a bound keeps above the incumbent is never touched. The last word
has a mixed integer program over the best few layouts (`planner.search.ilp`), which must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.halves import in_halves
from planner.layout import Layout
from planner.search.best_first import BestFirst
from planner.search.candidates import candidates, restrict
from planner.search.found import Found
from planner.search.nearest import nearest_row
from planner.search.provider import CostProvider

TOGETHER = 8  # numbers of GPUs that `least_gpus` tries at a time


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
    run = BestFirst(provider, table, keep, near, progress)
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


def fits(provider: CostProvider) -> bool:
    """Whether any layout fits: a search that stops at the first."""
    run = BestFirst(provider, candidates(provider), 1, 0.0, None)
    run.first_only = True
    run.best_first()
    return bool(run.kept)


@dataclass(frozen=True, slots=True)
class LeastGpus:
    """The least number of GPUs that was found to fit, None if none up to the limit did.

    `proven`: every smaller multiple was tried and does not fit. `tried` is the number of searches.
    """

    num_gpus: int | None
    proven: bool
    tried: int


def least_gpus(
    make_provider: Callable[[int], CostProvider | None],
    *,
    step: int,
    most: int,
    start: int = 1,
    most_checks: int = 64,
) -> LeastGpus:
    """The least multiple of `step` GPUs, from `start` to `most`, on which some layout fits.

    Doubles until something fits, then halves the interval. More GPUs need not help (a batch or a
    head count may not divide), so that multiples below the answer are then tried as well, from the
    least: all of them, if they are at most `most_checks` more.

    Parameters
    ----------
    make_provider
        The cost model for a number of GPUs; None where that number is not possible.
    """
    known: dict[int, bool] = {}

    def first_of(numbers: Sequence[int]) -> int | None:
        """The least of these that fits; they are tried on two cores, a few at a time."""
        for start in range(0, len(numbers), TOGETHER):
            some = numbers[start : start + TOGETHER]
            results = in_halves(lambda part: [fit(n * step) for n in part], some)
            known.update({n * step: done for n, done in zip(some, results, strict=True)})
            for number, done in zip(some, results, strict=True):
                if done:
                    return number * step
        return None

    def fit(number: int) -> bool:
        if number not in known:
            provider = make_provider(number)
            known[number] = provider is not None and fits(provider)
        return known[number]

    first = max(1, -(-start // step))
    low, high = first - 1, first
    while not fit(high * step):
        low, high = high, min(2 * high, most // step)
        if high <= low:
            left = [n for n in range(first, low) if n * step not in known]
            found = first_of(left[:most_checks])
            if found is not None:
                return LeastGpus(found, True, len(known))
            return LeastGpus(None, len(left) <= most_checks, len(known))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle * step) else (middle, high)
    left = [n for n in range(first, high) if n * step not in known]
    found = first_of(left[:most_checks])
    if found is not None:
        return LeastGpus(found, True, len(known))
    return LeastGpus(high * step, len(left) <= most_checks, len(known))
