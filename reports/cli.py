"""The command `validate`: parse, call `reports.accuracy`, print and write."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InputError


def validate(
    table: Annotated[
        Path | None,
        typer.Argument(metavar="TABLE.csv", help="published runs; left out: the table that ships"),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="only rows of this source_key")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write a prediction for every row")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write one self-contained page")
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="also move every assumed constant by 20 %; slow"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Predict published training runs and compare: errors, ranking, worst rows, coverage."""
    from reports.accuracy import report, rows_of
    from reports.accuracy_text import accuracy_lines, predictions_csv
    from reports.predictions import predictions

    for path in (csv, html):
        if path is not None:
            require_writable(path)
    gc.disable()  # nothing to collect, and looking for it takes a twentieth of the time
    try:
        found = predictions(rows_of(table, source))
        document = report(found, table is None and source is None)
    finally:
        gc.enable()
    if sensitivity:
        from reports.sensitivity import sensitivity as moved

        document["sensitivity"] = moved(found)
    if csv is not None:
        write_whole(csv, predictions_csv(document["rows"]))
    if html is not None:
        from reports.accuracy_page import accuracy_page

        write_whole(html, accuracy_page(document))
    if as_json:
        json.dump(document, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
        return
    print("\n".join(accuracy_lines(document)))


def require_writable(path: Path) -> None:
    """Refuse a path that cannot become a file before the work is done."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            f"{path.name[:60]!r} cannot be written: its folder must exist and be writable, and the "
            f"name must not be a folder",
            values={"file": path.name[:60]},
            legal=[],
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: under a temporary name, then renamed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"{path.name[:60]!r} cannot be written: {error.strerror}",
            values={"file": path.name[:60]},
            legal=[],
        ) from None
