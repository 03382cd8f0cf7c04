"""A fit finds again what made its numbers, and a calibrated profile reads back the same."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.fit import attention_curves, cluster_of, fit_gemm, fit_memory, gemm_seconds, medians
from hwprofiles.loader import load_cluster
from hwprofiles.local import local_cluster
from hwprofiles.profile import GemmCurve
from hwprofiles.writer import save_cluster

WIDTHS = (64, 128, 256, 512, 1024)
TRUE = GemmCurve(80e9, 32.0, 4e-6, ((16, 32, 1.0),), 90e9, 1, "measured", "test")


def gemm_rows(noise: float = 0.0) -> list[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    shapes = list(product((64, 256, 1024), WIDTHS, WIDTHS))
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*shapes, strict=True))
    seconds = gemm_seconds(TRUE, m, n, k, "fp32", 20e9) * np.exp(noise * rng.normal(size=m.size))
    return [(*shape, float(s)) for shape, s in zip(shapes, seconds, strict=True)]


def test_a_curve_is_found_again() -> None:
    curve, error = fit_gemm(gemm_rows(), "fp32", TRUE.launch_s, 20e9)
    assert error < 0.02
    assert curve.tile_flops_per_s == pytest.approx(TRUE.tile_flops_per_s, rel=0.1)


def test_noise_shows_in_the_residual() -> None:
    curve, error = fit_gemm(gemm_rows(noise=0.2), "fp32", TRUE.launch_s, 20e9)
    assert 0.05 < error < 0.3
    assert curve.residual_p90 > curve.residual_median == error


def test_memory_passes_give_rate_and_floor() -> None:
    rows = [(8.0 * n, 2e-6 + 8.0 * n / 5e9) for n in (2**10, 2**14, 2**17, 2**20, 2**23)]
    rate, floor = fit_memory(rows)
    assert rate == pytest.approx(5e9, rel=0.02)
    assert floor == pytest.approx(2e-6 + 8192 / 5e9)


def test_ranks_agree_on_their_median() -> None:
    assert medians([[(64, 2.0)], [(64, 4.0)], [(64, 9.0)]]) == [(64, 4.0)]


def test_attention_without_a_length_takes_the_nearest() -> None:
    curve = attention_curves([(32, 64, 1.0, 2.0), (32, 512, 3.0, 4.0), (64, 512, 5.0, 6.0)])
    table = curve["flash_attn_2"]
    assert table.forward_flops_per_s.tolist() == [[1.0, 3.0], [5.0, 5.0]]


def rank() -> dict[str, Any]:
    """What one of two ranks would measure."""
    lengths = (2**10, 2**12, 2**14)
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    return {
        "gemm": {"fp32": gemm_rows()},
        "attention": [(32, 64, 1e9, 2e9), (32, 256, 2e9, 3e9)],
        "memory": [(8.0 * n, 2e-6 + 8.0 * n / 5e9) for n in (2**10, 2**17, 2**20)],
        "launch": 3e-6,
        "group_sizes": (2,),
        "num_bytes": lengths,
        "collectives": {op: [[[1e-4 + n / 1e9] * 5 for n in lengths]] for op in ops},
    }


def test_a_calibrated_profile_reads_back_the_same(tmp_path: Path) -> None:
    noise = {"spread": 1.1, "drift": 1.0}
    cluster, told = cluster_of(local_cluster("local:2"), [rank(), rank()], noise)
    path = tmp_path / "here.toml"
    save_cluster(cluster, path)
    again = load_cluster(path)
    assert again.digest == cluster.digest
    assert again.device.gemm["fp32"].kind == "measured"
    assert again.curves["all_reduce"].seconds[0, 0] == pytest.approx(1e-4 + 1024 / 1e9)
    assert again.device.facts["kernel_floor"].kind == "measured"
    assert told["gemm_error"]["fp32"] < 0.02
    assert again.scale_up.bytes_per_s == pytest.approx(1e9, rel=0.01)
