"""Measured curves inside a file of one's own, as ``calibrate`` writes them.

A device table may hold ``[gemm.<precision>]`` and ``[attention.<kernel>]``, a cluster file
``[curves.<op>]``; numbers are SI, every curve names its kind and source, and a curve given here
replaces the shipped one of that name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

import numpy as np

from hwprofiles.errors import ProfileError
from hwprofiles.facts import KINDS, refuse_unknown, text
from hwprofiles.profile import Array, AttentionCurve, CollectiveCurve, GemmCurve

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_FLOATS = [field for field in fields(GemmCurve) if field.type == "float"]
GEMM_NUMBERS = tuple(field.name for field in _FLOATS if field.default is MISSING)
GEMM_OPTIONAL = tuple(field.name for field in _FLOATS if field.default is not MISSING)
ORIGIN = ("kind", "source", "note")


def _tables(raw: Any, where: str) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(raw, Mapping) or not all(isinstance(v, Mapping) for v in raw.values()):
        raise ProfileError(f"{where} must hold one table a curve, by name")
    return raw


def _origin(table: Mapping[str, Any], where: str) -> dict[str, str]:
    kind = text(table, "kind", where)
    if kind not in KINDS:
        raise ProfileError(
            f"{where} has the kind {kind[:40]!r}; a curve is one of {', '.join(KINDS)}",
            values={"kind": kind[:40]},
            legal={"kind": list(KINDS)},
        )
    note = text(table, "note", where, needed=False)
    return {"kind": kind, "source": text(table, "source", where), "note": note}


def _number(value: Any, what: str, *, zero_legal: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        number = float(value) if good else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero_legal):
        raise ProfileError(f"{what} must be a finite number above zero", values={"what": what})
    return number


def _numbers(value: Any, what: str, *, rising: bool = False) -> list[float]:
    if not isinstance(value, list) or not 1 <= len(value) <= 4096:
        raise ProfileError(f"{what} must be a list of 1 to 4096 numbers", values={"what": what})
    numbers = [_number(entry, what) for entry in value]
    if rising and any(later <= earlier for earlier, later in pairwise(numbers)):
        raise ProfileError(f"{what} must rise from entry to entry", values={"what": what})
    return numbers


def _axis(value: Any, what: str) -> tuple[int, ...]:
    numbers = _numbers(value, what, rising=True)
    if any(number != int(number) for number in numbers):
        raise ProfileError(f"{what} must be whole numbers", values={"what": what})
    return tuple(int(number) for number in numbers)


def _grid(value: Any, rows: int, columns: int, what: str) -> Array:
    if not isinstance(value, list) or len(value) != rows:
        raise ProfileError(f"{what} must have {rows} rows", values={"what": what, "rows": rows})
    grid = [_numbers(row, what) for row in value]
    if any(len(row) != columns for row in grid):
        raise ProfileError(f"{what} must have {columns} numbers a row", values={"what": what})
    return np.array(grid, dtype=np.float64)


def read_gemm(raw: Any, num_sms: int, where: str) -> dict[str, GemmCurve]:
    """GEMM curves by precision."""
    curves = {}
    for precision, table in _tables(raw, where).items():
        at = f"{where}, curve {precision[:40]!r}"
        refuse_unknown(table, [*GEMM_NUMBERS, *GEMM_OPTIONAL, "tiles", "num_sms", *ORIGIN], at)
        values: dict[str, Any] = {
            key: _number(table.get(key), f"{at}: {key}", zero_legal=key == "prologue_k")
            for key in GEMM_NUMBERS
        } | {
            key: _number(table[key], f"{at}: {key}", zero_legal=True)
            for key in GEMM_OPTIONAL
            if key in table
        }
        values |= _origin(table, at)
        raw_tiles = table.get("tiles")
        if not isinstance(raw_tiles, list) or not 1 <= len(raw_tiles) <= 64:
            raise ProfileError(f"{at}: tiles must be 1 to 64 of [rows, columns, efficiency]")
        tiles = [_numbers(tile, f"{at}: tiles") for tile in raw_tiles]
        if any(len(tile) != 3 for tile in tiles):
            raise ProfileError(f"{at}: a tile is [rows, columns, efficiency]")
        sms = int(_number(table.get("num_sms", num_sms), f"{at}: num_sms"))
        curves[precision] = GemmCurve(
            **values,
            tiles=tuple((max(1, int(x)), max(1, int(y)), e) for x, y, e in tiles),
            num_sms=max(1, sms),
        )
    return curves


def read_attention(raw: Any, where: str) -> dict[str, AttentionCurve]:
    """Attention curves by kernel."""
    curves = {}
    rates = ("forward_flops_per_s", "backward_flops_per_s")
    for kernel, table in _tables(raw, where).items():
        at = f"{where}, curve {kernel[:40]!r}"
        refuse_unknown(table, ["head_dims", "seq_lens", *rates, *ORIGIN], at)
        head_dims = _axis(table.get("head_dims"), f"{at}: head_dims")
        seq_lens = _axis(table.get("seq_lens"), f"{at}: seq_lens")
        shape = (len(head_dims), len(seq_lens))
        forward, backward = (_grid(table.get(key), *shape, f"{at}: {key}") for key in rates)
        curves[kernel] = AttentionCurve(
            kernel, head_dims, seq_lens, forward, backward, **_origin(table, at)
        )
    return curves


def read_collectives(raw: Any, where: str) -> dict[str, CollectiveCurve]:
    """Collective curves by operation."""
    curves = {}
    tables = _tables(raw, where)
    refuse_unknown(tables, OPS, where)
    for op, table in tables.items():
        at = f"{where}, curve {op[:40]!r}"
        refuse_unknown(table, ["group_sizes", "num_bytes", "seconds", *ORIGIN], at)
        sizes = _axis(table.get("group_sizes"), f"{at}: group_sizes")
        num_bytes = tuple(_numbers(table.get("num_bytes"), f"{at}: num_bytes", rising=True))
        seconds = _grid(table.get("seconds"), len(sizes), len(num_bytes), f"{at}: seconds")
        curves[op] = CollectiveCurve(op, sizes, num_bytes, seconds, **_origin(table, at))
    return curves
