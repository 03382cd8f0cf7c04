"""Measured collective times inside one scale-up domain -> curves sampled at powers of two.

Times of `aic_*` (nccl-tests-like loops) are used as they are: a late spike is cut by taking the
smallest time of all larger messages, so a curve never falls. OpenXLA's table adds a launch to each
time; for the groups that only it has, that addition is measured where both tables overlap and
taken off.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np

from hwprofiles.fit_gemm import MEASURED
from hwprofiles.profile import Array

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
FIRST_LOG2 = 9  # 512 B
SAMPLES = 21  # up to 512 MiB
LONG_SAMPLES = 26  # up to 16 GiB
# name of a family -> (aic source, XLA source, scale-up link)
FAMILIES = {
    "a100": ("aic_a100_sxm", "", "nvlink3"),
    "h100": ("aic_h100_sxm", "xla_sm_90", "nvlink4"),
    "b200": ("aic_b200_sxm", "xla_sm_100_B200", "nvlink5"),
    "b300": ("aic_b300_sxm", "", "nvlink5"),
    "gb200": ("aic_gb200", "xla_sm_100_GB200", "nvlink5"),
    "mi355x": ("", "xla_gfx950", "xgmi"),
}

Times = dict[tuple[str, str, int], dict[float, float]]  # (source, op, GPUs) -> bytes -> seconds


def read_times() -> Times:
    """Rows inside one domain by source, operation and group size; the fastest of equals."""
    times: Times = {}
    with (MEASURED / "collectives.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if not row["source_id"].startswith(("aic_", "xla_")):
                continue
            key = row["source_id"], row["op"], int(row["n_gpus"])
            at = float(row["message_bytes"])
            seconds = float(row["time_us"]) * 1e-6
            some = times.setdefault(key, {})
            some[at] = min(some.get(at, seconds), seconds)
    return times


def sample(points: dict[float, float], samples: int) -> Array:
    """Seconds at 2**9, 2**10, ... bytes: linear in log-log, linear in bytes beyond the end."""
    sizes = np.array(sorted(points))
    seconds = np.array([points[s] for s in sizes])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    grid = 2.0 ** (FIRST_LOG2 + np.arange(samples))
    inside = np.exp(np.interp(np.log(grid), np.log(sizes), np.log(seconds)))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    result: Array = np.where(grid > sizes[-1], seconds[-1] + slope * (grid - sizes[-1]), inside)
    return result


def permute_rate(times: Times, source: str, samples: int) -> Array | None:
    """Seconds of a ring shift from the collective-permute rows, if the source has any."""
    for (name, op, _), points in times.items():
        if (name, op) == (source, "send_recv"):
            return sample(points, samples)
    return None


def launch_s(times: Times) -> float:
    """Launch inside a time of OpenXLA's table: median excess on H100 up to 64 KiB [s]."""
    excess = [
        sample(points, SAMPLES)[:8] - sample(times["aic_h100_sxm", op, gpus], SAMPLES)[:8]
        for (source, op, gpus), points in times.items()
        if source == "xla_sm_90" and op in OPS
    ]
    return float(np.median(np.concatenate(excess)))


def fit_collectives() -> dict[str, dict[str, Any]]:
    """The documents of calibrations/collectives/*.json by family."""
    times = read_times()
    documents: dict[str, dict[str, Any]] = {}
    for family, (aic, xla, link) in FAMILIES.items():
        samples = LONG_SAMPLES if family == "gb200" else SAMPLES
        document: dict[str, Any] = {
            "scale_up": link,
            "first_log2_bytes": FIRST_LOG2,
            "source": aic or xla,
        }
        for op in OPS:
            rows: dict[int, Array] = {}
            for (source, some_op, gpus), points in times.items():
                if (source, some_op) == (aic or xla, op):
                    rows[gpus] = sample(points, samples)
                    if not aic:
                        rows[gpus] = rows[gpus] - min(launch_s(times), 0.5 * rows[gpus][0])
            if family == "gb200":
                _add_rack(rows, times, xla, op, samples)
            document[op] = {
                "group_sizes": sorted(rows),
                "microseconds": [(rows[g] * 1e6).round(2).tolist() for g in sorted(rows)],
            }
        shift = permute_rate(times, xla, samples)
        if aic:
            # Two ranks that gather 2 N bytes send each other N.
            both = {s / 2: t for s, t in times[aic, "all_gather", 2].items()}
            pair = sample(both, samples)
            shift = pair if shift is None else np.minimum(shift, pair)
        assert shift is not None
        document["send_recv"] = {
            "group_sizes": [2],
            "microseconds": [(np.maximum.accumulate(shift) * 1e6).round(2).tolist()],
        }
        documents[family] = document
    return documents


def _add_rack(rows: dict[int, Array], times: Times, xla: str, op: str, samples: int) -> None:
    """Groups of 8 to 72 GPUs of an NVL72 rack, with the launch inside XLA's times taken off."""
    launch = 0.0
    last = rows[4]
    for gpus in (4, 8, 18, 36, 72):
        curve = sample(times[xla, op, gpus], samples)
        if gpus == 4:
            launch = float(np.median((curve - rows[4])[:10]))
            # aic ends at 512 MiB; XLA's rate goes on from there.
            long = slice(SAMPLES, None)
            rows[4][long] = np.maximum(curve[long] - launch, rows[4][SAMPLES - 1])
            continue
        last = rows[gpus] = np.maximum.accumulate(np.maximum(curve - launch, last * 0.98))
