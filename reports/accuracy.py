"""Predicted against published: `validate` gives the whole comparison as one document."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from reports.predictions import Prediction, predictions
from reports.published_rules import composed_sources
from reports.published_table import PublishedRow, read_table
from reports.statistics import errors, regret, spearman

FAMILY_SIZE = 4  # layouts that make a family worth ranking
WORST = 20

GROUPS: dict[str, Callable[[PublishedRow], str]] = {
    "source": lambda row: row.source,
    "gpu": lambda row: row.text("gpu"),
    "kind": lambda row: "dense" if row.count("n_experts") is None else "moe",
    "precision": lambda row: row.text("precision"),
}


def validate(table: str | Path | None = None, source: str | None = None) -> dict[str, Any]:
    """Predict every published run and compare.

    `table` is a CSV file with the columns of the one that ships (None: that one); `source` keeps
    the rows of one source_key. The document holds `rows`, `errors` of time and memory by source,
    GPU, kind, precision and runtime (quality A and B; C apart), `ranking`, `worst`, `coverage`,
    `composed`: sources that are shown but not pooled, since their times are no measurements, and
    for the shipped table `cases`: reports of single runs judged (`reports.cases`).

    Raises
    ------
    InputError
        The table is not one, or no row has that source.
    """
    return report(predictions(rows_of(table, source)), table is None and source is None)


def report(found: Sequence[Prediction], with_cases: bool) -> dict[str, Any]:
    """The comparison, and the reported cases (`cases`) beside it where the table is the shipped."""
    document = document_of(found)
    if with_cases:
        from reports.cases import judged_cases

        document["cases"] = judged_cases()
    return document


def rows_of(table: str | Path | None, source: str | None) -> tuple[PublishedRow, ...]:
    """The rows asked for."""
    rows = read_table(table)
    if source is None:
        return rows
    known = sorted({row.source for row in rows})
    if source not in known:
        raise InputError(
            f"no row of the table has the source {source[:40]!r}; it has {', '.join(known)}",
            values={"source": source[:40]},
            legal={"source": known},
        )
    return tuple(row for row in rows if row.source == source)


def document_of(found: Sequence[Prediction]) -> dict[str, Any]:
    """The comparison, of predictions already made."""
    judged = [p for p in found if p.row.text("quality") in ("A", "B")]
    return {
        "rows": [row_document(p) for p in found],
        **tables_of(found),
        "worst": [worst_document(p) for p in worst(measured(judged))],
    }


def tables_of(found: Sequence[Prediction]) -> dict[str, Any]:
    """Errors, ranking and coverage: what needs no more than a row and its prediction."""
    judged = [p for p in found if p.row.text("quality") in ("A", "B")]
    doubtful = [p for p in found if p.row.text("quality") not in ("A", "B")]
    return {
        "errors": {
            "step_time": summary(judged, time_error),
            "memory": summary(judged, memory_error),
        },
        "quality_c": {
            "step_time": grouped(doubtful, GROUPS["source"], time_error),
            "memory": grouped(doubtful, GROUPS["source"], memory_error),
        },
        "ranking": ranking(judged),
        "coverage": coverage(found),
        "composed": {
            name: why
            for name, why in composed_sources().items()
            if any(p.row.source == name for p in found)
        },
    }


def measured(judged: Iterable[Prediction]) -> list[Prediction]:
    """Without the sources whose times are compositions."""
    composed = composed_sources()
    return [p for p in judged if p.row.source not in composed]


def time_error(prediction: Prediction) -> float | None:
    return prediction.time_error


def memory_error(prediction: Prediction) -> float | None:
    return prediction.memory_error


def half_of(row: PublishedRow) -> str:
    """Half A or B of a row: a hash of source and family, fixed before any error was looked at."""
    digest = hashlib.sha256(f"{row.source}/{row.text('family')}".encode()).digest()
    return "A" if digest[0] % 2 == 0 else "B"


def row_document(p: Prediction) -> dict[str, Any]:
    """One line of the predictions."""
    return {
        "id": p.row.id,
        "source": p.row.source,
        "quality": p.row.text("quality"),
        "half": half_of(p.row),
        "predicted_step_time_s": p.step_time_s,
        "measured_step_time_s": p.row.number("measured_step_time_s"),
        "predicted_tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
        "measured_tokens_per_s_per_gpu": p.row.number("measured_tokens_per_s_per_gpu"),
        "predicted_peak_memory_gib": p.peak_memory_gib,
        "measured_peak_memory_gib": p.row.number("peak_mem_gib"),
        "step_time_error_percent": p.time_error,
        "memory_error_percent": p.memory_error,
        "skipped_reason": p.skipped_reason,
    }


def grouped(
    found: Iterable[Prediction],
    key: Callable[[PublishedRow], str],
    error: Callable[[Prediction], float | None],
) -> dict[str, Any]:
    """Errors by group, in alphabetical order."""
    groups: dict[str, list[float]] = {}
    for p in found:
        value = error(p)
        if value is not None:
            groups.setdefault(key(p.row), []).append(value)
    result = {}
    for name in sorted(groups):
        one = errors(groups[name])
        if one is not None:
            result[name] = asdict(one)
    return result


def summary(
    judged: Sequence[Prediction], error: Callable[[Prediction], float | None]
) -> dict[str, Any]:
    """Errors of all measured rows, by group, and by source for each half."""
    pool = measured(judged)
    result: dict[str, Any] = {"all": grouped(pool, lambda row: "all", error)}
    for name, key in GROUPS.items():
        result[name] = grouped(judged if name == "source" else pool, key, error)
    runtimes = {p.row.id: p.case.setting.runtime.name for p in pool if p.case is not None}
    result["runtime"] = grouped(pool, lambda row: runtimes.get(row.id, ""), error)
    for half in ("A", "B"):
        some = [p for p in judged if half_of(p.row) == half]
        result[f"half_{half}"] = grouped(some, GROUPS["source"], error)
    return result


def families(judged: Iterable[Prediction]) -> dict[tuple[str, ...], list[Prediction]]:
    """Layouts of one model, GPUs, batch, length and precision; those of at least `FAMILY_SIZE`."""
    names = ("n_layers", "hidden", "n_heads", "n_gpus", "global_batch", "seq_len")
    found: dict[tuple[str, ...], list[Prediction]] = {}
    for p in judged:
        if p.time_error is None:
            continue
        row = p.row
        key = (row.source, *(f"{row.count(name) or 0}" for name in names))
        key = (*key, row.text("gpu"), row.text("precision"))
        found.setdefault(key, []).append(p)
    return {key: some for key, some in found.items() if distinct_layouts(some) >= FAMILY_SIZE}


def distinct_layouts(some: Iterable[Prediction]) -> int:
    names = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero_stage", "micro_batch", "recompute")
    return len({tuple(p.row.text(name) for name in names) for p in some})


def ranking(judged: Sequence[Prediction]) -> dict[str, Any]:
    """Rank correlation and regret inside families, by source."""
    by_source: dict[str, list[tuple[float | None, float]]] = {}
    for key, some in families(judged).items():
        predicted = [p.step_time_s or 0.0 for p in some]
        measured = [p.row.number("measured_step_time_s") or 0.0 for p in some]
        pair = (spearman(predicted, measured), regret(predicted, measured))
        by_source.setdefault(key[0], []).append(pair)
    return {name: rank_document(by_source[name]) for name in sorted(by_source)}


def rank_document(pairs: Sequence[tuple[float | None, float]]) -> dict[str, Any]:
    """Summary of the families of one source."""
    rank = [value for value, _ in pairs if value is not None]
    lost = np.asarray([value for _, value in pairs])
    return {
        "families": len(pairs),
        "spearman_median": float(np.median(rank)) if rank else None,
        "spearman_min": min(rank) if rank else None,
        "regret_mean": float(lost.mean()),
        "regret_median": float(np.median(lost)),
        "regret_p90": float(np.quantile(lost, 0.9)),
        "regret_max": float(lost.max()),
    }


def worst(judged: Iterable[Prediction]) -> list[Prediction]:
    """Rows with the largest error of time."""
    timed = [p for p in judged if p.time_error is not None]
    return sorted(timed, key=lambda p: -abs(p.time_error or 0.0))[:WORST]


def worst_document(p: Prediction) -> dict[str, Any]:
    """A row that is far off, with its largest cost term."""
    term = max(p.breakdown_s, key=lambda name: p.breakdown_s[name])
    whole = sum(p.breakdown_s.values())
    return row_document(p) | {
        "largest_term": term,
        "largest_term_percent": 100.0 * p.breakdown_s[term] / whole,
    }


def coverage(found: Sequence[Prediction]) -> dict[str, Any]:
    """How many rows were predicted, of all and of those that state dimensions, layout and time."""
    stated = [p for p in found if states_all(p.row)]
    reasons: dict[str, int] = {}
    for p in found:
        if p.skipped_reason:
            reasons[p.skipped_reason] = reasons.get(p.skipped_reason, 0) + 1
    done = sum(not p.skipped_reason for p in stated)
    return {
        "rows": len(found),
        "predicted": sum(not p.skipped_reason for p in found),
        "complete_rows": len(stated),
        "complete_rows_predicted": done,
        "complete_rows_predicted_percent": 100.0 * done / len(stated) if stated else None,
        "skipped": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def states_all(row: PublishedRow) -> bool:
    """Whether a row states dimensions, layout, batch and time."""
    names = ("n_layers", "hidden", "ffn_hidden", "n_heads", "vocab", "n_gpus", "tp", "pp", "dp")
    more = ("cp", "micro_batch", "global_batch", "seq_len", "measured_step_time_s")
    return all(row.number(name) is not None for name in (*names, *more))
