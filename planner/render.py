"""Print the answer of `plan` and `estimate`.

The input is the document that ``--json`` prints, plain dicts and lists; nothing here computes a
cost. Sections that the document does not have are left out. The keys:

``request``       model, cluster, num_nodes, num_gpus, global_batch_size, seq_len, precision,
                  optimizer, runtime
``fit``           text, fits (estimate only)
``layout``        `planner.forms.layout_document` and num_microbatches
``prediction``    step_time_s, lower_s, upper_s, tokens_per_s_per_gpu, mfu, hfu, breakdown_s,
                  communication {exposed_s, hidden_s}, memory_bytes (per stage, named addends),
                  peak_memory_bytes, capacity_bytes, stages (per stage {layers, recompute})
``alternatives``  [{layout, step_time_s, slower_fraction, peak_memory_bytes, recompute {policy:
                  layers}}]
``why_not``       [{degree, value, direction, layout, step_time_s, slower_fraction, term, text}]
``warnings``      sentences
``search``        enumerated, legal, fits, excluded_by_bound, solved, status, gap, wall_s,
                  layouts_per_second
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from hwprofiles.units import format_bytes
from planner.render_search import alternatives, certificate, warnings_section, why_not
from planner.typeset import (
    Column,
    Line,
    bar,
    heading,
    item_style,
    output_width,
    paragraph,
    plain,
    show,
    table,
)
from planner.words import degrees, gib, percent, seconds, seconds_like, words

Document = Mapping[str, Any]

# The order in which memory is itemised; names that are not here follow in the document's order.
MEMORY_ITEMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "unsharded parameters",
    "buffers",
    "context",
)
MAX_ITEMISED = 12
SHORT = {"unsharded parameters": "unsharded"}


def print_answer(document: Document, stream: TextIO | None = None) -> None:
    """Print a document to a terminal or a pipe."""
    stream = stream or sys.stdout
    show(answer_lines(document, output_width(stream)), stream)


def answer_text(document: Document, width: int = 80) -> str:
    """What `print_answer` writes to a pipe."""
    return plain(answer_lines(document, width))


def answer_lines(document: Document, width: int) -> list[Line]:
    """All sections, in their fixed order."""
    lines = recommendation(document, width)
    if "layout" in document:
        lines += layout_section(document, width)
    if "prediction" in document:
        lines += speed_section(document["prediction"], width)
        lines += breakdown_section(document["prediction"], width)
        lines += memory_section(document["prediction"], width)
    if document.get("alternatives"):
        lines += alternatives(document, width)
    if document.get("why_not"):
        lines += why_not(document, width)
    if "warnings" in document:
        lines += warnings_section(document["warnings"], width)
    if "search" in document:
        lines += certificate(document["search"], width)
    return lines


def recommendation(document: Document, width: int) -> list[Line]:
    """One line with the answer, one with the question."""
    lines: list[Line] = []
    if fit := document.get("fit"):
        style = "good" if fit.get("fits", True) else "bad"
        lines += paragraph(fit["text"], width, style=style, indent=0)
    elif "layout" in document and "prediction" in document:
        prediction = document["prediction"]
        lines += paragraph(
            f"Use {degrees(document['layout'])}: {seconds(prediction['step_time_s'])} a step, "
            f"MFU {percent(prediction['mfu'])}, "
            f"{gib(prediction['peak_memory_bytes']).removesuffix(' GiB')} of "
            f"{gib(prediction['capacity_bytes'])}.",
            width,
            style="good",
            indent=0,
        )
    if request := document.get("request"):
        lines += paragraph(question(request), width, style="dim", indent=0)
    return lines


def question(request: Document) -> str:
    """What was asked, in one line."""
    parts = [
        str(request["model"]),
        f"{request['cluster']}, {request['num_gpus']:,} GPUs"
        + (f" in {request['num_nodes']:,} nodes" if request.get("num_nodes", 1) > 1 else ""),
        f"batch {request['global_batch_size']:,} × {request['seq_len']:,} tokens",
        f"{request['precision']}, {request['optimizer']}, {request['runtime']}",
    ]
    return " · ".join(parts)


def layout_section(document: Document, width: int) -> list[Line]:
    layout = document["layout"]
    rows = layout_rows(layout)
    lines = heading("Layout")
    columns = [Column("axis", "<"), Column("degree"), Column("how", "<", "", True)]
    lines += table(columns, rows, width)
    stages = document.get("prediction", {}).get("stages", [])
    if stages:
        lines.append([])
        lines += table(
            [Column("stage", "<"), Column("layers", "<"), Column("recompute", "<", "", True)],
            grouped([[layers_text(stage), recompute_text(stage)] for stage in stages]),
            width,
        )
    return lines


def layout_rows(layout: Document) -> list[list[str]]:
    """A row per axis that is used, and the micro-batches."""
    zero, shard = layout["zero"], layout["shard"]
    copies = {
        0: "replicated",
        1: "optimizer sharded",
        2: "optimizer and gradients sharded",
        3: "parameters sharded",
    }
    how = f"ZeRO-{zero}, {copies[zero]} over {shard} ranks" if zero else copies[0]
    chunks = f", {layout['vpp']} chunks a rank" if layout["vpp"] > 1 else ""
    pipeline = f"{layout['schedule']}{chunks}" if layout["pp"] > 1 else ""
    rows = [
        ["data", f"dp {layout['dp']}", how],
        ["tensor", f"tp {layout['tp']}", ""],
        ["pipeline", f"pp {layout['pp']}", pipeline],
    ]
    if layout["cp"] > 1:
        rows.append(["context", f"cp {layout['cp']}", layout["cp_kind"]])
    if layout["ep"] > 1 or layout["etp"] > 1:
        replicas = layout["dp"] * layout["tp"] * layout["cp"] // (layout["ep"] * layout["etp"])
        how = f"expert tensor {layout['etp']}, {replicas} replicas of each expert shard"
        rows.append(["expert", f"ep {layout['ep']}", how])
    size = layout["micro_batch"]
    sequences = "1 sequence" if size == 1 else f"{size} sequences"
    count = layout["num_microbatches"]
    passes = "1 micro-batch" if count == 1 else f"{count:,} micro-batches"
    rows.append(["micro-batch", str(size), f"{sequences}, {passes} a step"])
    if layout["offload"] != "none":
        rows.append(["offload", "", layout["offload"]])
    return rows


def layers_text(stage: Document) -> str:
    kinds = stage.get("layers_by_kind") or {}
    if len(kinds) < 2:
        return str(stage["layers"])
    return ", ".join(f"{count} {name}" for name, count in kinds.items() if count)


def recompute_text(stage: Document) -> str:
    policies = {name: count for name, count in stage["recompute"].items() if count}
    if len(policies) == 1:
        return f"{next(iter(policies))}, all layers"
    return ", ".join(f"{name} {count}" for name, count in policies.items())


def grouped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows with their stage before them, equal neighbours as one.

    >>> grouped([["20"], ["20"], ["19"]])
    [['0–1', '20'], ['2', '19']]
    """
    groups: list[tuple[int, int, Sequence[str]]] = []
    for stage, row in enumerate(rows):
        if groups and list(groups[-1][2]) == list(row):
            groups[-1] = (groups[-1][0], stage, row)
        else:
            groups.append((stage, stage, row))
    return [[str(a) if a == b else f"{a}–{b}", *row] for a, b, row in groups]


