"""The curves against the measured rows they were fitted to, and against rows that they were not.

Limits are relative errors of time: median and ninth decile. Rows are in calibrations/measured.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hwprofiles
from hwprofiles.curves import backward_gemm_factor
from hwprofiles.loader import load_cluster, load_device
from planner.collectives import bus_bandwidth_factor, collective_s
from planner.roofline import attention_s, gemm_s, grouped_gemm_s

MEASURED = Path(hwprofiles.__file__).parent / "calibrations" / "measured"


def rows(table: str) -> list[dict[str, str]]:
    with (MEASURED / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def quantiles(model: object, measured: object) -> tuple[float, float]:
    error = np.abs(np.asarray(model, dtype=float) / np.asarray(measured, dtype=float) - 1.0)
    return float(np.median(error)), float(np.percentile(error, 90))


@pytest.mark.parametrize(
    ("device", "source", "median", "ninth"),
    [
        ("a100-sxm-80gb", "aic_a100_sxm", 0.04, 0.19),
        ("h100-sxm", "aic_h100_sxm", 0.04, 0.12),
        ("b200-sxm", "aic_b200_sxm", 0.045, 0.18),
        ("gb200", "aic_gb200", 0.06, 0.18),
        ("l40s", "aic_l40s", 0.09, 0.25),
        ("mi355x", "xla_gfx950", 0.12, 0.55),
    ],
)
def test_bf16_gemm(device: str, source: str, median: float, ninth: float) -> None:
    some = [
        r
        for r in rows("gemm")
        if (r["source_id"], r["precision"]) == (source, "bf16") and int(r["m"]) >= 128
    ]
    assert len(some) >= 90
    batch, m, n, k = (np.array([int(r[c]) for r in some]) for c in ("batch", "m", "n", "k"))
    time = np.array([float(r["time_us"]) for r in some]) * 1e-6
    model = gemm_s(load_device(device), "bf16", m, n, k, batch=batch, sustained=False)
    got = quantiles(model, time)
    assert got[0] <= median, got
    assert got[1] <= ninth, got


def test_products_without_16_byte_rows() -> None:
    some = [r for r in rows("gemm") if r["source_id"] == "fastwam_h200"]
    assert len(some) == 4
    m, n, k = (np.array([int(r[c]) for r in some]) for c in ("m", "n", "k"))
    aligned = np.array([r["layout"] != "unaligned" for r in some])
    time = np.array([float(r["time_us"]) for r in some]) * 1e-6
    model = gemm_s(load_device("h200-sxm"), "bf16", m, n, k, aligned=aligned)
    assert quantiles(model, time)[1] <= 0.12, model / time


def test_fp8_without_quantisation_meets_clean_benchmarks() -> None:
    """DeepGEMM times products alone; its grouped rows were not in the fit by shape alone."""
    h100 = load_device("h100-sxm")
    for grouped, limit in ((False, 0.08), (True, 0.06)):
        some = [
            r
            for r in rows("gemm")
            if r["source_id"] == "deepgemm"
            and int(r["m"]) >= 128
            and (int(r["batch"]) > 1) == grouped
        ]
        model = [
            float(
                grouped_gemm_s(
                    h100,
                    "fp8_block",
                    int(r["m"]),
                    int(r["batch"]),
                    int(r["n"]),
                    int(r["k"]),
                    sustained=False,
                )
            )
            for r in some
        ]
        got = quantiles(model, [float(r["time_us"]) * 1e-6 for r in some])
        assert got[0] <= limit, (grouped, got)


def test_no_curve_beats_the_best_shape_of_a_search() -> None:
    for r in rows("gemm"):
        if r["source_id"] != "mamf":
            continue
        best = 2.0 * int(r["m"]) * int(r["n"]) * int(r["k"]) / (float(r["time_us"]) * 1e-6)
        device = load_device(r["device"])
        cap = device.gemm[r["precision"]].cap_flops_per_s
        assert cap <= 1.01 * best, (r["device"], r["precision"], cap, best)
        assert cap >= 0.7 * best, (r["device"], r["precision"], cap, best)


def test_sustained_rate_of_h100_against_a_loop_of_a_minute() -> None:
    """Independent of the fit: an operator expects 769 TFLOP/s over 60 s, best shape."""
    h100 = load_device("h100-sxm").gemm["bf16"]
    stated = [r for r in rows("gemm") if r["source_id"] == "azure_baseline"]
    loop = next(float(r["tflop_per_s"]) for r in stated if r["device"] == "h100-sxm") * 1e12
    assert h100.cap_flops_per_s * h100.sustained_fraction <= loop <= 1.01 * h100.cap_flops_per_s


def test_backward_layouts_cost_a_few_percent() -> None:
    assert 1.02 < backward_gemm_factor() < 1.06


@pytest.mark.parametrize(
    ("device", "source", "kernel", "passes"),
    [
        ("h100-sxm", "fa3_h100", "flash_attn_2", "fwd"),
        ("h100-sxm", "fa3_h100", "flash_attn_3", "fwd"),
        ("h100-sxm", "fa3_h100", "cudnn", "fwd"),
        ("h100-sxm", "fa2_h100", "flash_attn_2", "fwd_bwd"),
        ("a100-sxm-80gb", "fa2_a100", "flash_attn_2", "fwd_bwd"),
        ("gb200", "fa4_sm100_2605", "flash_attn_4", "fwd"),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_figures(
    device: str, source: str, kernel: str, passes: str, causal: bool
) -> None:
    model, measured = [], []
    for r in rows("attention"):
        if (r["source_id"], r["kernel"], r["causal"]) != (source, kernel, str(causal)):
            continue
        s, d = int(r["seq_len"]), int(r["head_dim"])
        b = int(r["batch"]) if r["batch"] else 16384 // s
        h = int(r["n_heads"]) if r["n_heads"] else 2048 // d
        args = (load_device(device), kernel, b, h, h, s, s, d)
        time = float(attention_s(*args, causal=causal))
        flops = 4.0 * b * h * s * s * d * (0.5 if causal else 1.0)
        if passes == "fwd_bwd":
            time += float(attention_s(*args, causal=causal, backward=True))
            flops *= 3.5
        model.append(time)
        measured.append(flops / (float(r["tflop_per_s"]) * 1e12))
    assert len(model) >= 8
    median, ninth = quantiles(model, measured)
    assert median <= 0.02, (median, ninth)
    assert ninth <= 0.06, (median, ninth)


@pytest.mark.parametrize(
    ("device", "source", "median"),
    [("a100-sxm-80gb", "aic_a100_sxm", 0.21), ("h100-sxm", "aic_h100_sxm", 0.2)],
)
def test_attention_of_another_benchmark(device: str, source: str, median: float) -> None:
    """Prefill rows with 8 to 64 heads: other software (a cache write is timed too), lengths from
    2048, against the tables from the kernel authors' figures."""
    kernel = "flash_attn_2" if "a100" in device else "flash_attn_3"
    model, measured = [], []
    for r in rows("attention"):
        if r["source_id"] != source or int(r["seq_len"]) < 2048 or r["head_dim"] != "128":
            continue
        s, h, b = int(r["seq_len"]), int(r["n_heads"]), int(r["batch"])
        model.append(float(attention_s(load_device(device), kernel, b, h, h, s, s, 128)))
        measured.append(2.0 * b * h * s * s * 128 / (float(r["tflop_per_s"]) * 1e12))
    assert len(model) >= 20
    got = quantiles(model, measured)
    assert got[0] <= median, got


