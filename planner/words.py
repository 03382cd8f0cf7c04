"""Numbers and layouts in words, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hwprofiles.units import from_si

# What a layout is called by, in this order, where it differs from the default.
DEGREES: tuple[tuple[str, int | str], ...] = (
    ("tp", 1),
    ("cp", 1),
    ("pp", 1),
    ("vpp", 1),
    ("dp", 1),
    ("ep", 1),
    ("etp", 1),
    ("zero", 0),
    ("micro_batch", 1),
    ("offload", "none"),
)


def degrees(layout: Mapping[str, Any]) -> str:
    """A layout by the degrees that differ from one.

    >>> degrees({"dp": 2, "tp": 8, "zero": 1})
    'tp=8 dp=2 zero=1'
    """
    parts = [f"{k}={layout[k]}" for k, default in DEGREES if layout.get(k, default) != default]
    return " ".join(parts) or "one GPU, no parallelism"


def seconds(s: float) -> str:
    """Seconds with four digits, in ms below one second.

    >>> seconds(12.3456), seconds(0.0123456), seconds(0.0)
    ('12.35 s', '12.35 ms', '0 s')
    """
    if s == 0:
        return "0 s"
    unit = "s" if abs(s) >= 1 else "ms" if abs(s) >= 1e-3 else "us"
    value = from_si(s, unit)
    digits = 0 if abs(value) >= 999.5 else 1 if abs(value) >= 99.95 else 2
    return f"{value:,.{digits}f} {unit}"


def seconds_like(model: float, values: Sequence[float]) -> list[str]:
    """Every value in the unit and with the digits of `model`, so that a column adds up.

    >>> seconds_like(71.42, [59.31, 0.34, 0.0001])
    ['59.31 s', '0.34 s', '<0.01 s']
    """
    number, unit = seconds(model).split()
    digits = len(number.partition(".")[2])
    least = 0.5 * 10**-digits
    return [
        f"<{10**-digits:.{digits}f} {unit}"
        if 0 < from_si(value, unit) < least
        else f"{from_si(value, unit):,.{digits}f} {unit}"
        for value in values
    ]


def words(name: str) -> str:
    """A name of the document as a person reads it.

    >>> words("pipeline_bubble")
    'pipeline bubble'
    """
    return name.replace("_", " ")


def percent(fraction: float) -> str:
    """A share.

    >>> percent(0.4567)
    '45.7 %'
    """
    return f"{100 * fraction:.1f} %"


def signed_percent(fraction: float) -> str:
    """A difference.

    >>> signed_percent(0.0712)
    '+7.1 %'
    """
    return f"{100 * fraction:+.1f} %"


def count(number: float) -> str:
    """A whole number with its thousands apart.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,.0f}"


def gib(num_bytes: float) -> str:
    """Bytes in GiB, so that numbers of one column compare.

    >>> gib(85520809984)
    '79.6 GiB'
    """
    return f"{from_si(num_bytes, 'GiB'):,.1f} GiB"
