"""Cluster -> one TOML file that holds everything: device, links, facts and curves in place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from hwprofiles.profile import Cluster, Device, Fact, GemmCurve, Link


def _value(value: Any) -> str:
    """A TOML value; JSON's strings, numbers and lists are TOML's too."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return repr(value)  # int, float: the shortest text that reads back the same


def _line(key: str, value: Any) -> str:
    return f"{json.dumps(key)} = {_value(value)}" if ":" in key else f"{key} = {_value(value)}"


def _fact(fact: Fact) -> str:
    written = int(fact.written) if fact.written == int(fact.written) else fact.written
    entries = {"value": written, "unit": fact.unit, "kind": fact.kind, "source": fact.source}
    entries |= {key: word for key, word in (("per", fact.per), ("note", fact.note)) if word}
    return "{ " + ", ".join(_line(key, value) for key, value in entries.items()) + " }"


def _facts(facts: Mapping[str, Fact]) -> Iterable[str]:
    return (f"{name} = {_fact(fact)}" for name, fact in facts.items())


def _curves(at: str, curves: Mapping[str, Any], fields: Iterable[str]) -> Iterable[str]:
    for name, curve in curves.items():
        yield f"\n[{at}.{json.dumps(name)}]"
        for field in (*fields, "kind", "source", "note"):
            yield _line(field, getattr(curve, field))


def _device(device: Device) -> Iterable[str]:
    yield "\n[device]"
    for key in ("name", "vendor", "arch"):
        yield _line(key, getattr(device, key))
    yield from _facts(device.facts)
    gemm = [
        field.name for field in fields(GemmCurve) if field.name not in ("kind", "source", "note")
    ]
    yield from _curves("device.gemm", device.gemm, gemm)
    rates = ("forward_flops_per_s", "backward_flops_per_s")
    yield from _curves("device.attention", device.attention, ("head_dims", "seq_lens", *rates))


def _link(table: str, link: Link) -> Iterable[str]:
    return (f"\n[{table}]", _line("name", link.name), *_facts(link.facts))


def cluster_to_toml(cluster: Cluster) -> str:
    """The cluster as one self-contained TOML file; reading it gives the same digest.

    >>> from hwprofiles.loader import load_cluster
    >>> cluster_to_toml(load_cluster("l40s")).splitlines()[0]
    'name = "l40s"'
    """
    name = cluster.name.replace(":", "-")  # local:4 is asked of the machine, not a file's name
    lines = [_line("name", name), _line("description", cluster.description)]
    lines.append(_line("transports", cluster.transports))
    own = {key: fact for key, fact in cluster.facts.items() if not key.startswith("level.")}
    lines += _facts(own)
    lines += [*_device(cluster.device)]
    lines += [*_link("scale_up", cluster.scale_up), *_link("scale_out", cluster.scale_out)]
    lines += _curves("curves", cluster.curves, ("group_sizes", "num_bytes", "seconds"))
    for level in cluster.levels:
        start = f"level.{level.name}."
        facts = {k.removeprefix(start): f for k, f in cluster.facts.items() if k.startswith(start)}
        lines += ["\n[[levels]]", _line("name", level.name), *_facts(facts)]
    return "\n".join(lines) + "\n"


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write the file whole (temporary name, then rename) or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(cluster_to_toml(cluster), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
