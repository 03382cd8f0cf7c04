"""JSON forms of the types that are not read field by field: Layout and CommOp.

A Layout's codes are written as names, since a code means nothing to a reader of the file; its
numbers and those of a CommOp may be arrays elsewhere, but in a file they are plain numbers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from planner.codec import DECODERS, ENCODERS, at, decode_hint, encode, expect
from planner.errors import PlanFileError
from planner.layout import CP_KINDS, OFFLOADS, RECOMPUTE, SCHEDULES, Layout
from planner.results import CommOp

CODES = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "cp_kind": CP_KINDS,
    "offload": OFFLOADS,
}
COMM_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
COMM_TEXTS = ("kind", "axis", "phase", "what")


def layout_document(layout: Layout) -> dict[str, Any]:
    """A layout as plain values: degrees as numbers, codes as names.

    >>> document = layout_document(Layout(tp=8, schedule=2))
    >>> document["tp"], document["schedule"]
    (8, 'interleaved')
    """
    document: dict[str, Any] = {f.name: int(getattr(layout, f.name)) for f in fields(layout)}
    return document | {name: names[document[name]] for name, names in CODES.items()}


def layout_from_document(data: Any, where: str = "layout") -> Layout:
    """The layout of a document.

    Raises
    ------
    PlanFileError
        A key missing or unknown, a degree below one, or a name that there is not.
    """
    items = expect(dict, data, where)
    names = [f.name for f in fields(Layout)]
    if items.keys() != set(names):
        wrong = sorted(items.keys() ^ set(names))
        raise PlanFileError(
            f"{where} has missing or unknown keys: {', '.join(name[:40] for name in wrong)}",
            values={"keys": wrong},
            legal=names,
        )
    values: dict[str, int] = {}
    for name in names:
        place, value = at(where, name), items[name]
        if name in CODES:
            if value not in CODES[name]:
                raise PlanFileError(
                    f"{place} is {str(value)[:40]!r}; known: {', '.join(CODES[name])}",
                    values={name: value},
                    legal={name: CODES[name]},
                )
            values[name] = CODES[name].index(value)
            continue
        values[name] = decode_hint(int, value, place)
        lowest, highest = (0, 3) if name == "zero" else (1, 2**31)
        if not lowest <= values[name] <= highest:
            raise PlanFileError(
                f"{place} is {value}, and must be from {lowest} to {highest}",
                values={name: value},
                legal={name: [lowest, highest]},
            )
    return Layout(**values)


def comm_op_document(op: CommOp) -> dict[str, Any]:
    """A collective as plain values."""
    return {
        f.name: str(value) if f.name in COMM_TEXTS else encode(float(value))
        for f in fields(op)
        for value in [getattr(op, f.name)]
    }


def comm_op_from_document(data: Any, where: str) -> CommOp:
    """The collective of a document, refused as `layout_from_document` does."""
    items = expect(dict, data, where)
    names = {f.name for f in fields(CommOp)}
    if items.keys() != names:
        wrong = sorted(items.keys() ^ names)
        raise PlanFileError(
            f"{where} has missing or unknown keys: {', '.join(name[:40] for name in wrong)}",
            values={"keys": wrong},
            legal=sorted(names),
        )
    values = {
        name: decode_hint(str if name in COMM_TEXTS else float, value, at(where, name))
        for name, value in items.items()
    }
    if values["kind"] not in COMM_KINDS:
        raise PlanFileError(
            f"{where}.kind is {values['kind'][:40]!r}; known: {', '.join(COMM_KINDS)}",
            values={"kind": values["kind"]},
            legal={"kind": COMM_KINDS},
        )
    return CommOp(**values)


ENCODERS[Layout] = layout_document
DECODERS[Layout] = layout_from_document
ENCODERS[CommOp] = comm_op_document
DECODERS[CommOp] = comm_op_from_document
