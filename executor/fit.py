"""What `executor.calibrate` measured -> a Cluster, with how well each curve fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwprofiles.build import build_cluster, build_device, build_link
from hwprofiles.curves import backward_gemm_factor
from hwprofiles.profile import (
    AttentionCurve,
    Cluster,
    CollectiveCurve,
    Device,
    Fact,
    GemmCurve,
    Link,
)
from hwprofiles.tile_model import operand_bytes, wave_s
from hwprofiles.units import to_si

Floats = NDArray[np.float64]
SOURCE = "calibrate"
TILES = (1, 8, 16, 32, 64, 128)
PROLOGUES = (0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
ATTENTION_NAMES = ("flash_attn_2", "unfused")


def measured_fact(old: Fact, written: float, unit: str, note: str) -> Fact:
    """A fact with a measured value; its SI value is that of the number as written."""
    return replace(
        old,
        value=to_si(written, unit),
        written=written,
        unit=unit,
        kind="measured",
        source=SOURCE,
        note=note,
    )


def as_read(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Facts with float values, as a file gives them: an int would have another digest."""
    return {name: replace(fact, value=float(fact.value)) for name, fact in facts.items()}


def medians(rows: Sequence[Sequence[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    """Rows of all ranks -> one row each: shape from the first, numbers as the median over ranks."""
    found = []
    for same in zip(*rows, strict=True):
        shape = tuple(value for value in same[0] if isinstance(value, int))
        numbers = [[v for v in row if not isinstance(v, int)] for row in same]
        found.append((*shape, *np.median(np.array(numbers), axis=0).tolist()))
    return found


def fit_gemm(
    rows: Sequence[tuple[Any, ...]], precision: str, launch_s: float, memory_bytes_per_s: float
) -> tuple[GemmCurve, float]:
    """A GEMM curve of one unit (a core, or a whole GPU), and its median relative error.

    Tile and prologue are searched on a grid, the rate follows as the median of what each product
    asks for. The ceiling is the best rate that any product reached.
    """
    table = np.array(rows, dtype=np.float64)
    m, n, k, seconds = table.T
    busy = np.maximum(seconds - launch_s, 0.2 * seconds)
    best_rate = float(np.max(2 * m * n * k / busy))
    best: tuple[float, GemmCurve] | None = None
    for x, y, prologue in product(TILES, TILES, PROLOGUES):
        base = wave_s(
            m, n, k, num_sms=1, tile_flops_per_s=1.0, prologue_k=prologue, tiles=((x, y, 1.0),)
        )
        rate = float(np.median(base / busy))
        curve = GemmCurve(
            tile_flops_per_s=rate,
            prologue_k=prologue,
            launch_s=launch_s,
            tiles=((x, y, 1.0),),
            cap_flops_per_s=best_rate,
            num_sms=1,
            kind="measured",
            source=SOURCE,
        )
        errors = np.abs(gemm_seconds(curve, m, n, k, precision, memory_bytes_per_s) / seconds - 1)
        score = float(np.mean(np.minimum(errors, 1.0)))
        if best is None or score < best[0]:
            low, high = np.percentile(errors, [50, 90])
            best = score, replace(curve, residual_median=float(low), residual_p90=float(high))
    assert best is not None
    return best[1], best[1].residual_median


def gemm_seconds(
    curve: GemmCurve, m: Floats, n: Floats, k: Floats, precision: str, memory_bytes_per_s: float
) -> Floats:
    """The curve's time of a product; as `planner.roofline.gemm_s` reads it."""
    waves = wave_s(
        m,
        n,
        k,
        num_sms=curve.num_sms,
        tile_flops_per_s=curve.tile_flops_per_s,
        prologue_k=curve.prologue_k,
        tiles=curve.tiles,
    )
    moved = operand_bytes(m, n, k, precision) / memory_bytes_per_s
    compute = np.maximum(waves, 2 * m * n * k / curve.cap_flops_per_s)
    return np.asarray(curve.launch_s + np.maximum(compute, moved), dtype=np.float64)


def fit_memory(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(bytes/s, seconds of the shortest pass) of elementwise work."""
    table = np.array(rows, dtype=np.float64)
    size, seconds = table.T
    floor = float(seconds[0])
    middle = int(np.argmin(np.abs(np.log(size / 2**22))))  # what a layer of a small model moves
    return float(size[middle] / max(seconds[middle] - floor, 1e-9)), floor


def attention_curves(rows: Sequence[tuple[Any, ...]]) -> dict[str, AttentionCurve]:
    """Rates over head width and length; a width that lacks a length takes its nearest one."""
    widths = tuple(sorted({int(row[0]) for row in rows}))
    lengths = tuple(sorted({int(row[1]) for row in rows}))
    tables = []
    for column in (2, 3):
        table = np.zeros((len(widths), len(lengths)))
        for i, width in enumerate(widths):
            known = {int(row[1]): float(row[column]) for row in rows if int(row[0]) == width}
            for j, length in enumerate(lengths):
                near = min(known, key=lambda have: abs(np.log(have / length)))
                table[i, j] = known[near]
        tables.append(table)
    return {
        name: AttentionCurve(
            name, widths, lengths, tables[0], tables[1], "measured", SOURCE, "PyTorch's own kernel"
        )
        for name in ATTENTION_NAMES
    }


def collective_curves(
    ranks: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, CollectiveCurve], dict[str, Any]]:
    """Curves by operation: of every call the slowest rank, of calls the median."""
    sizes, lengths = ranks[0]["group_sizes"], ranks[0]["num_bytes"]
    curves: dict[str, CollectiveCurve] = {}
    told: dict[str, Any] = {}
    if not sizes:
        return curves, told
    for op in ranks[0]["collectives"]:
        seconds = np.zeros((len(sizes), len(lengths)))
        spreads = []
        for i, j in product(range(len(sizes)), range(len(lengths))):
            calls = np.array([rank["collectives"][op][i][j] for rank in ranks]).max(axis=0)
            seconds[i, j] = np.median(calls)
            low, high = np.percentile(calls, [10, 90])
            spreads.append(high / low)
        spread = float(np.median(spreads))
        note = f"median of {calls.size} calls; 90th over 10th percentile {spread:.2f}"
        curves[op] = CollectiveCurve(
            op, tuple(sizes), tuple(map(float, lengths)), seconds, "measured", SOURCE, note
        )
        told[op] = {
            "seconds_small": float(seconds[0, 0]),
            "bytes_per_s": float(lengths[-1] / seconds[0, -1]),
            "spread": spread,
        }
    return curves, told


def link_of(base: Link, curves: Mapping[str, CollectiveCurve]) -> Link:
    """The link that a point-to-point exchange shows."""
    curve = curves.get("send_recv")
    if curve is None:
        return base
    seconds = curve.seconds[0]
    latency = float(seconds[0])
    rate = float((curve.num_bytes[-1] - curve.num_bytes[0]) / max(seconds[-1] - seconds[0], 1e-9))
    facts = dict(base.facts)
    facts["bandwidth"] = measured_fact(facts["bandwidth"], rate / 1e9, "GB/s", "send_recv")
    facts["achieved_fraction"] = measured_fact(
        facts["achieved_fraction"], 1, "fraction", "the bandwidth is what was achieved"
    )
    half = latency / 2
    for key in ("latency", "base_latency"):
        facts[key] = measured_fact(facts[key], half * 1e6, "us", "half of a short send_recv")
    return build_link(base.name, facts)


def device_of(base: Device, ranks: Sequence[Mapping[str, Any]]) -> tuple[Device, dict[str, Any]]:
    """The device with measured facts and curves, and what a person should know of them."""
    rate, floor = fit_memory(medians([rank["memory"] for rank in ranks]))
    launch = float(np.median([rank["launch"] for rank in ranks]))
    gemm = dict(base.gemm)
    rates, errors = {}, {}
    facts = as_read(base.facts)
    for precision in ranks[0]["gemm"]:
        rows = medians([rank["gemm"][precision] for rank in ranks])
        curve, errors[precision] = fit_gemm(rows, precision, min(launch, floor), rate)
        # The planner multiplies backward products by what GPUs lose there; here none was seen.
        gemm[precision] = replace(
            curve, note=f"forward products; backward factor {backward_gemm_factor():.3f} applies"
        )
        rates[precision] = curve.cap_flops_per_s
        key = f"peak_{precision}"
        if key in facts:
            facts[key] = measured_fact(
                facts[key],
                curve.cap_flops_per_s / 1e9,
                "GFLOP/s",
                "best product measured",
            )
    for key in ("memory_bandwidth", "achieved_memory_bandwidth"):
        facts[key] = measured_fact(facts[key], rate / 1e9, "GB/s", "elementwise pass")
    facts["kernel_floor"] = measured_fact(
        facts["kernel_floor"], floor * 1e6, "us", "elementwise pass of 1024 elements"
    )
    facts["host_launch"] = measured_fact(
        facts["host_launch"], launch * 1e6, "us", "small operation with autograd"
    )
    attention = {**base.attention, **attention_curves(medians([r["attention"] for r in ranks]))}
    device = build_device(base.name, base.vendor, base.arch, facts, gemm, attention)
    return device, {
        "gemm_flops_per_s": rates,
        "gemm_error": errors,
        "memory_bytes_per_s": rate,
        "launch_s": launch,
    }


def cluster_of(
    base: Cluster, ranks: Sequence[Mapping[str, Any]], noise: Mapping[str, float]
) -> tuple[Cluster, dict[str, Any]]:
    """The cluster `base` with everything that was measured in place of what was assumed."""
    device, told = device_of(base.device, ranks)
    curves, collectives = collective_curves(ranks)
    facts = as_read(base.facts)
    link = link_of(base.scale_up, curves)
    facts["pair_bandwidth"] = measured_fact(
        facts["pair_bandwidth"], link.bytes_per_s / 1e9, "GB/s", "send_recv"
    )
    cluster = build_cluster(
        base.name.replace(":", "-"),
        device,
        link,
        base.scale_out,
        facts,
        (),
        transports=base.transports,
        description=f"{base.description.partition('; ')[0]}; measured: one product spread by "
        f"{noise['spread']:.2f} and drifted by {noise['drift']:.2f}",
        curves={**base.curves, **curves},
    )
    return cluster, {**told, "collectives": collectives}
