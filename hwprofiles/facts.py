"""One fact of a profile file: which facts there are, and the check of a fact table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hwprofiles.errors import ProfileError
from hwprofiles.profile import Fact
from hwprofiles.units import dimension_of, to_si, units_of

KINDS = ("datasheet", "measured", "derived", "assumed")
FACT_KEYS = ("value", "unit", "kind", "source", "per", "note")
MAX_COUNT = 10_000_000
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")

# fact -> (dimension, needed, zero is legal and means "none")
Spec = Mapping[str, tuple[str, bool, bool]]
DEVICE_FACTS: Spec = {
    "memory": ("bytes", True, False),
    "memory_bandwidth": ("bytes/s", True, False),
    "achieved_memory_bandwidth": ("bytes/s", True, False),
    **{f"peak_{precision}": ("FLOP/s", False, False) for precision in PRECISIONS},
    "num_sms": ("count", True, False),
    "l2": ("bytes", True, False),
    "tdp": ("watts", True, False),
    "kernel_floor": ("seconds", True, False),
    "host_launch": ("seconds", True, False),
    "host_link_bandwidth": ("bytes/s", True, False),
    "price_low": ("USD/h", False, False),
    "price_high": ("USD/h", False, False),
}
LINK_FACTS: Spec = {
    "bandwidth": ("bytes/s", True, False),
    "achieved_fraction": ("ratio", True, False),
    "latency": ("seconds", True, False),
    "base_latency": ("seconds", True, False),
}
CLUSTER_FACTS: Spec = {
    "gpus_per_node": ("count", True, False),
    "domain_gpus": ("count", True, False),
    "nics_per_node": ("count", True, False),
    "pair_bandwidth": ("bytes/s", True, False),
    "in_switch_reduction": ("flag", True, True),
    "host_memory": ("bytes", True, False),
    "host_memory_bandwidth": ("bytes/s", False, False),
    "gpus_per_host_link": ("ratio", False, False),
    "nvme": ("bytes", True, True),
    "nvme_read_bandwidth": ("bytes/s", True, True),
    "nvme_write_bandwidth": ("bytes/s", True, True),
    "node_overhead": ("watts", True, True),
    "max_nodes": ("count", False, False),
}
LEVEL_FACTS: Spec = {
    "nodes": ("count", True, False),
    "oversubscription": ("ratio", True, False),
    "hop_latency": ("seconds", True, True),
}
WHOLE = {"num_sms", "gpus_per_node", "domain_gpus", "max_nodes", "nodes"}
CANONICAL_UNIT = {
    "bytes": "B",
    "bytes/s": "B/s",
    "FLOP/s": "FLOP/s",
    "seconds": "s",
    "watts": "W",
    "USD/h": "USD/h",
    "ratio": "ratio",
    "flag": "flag",
}


def near(name: str, names: Iterable[str]) -> list[str]:
    """The names most like `name`, best first; all of them where none is alike."""
    import difflib  # only where a name is wrong

    every = list(names)
    folded = name.lower().replace("_", "-").replace(" ", "-")[:80]
    close = difflib.get_close_matches(folded, every, n=6, cutoff=0.5)
    inside = [known for known in every if folded and (folded in known or known in folded)]
    return list(dict.fromkeys(close + inside))[:8] or every


def refuse_unknown(keys: Iterable[str], legal: Iterable[str], where: str) -> None:
    """Raise on the first key that is not legal."""
    known = list(legal)
    for key in keys:
        if key not in known:
            raise ProfileError(
                f"{where} has the unknown key {key[:60]!r}; near legal keys: "
                f"{', '.join(near(key, known)[:8])}",
                values={"key": key[:60], "where": where},
                legal={"key": known},
            )


def text(table: Mapping[str, Any], key: str, where: str, *, needed: bool = True) -> str:
    """A one-line text entry of a table."""
    value = table.get(key, "" if not needed else None)
    if not isinstance(value, str) or (needed and not value.strip()) or len(value) > 2000:
        raise ProfileError(
            f"{where} needs {key!r} as a text of 1 to 2000 characters",
            values={"key": key, "given": type(value).__name__ if value is not None else "nothing"},
        )
    return value.strip()


def read_fact(name: str, raw: Any, spec: tuple[str, bool, bool], where: str) -> Fact:
    """Check one fact table ``{value, unit, kind, source, per, note}`` and convert it to SI."""
    dimension, _, zero_legal = spec
    at = f"{where}: fact {name!r}"
    if not isinstance(raw, Mapping):
        raise ProfileError(
            f"{at} must be a table with value, unit, kind and source, and is a "
            f"{type(raw).__name__}",
            values={"fact": name},
            legal={"keys": list(FACT_KEYS)},
        )
    refuse_unknown(raw, FACT_KEYS, at)
    value = raw.get("value")
    if dimension == "flag" and isinstance(value, bool):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(
            f"{at} needs a number as value, and has {'nothing' if value is None else 'no number'}",
            values={"fact": name},
        )
    unit = text(raw, "unit", at)
    if dimension_of(unit) != dimension:
        raise ProfileError(
            f"{at} is a quantity in {dimension} and cannot be given in {unit!r}; legal units: "
            f"{', '.join(units_of(dimension))}",
            values={"fact": name, "unit": unit},
            legal={"unit": units_of(dimension)},
        )
    kind = text(raw, "kind", at)
    if kind not in KINDS:
        raise ProfileError(
            f"{at} has the kind {kind[:40]!r}; a fact is one of {', '.join(KINDS)}",
            values={"fact": name, "kind": kind[:40]},
            legal={"kind": list(KINDS)},
        )
    source = text(raw, "source", at)
    try:
        written = float(value)
    except OverflowError:
        written = math.inf
    check_value(name, written, dimension, zero_legal, at)
    si = to_si(written, unit)
    return Fact(
        value=si,
        written=written,
        unit=unit,
        kind=kind,
        source=source,
        per=text(raw, "per", at, needed=False),
        note=text(raw, "note", at, needed=False),
    )


def check_value(name: str, value: float, dimension: str, zero_legal: bool, at: str) -> None:
    """Raise unless the number is one that this fact can have."""
    rule = ""
    if not math.isfinite(value):
        rule = "a finite number"
    elif value < 0 or (value == 0 and not zero_legal):
        rule = "zero or more" if zero_legal else "more than zero"
    elif dimension == "flag" and value not in (0, 1):
        rule = "true or false"
    elif name in WHOLE and value != int(value):
        rule = "a whole number"
    elif dimension == "count" and value > MAX_COUNT:
        rule = f"at most {MAX_COUNT}"
    elif name == "achieved_fraction" and value > 1:
        rule = "at most 1"
    elif name == "oversubscription" and value < 1:
        rule = "1 (non-blocking) or more"
    if rule:
        raise ProfileError(
            f"{at} is {value!r} and must be {rule}", values={"fact": name, "value": repr(value)}
        )


def read_facts(
    table: Mapping[str, Any], specs: Spec, where: str, *, others: Iterable[str] = ()
) -> dict[str, Fact]:
    """All facts of a table; refuses unknown keys and missing facts."""
    refuse_unknown(table, [*specs, *others], where)
    facts = {
        name: read_fact(name, table[name], spec, where)
        for name, spec in specs.items()
        if name in table
    }
    missing = [name for name, (_, needed, _) in specs.items() if needed and name not in facts]
    if missing:
        raise ProfileError(
            f"{where} lacks the fact{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"each is a table with value, unit, kind and source",
            values={"missing": missing},
            legal={"facts": list(specs)},
        )
    return facts