@pytest.mark.parametrize(
    ("source", "cluster", "at_least", "median"),
    [
        ("aic_h100_sxm", "dgx-h100", 512, 0.001),
        ("aic_a100_sxm", "dgx-a100-80gb", 512, 0.001),
        ("aic_b300_sxm", "dgx-b300", 512, 0.001),
        # Not in the curves: other hosts, and messages beyond the table. Of the forms across nodes
        # only the fill of the pipe (h20_2node) and the number of rails (NVL72) were set from rows.
        ("dgxc_h100", "dgx-h100", 2**20, 0.05),
        ("mleng_h200", "dgx-h200", 2**24, 0.06),
        ("mleng_a100", "dgx-a100-80gb", 2**27, 0.1),
        ("oci_h100", "oci-h100", 2**30, 0.08),
        ("coreweave", "dgx-h100", 2**29, 0.1),
        ("aws_p5en", "aws-p5en", 2**30, 0.12),
        ("gke_a3ultra", "gcp-a3-ultra", 2**20, 0.12),
        ("gke_a3ultra", "gcp-a3-ultra", 1024, 0.25),
        ("p6b200_2node", "aws-p6-b200", 8, 0.25),
        # Hosts whose owners ask why they are slow, or whose ports are not fully known.
        ("gke_a3high", "gcp-a3-high", 2**25, 0.1),
        ("h20_2node", "hgx-h20", 1, 0.25),
        ("p4d_2022", "aws-p4d", 2**30, 0.35),
    ],
)
def test_collectives(source: str, cluster: str, at_least: int, median: float) -> None:
    at = load_cluster(cluster)
    model, measured = [], []
    for r in rows("collectives"):
        if r["source_id"] != source or int(r["message_bytes"]) < at_least:
            continue
        if r["device"] != at.device.name or "NVLS_ENABLE" in r["algo"] or r["algo"] == "ring":
            continue
        size = int(r["n_gpus"])
        alone = size < at.domain_gpus  # these rows time one group and leave other GPUs idle
        q = int(r["message_bytes"])
        model.append(float(collective_s(at, r["op"], q, size, concurrent=not alone)))
        measured.append(float(r["time_us"]) * 1e-6)
    assert model
    got = quantiles(model, measured)
    assert got[0] <= median, got


