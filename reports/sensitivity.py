"""How far errors move when a constant that nobody measured is 20 % more or less."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hwprofiles.errors import ProfileError
from hwprofiles.override import override
from planner.runtime import Runtime
from reports.predictions import Prediction, predict
from reports.published_rows import Case

STEP = 0.2
SAMPLE = 6
WHOLE = ("count", "flag", "ranks")  # units of which a fifth more is nothing
# Facts that only say what is legal or how much of a thing there is: no cost reads them as a rate.
NOT_RATES = ("max_tp", "max_pp", "max_cp", "max_ep", "vocab_multiple", "price", "tdp", "max_nodes")


def sensitivity(found: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Median error of time and memory with each assumed constant 20 % down and up.

    Over the rows of quality A and B whose runtime or cluster has that constant, at most `SAMPLE` of
    a source, evenly spaced: every constant is two predictions of each.
    """
    cases = sample(
        [p.case for p in found if p.case is not None and p.row.text("quality") in ("A", "B")]
    )
    rows = []
    for where, name in assumed(cases):
        some = [case for case in cases if is_assumed(case, where, name)]
        try:
            less, more = (
                [moved(case, where, name, factor) for case in some]
                for factor in (1 - STEP, 1 + STEP)
            )
        except ProfileError:  # a whole number, or one that another fact bounds
            continue
        base, down, up = (
            median_errors([predict(case) for case in cases]) for cases in (some, less, more)
        )
        rows += [
            {
                "constant": f"{where}.{name} ({what})",
                "rows": len(some),
                "base": base[what],
                "down": down[what],
                "up": up[what],
            }
            for what in ("time", "memory")
            if base[what] is not None and (down[what] != base[what] or up[what] != base[what])
        ]
    return sorted(rows, key=lambda row: -max(abs(row[k] - row["base"]) for k in ("down", "up")))


def sample(cases: Sequence[Case]) -> list[Case]:
    """At most `SAMPLE` cases of each source, evenly spaced in the order of the table."""
    by_source: dict[str, list[Case]] = {}
    for case in cases:
        by_source.setdefault(case.row.source, []).append(case)
    chosen = []
    for some in by_source.values():
        count = min(len(some), SAMPLE)
        chosen += [some[index * len(some) // count] for index in range(count)]
    return chosen


def assumed(cases: Sequence[Case]) -> Iterator[tuple[str, str]]:
    """Assumed facts of the runtimes, devices and clusters of the cases."""
    for where in ("runtime", "device", "cluster"):
        names = {
            name
            for case in cases
            for name, fact in facts_of(case, where).items()
            if fact.kind == "assumed" and fact.unit not in WHOLE and not name.startswith(NOT_RATES)
        }
        yield from ((where, name) for name in sorted(names))


def is_assumed(case: Case, where: str, name: str) -> bool:
    """Whether the constant of this case is assumed: another device may have it measured."""
    fact = facts_of(case, where).get(name)
    return fact is not None and fact.kind == "assumed"


def facts_of(case: Case, where: str) -> dict[str, Any]:
    setting = case.setting
    if where == "runtime":
        return dict(setting.runtime.facts)
    return dict(setting.cluster.device.facts if where == "device" else setting.cluster.facts)


def moved(case: Case, where: str, name: str, factor: float) -> Case:
    """The case with one constant times `factor`; fractions stay at most 1."""
    setting = case.setting
    if where == "runtime":
        runtime = moved_runtime(setting.runtime, name, factor)
        return replace(case, setting=replace(setting, runtime=runtime))
    cluster = override(setting.cluster, {f"{where}.{name}": f"{factor}x"})
    return replace(case, setting=replace(setting, cluster=cluster))


def moved_runtime(runtime: Runtime, name: str, factor: float) -> Runtime:
    table, _, item = name.partition(".")
    if item:
        values = dict(getattr(runtime, table))
        values[item] *= factor
        changes: dict[str, Any] = {table: values}
        return replace(runtime, **changes)
    value = getattr(runtime, name) * factor
    if runtime.facts[name].unit == "fraction":
        value = min(1.0, value)
    changes = {name: value}
    return replace(runtime, **changes)


def median_errors(found: Sequence[Prediction]) -> dict[str, Any]:
    """Median absolute errors of time and memory [percent]."""
    sides = {
        "time": [abs(p.time_error) for p in found if p.time_error is not None],
        "memory": [abs(p.memory_error) for p in found if p.memory_error is not None],
    }
    return {name: float(np.median(values)) if values else None for name, values in sides.items()}
