"""The part of the answer that tells of the other layouts: alternatives, why not, certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.typeset import Column, Line, heading, paragraph, table
from planner.words import count, gib, percent, seconds, signed_percent

Document = Mapping[str, Any]

# Columns of the alternatives: key, title, and the value at which a column that is equal
# everywhere need not be shown.
LAYOUT_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("tp", "tp", None),
    ("cp", "cp", 1),
    ("pp", "pp", None),
    ("vpp", "vpp", 1),
    ("dp", "dp", None),
    ("ep", "ep", 1),
    ("etp", "etp", 1),
    ("zero", "zero", None),
    ("micro_batch", "mb", None),
    ("schedule", "schedule", "1f1b"),
    ("offload", "offload", "none"),
)
TEXTS = ("schedule", "offload")


def alternatives(rows: Sequence[Document], width: int) -> list[Line]:
    """The next best layouts, one a row."""
    columns = [Column("#"), Column("step"), Column("slower"), Column("memory")]
    shown = [
        (key, title)
        for key, title, quiet in LAYOUT_COLUMNS
        if quiet is None or any(row["layout"][key] != quiet for row in rows)
    ]
    columns += [Column(title, "<" if key in TEXTS else ">") for key, title in shown]
    cells = [
        [
            str(number),
            seconds(row["step_time_s"]),
            signed_percent(row["slower_fraction"]),
            gib(row["peak_memory_bytes"]),
            *(str(row["layout"][key]) for key, _ in shown),
        ]
        for number, row in enumerate(rows, start=2)
    ]
    return heading("Alternatives") + table(columns, cells, width)


def why_not(document: Document, width: int) -> list[Line]:
    """For each degree, what its next lower and next higher value would cost."""
    chosen = document.get("layout", {})
    rows = []
    for row in document["why_not"]:
        degree = row["degree"]
        change = f"{degree} {chosen.get(degree, '')} → {row['value']}"
        fits = row.get("step_time_s") is not None
        rows.append(
            [
                change,
                seconds(row["step_time_s"]) if fits else "–",
                signed_percent(row["slower_fraction"]) if fits else "–",
                row["text"],
            ]
        )
    columns = [
        Column("change", "<"),
        Column("step"),
        Column("slower"),
        Column("because", "<", "", True),
    ]
    return heading("Why not") + table(columns, rows, width)


def warnings_section(warnings: Sequence[str], width: int) -> list[Line]:
    lines = heading("Warnings")
    if not warnings:
        return [*lines, [("  none", "dim")]]
    for warning in warnings:
        lines += paragraph(warning, width, style="warning", mark="- ")
    return lines


def certificate(search: Document, width: int) -> list[Line]:
    """How the search knows: what it counted, how it ended, how long it took."""
    counted = (
        ("enumerated", "enumerated"),
        ("legal", "legal"),
        ("fits", "fitting"),
        ("excluded_by_bound", "excluded by bound"),
        ("solved", "solved by MILP"),
    )
    lines = heading("Certificate")
    lines += table(
        [Column(title) for _, title in counted],
        [[count(search[key]) for key, _ in counted]],
        width,
    )
    lines += paragraph(
        f"{search['status']}, gap {percent(search['gap'])}; {search['wall_s']:.2f} s, "
        f"{count(search['layouts_per_second'])} layouts/s",
        width,
    )
    return lines