def test_two_nodes_with_half_the_ports() -> None:
    """a100_hdr_2node: two A100 nodes with four 200 Gbit/s ports each."""
    at = replace(load_cluster("dgx-a100-80gb"), nics_per_node=4.0)
    for r in rows("collectives"):
        if r["source_id"] == "a100_hdr_2node":
            seconds = float(collective_s(at, r["op"], int(r["message_bytes"]), int(r["n_gpus"])))
            assert seconds == pytest.approx(float(r["time_us"]) * 1e-6, rel=0.12)


def test_racks_of_72() -> None:
    """One rack, and two and twenty racks, whose rates show how many ports a collective drives."""
    rack = load_cluster("gb200-nvl72")
    for gpus, limit in ((72, 0.08), (144, 0.12), (1440, 0.35)):
        some = [
            r
            for r in rows("collectives")
            if (r["source_id"], r["device"], r["n_gpus"]) == ("coreweave", "gb200", str(gpus))
        ]
        model = [float(collective_s(rack, r["op"], int(r["message_bytes"]), gpus)) for r in some]
        got = quantiles(model, [float(r["time_us"]) * 1e-6 for r in some])
        assert got[0] <= limit, (gpus, got)


def test_rings_over_many_nodes_follow_the_simai_table() -> None:
    """Fraction of a 400 GB/s node by message and nodes, 2 to 128: within 25 % on the median."""
    h100 = load_cluster("dgx-h100")
    model, published = [], []
    for r in rows("scaling_ratio"):
        if r["source_id"] != "simai_nic_table" or r["n_nodes"] == "1":
            continue
        size, q = int(r["n_gpus"]), float(r["message_bytes"])
        seconds = float(collective_s(h100, "all_gather", q, size))
        model.append(q / seconds * float(bus_bandwidth_factor("all_gather", size)) / 400e9)
        published.append(float(r["busbw_fraction_of_link"]))
    got = quantiles(model, published)
    assert got[0] <= 0.15, got
    assert got[1] <= 0.4, got


def test_shipped_files_are_what_the_fit_writes(tmp_path: Path) -> None:
    """The quick fits; the search for GEMM constants takes ten seconds: left to the command."""
    from hwprofiles.fit import CALIBRATIONS, write
    from hwprofiles.fit_attention import fit_attention
    from hwprofiles.fit_collectives import fit_collectives

    write(tmp_path / "attention.json", fit_attention())
    shipped = (CALIBRATIONS / "attention.json").read_text()
    assert (tmp_path / "attention.json").read_text() == shipped
    for family, document in fit_collectives().items():
        write(tmp_path / "one.json", document)
        shipped = (CALIBRATIONS / "collectives" / f"{family}.json").read_text()
        assert (tmp_path / "one.json").read_text() == shipped


def test_every_row_has_a_place_it_was_read() -> None:
    import tomllib

    places = tomllib.loads((MEASURED / "sources.toml").read_text())
    for table in ("gemm", "attention", "collectives", "scaling_ratio"):
        assert {r["source_id"] for r in rows(table)} <= set(places)
