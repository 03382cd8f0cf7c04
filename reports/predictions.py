"""Rows of the table -> predictions: a time and a memory with their parts, or a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.errors import ShardwiseError
from planner.estimate import estimate_stages
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
    """Predict every row, in order."""
    elsewhere = vpp_by_run(tuple(rows))
    found = []
    for row in rows:
        try:
            case = case_of(row, elsewhere)
        except (MissingField, NotPredictable) as reason:
            found.append(Prediction(row, str(reason)))
            continue
        found.append(predict(case))
    return found


def predict(case: Case) -> Prediction:
    """Time, and the memory of the rank that the source measured."""
    try:
        result = estimate_stages(case.layout, case.stages, case.setting, bounds=False)
    except ShardwiseError as error:
        return Prediction(case.row, str(error))
    memory = measured_rank(result, case.ranks)
    return Prediction(
        case.row,
        step_time_s=result.step_time_s if case.timed else None,
        tokens_per_s_per_gpu=result.tokens_per_s_per_gpu if case.timed else None,
        peak_memory_gib=sum(memory.values()),
        breakdown_s=dict(result.breakdown_s),
        memory_gib=memory,
        case=case,
    )


def measured_rank(result: Estimate, ranks: str) -> dict[str, float]:
    """Memory by item of the fullest rank among those that were measured [GiB]."""
    stages = list(result.memory_bytes)
    if ranks in ("first", "last"):
        stages = stages[:1] if ranks == "first" else stages[-1:]
    elif ranks == "ends":
        stages = [stages[0], stages[-1]]
    fullest = max(stages, key=lambda items: sum(items.values()))
    return {name: value / GIB for name, value in fullest.items()}
