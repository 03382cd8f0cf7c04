"""The table of published runs: a CSV file read into rows whose fields say when they are missing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from planner.errors import InputError

VALIDATION_DIR = Path(__file__).parent / "validation"
SHIPPED_TABLE = VALIDATION_DIR / "published_runs.csv"
MAX_BYTES = 50_000_000

TEXT_COLUMNS = (
    "id",
    "model_name",
    "gpu",
    "inter_link",
    "sharding_note",
    "precision",
    "recompute",
    "offload",
    "optimizer",
    "notes",
    "source_key",
    "family",
    "quality",
)
COUNT_COLUMNS = (
    "n_layers",
    "hidden",
    "ffn_hidden",
    "n_heads",
    "n_kv_heads",
    "vocab",
    "seq_len",
    "n_experts",
    "top_k",
    "moe_ffn_hidden",
    "n_gpus",
    "gpus_per_node",
    "tp",
    "pp",
    "vpp",
    "dp",
    "cp",
    "ep",
    "etp",
    "micro_batch",
    "global_batch",
)
NUMBER_COLUMNS = (
    "n_shared_experts",
    "gated_mlp",
    "tied_embeddings",
    "zero_stage",
    "sequence_parallel",
    "flash_attention",
    "measured_step_time_s",
    "measured_tokens_per_s_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "peak_mem_gib",
)
COLUMNS = (*TEXT_COLUMNS, *COUNT_COLUMNS, *NUMBER_COLUMNS)


class MissingField(Exception):
    """A field that a prediction needs is empty; `default` is what would have had to be assumed."""

    def __init__(self, field: str, default: str) -> None:
        self.field = field
        super().__init__(f"{field} is not stated; a default of {default} would have been needed")


class NotPredictable(Exception):
    """The row cannot be predicted for a reason other than an empty field."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published run, its fields as written."""

    fields: Mapping[str, str]

    @property
    def id(self) -> str:
        return self.fields["id"]

    @property
    def source(self) -> str:
        return self.fields["source_key"]

    def text(self, name: str) -> str:
        return self.fields[name]

    def says(self, name: str, words: str) -> bool:
        """Whether field `name` contains `words`, whatever their case."""
        return words.lower() in self.fields[name].lower()

    def number(self, name: str) -> float | None:
        """The number in a field, None where it is empty."""
        value = self.fields[name]
        return float(value) if value else None

    def count(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def needed(self, name: str, default: str) -> int:
        """The whole number in a field that a prediction cannot do without."""
        value = self.count(name)
        if value is None:
            raise MissingField(name, default)
        return value

    def flag(self, name: str) -> bool | None:
        value = self.number(name)
        return None if value is None else value != 0


def read_table(path: str | Path | None = None) -> tuple[PublishedRow, ...]:
    """Rows of a table of published runs; None reads the one that ships.

    Raises
    ------
    InputError
        The file cannot be read, lacks columns, holds no row, or a field is not of its column.
    """
    return _read(str(SHIPPED_TABLE if path is None else path))


@lru_cache(maxsize=2)
def _read(path: str) -> tuple[PublishedRow, ...]:
    name = Path(path).name[:80]
    try:
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            raise refuse(f"{name} has {size} bytes, and a table may have {MAX_BYTES}", name)
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise refuse(f"{name} is not a text file in UTF-8", name) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "not a path"
        raise refuse(f"the table {name} cannot be read: {cause}", name) from None
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        header = list(reader.fieldnames or [])
        absent = [column for column in COLUMNS if column not in header]
        if absent:
            more = f" and {len(absent) - 4} more" if len(absent) > 4 else ""
            raise InputError(
                f"the table {name} lacks the columns {', '.join(absent[:4])}{more}",
                values={"table": name, "missing": absent},
                legal={"columns": list(COLUMNS)},
            )
        rows = tuple(_checked(reader, name))
    except csv.Error as error:
        raise refuse(
            f"the table {name} is not CSV: {error} near line {reader.line_num}", name
        ) from None
    if not rows:
        raise refuse(f"the table {name} has a header and no rows", name)
    return rows


def _checked(reader: csv.DictReader[str], name: str) -> Iterator[PublishedRow]:
    """Rows one by one, each field checked against its column."""
    seen: set[str] = set()
    for record in reader:
        line = reader.line_num
        if None in record or None in record.values():
            raise refuse(f"line {line} of {name} has not as many fields as the header", name)
        fields = {column: record[column].strip() for column in COLUMNS}
        for column in (*COUNT_COLUMNS, *NUMBER_COLUMNS):
            if fields[column]:
                _check_number(fields[column], column, line, name)
        if not fields["id"] or fields["id"] in seen:
            what = f"repeats the id {fields['id'][:60]!r}" if fields["id"] else "has no id"
            raise refuse(f"line {line} of {name} {what}; every row needs one of its own", name)
        seen.add(fields["id"])
        yield PublishedRow(fields)


def _check_number(value: str, column: str, line: int, name: str) -> None:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    whole = column in COUNT_COLUMNS
    legal = math.isfinite(number) and number >= 0 and (not whole or number == int(number) >= 1)
    if not legal or number > 1e15:
        rule = "a whole number of at least 1" if whole else "a number that is not negative"
        raise InputError(
            f"line {line} of {name}: {column} is {value[:40]!r}, and must be {rule} or empty",
            values={column: value[:40], "line": line},
            legal={column: [1] if whole else [0]},
        )


def refuse(sentence: str, name: str) -> InputError:
    return InputError(sentence, values={"table": name}, legal=[])
