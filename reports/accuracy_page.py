"""The comparison as one self-contained HTML page: predicted over measured, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.accuracy_text import predicted_text, reported_text

SIZE, MARGIN = 640.0, 52.0
COLORS = (
    "#0090ff", "#e5484d", "#30a46c", "#f76b15", "#8e4ec6", "#00a2c7", "#d6409f", "#978365",
    "#5b5bd6", "#12a594", "#ffba18", "#ab4aba", "#46a758", "#e54666", "#7c7c7c", "#3e63dd",
)  # fmt: skip
SIDES = (
    ("Step time", "step_time", "step_time_s", "s"),
    ("Peak memory", "memory", "peak_memory_gib", "GiB"),
)


def accuracy_page(document: Mapping[str, Any]) -> str:
    """HTML of a document of `reports.accuracy.validate`; every name is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(
        Path(__file__).with_name("accuracy.html.j2").read_text(encoding="utf-8")
    )
    sources = sorted({row["source"] for row in document["rows"]})
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(sources)}
    plots = [plot(document, side, color) for side in SIDES]
    return template.render(
        coverage=document["coverage"],
        plots=[one for one in plots if one is not None],
        ranking=[ranking_row(*item) for item in document["ranking"].items()],
        worst=[worst_row(row) for row in document["worst"]],
        cases=[case_row(row) for row in document.get("cases", {}).get("rows", ())],
    )


def plot(
    document: Mapping[str, Any], side: tuple[str, str, str, str], color: Mapping[str, str]
) -> dict[str, Any] | None:
    """Scatter and table of one measured quantity; None where no row has it."""
    title, key, field, unit = side
    pairs = [
        (row, row[f"predicted_{field}"], row[f"measured_{field}"])
        for row in document["rows"]
        if row[f"predicted_{field}"] and row[f"measured_{field}"]
    ]
    tables = document["errors"][key]
    if not pairs:
        return None
    values = [math.log10(v) for _, *both in pairs for v in both]
    low, high = math.floor(min(values)), math.ceil(max(values))
    high = max(high, low + 1)

    def at(value: float) -> float:
        return MARGIN + (math.log10(value) - low) / (high - low) * (SIZE - 2 * MARGIN)

    dots = [
        {
            "x": f"{at(measured):.1f}",
            "y": f"{SIZE - at(predicted):.1f}",
            "color": color[row["source"]],
            "label": f"{row['id']}: {predicted:.4g} {unit}, measured {measured:.4g} {unit}",
        }
        for row, predicted, measured in pairs
    ]
    shown = sorted({row["source"] for row, *_ in pairs})
    return {
        "title": title,
        "size": int(SIZE),
        "dots": dots,
        "lines": lines(at, low, high),
        "marks": marks(at, low, high, unit),
        "key": [(name, color[name]) for name in shown],
        "table": [
            error_row(name, one, tables["half_A"].get(name), tables["half_B"].get(name))
            for name, one in [*tables["source"].items(), *tables["all"].items()]
        ],
    }


def lines(at: Any, low: int, high: int) -> list[dict[str, str]]:
    """Axes, the line of equality and those 10 % off."""

    def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> dict[str, str]:
        numbers = {"x1": x1, "y1": SIZE - y1, "x2": x2, "y2": SIZE - y2}
        return {"kind": kind, **{name: f"{value:.1f}" for name, value in numbers.items()}}

    start, end = at(10.0**low), at(10.0**high)
    shift = at(1.1 * 10.0**low) - start
    return [
        line("axis", start, start, end, start),
        line("axis", start, start, start, end),
        line("equal", start, start, end, end),
        line("off", start, start + shift, end - shift, end),
        line("off", start + shift, start, end, end - shift),
    ]


def marks(at: Any, low: int, high: int, unit: str) -> list[dict[str, str]]:
    """Powers of ten along both axes, and what they are."""
    found = []
    for power in range(low, high + 1):
        where, text = at(10.0**power), f"{10.0**power:g}"
        found.append(
            {
                "x": f"{where:.1f}",
                "y": f"{SIZE - MARGIN + 18:.1f}",
                "anchor": "middle",
                "text": text,
            }
        )
        found.append(
            {
                "x": f"{MARGIN - 8:.1f}",
                "y": f"{SIZE - where + 4:.1f}",
                "anchor": "end",
                "text": text,
            }
        )
    foot, side = f"measured [{unit}]", f"predicted [{unit}]"
    found.append(
        {"x": f"{SIZE - MARGIN:.0f}", "y": f"{SIZE - 8:.0f}", "anchor": "end", "text": foot}
    )
    found.append({"x": "8", "y": f"{MARGIN - 24:.0f}", "anchor": "start", "text": side})
    return found


def error_row(name: str, one: Mapping[str, Any], *halves: Mapping[str, Any] | None) -> list[str]:
    numbers = [f"{one[key]:.1f}" for key in ("median", "mean", "p90")]
    split = [
        "-" if half is None else f"{half['median']:.1f} / {half['p90']:.1f}" for half in halves
    ]
    return [name, str(one["n"]), *numbers, f"{one['bias']:+.1f}", *split]


def ranking_row(name: str, one: Mapping[str, Any]) -> Sequence[str]:
    rank = [
        "-" if one[key] is None else f"{one[key]:.2f}"
        for key in ("spearman_median", "spearman_min")
    ]
    lost = [f"{one[key]:.1f}" for key in ("regret_mean", "regret_p90", "regret_max")]
    return [name, str(one["families"]), *rank, *lost]


def worst_row(row: Mapping[str, Any]) -> Sequence[str]:
    return [
        row["id"],
        f"{row['step_time_error_percent']:+.1f}",
        f"{row['predicted_step_time_s']:.4g}",
        f"{row['measured_step_time_s']:.4g}",
        f"{row['largest_term']} ({row['largest_term_percent']:.0f} %)",
    ]


def case_row(row: Mapping[str, Any]) -> Sequence[str]:
    why = row["reason"] or row["cause"]
    return [
        row["id"],
        row["model"],
        reported_text(row),
        predicted_text(row),
        row["judgement"],
        why or ("not understood" if row["judgement"] != "agrees" else ""),
    ]
