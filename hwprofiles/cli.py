"""``hardware [NAME]``: the clusters and devices there are, or every fact of one of them.

`app` is a group in which an unknown command name is a NAME, so that ``hardware dgx-h100`` and
``hardware gemm ...`` both work; planner's commands join it with ``app.command("gemm")(gemm)``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from textwrap import wrap
from typing import Annotated, Any

import typer
import typer.core

from hwprofiles.errors import ProfileError
from hwprofiles.facts import near
from hwprofiles.loader import (
    available_clusters,
    available_devices,
    available_links,
    load_cluster,
    load_device,
    load_link,
)
from hwprofiles.profile import Cluster, Device, Fact, Link
from hwprofiles.units import format_bytes, format_rate


class _NameGroup(typer.core.TyperGroup):
    """A group that takes a word which is no command of it as the NAME of ``show``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word for word in args if not word.startswith("-")]
        helps = {"--help", "-h"} & set(args)
        if (not words and not helps) or (words and words[0] not in self.commands):
            args = ["show", *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


app = typer.Typer(
    cls=_NameGroup,
    add_completion=False,
    rich_markup_mode=None,
    help="List the clusters and devices; with NAME, every fact of one and its source.",
)


@app.callback()
def _group() -> None:
    """List the clusters and devices; with NAME, every fact of one and its source."""


@app.command("show")
def show(
    name: Annotated[
        str | None, typer.Argument(help="A cluster, device or link, or a TOML file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document")] = False,
) -> None:
    """What there is, or every fact of NAME with its unit, kind and source."""
    document = hardware_document(name)
    if as_json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    else:
        print_hardware(document)


def hardware_document(name: str | None = None) -> dict[str, Any]:
    """The list of clusters and devices, or everything about one of them; plain data.

    >>> hardware_document("dgx-h100")["facts"]["gpus_per_node"]["value"]
    8.0
    """
    if name is None:
        return {
            "clusters": [
                _cluster_row(load_cluster(cluster))
                for cluster in available_clusters()
                if cluster != "local"  # asks the operating system: shown when it is named
            ]
            + [{"name": "local", "description": "this machine, as its operating system says"}],
            "devices": [_device_row(load_device(device)) for device in available_devices()],
            "links": available_links(),
        }
    if name in available_devices() and name not in available_clusters():
        return _device_document(load_device(name))
    if name in available_links():
        return _link_document(load_link(name))
    if name in available_clusters() or name.startswith("local:") or name.endswith(".toml"):
        return _cluster_document(load_cluster(name))
    every = [*available_clusters(), *available_devices(), *available_links()]
    close = near(name, every)[:8]
    raise ProfileError(
        f"there is no cluster, device or link {name[:60]!r}; near names: {', '.join(close)}",
        values={"name": name[:60]},
        legal={"name": close},
    )


def _cluster_row(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "description": cluster.description,
        "device": cluster.device.name,
        "gpus_per_node": cluster.gpus_per_node,
        "domain_gpus": cluster.domain_gpus,
        "memory_bytes": cluster.device.memory_bytes,
        "scale_up": cluster.scale_up.name,
        "scale_out": cluster.scale_out.name,
        "node_scale_out_bytes_per_s": cluster.node_scale_out_bytes_per_s,
        "digest": cluster.digest,
    }


def _device_row(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "arch": device.arch,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "peak_flops_per_s": dict(device.peak_flops_per_s),
    }


def _facts(facts: Mapping[str, Fact]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "value": fact.value,
            "written": fact.written,
            "unit": fact.unit,
            "kind": fact.kind,
            "source": fact.source,
            "per": fact.per,
            "note": fact.note,
        }
        for name, fact in facts.items()
    }


def _device_document(device: Device) -> dict[str, Any]:
    return {
        "what": "device",
        **_device_row(device),
        "facts": _facts(device.facts),
        "curves": {
            "gemm": {name: _origin(curve) for name, curve in device.gemm.items()},
            "attention": {name: _origin(curve) for name, curve in device.attention.items()},
        },
    }