def speed_section(prediction: Document, width: int) -> list[Line]:
    """The step, tokens, MFU and HFU; then the bounds."""
    lines = heading("Speed")
    lines += paragraph(
        f"{seconds(prediction['step_time_s'])} a step · "
        f"{prediction['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU · "
        f"MFU {percent(prediction['mfu'])} · HFU {percent(prediction['hfu'])}",
        width,
        style="title",
    )
    lines += paragraph(
        f"between {seconds(prediction['lower_s'])} (all communication hidden) and "
        f"{seconds(prediction['upper_s'])} (none)",
        width,
        style="dim",
    )
    return lines


def breakdown_section(prediction: Document, width: int) -> list[Line]:
    """Named addends with a bar each, then communication exposed and hidden."""
    addends = {words(name): s for name, s in prediction["breakdown_s"].items() if s}
    total = prediction["step_time_s"]
    names = max(map(len, [*addends, "total"]))
    texts = seconds_like(total, [*addends.values(), total])
    wide = max(map(len, texts))
    cells = max(10, min(50, width - names - wide - 15))
    lines = heading("Time")
    for (name, s), text in zip(addends.items(), texts, strict=False):
        lines.append(
            [
                (f"  {name:<{names}}  {text:>{wide}}  {percent(s / total):>7}  ", ""),
                ("█" * round(cells * s / total), item_style(0)),
            ]
        )
    lines.append([(f"  {'total':<{names}}  {texts[-1]:>{wide}}", "title")])
    communication = prediction["communication"]
    exposed, hidden = communication["exposed_s"], communication["hidden_s"]
    lines += paragraph(
        f"Communication: {seconds(exposed)} exposed, {seconds(hidden)} hidden behind compute, "
        f"{seconds(exposed + hidden)} in all.",
        width,
    )
    return lines


