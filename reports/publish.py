"""Writes the dated result into reports/published/ and its summary into README.

    python -m reports.publish 2026-12-01

All numbers of the text are read back from the CSV files beside it, so that it holds none of its
own. Sensitivity takes minutes; --without-sensitivity keeps the table that is there.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reports.accuracy import report, rows_of
from reports.accuracy_page import accuracy_page
from reports.accuracy_text import cell, predictions_csv
from reports.cli import write_whole
from reports.deepseek_step import deepseek_step
from reports.predictions import Prediction, predictions
from reports.published_text import accuracy_markdown, readme_section
from reports.sensitivity import sensitivity

PUBLISHED_DIR = Path(__file__).parent / "published"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- accuracy: written by make accuracy -->", "<!-- end of accuracy -->"


def publish(date: str, with_sensitivity: bool = True) -> None:
    """Predict all that ships and write CSV, HTML and text of it under that date."""
    found = predictions(rows_of(None, None))
    document = report(found, with_cases=True)
    folder = PUBLISHED_DIR
    write_whole(folder / f"predictions-{date}.csv", predictions_csv(document["rows"]))
    write_whole(folder / f"cases-{date}.csv", table_csv(document["cases"]["rows"]))
    write_whole(folder / f"deepseek-v3-{date}.csv", table_csv(deepseek_step()))
    if with_sensitivity:
        write_whole(folder / f"sensitivity-{date}.csv", table_csv(sensitivity(found)))
    write_whole(folder / f"accuracy-{date}.html", accuracy_page(document))
    result = published(date)
    write_whole(folder / f"accuracy-{date}.md", accuracy_markdown(*result, date))
    write_whole(README, with_section(README.read_text(encoding="utf-8"), readme_section(*result)))


Result = tuple[list[Prediction], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]


def published(date: str) -> Result:
    """Predictions, cases, sensitivity and the DeepSeek-V3 step, as their files of a date say."""
    folder = PUBLISHED_DIR
    rows = {row.id: row for row in rows_of(None, None)}
    found = [
        replace(
            Prediction(rows[line["id"]], line["skipped_reason"]),
            step_time_s=number(line["predicted_step_time_s"]),
            tokens_per_s_per_gpu=number(line["predicted_tokens_per_s_per_gpu"]),
            peak_memory_gib=number(line["predicted_peak_memory_gib"]),
        )
        for line in read(folder / f"predictions-{date}.csv")
    ]
    names = ("cases", "sensitivity", "deepseek-v3")
    tables = [read(folder / f"{name}-{date}.csv") for name in names]
    cases, moved, step = ([typed(line) for line in table] for table in tables)
    return found, cases, moved, step


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    return float(text) if text else None


TEXT = ("id", "kind", "model", "source", "reported", "unit", "predicted", "judgement", "reason",
        "cause", "table", "what", "note", "constant")  # fmt: skip


def typed(line: Mapping[str, str]) -> dict[str, Any]:
    """A line of a published table, its numbers as numbers; `predicted` may be either."""
    words = TEXT if "judgement" in line else tuple(name for name in TEXT if name != "predicted")
    return {name: text if name in words else number(text) for name, text in line.items()}


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, numbers with seven digits."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    names = list(rows[0])
    writer.writerow(names)
    writer.writerows([cell(row[name]) for name in names] for row in rows)
    return out.getvalue()


def with_section(text: str, section: str) -> str:
    """The text with what lies between its two marks replaced.

    >>> with_section(f"a {BEGIN} b {END} c", "new")
    'a <!-- accuracy: written by make accuracy -->\\nnew\\n<!-- end of accuracy --> c'
    """
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"the text has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="publish the accuracy of predictions")
    parser.add_argument("date", nargs="?", default=dt.datetime.now(tz=dt.UTC).date().isoformat())
    parser.add_argument("--without-sensitivity", action="store_true")
    given = parser.parse_args()
    publish(dt.date.fromisoformat(given.date).isoformat(), not given.without_sensitivity)
