"""The published result as Markdown: the whole of it, and the summary for README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reports.accuracy import tables_of
from reports.accuracy_text import predicted_text, reported_text
from reports.predictions import Prediction
from reports.statistics import errors
from reports.targets import memory_target, targets, time_targets

Rows = Sequence[Mapping[str, Any]]
FITTED = (
    "No constant is fitted to them but one: `moe_drain_s`, a wait in MoE layers that no "
    "measurement backs, was first set on rows of this table."
)
TOP = 10  # constants shown of those that move errors
PARTS = {
    "attention": "attention kernels",
    "gemm": "matrix products, with gradients of weights",
    "passes": "casts, norms, permutation, other passes",
    "exchange": "dispatch and combine",
    "exposed": "of it, what compute waits for",
    "recompute": "recompute of norms and up-projections",
    "all": "all of the layer",
}


def accuracy_markdown(
    found: Sequence[Prediction], cases: Rows, moved: Rows, step: Rows, date: str
) -> str:
    """The result of a date, from predictions and tables alone."""
    tables = tables_of(found)
    coverage = tables["coverage"]
    parts = [
        f"# Accuracy on {date}",
        coverage_text(tables["coverage"]),
        (
            "Errors are |predicted / measured - 1| in percent over rows of quality A and B; bias "
            "is the signed median, positive where the model is too slow or too full. Written by "
            "`make accuracy` from the CSV files beside it."
        ),
        "## What it should reach",
        *target_parts(found, tables),
        "## Step time by source",
        source_table(tables["errors"]["step_time"]),
        *composed_parts(tables),
        "## Step time by GPU, kind and precision",
        group_table(tables["errors"]["step_time"], ("gpu", "kind", "precision")),
        "## Peak memory by source",
        source_table(tables["errors"]["memory"]),
        "## Ranking inside families of at least four layouts",
        ranking_table(tables["ranking"]),
        "## Reported cases",
        *case_parts(cases),
        "## Constants that nobody measured",
        (
            "Each assumed constant 20 % down and up: the median error in percent of the rows that "
            f"have it, of at most six rows a source. The {TOP} that move it most."
        ),
        sensitivity_table(moved[:TOP]),
        "## A step of DeepSeek-V3's own run",
        *step_parts(step),
        "## What is not judged",
        skipped_table(coverage["skipped"]),
    ]
    return "\n\n".join(parts) + "\n"


def coverage_text(coverage: Mapping[str, Any]) -> str:
    return (
        f"{coverage['predicted']} of {coverage['rows']} published runs are predicted, each with "
        f"its own layout, runtime, precision and cluster; {coverage['complete_rows_predicted']} of "
        f"the {coverage['complete_rows']} that state dimensions, layout and time. {FITTED}"
    )


def readme_section(found: Sequence[Prediction], cases: Rows, moved: Rows, step: Rows) -> str:
    """What README says of it."""
    del moved
    tables = tables_of(found)
    coverage, judged = tables["coverage"], judged_rows(found)
    missed = [row["name"] for row in time_targets(judged) if not row["met"]]
    memory = memory_target(judged)
    hours = next(row for row in step if row["table"] == "run")
    counts = case_counts(cases)
    lines = [
        source_table(tables["errors"]["step_time"], halves=False),
        (
            f"Median, 90th percentile and bias (signed median; positive is too slow) of the error "
            f"of step time in percent. {coverage_text(coverage)} Peak memory, where it was "
            f"published ({memory['n']} runs): median {memory['median']:.1f} %, p90 "
            f"{memory['p90']:.1f} %; {memory['too_low']} predictions lie over "
            f"{memory['target_too_low']} % too low."
        ),
        (
            f"The goals that it misses, in step time: {'; '.join(missed) if missed else 'none'}"
            f"{'' if memory['met'] else '; and in memory'}."
        ),
        *composed_parts(tables),
        (
            f"Of {len(cases)} reported cases (fits, out of memory, so many seconds) "
            f"{counts['agrees']} agree, {counts['borderline']} are borderline, {counts['differs']} "
            f"differ and {counts['skipped']} state too little. DeepSeek-V3's own run is predicted "
            f"at {hours['predicted'] / 1e3:.0f} thousand H800 hours per trillion tokens; its "
            f"report has {hours['published'] / 1e3:.0f}."
        ),
    ]
    return "\n\n".join(lines)


def judged_rows(found: Sequence[Prediction]) -> list[Prediction]:
    return [p for p in found if p.row.text("quality") in ("A", "B")]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    rule = "|".join(["---", *["---:"] * (len(head) - 1)])
    lines = [f"| {' | '.join(head)} |", f"|{rule}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def target_parts(found: Sequence[Prediction], tables: Mapping[str, Any]) -> list[str]:
    judged = judged_rows(found)
    rows = []
    for one in time_targets(judged):
        goal = f"{one['target_median']:g}"
        if one["target_p90"]:
            goal += f", {one['target_p90']:g}"
        if one["target_bias"]:
            goal += f"; bias {one['target_bias']:g}"
        reached = f"{one['median']:.1f}, {one['p90']:.1f}"
        rows.append(
            [one["name"], str(one["n"]), reached, f"{one['bias']:+.1f}", goal, yes(one["met"])]
        )
    memory = memory_target(judged)
    rows.append(
        [
            "peak memory",
            str(memory["n"]),
            f"{memory['median']:.1f}, {memory['p90']:.1f}",
            f"{memory['bias']:+.1f}",
            f"{memory['target_median']:g}, {memory['target_p90']:g}",
            yes(memory["met"]),
        ]
    )
    wanted = targets()["ranking"]
    text = [
        table(("group", "n", "median, p90", "bias", "goal", "met"), rows),
        (
            f"Memory: {memory['too_low']} of {memory['n']} predictions lie more than "
            f"{memory['target_too_low']} % below what was measured, the lowest "
            f"{memory['lowest']:.1f} %; none should."
        ),
    ]
    for name, one in tables["ranking"].items():
        if name == "vtrain_single":
            met = (
                (one["spearman_median"] or 0.0) >= wanted["spearman_median"]
                and one["regret_mean"] <= wanted["regret_mean"]
                and one["regret_p90"] <= wanted["regret_p90"]
            )
            text.append(
                f"Ranking on {name}, {one['families']} families: Spearman "
                f"{one['spearman_median']:.2f} (goal {wanted['spearman_median']}), regret mean "
                f"{one['regret_mean']:.1f} % (goal {wanted['regret_mean']}), p90 "
                f"{one['regret_p90']:.1f} % (goal {wanted['regret_p90']}): "
                f"{'met' if met else 'not met'}."
            )
    return text


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def source_table(errors_of: Mapping[str, Any], halves: bool = True) -> str:
    """Errors by source, and of all that is pooled."""
    head = ["source", "n", "median", "p90", "bias"]
    rows = []
    for name, one in [*errors_of["source"].items(), *errors_of["all"].items()]:
        line = ["all measured" if name == "all" else name, str(one["n"])]
        line += [f"{one['median']:.1f}", f"{one['p90']:.1f}", f"{one['bias']:+.1f}"]
        if halves:
            line += [half(errors_of[key].get(name)) for key in ("half_A", "half_B")]
        rows.append(line)
    return table([*head, *(["half A", "half B"] if halves else [])], rows)


def half(one: Mapping[str, Any] | None) -> str:
    return "-" if one is None else f"{one['median']:.1f}, {one['p90']:.1f}"


def composed_parts(tables: Mapping[str, Any]) -> list[str]:
    return [
        f"`{name}` is shown and counts in no total, since its times are put together: {why}."
        for name, why in tables["composed"].items()
    ]


def group_table(errors_of: Mapping[str, Any], groups: Sequence[str]) -> str:
    rows = []
    for group in groups:
        for name, one in errors_of[group].items():
            figures = [f"{one['median']:.1f}", f"{one['p90']:.1f}", f"{one['bias']:+.1f}"]
            rows.append([name, str(one["n"]), *figures])
    return table(("rows", "n", "median", "p90", "bias"), rows)


def ranking_table(ranking: Mapping[str, Any]) -> str:
    rows = []
    for name, one in ranking.items():
        rank = "-" if one["spearman_median"] is None else f"{one['spearman_median']:.2f}"
        lost = [f"{one[key]:.1f}" for key in ("regret_mean", "regret_p90", "regret_max")]
        rows.append([name, str(one["families"]), rank, *lost])
    return table(("source", "families", "Spearman, median", "regret % mean", "p90", "max"), rows)


def case_counts(cases: Rows) -> dict[str, int]:
    names = ("agrees", "borderline", "differs", "skipped")
    found = [row["judgement"] for row in cases]
    return {name: found.count(name) for name in names}


def case_parts(cases: Rows) -> list[str]:
    """How many cases agree, those that do not, and why others are not judged."""
    counts = case_counts(cases)
    parts = [
        (
            f"Reports of single runs, from issues, guides and tables: {counts['agrees']} of "
            f"{len(cases)} agree (values within 15 %, verdicts the same), {counts['borderline']} "
            f"are borderline, {counts['differs']} differ, {counts['skipped']} could not be judged."
        )
    ]
    rows = []
    for kind in ("memory", "throughput"):
        signed = [
            row["error_percent"]
            for row in cases
            if row["kind"] == kind and row["error_percent"] is not None
        ]
        one = errors(signed)
        if one is not None:
            figures = [f"{one.median:.1f}", f"{one.p90:.1f}", f"{one.bias:+.1f}"]
            rows.append([f"{kind}, as reported", str(one.n), *figures])
    parts.append(table(("values", "n", "median", "p90", "bias"), rows))
    off = [row for row in cases if row["judgement"] in ("differs", "borderline")]
    parts.append(
        table(
            ("case", "model", "reported", "predicted", "why"),
            [
                [
                    row["id"],
                    row["model"],
                    reported_text(row),
                    predicted_text(row),
                    row["cause"] or "not understood",
                ]
                for row in off
            ],
        )
    )
    reasons: dict[str, int] = {}
    for row in cases:
        if row["reason"]:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    parts.append(skipped_table(reasons))
    return parts


def skipped_table(reasons: Mapping[str, int]) -> str:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return table(("not judged because", "rows"), [[why, str(count)] for why, count in ordered])


def sensitivity_table(moved: Rows) -> str:
    rows = [
        [
            row["constant"],
            f"{int(row['rows'])}",
            f"{row['down']:.1f}",
            f"{row['base']:.1f}",
            f"{row['up']:.1f}",
        ]
        for row in moved
    ]
    return table(("constant", "rows", "20 % less", "as it is", "20 % more"), rows)


def step_parts(step: Rows) -> list[str]:
    """The DeepSeek-V3 run: what is predicted beside what is published."""

    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"

    def lines(name: str) -> list[list[str]]:
        return [
            [
                f"{PARTS.get(row['what'], row['what'])} [{row['unit']}]",
                figure(row["predicted"]),
                figure(row["published"]),
            ]
            for row in step
            if row["table"] == name
        ]

    whole = next(row["predicted"] for row in step if row["what"] == "step time")
    shares = [
        [row["what"], f"{row['predicted']:.2f}", f"{100 * row['predicted'] / whole:.1f}"]
        for row in step
        if row["table"] == "step"
    ]
    return [
        (
            "2048 H800, fp8, pp=16 in DualPipe, ep=64, dp=128, ZeRO-1, 15360 sequences of 4096 "
            "tokens, as arXiv 2412.19437 states. Hours per trillion tokens are its section 1; "
            "published times follow from them. The step leaves out multi-token prediction."
        ),
        table(("run", "predicted", "published"), lines("run")),
        table(("part of the step", "s", "%"), shares),
        (
            "One MoE layer, forward and backward of one sequence, beside a fourth of the public "
            "profile of four (deepseek-ai/profile-data, train.json: kernels summed by name; "
            "balanced routing, no pipeline sends):"
        ),
        table(("MoE layer", "predicted", "profile"), lines("layer")),
    ]
