"""Lines of styled text for a terminal or a pipe: paragraphs, tables and bars of a given width.

A line is a list of spans (text, style). The same lines go to a terminal, coloured by rich, and to a
pipe as plain text, so that both say the same.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TextIO

Span = tuple[str, str]
Line = list[Span]

PIPE_WIDTH = 80
MIN_WIDTH, MAX_WIDTH = 60, 120

# Items in bars and their table columns: colours that colour-blind people tell apart (Okabe, Ito).
ITEM_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#B8A800",
    "#999999",
)
STYLES = {
    "": "",
    "title": "bold",
    "dim": "dim",
    "good": "bold green",
    "bad": "bold red",
    "warning": "yellow",
    **{f"item{i}": colour for i, colour in enumerate(ITEM_COLOURS)},
}
# Signs that an old terminal or a log in ASCII cannot show.
ASCII = str.maketrans({"█": "#", "░": ".", "→": ">", "·": "|", "×": "x", "–": "-"})


class Column(NamedTuple):
    """A table column: its title, alignment (``<`` or ``>``), style, and whether long text wraps."""

    title: str
    align: str = ">"
    style: str = ""
    wraps: bool = False


def item_style(index: int) -> str:
    """The style of the index-th item of a bar."""
    return f"item{index % len(ITEM_COLOURS)}"


def heading(text: str) -> list[Line]:
    """A section's title, set off by an empty line."""
    return [[], [(text, "title")]]


def paragraph(
    text: str, width: int, *, style: str = "", indent: int = 2, mark: str = ""
) -> list[Line]:
    """Wrapped text; `mark` stands before the first line and the rest hangs below it."""
    lead = " " * indent
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=lead + mark,
        subsequent_indent=lead + " " * len(mark),
        break_on_hyphens=False,
    )
    return [[(line, style)] for line in lines]


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, indent: int = 2
) -> list[Line]:
    """A table with its header; too wide, it goes on below with the first column repeated.

    >>> for line in table([Column("stage", "<"), Column("GiB")], [["0", "61.2"]], 40):
    ...     print("".join(text for text, _ in line))
      stage   GiB
      0      61.2
    """
    sizes = [
        max([len(column.title), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)
    ]
    wrapped = next((i for i, column in enumerate(columns) if column.wraps), None)
    if wrapped is not None:
        rest = indent + sum(sizes) - sizes[wrapped] + 2 * (len(sizes) - 1)
        sizes[wrapped] = min(sizes[wrapped], max(16, width - rest))
    gap = 2 if indent + sum(sizes) + 2 * (len(sizes) - 1) <= width else 1
    fitting = columns_that_fit(sizes, gap, width - indent)
    if fitting < len(columns):
        left = table(columns[:fitting], [row[:fitting] for row in rows], width, indent)
        more = [columns[0], *columns[fitting:]]
        return left + table(more, [[row[0], *row[fitting:]] for row in rows], width, indent)
    lines = [table_line(columns, [c.title for c in columns], sizes, gap, indent, header=True)]
    for row in rows:
        parts = [
            textwrap.wrap(cell, size, break_on_hyphens=False) or [""] if column.wraps else [cell]
            for column, cell, size in zip(columns, row, sizes, strict=True)
        ]
        for depth in range(max(map(len, parts))):
            cells = [part[depth] if depth < len(part) else "" for part in parts]
            lines.append(table_line(columns, cells, sizes, gap, indent))
    return lines


def columns_that_fit(sizes: Sequence[int], gap: int, width: int) -> int:
    """How many columns from the left fit in `width`; two at least, or a table would never end."""
    used, count = sizes[0], 1
    while count < len(sizes) and (used + gap + sizes[count] <= width or count < 2):
        used += gap + sizes[count]
        count += 1
    return count


def table_line(
    columns: Sequence[Column],
    cells: Sequence[str],
    sizes: Sequence[int],
    gap: int,
    indent: int,
    *,
    header: bool = False,
) -> Line:
    line: Line = [(" " * indent, "")]
    for i, (column, cell, size) in enumerate(zip(columns, cells, sizes, strict=True)):
        style = column.style or "dim" if header else column.style if i else ""
        line.append((f"{' ' * gap if i else ''}{cell:{column.align}{size}}", style))
    return trimmed(line)


def trimmed(line: Line) -> Line:
    """Without blanks at the end."""
    kept = list(line)
    while kept and not kept[-1][0].strip():
        kept.pop()
    if kept:
        kept[-1] = (kept[-1][0].rstrip(), kept[-1][1])
    return kept


def bar(fractions: Sequence[float], cells: int) -> list[Span]:
    """A bar of `cells` signs whose parts take these fractions of it; what is left stays light.

    >>> "".join(text for text, _ in bar([0.5, 0.25], 8))
    '██████░░'
    """
    spans: list[Span] = []
    ends = [0.0]
    for fraction in fractions:
        ends.append(min(1.0, ends[-1] + max(0.0, fraction)))
    marks = [round(end * cells) for end in ends]
    for index in range(len(fractions)):
        if filled := marks[index + 1] - marks[index]:
            spans.append(("█" * filled, item_style(index)))
    if rest := cells - marks[-1]:
        spans.append(("░" * rest, "dim"))
    return spans


def plain(lines: Iterable[Line]) -> str:
    """The lines as text without styles."""
    return "\n".join("".join(text for text, _ in trimmed(line)) for line in lines) + "\n"


def output_width(stream: TextIO) -> int:
    """Columns to print in: the terminal's, within reason; `PIPE_WIDTH` in a pipe."""
    if not stream.isatty():
        return PIPE_WIDTH
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size().columns))


def show(lines: Sequence[Line], stream: TextIO | None = None) -> None:
    """Print: coloured on a terminal that wants colour, plain elsewhere."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("NO_COLOR") is None and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.text import Text

        console = Console(file=stream, highlight=False, soft_wrap=True)
        for line in lines:
            console.print(Text.assemble(*((text, STYLES[style]) for text, style in trimmed(line))))
        return
    text = plain(lines)
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(ASCII)
        text = text.encode(stream.encoding, "replace").decode(stream.encoding)
    stream.write(text)
