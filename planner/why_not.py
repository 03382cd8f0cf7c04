"""Why not another degree: the best layout with each degree one step lower and one step higher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.estimate import estimate_stages
from planner.explain import why_not_row
from planner.provider import ModelProvider
from planner.results import Estimate
from planner.search.each import best_each
from planner.search.found import Found, Solved
from planner.words import gib

Neighbour = tuple[str, int, str]  # degree, value, lower or higher
WHY_NOT = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "zero")


def neighbours_of(provider: ModelProvider, best: Solved) -> list[Neighbour]:
    """For each degree its next lower and next higher value, where there is one."""
    values = provider.space().values
    wanted: list[Neighbour] = []
    for degree in WHY_NOT:
        chosen = int(getattr(best.layout, degree))
        choices = sorted(set(values.get(degree, ())))
        if degree == "dp" and not choices:
            num_gpus = provider.setting.num_gpus
            choices = [d for d in range(1, num_gpus + 1) if num_gpus % d == 0]
        if degree in provider.fixed:
            continue
        wanted += [(degree, v, "lower") for v in choices if v < chosen][-1:]
        wanted += [(degree, v, "higher") for v in choices if v > chosen][:1]
    return wanted


def why_not_rows(
    provider: ModelProvider, own: Estimate, wanted: Sequence[Neighbour]
) -> list[dict[str, Any]]:
    """For each neighbour, the best layout that has it; `own` is the estimate of the best of all."""
    found = best_each(provider, [(degree, value) for degree, value, _ in wanted])
    return [row_of(provider, own, *one, each) for one, each in zip(wanted, found, strict=True)]


def row_of(
    provider: ModelProvider, own: Estimate, degree: str, value: int, direction: str, found: Found
) -> dict[str, Any]:
    """The best layout with one degree at another value, and the largest term of the difference."""
    if found.best is not None:
        other = estimate_stages(
            found.best.layout, found.best.stages, provider.setting, bounds=False
        )
        return why_not_row(degree, value, direction, own, found.best.layout, other)
    if found.counts.legal == 0:
        reason = f"no legal layout has {degree}={value} here"
    else:
        reason = f"no layout with {degree}={value} fits in memory"
        if found.nearest is not None:
            missing, term = found.nearest.missing_bytes, found.nearest.main_term
            reason += f": {gib(missing)} are missing, most of them for {term}"
    return why_not_row(degree, value, direction, own, None, None, reason)
