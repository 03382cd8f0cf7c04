"""A Timeline as a picture: ranks downwards, time to the right, written as SVG by hand.

Colours are those of Okabe and Ito, which people with any common colour blindness tell apart; a
later chunk of the same rank is a lighter shade. Hovering over a cell in a browser names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from planner.errors import InputError
from planner.files import write_whole
from planner.results import Timeline
from planner.trace import (
    OP_WORDS,
    StepSpan,
    action_name,
    check_step_spans,
    chunk_of_stage,
)

__all__ = ["timeline_svg", "write_plot"]

COLOURS = {"F": (0, 114, 178), "B": (230, 159, 0), "W": (0, 158, 115)}
STEP_COLOUR = (204, 121, 167)
IDLE = "#eef0f2"
INK, FAINT = "#20262e", "#6b7480"

ROW, GAP = 26, 7
LEFT, TOP, BOTTOM = 64, 92, 50
COLUMN = 84  # each of the two columns of figures on the right
READABLE = 17  # width of a cell that can carry its number
NARROWEST, WIDEST = 760, 1560  # of the time axis


def write_plot(
    timeline: Timeline,
    path: str | os.PathLike[str],
    title: str = "Pipeline schedule",
    step_spans: Sequence[StepSpan] = (),
) -> None:
    """Write `timeline` as an SVG picture; the path must end in .svg."""
    if Path(path).suffix.lower() != ".svg":
        raise InputError(
            f"cannot plot to {os.fspath(path)!r}: plots are written as SVG; legal here: a path "
            "that ends in .svg",
            values={"path": os.fspath(path)},
            legal={"path": [str(Path(path).with_suffix(".svg"))]},
        )
    write_whole(path, timeline_svg(timeline, title, step_spans))


def timeline_svg(
    timeline: Timeline, title: str = "Pipeline schedule", step_spans: Sequence[StepSpan] = ()
) -> str:
    """`timeline` as an SVG document.

    Cells narrower than 1.5 pixels are drawn by sampling: every pixel shows what runs at its middle.
    """
    check_step_spans(timeline, step_spans)
    chunks = chunk_of_stage(timeline)
    num_chunks = 1 + max(chunks.values(), default=0)
    end_s = max([timeline.total_s, *(span.end_s for span in step_spans)])
    lengths_s = [end - start for spans in timeline.spans for _, start, end in spans if end > start]
    typical_s = float(np.median(lengths_s)) if lengths_s else 0.0
    wanted = READABLE * end_s / typical_s if typical_s > 0 else NARROWEST
    across = min(max(wanted, NARROWEST), WIDEST)
    scale = across / end_s if end_s > 0 else 0.0
    sampled = typical_s * scale < 1.5

    height = TOP + len(timeline.spans) * (ROW + GAP) + BOTTOM
    width = LEFT + across + 2 * COLUMN + 12
    ops = [op for op in "FBW" if any(a.op == op for spans in timeline.spans for a, _, _ in spans)]
    subtitle = (
        f"{len(timeline.spans)} ranks, {_num_microbatches(timeline)} micro-batches: "
        f"{_ms(timeline.total_s)} ms, {100 * timeline.bubble_fraction:.1f} % of it idle"
        + ("; cells narrower than a pixel are sampled" if sampled else "")
    )
    size = f'width="{width:.0f}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {size}',
        'role="img" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(subtitle)}</desc>",
        f'<rect {size} fill="#ffffff"/>',
        _text(LEFT, 26, title, size=17, weight="bold"),
        _text(LEFT, 46, subtitle, fill=FAINT, size=13),
        *_legend(ops, num_chunks, bool(step_spans)),
        *_axis(end_s, scale, height),
        _text(LEFT + across + COLUMN - 10, TOP - 9, "idle", fill=FAINT, anchor="end"),
        _text(LEFT + across + 2 * COLUMN, TOP - 9, "peak in flight", fill=FAINT, anchor="end"),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = TOP + rank * (ROW + GAP)
        busy_s = sum(end - start for _, start, end in spans)
        idle = 1 - busy_s / timeline.total_s if timeline.total_s > 0 else 0.0
        middle = y + ROW / 2 + 4
        figures = ((COLUMN - 10, f"{100 * idle:.1f} %"), (2 * COLUMN, _count(timeline, rank)))
        parts += [
            _text(LEFT - 10, middle, f"rank {rank}", anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{across:.2f}" height="{ROW}" fill="{IDLE}"/>',
            *(_text(LEFT + across + x, middle, words, anchor="end") for x, words in figures),
            *(_sampled if sampled else _cells)(timeline, rank, y, scale, chunks, num_chunks),
            *(
                _rect(span.start_s, span.end_s, y, scale, _css(STEP_COLOUR), span.name)
                for span in step_spans
                if span.rank == rank
            ),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cells(
    timeline: Timeline,
    rank: int,
    y: float,
    scale: float,
    chunks: dict[int, int],
    num_chunks: int,
) -> Iterator[str]:
    for action, start_s, end_s in timeline.spans[rank]:
        chunk = chunks[action.stage]
        colour = _shade(COLOURS[action.op], chunk, num_chunks)
        hint = f"{action_name(action, chunk)}: {_ms(start_s)} to {_ms(end_s)} ms"
        yield _rect(start_s, end_s, y, scale, _css(colour), hint)
        label = str(action.microbatch)
        across = (end_s - start_s) * scale
        if across >= 7 * len(label) + 2:
            yield _text(
                LEFT + (start_s + end_s) / 2 * scale,
                y + ROW / 2 + 4,
                label,
                fill=_readable_on(colour),
                size=11,
                anchor="middle",
            )


def _sampled(
    timeline: Timeline,
    rank: int,
    y: float,
    scale: float,
    chunks: dict[int, int],
    num_chunks: int,
) -> Iterator[str]:
    """One rectangle per run of pixels in whose middle the same kind of action runs."""
    spans = timeline.spans[rank]
    if not spans:
        return
    starts = np.array([start for _, start, _ in spans])
    ends = np.array([end for _, _, end in spans])
    kinds = sorted({(action.op, chunks[action.stage]) for action, _, _ in spans})
    kind = np.array([kinds.index((action.op, chunks[action.stage])) for action, _, _ in spans])
    middles_s = (np.arange(math.ceil(ends[-1] * scale)) + 0.5) / scale
    span = np.searchsorted(starts, middles_s, side="right") - 1
    shown = np.where((span >= 0) & (middles_s < ends[span]), kind[span], -1)
    borders = np.flatnonzero(np.diff(shown)) + 1
    for first, last in zip([0, *borders], [*borders, len(shown)], strict=True):
        if shown[first] < 0:
            continue
        op, chunk = kinds[shown[first]]
        colour = _css(_shade(COLOURS[op], chunk, num_chunks))
        yield (
            f'<rect x="{LEFT + first}" y="{y}" width="{last - first}" height="{ROW}" '
            f'fill="{colour}"/>'
        )


def _legend(ops: Sequence[str], num_chunks: int, has_step_end: bool) -> Iterator[str]:
    """Left to right above the rows; the shades of an op side by side, chunk 0 first."""
    split = "W" in ops
    entries = [
        (
            [_css(_shade(COLOURS[op], chunk, num_chunks)) for chunk in range(num_chunks)],
            OP_WORDS[op] + (" (input gradient, where W is apart)" if op == "B" and split else ""),
        )
        for op in ops
    ]
    if num_chunks > 1:
        first_words = entries[0][1]
        between = "," if num_chunks == 2 else " to"
        entries[0] = (entries[0][0], f"{first_words} (chunk 0{between} {num_chunks - 1})")
    if has_step_end:
        entries.append(([_css(STEP_COLOUR)], "once per step"))
    entries.append(([IDLE], "idle"))
    x: float = LEFT
    for colours, words in entries:
        for colour in colours:
            yield f'<rect x="{x:.0f}" y="60" width="13" height="13" fill="{colour}"/>'
            x += 14
        yield _text(x + 5, 71, words)
        x += 5 + 6.3 * len(words) + 18


def _axis(end_s: float, scale: float, height: float) -> Iterator[str]:
    """Ticks in ms at round distances, with faint lines through the rows."""
    bottom = height - BOTTOM + 2
    step_s = _round_step(end_s / 8) if end_s > 0 else 0.0
    for i in range(int(end_s / step_s * (1 + 1e-9)) + 1 if step_s else 1):
        x = LEFT + i * step_s * scale
        yield (
            f'<line x1="{x:.2f}" y1="{TOP - 4}" x2="{x:.2f}" y2="{bottom}" stroke="#d5d9de" '
            'stroke-width="1"/>'
        )
        yield _text(x, bottom + 16, f"{i * step_s * 1e3:.10g}", fill=FAINT, anchor="middle")
    yield _text(LEFT + end_s * scale / 2, bottom + 36, "time [ms]", fill=FAINT, anchor="middle")


def _round_step(least: float) -> float:
    """Least of 1, 2, 5 times a power of ten that is at least `least`.

    >>> [_round_step(x) for x in (0.7, 1.1, 23.0)]
    [1.0, 2.0, 50.0]
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-12))


