"""Predicted against measured, term by term: time, memory, every collective's count and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from executor.measure import Measurements, RankMeasure, plan_digest
from planner.errors import InputError
from planner.plan import Plan

# What training does beside its plan: the loss and the norm of the gradients, of a few bytes.
CONTROL_BYTES = 64


def compare(plan: Plan, measurements: Measurements) -> dict[str, Any]:
    """The document of a comparison.

    Raises
    ------
    InputError
        The measurements are of another plan.
    """
    digest = plan_digest(plan)
    if measurements.plan_digest != digest:
        raise InputError(
            f"the measurements are of the plan {measurements.plan_digest[:12]}, and this plan is "
            f"{digest[:12]}; run this plan, or name the one that was run",
            values={"measured": measurements.plan_digest, "plan": digest},
        )
    rows = collective_rows(plan, measurements)
    why_not = why_time_does_not_count(measurements)
    predicted, measured = plan.prediction.step_time_s, measurements.step_time_s
    return {
        "plan": digest,
        "time": {
            "predicted_s": predicted,
            "measured_s": measured,
            "error": predicted / measured - 1 if measured else None,
            "counts": why_not is None,
            "why_not": why_not,
            "timed_steps": len(measurements.timed_steps),
        },
        "memory": memory_rows(plan, measurements),
        "collectives": rows,
        "collectives_equal": all(row["equal"] for row in rows),
    }


def why_time_does_not_count(measurements: Measurements) -> str | None:
    """Why the measured time says nothing about the prediction; None where it does."""
    if measurements.shares_cores:
        return (
            f"{measurements.ranks_per_node} processes shared {measurements.cores_per_node} cores: "
            "each waited for the others, as GPUs do not"
        )
    if len(measurements.steps) <= 2:
        return f"only {len(measurements.steps)} steps ran, and the first two warm up"
    return None


# --- collectives ----------------------------------------------------------------------------------

Totals = dict[tuple[str, str], tuple[int, float]]


def planned_totals(plan: Plan, pp_rank: int) -> Totals:
    """(kind, axis) -> calls and bytes of a step, on a rank of the stage that the plan describes.

    The plan's sends are those of a stage between others; at the ends there are fewer.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in plan.comm_ops:
        count = float(op.count)
        if op.axis == "pp":
            count = plan.num_microbatches * num_sends(plan, pp_rank, op.phase)
        entry = found[op.kind, op.axis]
        entry[0] += count
        entry[1] += count * float(op.num_bytes)
    return {key: (round(count), size) for key, (count, size) in found.items()}


def num_sends(plan: Plan, pp_rank: int, phase: str) -> int:
    """Chunks of a pipeline rank whose output (or input gradient) goes to another rank."""
    step = 1 if phase == "forward" else -1
    holder = {chunk.virtual_stage: r for r, s in enumerate(plan.stages) for chunk in s.chunks}
    return sum(
        holder.get(chunk.virtual_stage + step, pp_rank) != pp_rank
        for chunk in plan.stages[pp_rank].chunks
    )


def planned_stage(plan: Plan) -> int:
    """The pipeline rank whose collectives the plan lists: the slowest."""
    seconds = plan.prediction.stage_s
    return seconds.index(max(seconds))


def measured_totals(rank: RankMeasure) -> Totals:
    """(kind, axis) -> calls and bytes of a step on one rank; control traffic is left out."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rank.collectives:
        if row.num_bytes <= CONTROL_BYTES:
            continue
        entry = found[row.kind, row.axis]
        entry[0] += row.count
        entry[1] += row.count * row.num_bytes
    return {key: (round(count), size) for key, (count, size) in found.items()}


def rank_of_stage(measurements: Measurements, pp_rank: int) -> RankMeasure:
    """The first rank of a stage."""
    return next(r for r in measurements.ranks if r.coordinates.get("pp", 0) == pp_rank)


def collective_rows(plan: Plan, measurements: Measurements) -> list[dict[str, Any]]:
    """Count and bytes of every kind and axis, planned and measured."""
    stage = planned_stage(plan)
    planned = planned_totals(plan, stage)
    measured = measured_totals(rank_of_stage(measurements, stage))
    rows = []
    for key in sorted({*planned, *measured}):
        (count, size), (ran, sent) = planned.get(key, (0, 0.0)), measured.get(key, (0, 0.0))
        rows.append(
            {
                "kind": key[0],
                "axis": key[1],
                "planned_count": count,
                "measured_count": ran,
                "planned_bytes": size,
                "measured_bytes": sent,
                "equal": count == ran and abs(size - sent) < 0.5,
            }
        )
    return rows


# --- memory ---------------------------------------------------------------------------------------

STATE = {
    "weights": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
}


def memory_rows(plan: Plan, measurements: Measurements) -> list[dict[str, Any]]:
    """Planned and measured bytes of the first rank of every stage."""
    rows = []
    first = {rank.coordinates.get("pp", 0): rank for rank in reversed(measurements.ranks)}
    for stage, planned in enumerate(plan.prediction.memory_bytes):
        rank = first.get(stage)
        if rank is None:
            continue
        # In fp32, and where only a shard of the master is kept, weights are their own master: the
        # executor holds one copy that the plan may count under either name.
        held = rank.parameter_bytes + rank.gradient_bytes + rank.optimizer_bytes
        rows.append(
            {
                "stage": stage,
                "planned_state_bytes": sum(planned.get(name, 0.0) for name in STATE),
                "measured_state_bytes": held,
                "planned_peak_bytes": sum(planned.values()),
                "measured_peak_bytes": rank.peak_memory_bytes,
                "peak_kind": rank.memory_kind,
            }
        )
    return rows


# --- text -----------------------------------------------------------------------------------------


def render(document: Mapping[str, Any]) -> str:
    """The comparison for a person."""
    time = document["time"]
    lines = [
        f"step time   predicted {time['predicted_s'] * 1e3:.1f} ms, "
        f"measured {time['measured_s'] * 1e3:.1f} ms"
        + (f" ({time['error']:+.1%})" if time["counts"] else "")
    ]
    if time["why_not"]:
        lines.append(f"            the times do not count: {time['why_not']}")
    for row in document["memory"]:
        lines.append(
            f"stage {row['stage']:<5} state planned {row['planned_state_bytes'] / 2**20:.2f} MiB, "
            f"measured {row['measured_state_bytes'] / 2**20:.2f} MiB"
        )
    lines.append("")
    lines.append(f"{'collective':<16}{'axis':<11}{'calls':>17}{'bytes':>27}")
    for row in document["collectives"]:
        calls = f"{row['planned_count']} / {row['measured_count']}"
        size = f"{row['planned_bytes']:.0f} / {row['measured_bytes']:.0f}"
        mark = "" if row["equal"] else "  differ"
        lines.append(f"{row['kind']:<16}{row['axis']:<11}{calls:>17}{size:>27}{mark}")
    lines.append("(planned / measured, a step of the first rank of the slowest stage)")
    return "\n".join(lines)