def memory_section(prediction: Document, width: int) -> list[Line]:
    """A bar per stage against the capacity, then every addend in GiB."""
    stages, capacity = prediction["memory_bytes"], prediction["capacity_bytes"]
    items = memory_items(stages)
    shown = grouped([[gib(stage.get(item, 0.0)) for item in items] for stage in stages])
    names = max(len(row[0]) for row in shown)
    cells = max(10, min(60, width - names - 35))
    margin = prediction.get("memory_margin_fraction", 0.0)
    kept = f"; {percent(margin)} of it is kept free" if margin else ""
    lines = heading(f"Memory per stage, of {format_bytes(capacity)}{kept}")
    for row in shown:
        stage = stages[int(row[0].split("–")[0])]
        used = sum(stage.values())
        over = used > capacity
        lines.append(
            [
                (f"  {row[0]:<{names}}  ", ""),
                *bar([stage.get(item, 0.0) / capacity for item in items], cells),
                (f"  {gib(used):>9}  {percent(used / capacity):>7}", "bad" if over else ""),
                ("  too much" if over else "", "bad"),
            ]
        )
    columns = [Column("stage", "<")] + [
        Column(SHORT.get(words(item), words(item)), ">", item_style(index))
        for index, item in enumerate(items)
    ]
    lines.append([])
    told, note = itemised(shown, stages)
    rows = [[row[0], *(cell.removesuffix(" GiB") for cell in row[1:])] for row in told]
    lines += table(columns, rows, width)
    lines.append([(f"  in GiB{note}", "dim")])
    return lines


def itemised(
    shown: Sequence[Sequence[str]], stages: Sequence[Mapping[str, float]]
) -> tuple[Sequence[Sequence[str]], str]:
    """The rows to itemise, and a note: all of a few, else the first, the fullest and the last."""
    if len(shown) <= MAX_ITEMISED:
        return shown, ""
    firsts = [int(row[0].split("–")[0]) for row in shown]
    fullest = max(range(len(shown)), key=lambda i: sum(stages[firsts[i]].values()))
    kept = sorted({0, fullest, len(shown) - 1})
    return [shown[i] for i in kept], "; the first, the fullest and the last stage, all with --json"


def memory_items(stages: Sequence[Mapping[str, float]]) -> list[str]:
    """Names that any stage has bytes under."""
    known = [item for item in MEMORY_ITEMS if any(stage.get(item) for stage in stages)]
    others = {name: None for stage in stages for name, used in stage.items() if used}
    return known + [name for name in others if name not in MEMORY_ITEMS]
