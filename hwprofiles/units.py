"""The only conversion table: written units to SI and back to what people read."""

from __future__ import annotations

import math

from hwprofiles.errors import ProfileError

# unit -> (dimension, how many SI units one is)
UNITS: dict[str, tuple[str, float]] = {
    "B": ("bytes", 1.0),
    "kB": ("bytes", 1e3),
    "MB": ("bytes", 1e6),
    "GB": ("bytes", 1e9),
    "TB": ("bytes", 1e12),
    "KiB": ("bytes", 2.0**10),
    "MiB": ("bytes", 2.0**20),
    "GiB": ("bytes", 2.0**30),
    "TiB": ("bytes", 2.0**40),
    "B/s": ("bytes/s", 1.0),
    "MB/s": ("bytes/s", 1e6),
    "GB/s": ("bytes/s", 1e9),
    "TB/s": ("bytes/s", 1e12),
    "MiB/s": ("bytes/s", 2.0**20),
    "GiB/s": ("bytes/s", 2.0**30),
    "Mbit/s": ("bytes/s", 1e6 / 8),
    "Gbit/s": ("bytes/s", 1e9 / 8),
    "FLOP/s": ("FLOP/s", 1.0),
    "GFLOP/s": ("FLOP/s", 1e9),
    "TFLOP/s": ("FLOP/s", 1e12),
    "PFLOP/s": ("FLOP/s", 1e15),
    "s": ("seconds", 1.0),
    "ms": ("seconds", 1e-3),
    "us": ("seconds", 1e-6),
    "ns": ("seconds", 1e-9),
    "W": ("watts", 1.0),
    "kW": ("watts", 1e3),
    "USD/h": ("USD/h", 1.0),
    "GPU": ("count", 1.0),
    "node": ("count", 1.0),
    "NIC": ("count", 1.0),
    "SM": ("count", 1.0),
    "CU": ("count", 1.0),
    "core": ("count", 1.0),
    "fraction": ("ratio", 1.0),
    "ratio": ("ratio", 1.0),
    "flag": ("flag", 1.0),
}


def units_of(dimension: str) -> list[str]:
    """All units of one dimension, as they may be written."""
    return [unit for unit, (its, _) in UNITS.items() if its == dimension]


def dimension_of(unit: str) -> str:
    """Dimension of a unit, e.g. ``bytes/s``.

    >>> dimension_of("Gbit/s")
    'bytes/s'
    """
    if unit not in UNITS:
        raise ProfileError(
            f"unit {unit[:40]!r} is not known; use one of {', '.join(UNITS)}",
            values={"unit": unit[:40]},
            legal={"unit": list(UNITS)},
        )
    return UNITS[unit][0]


def to_si(value: float, unit: str) -> float:
    """`value` in the SI unit of its dimension (bytes, seconds, FLOP/s, bytes/s, W, USD/h, 1).

    >>> to_si(400, "Gbit/s")
    50000000000.0
    >>> to_si(2, "GiB")
    2147483648.0
    """
    dimension_of(unit)
    si = float(value) * UNITS[unit][1]
    if not math.isfinite(si):
        raise ProfileError(
            f"value {value!r} {unit} is not a finite number",
            values={"value": str(value), "unit": unit},
        )
    return si


def from_si(si: float, unit: str) -> float:
    """The inverse of `to_si`.

    >>> from_si(5e10, "Gbit/s")
    400.0
    """
    dimension_of(unit)
    return si / UNITS[unit][1]


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    size, unit = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return (
        f"{value / size:.3g} {unit}" if abs(value / size) < 999.5 else f"{value / size:.0f} {unit}"
    )


def format_bytes(num_bytes: float) -> str:
    """Bytes for a person, in binary units.

    >>> format_bytes(85520809984)
    '79.6 GiB'
    """
    steps = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
    return _scaled(num_bytes, steps)


def format_seconds(seconds: float) -> str:
    """Seconds for a person.

    >>> format_seconds(3.4e-06), format_seconds(7200)
    ('3.4 us', '2 h')
    """
    steps = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    return _scaled(seconds, steps)


def format_rate(per_second: float, of: str = "bytes") -> str:
    """A rate for a person; `of` is ``bytes`` or ``flops``.

    >>> format_rate(3.35e12), format_rate(989e12, "flops")
    ('3.35 TB/s', '989 TFLOP/s')
    """
    unit = {"bytes": "B/s", "flops": "FLOP/s"}[of]
    steps: tuple[tuple[float, str], ...] = (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
    )
    if of == "flops":  # people say 1979 TFLOP/s, not 1.98 PFLOP/s, of one device
        steps = tuple(step for step in steps if step[1] != "P" or per_second >= 1e17)
    return _scaled(per_second, tuple((size, prefix + unit) for size, prefix in steps))
