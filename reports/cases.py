"""Reported cases judged: what the model says of each beside what people saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from planner.errors import ShardwiseError
from planner.estimate import FITS_FRACTION, estimate_stages
from planner.model_flops import model_flops_per_token
from planner.results import Estimate
from reports.case_rows import ready
from reports.case_table import ReportedCase, read_cases
from reports.predictions import GIB, measured_rank
from reports.published_rows import Case
from reports.published_table import MissingField, NotPredictable
from reports.statistics import errors

AGREES_PERCENT = 15.0  # reports are rounded, of one step, or of what a monitor showed
HOUR = 3600.0
GB = 1e9


def judged_cases(cases: Sequence[ReportedCase] | None = None) -> dict[str, Any]:
    """Every case judged: `rows`, how many `agree`, and `errors` of the values.

    `judgement` of a row is agrees, borderline, differs or skipped. A value agrees within
    `AGREES_PERCENT`; a report of fits, or of out of memory, agrees where the model says the same,
    and is borderline where its peak lies between `FITS_FRACTION` and all of the memory.
    """
    rows = [judge(case) for case in (read_cases() if cases is None else cases)]
    judgements = [row["judgement"] for row in rows]
    reasons: dict[str, int] = {}
    for row in rows:
        if row["reason"]:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["error_percent"] is not None and row["reported"] == "value":
            values.setdefault(row["kind"], []).append(row["error_percent"])
    found = {kind: errors(signed) for kind, signed in values.items()}
    return {
        "rows": rows,
        "counts": {
            name: judgements.count(name) for name in ("agrees", "borderline", "differs", "skipped")
        },
        "errors": {kind: asdict(one) for kind, one in found.items() if one is not None},
        "skipped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def judge(case: ReportedCase) -> dict[str, Any]:
    """One case: its report, the prediction in the report's unit, and whether they agree."""
    row: dict[str, Any] = {
        "id": case.id,
        "kind": case.fields["kind"],
        "model": case.fields["model"],
        "source": case.fields["source"],
        "reported": case.fields["verdict"],
        "reported_value": case.value,
        "unit": case.fields["unit"],
        "predicted": "",
        "predicted_value": None,
        "error_percent": None,
        "judgement": "skipped",
        "reason": "",
        "cause": "",
    }
    try:
        judgement = of_states(case) if case.fields["verdict"] == "oom" else of_run(case)
    except (MissingField, NotPredictable, ShardwiseError) as reason:
        return row | {"reason": str(reason)}
    row |= judgement
    if row["judgement"] != "agrees":
        row["cause"] = case.rule.cause
    return row


def estimated(ready_case: Case) -> Estimate:
    return estimate_stages(ready_case.layout, ready_case.stages, ready_case.setting, bounds=False)


def of_states(case: ReportedCase) -> dict[str, Any]:
    """A report of out of memory: as it was run, or, where it leaves things open, at its least."""
    reason, least = "", False
    try:
        found = ready(case)
    except MissingField as missing:
        found, reason, least = ready(case, lenient=True), str(missing), True
    result = estimated(found)
    peak = result.peak_memory_bytes / GIB
    verdict = fit(peak, result.capacity_bytes / GIB)
    if least and verdict != "oom":
        raise NotPredictable(f"{reason}, and at the least it may be {peak:.1f} GiB are enough")
    return {
        "predicted": verdict,
        "predicted_value": peak,
        "unit": "GiB",
        "judgement": {"oom": "agrees", "borderline": "borderline", "fits": "differs"}[verdict],
    }


def of_run(case: ReportedCase) -> dict[str, Any]:
    """A report of a value, or that a run fits."""
    found = ready(case)
    result = estimated(found)
    peak = result.peak_memory_bytes / GIB
    verdict = fit(peak, result.capacity_bytes / GIB)
    if case.fields["verdict"] == "fits":
        agrees = {"fits": "agrees", "borderline": "borderline", "oom": "differs"}[verdict]
        return {
            "predicted": verdict,
            "predicted_value": peak,
            "unit": "GiB",
            "judgement": agrees,
        }
    value = value_of(case, found, result)
    reported = case.value
    if reported is None:
        raise NotPredictable("the report has no value")
    if case.fields["kind"] == "throughput":
        refuse_impossible(case.fields["unit"], value / reported, result.mfu)
    error = 100.0 * (value / reported - 1.0)
    good = value <= reported if case.rule.bound else abs(error) <= AGREES_PERCENT
    return {
        "predicted": "value",
        "predicted_value": value,
        "error_percent": None if case.rule.bound else error,
        "judgement": "agrees" if good else "differs",
    }


def refuse_impossible(unit: str, ratio: float, mfu: float) -> None:
    """Refuse a report that would need more than the peak of its GPU; `ratio` is predicted over
    reported, `mfu` the predicted one."""
    times = ratio if unit == "s/iter" or unit == "GPU-hours" else 1.0 / ratio
    if mfu * times > 1.0:
        raise NotPredictable(
            f"the report would need {100.0 * mfu * times:.0f} % of the peak of its GPU, so that "
            f"length, batch or time is not as stated"
        )


def fit(peak_gib: float, capacity_gib: float) -> str:
    """The verdict of `shardwise estimate`, in one word.

    >>> fit(70.0, 80.0), fit(78.0, 80.0), fit(81.0, 80.0)
    ('fits', 'borderline', 'oom')
    """
    share = peak_gib / capacity_gib
    return "fits" if share <= FITS_FRACTION else "borderline" if share <= 1.0 else "oom"


def value_of(case: ReportedCase, found: Case, result: Estimate) -> float:
    """The prediction in the unit of the report."""
    unit, rule = case.fields["unit"], case.rule
    if case.fields["kind"] == "memory":
        return memory_value(case, found, result)
    rate = result.tokens_per_s_per_gpu
    if unit == "s/iter":
        return result.step_time_s
    if unit == "tokens/s/GPU":
        return rate
    if unit == "tokens/s":
        return rate * found.layout.num_gpus
    if unit == "TFLOP/s/GPU":
        # Megatron-LM counts every query against every key.
        setting = found.setting
        flops = model_flops_per_token(setting.model, setting.train.seq_len, causal=False)
        return float(rate * flops.total_flops / 1e12)
    if unit == "GPU-hours" and rule.tokens:
        return rule.tokens / rate / HOUR
    raise NotPredictable(f"the model does not predict {case.fields['expected'][:60]} [{unit}]")


def memory_value(case: ReportedCase, found: Case, result: Estimate) -> float:
    unit, rule = case.fields["unit"], case.rule
    if rule.measure == "host":
        return result.host_bytes_per_node / GB
    items = measured_rank(result, found.ranks)
    wanted = items if rule.measure == "peak" else {"activations": items["activations"]}
    return sum(wanted.values()) * (GIB / rule.gb_bytes if unit.startswith("GB") else 1.0)