def _origin(curve: Any) -> dict[str, str]:
    return {"kind": curve.kind, "source": curve.source, "note": curve.note}


def _link_document(link: Link) -> dict[str, Any]:
    return {
        "what": "link",
        "name": link.name,
        "bytes_per_s": link.bytes_per_s,
        "achieved_bytes_per_s": link.bytes_per_s * link.achieved_fraction,
        "facts": _facts(link.facts),
    }


def _cluster_document(cluster: Cluster) -> dict[str, Any]:
    return {
        "what": "cluster",
        **_cluster_row(cluster),
        "transports": list(cluster.transports),
        "facts": _facts(cluster.facts),
        "parts": {
            "device": _device_document(cluster.device),
            "scale_up": _link_document(cluster.scale_up),
            "scale_out": _link_document(cluster.scale_out),
        },
        "curves": {"collectives": {op: _origin(curve) for op, curve in cluster.curves.items()}},
    }


def print_hardware(document: Mapping[str, Any]) -> None:
    """Print a document of `hardware_document` as plain text of at most 100 columns."""
    lines = _listing(document) if "what" not in document else _sheet(document)
    sys.stdout.write("\n".join(lines) + "\n")


def _listing(document: Mapping[str, Any]) -> list[str]:
    lines = [
        (
            f"{'Clusters':<22}{'device':<24}{'GPUs':<9}{'scale-up':<17}"
            f"{'scale-out':<16}{'of a node':>9}"
        ),
        "",
    ]
    for row in document["clusters"]:
        if "device" not in row:
            lines.append(f"  {row['name']:<20}{row['description']}")
            continue
        size = str(row["gpus_per_node"])  # of a node, and of a larger scale-up domain
        if row["domain_gpus"] > row["gpus_per_node"]:
            size += f" of {row['domain_gpus']}"
        node = format_rate(row["node_scale_out_bytes_per_s"])
        lines.append(
            f"  {row['name']:<20}{row['device']:<24}{size:<9}"
            f"{row['scale_up']:<17}{row['scale_out']:<16}{node:>9}"
        )
    lines += ["", f"{'Devices':<26}{'arch':<15}memory   bandwidth            peak", ""]
    for row in document["devices"]:
        peaks = row["peak_flops_per_s"]
        best = next(p for p in ("bf16", "fp16", "fp32") if p in peaks)
        lines.append(
            f"  {row['name']:<24}{row['arch']:<12}{format_bytes(row['memory_bytes']):>9}  "
            f"{format_rate(row['memory_bytes_per_s']):>9}  "
            f"{best} {format_rate(peaks[best], 'flops'):>13}"
        )
    return [*lines, "", "Name one to see every fact of it with its source."]


def _short(source: str) -> str:
    return source if len(source) <= 24 else f"{source[:23]}…"


def _sheet(document: Mapping[str, Any], depth: int = 0) -> list[str]:
    title = f"{document['what']} {document['name']}"
    lines = [title if depth == 0 else f"-- {title}"]
    if document.get("description"):
        lines.append(document["description"])
    if document.get("digest"):
        lines.append(f"digest {document['digest']}")
    lines.append("")
    for name, fact in document["facts"].items():
        amount = f"{fact['written']:,.10g} {fact['unit']}"
        if fact["unit"] == "flag":
            amount = "yes" if fact["written"] else "no"
        per = f" per {fact['per']}" if fact["per"] else ""
        head = f"  {name:<26} {amount + per}"
        lines.append(f"{head:<62} {fact['kind']:<11}{_short(fact['source'])}")
        lines += wrap(fact["note"], 98, initial_indent=" " * 29, subsequent_indent=" " * 29)
    for group, curves in document.get("curves", {}).items():
        for name, curve in curves.items():
            label = f"{group} {name}"
            lines.append(f"  {label:<26} {'curve':<34}{curve['kind']:<11}{_short(curve['source'])}")
    for part in document.get("parts", {}).values():
        lines += ["", *_sheet(part, depth + 1)]
    return lines
