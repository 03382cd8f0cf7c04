"""``hardware gemm`` and ``hardware collective``: the time of one operation, and its source."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from hwprofiles.curves import backward_gemm_factor
from hwprofiles.loader import load_cluster, load_device
from planner.collectives import (
    OPS,
    bus_bandwidth_factor,
    collective_algorithm,
    collective_s,
)
from planner.errors import InputError
from planner.roofline import gemm_curve, gemm_s

LARGEST = 2**40


def _positive(**values: int) -> None:
    for name, value in values.items():
        if not 1 <= value <= LARGEST:
            raise InputError(
                f"{name}={value} is not a size; it is an integer from 1 to {LARGEST}",
                values={name: value},
                legal={name: [1, LARGEST]},
            )


def gemm_document(
    device_name: str,
    precision: str,
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    backward: bool = False,
    short: bool = False,
) -> dict[str, Any]:
    """Time, rate and efficiency of one GEMM, with the birth certificate of its curve.

    >>> gemm_document("h100-sxm", "bf16", 4096, 4096, 4096)["kind"]
    'measured'
    """
    _positive(m=m, n=n, k=k, batch=batch)
    device = load_device(device_name)
    curve = gemm_curve(device, precision)
    seconds = float(
        gemm_s(device, precision, m, n, k, batch=batch, backward=backward, sustained=not short)
    )
    rate = 2.0 * batch * m * n * k / seconds
    peak = device.peak_flops_per_s.get("fp8" if precision == "fp8_block" else precision)
    return {
        "device": device.name,
        "precision": precision,
        "m": m,
        "n": n,
        "k": k,
        "batch": batch,
        "seconds": seconds,
        "flops_per_s": rate,
        "efficiency": rate / peak if peak else None,
        "sustained_fraction": 1.0 if short else curve.sustained_fraction,
        "backward_factor": backward_gemm_factor() if backward else 1.0,
        "kind": curve.kind,
        "source": curve.source,
        "note": curve.note,
        "residual_median": curve.residual_median,
        "residual_p90": curve.residual_p90,
    }


def collective_document(
    cluster_name: str,
    op: str,
    num_bytes: int,
    gpus: int,
    *,
    nodes: int | None = None,
    hierarchical: bool = False,
) -> dict[str, Any]:
    """Time, algorithm bandwidth and bus bandwidth of one collective over `gpus` GPUs.

    `nodes` says over how many nodes they are spread evenly; the fewest that hold them if not given.

    >>> collective_document("dgx-h100", "all_reduce", 2**30, 8)["algorithm"]
    'measured'
    """
    if op not in OPS:
        raise InputError(
            f"unknown collective {op!r}; known: {', '.join(OPS)}",
            values={"op": op},
            legal={"op": list(OPS)},
        )
    _positive(bytes=num_bytes, gpus=gpus)
    cluster = load_cluster(cluster_name)
    per_node = cluster.gpus_per_node
    if nodes is None:
        spread, stride = -(-gpus // per_node), 1
    else:
        spread = nodes
        legal = [gpus // d for d in range(per_node, 0, -1) if per_node % d == gpus % d == 0]
        if gpus <= per_node and 1 not in legal:
            legal.insert(0, 1)
        if spread not in legal:
            raise InputError(
                f"{gpus} GPUs over {spread} nodes of {per_node}: each node must hold the same "
                f"number, a divisor of {per_node}; nodes may be {', '.join(map(str, legal))}",
                values={"gpus": gpus, "nodes": spread, "gpus_per_node": per_node},
                legal={"nodes": legal},
            )
        stride = 1 if spread == 1 else per_node // (gpus // spread)
    if cluster.max_nodes is not None and spread > cluster.max_nodes:
        raise InputError(
            f"cluster {cluster.name!r} has {cluster.max_nodes} nodes, not {spread}",
            values={"nodes": spread},
            legal={"nodes": [1, cluster.max_nodes]},
        )
    how = {"concurrent": spread > 1, "hierarchical": hierarchical}
    seconds = float(collective_s(cluster, op, num_bytes, gpus, stride, **how))
    algorithm = collective_algorithm(cluster, op, num_bytes, gpus, stride, **how)
    curve = cluster.curves.get(op)
    measured = algorithm == "measured" and curve is not None
    rate = num_bytes / seconds if seconds > 0 else None
    return {
        "cluster": cluster.name,
        "op": op,
        "bytes": num_bytes,
        "gpus": gpus,
        "nodes": spread,
        "stride": stride,
        "seconds": seconds,
        "algbw_bytes_per_s": rate,
        "busbw_bytes_per_s": rate * float(bus_bandwidth_factor(op, gpus)) if rate else None,
        "algorithm": algorithm,
        "kind": curve.kind if measured and curve else "derived",
        "source": curve.source if measured and curve else "latency and bandwidth of the links",
        "note": curve.note if measured and curve else "",
    }


def _show(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    for key, value in document.items():
        if value in ("", None):
            continue
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        sys.stdout.write(f"{key:<20} {text}\n")


def gemm(
    device: Annotated[str, typer.Option(help="A device, for example h100-sxm")],
    m: Annotated[int, typer.Option(help="Rows of the result")],
    n: Annotated[int, typer.Option(help="Columns of the result")],
    k: Annotated[int, typer.Option(help="Inner length")],
    precision: Annotated[str, typer.Option(help="bf16, fp16, tf32, fp8, fp8_block, fp4")] = "bf16",
    batch: Annotated[int, typer.Option(help="Products in one grouped launch")] = 1,
    backward: Annotated[bool, typer.Option(help="A backward product (its own shape)")] = False,
    short: Annotated[
        bool, typer.Option(help="As a short run, not held by the power limit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document")] = False,
) -> None:
    """Time of one matrix product C[m,n] = A[m,k] B[k,n] on a device."""
    document = gemm_document(
        device, precision, m, n, k, batch=batch, backward=backward, short=short
    )
    _show(document, as_json)


def collective(
    cluster: Annotated[str, typer.Option(help="A cluster, for example dgx-h100, or a TOML file")],
    op: Annotated[str, typer.Option(help=", ".join(OPS))],
    num_bytes: Annotated[
        int, typer.Option("--bytes", help="Bytes, counted as nccl-tests counts them")
    ],
    gpus: Annotated[int, typer.Option(help="GPUs of the group")],
    nodes: Annotated[
        int | None, typer.Option(help="Nodes they are spread over (default: the fewest)")
    ] = None,
    hierarchical: Annotated[
        bool, typer.Option(help="All-to-all with one message per domain, forwarded inside")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document")] = False,
) -> None:
    """Time of one collective, while every other equal group of the cluster runs the same."""
    document = collective_document(
        cluster, op, num_bytes, gpus, nodes=nodes, hierarchical=hierarchical
    )
    _show(document, as_json)
