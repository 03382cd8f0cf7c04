"""The cost model as a whole: tables equal single rows, bounds are bounds, addends sum up."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from hwprofiles.loader import load_cluster
from hwprofiles.override import override
from planner.estimate import (
    cost_row,
    estimate_stages,
    even_counts,
    stage_layouts,
    stage_seconds,
    step_time,
)
from planner.layout import RECOMPUTE, SCHEDULES, Layout
from planner.problem import make_setting
from planner.provider import ModelProvider
from planner.results import StageCosts
from planner.search.candidates import candidates, expand, rows
from planner.search.search import search
from planner.setting import Setting

CASES = {
    "dense": {
        "model": "llama-2-13b",
        "cluster": "dgx-a100-80gb",
        "gpus": 32,
        "global_batch_size": 64,
        "seq_len": 4096,
    },
    "moe": {
        "model": "deepseek-v2-lite",
        "cluster": "dgx-h100",
        "gpus": 16,
        "global_batch_size": 32,
        "seq_len": 4096,
    },
    "alternating": {
        "model": "gemma-2-9b",
        "cluster": "aws-p5",
        "gpus": 16,
        "global_batch_size": 32,
        "seq_len": 8192,
    },
    "fsdp": {
        "model": "llama-3-8b",
        "cluster": "dgx-h200",
        "gpus": 16,
        "global_batch_size": 32,
        "seq_len": 8192,
        "runtime": "fsdp2",
    },
    "ours": {
        "model": "qwen3-30b-a3b",
        "cluster": "l40s",
        "gpus": 32,
        "global_batch_size": 64,
        "seq_len": 2048,
        "runtime": "shardwise",
    },
    "fp8": {
        "model": "mixtral-8x7b",
        "cluster": "dgx-b200",
        "gpus": 32,
        "global_batch_size": 64,
        "seq_len": 4096,
        "precision": "fp8",
    },
}


@cache
def provider_of(name: str) -> ModelProvider:
    case = dict(CASES[name])
    return ModelProvider(make_setting(case.pop("model"), **case))


def some_rows(name: str, count: int = 60) -> Layout:
    """Legal rows spread over the whole space, and the same ones every time."""
    provider = provider_of(name)
    table = candidates(provider)
    rng = np.random.default_rng(7)
    chosen = rng.choice(table.num_cells, size=min(table.num_cells, 400), replace=False)
    cell, local = expand(table, np.sort(chosen))
    index = np.sort(rng.choice(cell.size, size=min(count, cell.size), replace=False))
    return rows(table, cell[index], local[index])


@pytest.mark.parametrize("name", CASES)
def test_a_table_of_rows_equals_each_row_alone(name: str) -> None:
    provider = provider_of(name)
    table = provider.table(some_rows(name, 25))
    costs = provider.stage_costs(table)
    for i in range(len(table.tp)):
        alone = cost_row(table.take(i), provider.setting).sums
        for field in StageCosts.__dataclass_fields__:
            if field in ("capacity_bytes", "host"):
                continue
            whole, one = getattr(costs, field)[i], getattr(alone, field)[0]
            if np.ndim(one) == 2:
                one = one[:, list(provider.policy_codes)]
            np.testing.assert_allclose(whole, one, rtol=1e-12, err_msg=field)


@pytest.mark.parametrize("name", CASES)
def test_no_cell_bound_is_above_any_of_its_rows(name: str) -> None:
    provider = provider_of(name)
    table = provider.table(some_rows(name, 400))
    costs = provider.stage_costs(table)
    floor, in_flight = provider.cell_costs(table)
    for field in StageCosts.__dataclass_fields__:
        if field in ("capacity_bytes", "num_microbatches", "host"):
            continue
        low, real = getattr(floor, field), getattr(costs, field)
        assert (low <= real * (1 + 1e-12) + 1e-15).all(), field
    assert (in_flight <= provider.in_flight(table, 0) + 1e-12).all()
    assert (in_flight <= provider.in_flight(table, np.asarray(table.pp) - 1) + 1e-12).all()


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_of_the_answer_is_the_time_that_was_minimised(name: str) -> None:
    provider = provider_of(name)
    found = search(provider, keep=3)
    assert found.status == "optimal"
    for solved in found.near:
        result = estimate_stages(solved.layout, solved.stages, provider.setting)
        assert result.step_time_s == pytest.approx(solved.time_s, rel=1e-9)
        assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-12)
        assert result.lower_s <= result.step_time_s <= result.upper_s
        assert result.peak_memory_bytes <= provider.capacity_bytes * (1 + 1e-9)
        row = cost_row(solved.layout, provider.setting)
        assert step_time(row, solved.stages) == pytest.approx(solved.time_s, rel=1e-9)


def seconds(setting: Setting, layout: Layout, policy: str = "none") -> float:
    counts = even_counts(setting.model.num_hidden_layers, layout.pp)
    stages = stage_layouts(layout, setting, counts, RECOMPUTE.index(policy))
    return estimate_stages(layout, stages, setting, bounds=False).step_time_s


FASTER = ("link.nvlink3.bandwidth", "link.ib-hdr.bandwidth", "device.memory_bandwidth")


@pytest.mark.parametrize("fact", FASTER)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_more_bandwidth_is_never_slower(fact: str, zero: int) -> None:
    setting = provider_of("dense").setting
    layout = Layout(dp=4, tp=4, pp=2, zero=zero, shard=4 if zero else 1, micro_batch=2)
    before = seconds(setting, layout)
    for factor in ("1.25x", "2x"):
        cluster = override(load_cluster("dgx-a100-80gb"), {fact: factor})
        faster = Setting(
            setting.model, setting.train, cluster, setting.runtime, 32, kernel=setting.kernel
        )
        assert seconds(faster, layout) <= before * (1 + 1e-9)


def test_recompute_trades_time_for_memory() -> None:
    setting = provider_of("dense").setting
    layout = Layout(dp=4, tp=4, pp=2, zero=1, shard=4, micro_batch=2)
    results = {}
    for policy in ("none", "selective", "full"):
        stages = stage_layouts(layout, setting, [20, 20], RECOMPUTE.index(policy))
        results[policy] = estimate_stages(layout, stages, setting, bounds=False)
    times = [results[p].step_time_s for p in ("none", "selective", "full")]
    memory = [results[p].peak_memory_bytes for p in ("none", "selective", "full")]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)
    assert results["full"].hfu > results["full"].mfu
    assert results["none"].hfu == pytest.approx(results["none"].mfu)


def test_one_gpu_has_no_communication_and_no_bubble() -> None:
    setting = make_setting(
        "llama-3.2-1b", cluster="dgx-h100", gpus=1, global_batch_size=4, seq_len=2048
    )
    stages = stage_layouts(Layout(), setting, [16], 0)
    result = estimate_stages(Layout(), stages, setting)
    assert result.comm_ops == ()
    assert "pipeline_bubble" not in result.breakdown_s
    assert result.lower_s == pytest.approx(result.step_time_s)
    assert result.upper_s == pytest.approx(result.step_time_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_have_the_textbook_bubble(schedule: str) -> None:
    setting = provider_of("ours").setting
    layout = Layout(dp=8, pp=4, zero=1, shard=8, schedule=SCHEDULES.index(schedule))
    row = cost_row(layout, setting)
    stages = stage_layouts(layout, setting, [12] * 4, 0)
    t = stage_seconds(row, stages)
    counted = estimate_stages(layout, stages, setting).breakdown_s["pipeline_bubble"]
    assert counted == pytest.approx(sum(t) - max(t))
