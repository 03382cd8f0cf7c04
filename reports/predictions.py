"""Rows of the table -> predictions: a time and a memory with their parts, or a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import ShardwiseError
from planner.estimate import estimate_stages
from planner.halves import in_halves
from planner.results import Estimate
from reports.published_rows import Case, case_of, vpp_by_run
from reports.published_table import MissingField, NotPredictable, PublishedRow

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the cost model says of one row, beside what was measured.

    `skipped_reason` is empty for a row that was predicted. `step_time_s` is None where the batch is
    not stated: then memory alone is predicted.
    """

    row: PublishedRow
    skipped_reason: str = ""
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_memory_gib: float | None = None
    breakdown_s: dict[str, float] = field(default_factory=dict)
    memory_gib: dict[str, float] = field(default_factory=dict)
    case: Case | None = None

    @property
    def time_error(self) -> float | None:
        """Signed error of the step time [percent]; None where either side is missing."""
        return percent(self.step_time_s, self.row.number("measured_step_time_s"))

    @property
    def memory_error(self) -> float | None:
        return percent(self.peak_memory_gib, self.row.number("peak_mem_gib"))


def percent(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else 100.0 * (predicted / measured - 1.0)


def predictions(rows: Sequence[PublishedRow]) -> list[Prediction]:
    """Predict every row, in order; half of them in a second process where there is one to spare."""
    elsewhere = vpp_by_run(tuple(rows))
    found: list[Prediction | Case] = []
    for row in rows:
        try:
            found.append(case_of(row, elsewhere))
        except (MissingField, NotPredictable) as reason:
            found.append(Prediction(row, str(reason)))
    cases = [one for one in found if isinstance(one, Case)]
    done = iter(in_halves(lambda some: [values_of(case) for case in some], cases))
    return [prediction_of(one, next(done)) if isinstance(one, Case) else one for one in found]


def predict(case: Case) -> Prediction:
    """Time, and the memory of the rank that the source measured."""
    return prediction_of(case, values_of(case))


def values_of(case: Case) -> dict[str, Any]:
    """What `Prediction` holds of a case, as plain values."""
    try:
        result = estimate_stages(case.layout, case.stages, case.setting, bounds=False)
    except ShardwiseError as error:
        return {"skipped_reason": str(error)}
    memory = measured_rank(result, case.ranks)
    return {
        "step_time_s": float(result.step_time_s) if case.timed else None,
        "tokens_per_s_per_gpu": float(result.tokens_per_s_per_gpu) if case.timed else None,
        "peak_memory_gib": sum(memory.values()),
        "breakdown_s": {name: float(value) for name, value in result.breakdown_s.items()},
        "memory_gib": memory,
    }


def prediction_of(case: Case, values: dict[str, Any]) -> Prediction:
    """The prediction of a case; one that was refused keeps the reason alone."""
    refused = "skipped_reason" in values
    return Prediction(case.row, **values, case=None if refused else case)


def measured_rank(result: Estimate, ranks: str) -> dict[str, float]:
    """Memory by item of the fullest rank among those that were measured [GiB]."""
    stages = list(result.memory_bytes)
    if ranks in ("first", "last"):
        stages = stages[:1] if ranks == "first" else stages[-1:]
    elif ranks == "ends":
        stages = [stages[0], stages[-1]]
    fullest = max(stages, key=lambda items: sum(items.values()))
    return {name: float(value) / GIB for name, value in fullest.items()}
