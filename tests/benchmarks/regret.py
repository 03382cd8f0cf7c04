"""Predicted against measured step time on this machine, and what trusting the planner costs.

    python tests/benchmarks/regret.py [--quick] [--output reports/published/regret.json]

Calibrates, runs every layout below with 2 processes, and prints the median error of the step time,
Spearman's rank correlation, and, for each model and batch, how much slower the planner's first
choice is than the best layout measured. Exits 1 when a limit is missed. Give it a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.calibrate import calibrate
from executor.launch import start
from executor.run import RunOptions, run_plan
from planner import api
from planner.files import write_whole
from planner.plan import Plan
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

PROCESSES = 2
ERROR_LIMIT, RANK_LIMIT, REGRET_LIMIT = 0.12, 0.9, 0.05
TIME_LIMIT_S = 300.0


def model(name: str, hidden: int, layers: int, vocab: int) -> ModelSpec:
    kind = LayerSpec(AttentionSpec(hidden // 32, hidden // 64, 32), mlp=MlpSpec(3 * hidden))
    return ModelSpec(name, hidden, vocab, (kind,), (0,) * layers)


# (model, global batch, sequence length): shapes that stress products, vocabulary and length.
SHAPES = (
    (model("wide", 512, 4, 1024), 8, 128),
    (model("deep", 256, 8, 512), 8, 128),
    (model("long", 256, 4, 512), 4, 512),
)
LAYOUTS = (
    "dp=2 micro_batch=1",
    "dp=2 micro_batch=2",
    "dp=2 micro_batch=2 zero=1",
    "dp=2 micro_batch=2 zero=3",
    "dp=2 micro_batch=2 recompute=full",
    "tp=2 micro_batch=2",
    "tp=2 micro_batch=4",
    "pp=2 micro_batch=1",
    "pp=2 micro_batch=2",
    "pp=2 micro_batch=1 schedule=gpipe",
    "cp=2 micro_batch=2",
    "cp=2 micro_batch=4 cp_kind=ulysses",
)


@dataclass(frozen=True)
class Row:
    """One layout of one shape. Seconds."""

    shape: str
    layout: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def plan_of(spec: ModelSpec, batch: int, seq_len: int, layout: str, cluster: Path) -> Plan:
    return api.estimate(
        spec,
        layout=layout,
        cluster=str(cluster),
        gpus=PROCESSES,
        global_batch_size=batch,
        seq_len=seq_len,
        runtime="shardwise",
        precision="fp32",
    ).plan


def measured_s(plan: Plan, steps: int) -> float:
    """Median step time of a run [s]."""
    options = RunOptions(steps=steps, device="cpu", quiet=True, timeout_s=120.0)
    found = start(run_plan, PROCESSES, (plan, options), time_limit_s=TIME_LIMIT_S)[0]
    return float(found.step_time_s)


def spearman(one: list[float], two: list[float]) -> float:
    """Rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, two)]
    return float(np.corrcoef(*ranks)[0, 1])


def regret(rows: list[Row]) -> dict[str, float]:
    """By shape: time measured of the layout predicted best, over the best measured, less 1."""
    found = {}
    for shape in dict.fromkeys(row.shape for row in rows):
        same = [row for row in rows if row.shape == shape]
        chosen = min(same, key=lambda row: row.predicted_s)
        found[shape] = chosen.measured_s / min(row.measured_s for row in same) - 1
    return found


def document(rows: list[Row], calibration: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "make regret",
        "processes": PROCESSES,
        "noise": calibration["noise"],
        "noisy": calibration["noisy"],
        "median_error": median(abs(row.error) for row in rows),
        "spearman": spearman([r.predicted_s for r in rows], [r.measured_s for r in rows]),
        "regret": regret(rows),
        "rows": [
            {
                "shape": row.shape,
                "layout": row.layout,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
            }
            for row in rows
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="coarser calibration, fewer steps")
    parser.add_argument("--only", type=int, help="the first layouts alone, to try it out")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "here.toml"
        begin = time.monotonic()
        calibration = calibrate(cluster, device="cpu", nproc=PROCESSES, quick=given.quick)
        print(f"calibrated in {time.monotonic() - begin:.0f} s; noise {calibration['noise']}")
        rows = []
        for spec, batch, seq_len in SHAPES:
            for layout in LAYOUTS[: given.only]:
                plan = plan_of(spec, batch, seq_len, layout, cluster)
                seconds = measured_s(plan, 8 if given.quick else 15)
                row = Row(
                    f"{spec.name} {batch}x{seq_len}", layout, plan.prediction.step_time_s, seconds
                )
                rows.append(row)
                print(
                    f"{row.shape:<14} {row.layout:<36} predicted {row.predicted_s * 1e3:8.1f} ms, "
                    f"measured {row.measured_s * 1e3:8.1f} ms  {row.error:+.0%}",
                    flush=True,
                )
    found = document(rows, calibration)
    print(f"median error {found['median_error']:.1%}, Spearman {found['spearman']:.3f}")
    for shape, loss in found["regret"].items():
        print(f"{shape}: the planner's choice is {loss:.1%} slower than the best")
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(given.output, json.dumps(found, indent=2) + "\n")
    missed = (
        found["median_error"] > ERROR_LIMIT
        or found["spearman"] < RANK_LIMIT
        or max(found["regret"].values()) > REGRET_LIMIT
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
