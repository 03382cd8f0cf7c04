"""The comparison as text for a terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

CSV_COLUMNS = (
    "id",
    "predicted_step_time_s",
    "predicted_tokens_per_s_per_gpu",
    "predicted_peak_memory_gib",
    "skipped_reason",
)


def predictions_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for every row of the table, predicted or not."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        writer.writerow([cell(row[name]) for name in CSV_COLUMNS])
    return out.getvalue()


def cell(value: Any) -> str:
    """A number with seven digits, nothing for None.

    >>> cell(1.23456789), cell(None), cell("x")
    ('1.234568', '', 'x')
    """
    return "" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)


def accuracy_lines(document: Mapping[str, Any]) -> list[str]:
    """What the command prints."""
    lines = []
    for what, title in (("step_time", "Step time"), ("memory", "Peak memory")):
        tables = document["errors"][what]
        if not tables["source"]:
            continue
        lines += [f"{title}: |predicted / measured - 1| in percent; bias is the signed median", ""]
        lines += error_table(tables)
        lines.append("")
    for name, why in document["composed"].items():
        lines += [f"{name} is no measurement and in no total: {why}.", ""]
    lines += ranking_lines(document["ranking"])
    doubtful = document["quality_c"]["step_time"]
    if doubtful:
        lines += ["Rows of quality C, judged apart (step time)", "", HEAD]
        lines += [error_line(name, value) for name, value in doubtful.items()] + [""]
    lines += worst_lines(document["worst"])
    lines += coverage_lines(document["coverage"])
    if "cases" in document:
        lines += ["", *case_lines(document["cases"])]
    if "sensitivity" in document:
        lines += ["", *sensitivity_lines(document["sensitivity"])]
    return lines


HEAD = f"  {'':<30}{'n':>5}{'median':>8}{'mean':>8}{'p90':>8}{'bias':>8}"


def error_table(tables: Mapping[str, Any]) -> list[str]:
    """Errors by source with both halves, then by GPU, kind, precision and runtime."""
    lines = [HEAD + f"{'half A':>14}{'half B':>14}"]
    for name, value in tables["source"].items():
        halves = "".join(half_text(tables[half].get(name)) for half in ("half_A", "half_B"))
        lines.append(error_line(name, value) + halves)
    lines += [error_line("all measured", one) for one in tables["all"].values()]
    for group in ("gpu", "kind", "precision", "runtime"):
        lines.append(f"  by {group}")
        lines += [error_line(f"  {name or 'none'}", one) for name, one in tables[group].items()]
    return lines


def error_line(name: str, value: Mapping[str, Any]) -> str:
    numbers = "".join(f"{value[key]:>8.1f}" for key in ("median", "mean", "p90"))
    return f"  {name:<30}{value['n']:>5}{numbers}{value['bias']:>+8.1f}"


def half_text(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return f"{'-':>14}"
    return f"{value['median']:>8.1f} /{value['p90']:>4.0f}"


def ranking_lines(ranking: Mapping[str, Any]) -> list[str]:
    if not ranking:
        return []
    lines = [
        "Ranking inside families of at least 4 layouts; regret in percent",
        "",
        f"  {'':<20}{'families':>9}{'Spearman':>10}{'min':>7}{'regret':>8}{'p90':>7}{'max':>7}",
    ]
    for name, value in ranking.items():
        rank = "".join(
            f"{value[key]:>{width}.2f}" if value[key] is not None else f"{'-':>{width}}"
            for key, width in (("spearman_median", 10), ("spearman_min", 7))
        )
        lost = f"{value['regret_mean']:>8.1f}{value['regret_p90']:>7.1f}{value['regret_max']:>7.1f}"
        lines.append(f"  {name:<20}{value['families']:>9}{rank}{lost}")
    return [*lines, ""]


def worst_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["Rows furthest off, with their largest cost term", ""]
    for row in rows[:10]:
        term = f"{row['largest_term']} {row['largest_term_percent']:.0f} %"
        lines.append(f"  {row['step_time_error_percent']:>+7.1f} %  {row['id'][:56]:<56}  {term}")
    return [*lines, ""]


def coverage_lines(coverage: Mapping[str, Any]) -> list[str]:
    done, complete = coverage["complete_rows_predicted"], coverage["complete_rows"]
    head = f"Predicted {coverage['predicted']} of {coverage['rows']} rows"
    lines = [f"{head}; of the {complete} that state dimensions, layout and time, {done}."]
    for reason, count in coverage["skipped"].items():
        lines.append(f"  {count:>4} skipped: {reason}")
    return lines


def case_lines(cases: Mapping[str, Any]) -> list[str]:
    """Reported cases: how many agree, those that do not, and why others were not judged."""
    counts = cases["counts"]
    lines = [
        (
            f"Cases: of {len(cases['rows'])} reported runs {counts['agrees']} agree, "
            f"{counts['borderline']} are borderline, {counts['differs']} differ, "
            f"{counts['skipped']} could not be judged"
        ),
        "",
    ]
    for kind, one in cases["errors"].items():
        lines.append(error_line(f"{kind} values", one))
    lines += ["", f"  {'':<9}{'':<10}{'reported':>24}{'predicted':>24}"]
    for row in cases["rows"]:
        if row["judgement"] in ("differs", "borderline"):
            lines.append(
                f"  {row['id']:<7}{row['judgement']:<12}{reported_text(row):>24}"
                f"{predicted_text(row):>24}  {row['model'][:24]}"
            )
    lines.append("")
    lines += [f"  {count:>4} not judged: {why}" for why, count in cases["skipped"].items()]
    return lines


def reported_text(row: Mapping[str, Any]) -> str:
    """What was reported of a case.

    >>> reported_text({"reported": "oom", "reported_value": None, "unit": ""})
    'oom'
    """
    if row["reported_value"] is None or row["reported"] == "fits":
        return str(row["reported"])
    return f"{row['reported_value']:.5g} {row['unit']}"


def predicted_text(row: Mapping[str, Any]) -> str:
    """What the model says of a case: a value, or a verdict with its memory."""
    if row["predicted_value"] is None:
        return "-"
    value = f"{row['predicted_value']:.5g} {row['unit']}"
    return value if row["predicted"] == "value" else f"{row['predicted']}, {value}"


def sensitivity_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["Assumed constants 20 % down and up: median error of sampled rows that have it", ""]
    for row in rows:
        lines.append(
            f"  {row['constant']:<48}{row['down']:>8.2f}{row['base']:>8.2f}{row['up']:>8.2f}"
        )
    return lines
