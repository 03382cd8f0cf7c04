"""The part of the answer that tells of the other layouts: alternatives, why not, certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planner.typeset import Column, Line, heading, paragraph, table
from planner.words import count, gib, percent, seconds, signed_percent

Document = Mapping[str, Any]

# Columns of the alternatives: key and title. Those not in ALWAYS are shown where they differ.
LAYOUT_COLUMNS = (
    ("tp", "tp"),
    ("cp", "cp"),
    ("cp_kind", "cp kind"),
    ("pp", "pp"),
    ("vpp", "vpp"),
    ("dp", "dp"),
    ("ep", "ep"),
    ("etp", "etp"),
    ("zero", "zero"),
    ("shard", "shard"),
    ("micro_batch", "mb"),
    ("schedule", "schedule"),
    ("offload", "offload"),
    ("recompute", "recompute"),
)
ALWAYS = ("tp", "pp", "dp", "zero", "micro_batch")
TEXTS = ("cp_kind", "schedule", "offload", "recompute")


def alternatives(document: Document, width: int) -> list[Line]:
    """The next best layouts, one a row, by what differs among them or from the chosen one."""
    rows = document["alternatives"]
    columns = [Column("#"), Column("step"), Column("slower"), Column("memory")]
    told = [layout_words(row["layout"], row.get("recompute", {})) for row in rows]
    stages = document.get("prediction", {}).get("stages", [])
    chosen = layout_words(document["layout"], policies_of(stages))
    shown = [
        (key, title)
        for key, title in LAYOUT_COLUMNS
        if key in ALWAYS or any(one[key] != chosen[key] for one in told)
    ]
    columns += [
        Column(title, "<" if key in TEXTS else ">", "", key == "recompute") for key, title in shown
    ]
    cells = [
        [
            str(number),
            seconds(row["step_time_s"]),
            signed_percent(row["slower_fraction"]),
            gib(row["peak_memory_bytes"]),
            *(one[key] for key, _ in shown),
        ]
        for number, (row, one) in enumerate(zip(rows, told, strict=True), start=2)
    ]
    lines = heading("Alternatives") + table(columns, cells, width)
    return lines + paragraph("What no column tells is as in the layout above.", width, style="dim")


def layout_words(layout: Document, policies: Mapping[str, int]) -> dict[str, str]:
    """What a row of the alternatives says of a layout; a dash where a field means nothing."""
    told = {key: str(layout[key]) for key, _ in LAYOUT_COLUMNS}
    if layout["cp"] == 1:
        told["cp_kind"] = "–"
    if layout["pp"] == 1:
        told["schedule"] = "–"
    if layout["zero"] == 0:
        told["shard"] = "–"
    elif layout["shard"] == layout["dp"] * layout["cp"]:
        told["shard"] = "all"
    used = {name: layers for name, layers in policies.items() if layers}
    told["recompute"] = (
        next(iter(used))
        if len(used) == 1
        else ", ".join(f"{name} {layers}" for name, layers in used.items())
    )
    return told


def policies_of(stages: Sequence[Document]) -> dict[str, int]:
    """Layers under each recompute policy, over all stages."""
    total: dict[str, int] = {}
    for stage in stages:
        for name, layers in stage["recompute"].items():
            total[name] = total.get(name, 0) + layers
    return total


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