def _rect(start_s: float, end_s: float, y: float, scale: float, colour: str, hint: str) -> str:
    # The white edge parts neighbours of one colour; on narrow cells it would be all there is.
    across = (end_s - start_s) * scale
    edge = ' stroke="#ffffff" stroke-width="0.8"' if across > 4 else ""
    return (
        f'<rect x="{LEFT + start_s * scale:.2f}" y="{y}" width="{across:.2f}" height="{ROW}" '
        f'fill="{colour}"{edge}><title>{escape(hint)}</title></rect>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    size: int = 12,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _shade(colour: tuple[int, int, int], chunk: int, num_chunks: int) -> tuple[int, int, int]:
    white = 0.55 * chunk / max(1, num_chunks - 1)
    red, green, blue = (round(c + (255 - c) * white) for c in colour)
    return red, green, blue


def _readable_on(colour: tuple[int, int, int]) -> str:
    red, green, blue = colour
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#ffffff"


def _css(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds < 10 else f"{seconds * 1e3:.0f}"


def _count(timeline: Timeline, rank: int) -> str:
    return f"{timeline.peak_in_flight[rank]:.4g}"


def _num_microbatches(timeline: Timeline) -> int:
    return len({action.microbatch for spans in timeline.spans for action, _, _ in spans})
