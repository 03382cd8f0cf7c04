"""One step of DeepSeek-V3's own run, beside what its report and its public profile say.

The run is case T-227: 2048 H800, fp8, pp=16 in DualPipe, ep=64, 15360 sequences of 4096 tokens.
The profile shows a forward and a backward chunk of four MoE layers under the same degrees, without
pipeline sends: `validation/deepseek_v3_profile.csv` sums its kernels (deepseek-ai/profile-data,
train.json at commit 4496024) by the names in its column `match`.

References: DeepSeekV3.
"""

from __future__ import annotations

import csv
from typing import Any

from planner.estimate import cost_row, estimate_stages, scalar
from planner.layout import RECOMPUTE
from reports.case_rows import ready
from reports.case_table import read_cases
from reports.published_table import VALIDATION_DIR

CASE = "T-227"
PROFILE = VALIDATION_DIR / "deepseek_v3_profile.csv"
PROFILE_LAYERS = 4
REPORTED_HOURS = 180e3  # H800 hours per trillion tokens, section 1 of the report
TRILLION, HOUR = 1e12, 3600.0
# Parts of the profile by the names of the cost model.
PARTS = {
    "attention": ("attention_core",),
    "gemm": ("attention_gemm", "mlp_gemm", "expert_gemm"),
    "passes": ("memory_bound",),
}


def deepseek_step() -> list[dict[str, Any]]:
    """Rows `table, what, predicted, published, unit`: the run, its step by part, and an MoE layer.

    Of the layer: forward and backward of one micro-batch of one sequence, in milliseconds.
    """
    case = ready(next(one for one in read_cases() if one.id == CASE))
    result = estimate_stages(case.layout, case.stages, case.setting)
    rate = result.tokens_per_s_per_gpu
    published = TRILLION / (REPORTED_HOURS * HOUR)
    hours = TRILLION / rate / HOUR
    step = case.setting.train.global_batch_size * case.setting.train.seq_len
    rows = [
        row("run", "H800 hours per trillion tokens", hours, REPORTED_HOURS, "h"),
        row("run", "tokens/s per GPU", rate, published, "tokens/s"),
        row(
            "run",
            "step time",
            result.step_time_s,
            step / case.layout.num_gpus / published,
            "s",
        ),
        row("run", "step time with all communication hidden", result.lower_s, None, "s"),
    ]
    rows += [
        row("step", name.replace("_", " "), seconds, None, "s")
        for name, seconds in result.breakdown_s.items()
        if seconds >= 0.005 * result.step_time_s
    ]
    return rows + layer_rows(case)


def layer_rows(case: Any) -> list[dict[str, Any]]:
    """An MoE layer's forward and backward beside a fourth of the profile."""
    costs = cost_row(case.layout, case.setting).named.layers[-1]
    profile = profile_ms()
    rows = []
    for part, names in PARTS.items():
        seconds = sum(
            scalar(phase.get(name, 0.0))
            for phase in (costs.forward_s, costs.backward_s)
            for name in names
        )
        rows.append(row("layer", part, 1e3 * seconds, profile[part][1], "ms", profile[part][0]))
    exchange = [op for op in costs.comm_ops if op.kind == "all_to_all"]
    both = profile["dispatch"][1] + profile["combine"][1]
    total = sum(scalar(op.total_s) for op in exchange)
    left = sum(scalar(op.exposed_s) for op in exchange)
    rows.append(row("layer", "exchange", 1e3 * total, both, "ms", "dispatch and combine kernels"))
    rows.append(row("layer", "exposed", 1e3 * left, None, "ms", "exchange that compute waits for"))
    again = scalar(costs.recompute_s[RECOMPUTE.index("selective")])
    rows.append(row("layer", "recompute", 1e3 * again, None, "ms", "of norms and up-projections"))
    whole = scalar(costs.forward_total_s) + scalar(costs.backward_total_s) + again
    rows.append(row("layer", "all", 1e3 * whole, profile["span"][1], "ms", "first kernel to last"))
    return rows


def row(
    table: str, what: str, predicted: float, published: float | None, unit: str, note: str = ""
) -> dict[str, Any]:
    return {
        "table": table,
        "what": what,
        "predicted": predicted,
        "published": published,
        "unit": unit,
        "note": note,
    }


def profile_ms() -> dict[str, tuple[str, float]]:
    """What each part is, and its milliseconds per layer."""
    with open(PROFILE, encoding="utf-8", newline="") as file:
        return {
            line["part"]: (line["what"], float(line["total_ms"]) / PROFILE_LAYERS)
            for line in csv.DictReader(file)
        }
