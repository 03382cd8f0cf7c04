"""Launches of the host, the empty queue after a wait, and what of it a layout changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hwprofiles.loader import load_cluster
from planner.host import expert_launches, layer_launches, paced_s
from planner.layer import layer_costs
from planner.layout import Layout
from planner.presets_index import load_model
from planner.runtime import load_runtime
from planner.setting import Setting
from planner.specs import TrainSpec

RUNTIME = load_runtime("nemo")
MODEL = load_model("gpt-oss-120b")
EIGHT = Layout(dp=8, ep=8, micro_batch=1)


def setting(**changes: object) -> Setting:
    runtime = replace(RUNTIME, **changes)  # type: ignore[arg-type]
    train = TrainSpec(global_batch_size=8, seq_len=4096, precision="bf16", runtime="nemo")
    return Setting(MODEL, train, load_cluster("dgx-h100"), runtime, 8, kernel="cudnn")


def test_paced_time_lies_between_the_longer_side_and_the_sum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        segments = list(zip(rng.integers(1, 40, 4), rng.uniform(0, 30, 4), strict=True))
        host, device = sum(n for n, _ in segments), sum(s for _, s in segments)
        paced = float(paced_s(segments, 1.0))
        assert max(host, device) <= paced <= host + device + 1e-9


@pytest.mark.parametrize(("ep", "local"), [(1, 128), (8, 16), (64, 2)])
def test_experts_are_launched_one_by_one(ep: int, local: int) -> None:
    moe = MODEL.kinds[0].moe
    assert moe is not None
    launches = RUNTIME.launches
    each = launches["expert_forward"] + launches["expert_bias_forward"]
    got = expert_launches(moe, replace(EIGHT, ep=ep), setting(), "forward")
    assert float(got) == each * local
    plain = replace(moe, expert_bias=False)
    got = expert_launches(plain, replace(EIGHT, ep=ep), setting(), "forward")
    assert float(got) == launches["expert_forward"] * local


def test_a_wait_costs_in_both_directions_and_not_beside_another_micro_batch() -> None:
    kind = MODEL.kinds[0]

    def launch(**changes: object) -> tuple[float, float]:
        costs = layer_costs(kind, EIGHT, setting(**changes))
        return tuple(float(np.max(x["launch"])) for x in (costs.forward_s, costs.backward_s))  # type: ignore[return-value]

    none, once = launch(moe_drains=0.0), launch()
    assert once[0] >= none[0] + RUNTIME.moe_drain_s / 2
    assert once[1] == pytest.approx(none[1] + RUNTIME.moe_drain_s / 2)
    assert launch(ep_overlap_fraction=1.0)[0] <= none[0]


def test_a_host_slower_than_the_device_sets_the_time() -> None:
    kind = MODEL.kinds[0]
    count = float(layer_launches(kind, EIGHT, setting(), "backward"))
    slow = load_cluster("dgx-h100")
    slow = replace(slow, device=replace(slow.device, host_launch_s=1e-3))
    costs = layer_costs(kind, EIGHT, replace(setting(moe_drain_s=0.0), cluster=slow))
    assert float(np.max(costs.backward_total_s)) == pytest.approx(count * 1e-3)


def test_clamps_biases_and_order_are_passes_over_the_rows_of_this_rank() -> None:
    kind = MODEL.kinds[0]
    moe = kind.moe
    assert moe is not None
    bare = replace(kind, moe=replace(moe, clamped=False, expert_bias=False))
    more, less = (layer_costs(k, EIGHT, setting()) for k in (kind, bare))
    rows, width = 4096 * moe.num_experts_per_tok, MODEL.hidden_size
    passes = RUNTIME.pass_bytes
    extra = rows * width * (passes["clamp_forward"] + passes["expert_bias_forward"])
    rate = load_cluster("dgx-h100").device.achieved_memory_bytes_per_s
    gained = float(np.max(more.forward_s["memory_bound"] - less.forward_s["memory_bound"]))
    assert gained == pytest.approx(extra / rate, rel=0.05)
