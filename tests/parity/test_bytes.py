"""The collectives that run are the plan's: count and bytes by kind and axis, on every rank."""

from __future__ import annotations

import pytest

from planner.plan import Plan
from planner.specs import LayerSpec, ModelSpec
from tests.parity.counting import Totals, count_step, planned
from tests.parity.models import dense_model, moe_model
from tests.parity.ranks import run_ranks
from tests.parity.training import plan_of

# A vocabulary that all ranks divide: a shard of an odd one is padded, and the plan does not pad.
DENSE = dense_model(vocab_size=96)
MOE = moe_model(3)
SHARED = moe_model(3, shared=64)
FP32 = 4

EXACT = [
    (DENSE, 2, "dp=2 zero=1"),
    (DENSE, 4, "dp=4 zero=1"),
    (DENSE, 2, "dp=2 zero=2"),
    (DENSE, 2, "dp=2 zero=3"),
    (DENSE, 4, "dp=4 zero=3"),
    (DENSE, 4, "dp=4 zero=2 shard=2"),
    (DENSE, 4, "dp=4 zero=3 shard=2"),
    (DENSE, 2, "dp=2 zero=3 recompute=full"),
    (DENSE, 2, "cp=2 cp_kind=ulysses zero=2"),
    (DENSE, 2, "cp=2 cp_kind=ulysses zero=1 recompute=selective"),
    (DENSE, 4, "cp=2 dp=2 cp_kind=ulysses zero=3"),
    (MOE, 2, "dp=2 ep=2"),
    (MOE, 4, "dp=4 ep=2"),
    (MOE, 4, "dp=4 ep=4"),
    (MOE, 4, "dp=4 ep=2 zero=1"),
    (MOE, 4, "dp=4 ep=2 zero=2"),
    (MOE, 4, "dp=4 ep=2 zero=3"),
    (MOE, 2, "dp=2 ep=2 recompute=full"),
    (SHARED, 4, "dp=4 ep=2 zero=3"),
    (DENSE, 2, "tp=2"),
    (DENSE, 4, "tp=4"),
    (DENSE, 4, "tp=2 dp=2"),
    (DENSE, 4, "tp=2 dp=2 zero=3"),
    (SHARED, 2, "tp=2 ep=2"),
    (SHARED, 4, "tp=2 dp=2 ep=2 zero=3"),
    (DENSE, 2, "cp=2 zero=1"),
    (DENSE, 2, "cp=2 zero=1 recompute=selective"),
    (DENSE, 4, "cp=4 zero=3"),
    (SHARED, 4, "cp=2 dp=2 ep=2"),
    (DENSE, 4, "cp=2 tp=2"),
]
"""Layouts whose every collective is compared; what the plan leaves out is added by `as_run`."""


def as_run(plan: Plan) -> Totals:
    """The plan's collectives, and those that it does not list though they run."""
    totals = planned(plan)
    layout, model = plan.layout, plan.model
    layers = [model.kinds[kind] for kind in model.layer_kinds]
    if layout.tp > 1:
        # Gradients of parameters that every tensor rank holds whole: one message a step.
        whole = model.hidden_size + sum(whole_parameters(model, layer) for layer in layers)
        add(totals, "all_reduce", "tp", 1, FP32 * whole // layout.shard)
    num_moe = sum(layer.moe is not None for layer in layers)
    for axis in ("tp", "cp"):
        if num_moe and getattr(layout, axis) > 1:
            # The balancing loss of a sequence that lies on several ranks: two numbers an expert.
            experts = next(layer.moe for layer in layers if layer.moe is not None).num_experts
            size = 2 * FP32 * layout.micro_batch * experts
            add(totals, "all_reduce", axis, num_moe * plan.num_microbatches, size)
    if layout.cp > 1 and ("send_recv", "cp") in totals:
        # Backward sends keys and values, and their gradients, as two messages and not as one.
        count, size = totals["send_recv", "cp"]
        totals["send_recv", "cp"] = count // 2 * 3, size
    return totals


def whole_parameters(model: ModelSpec, layer: LayerSpec) -> int:
    """Elements of a layer that tensor parallelism does not cut: norms and router."""
    router = 0 if layer.moe is None else layer.moe.num_experts * model.hidden_size
    return layer.norms * model.hidden_size + router


def add(totals: Totals, kind: str, axis: str, count: int, size: int) -> None:
    had = totals.get((kind, axis), (0, 0))
    totals[kind, axis] = had[0] + count, had[1] + count * size


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    EXACT,
    ids=[f"{model.name} {layout}" for model, _, layout in EXACT],
)
def test_every_collective_is_the_plans(model: ModelSpec, gpus: int, layout: str) -> None:
    plan = plan_of(model, layout, gpus)
    for rank, found in enumerate(run_ranks(count_step, gpus, plan)):
        assert found == as_run(plan), f"rank {rank}"


@pytest.mark.parametrize("layout", ["dp=2", "dp=4"])
def test_ddp_sends_the_planned_bytes_in_fewer_messages(layout: str) -> None:
    plan = plan_of(DENSE, layout, int(layout[-1]))
    count, size = planned(plan)["all_reduce", "replicate"]
    for found in run_ranks(count_step, plan.num_gpus, plan):
        ((ran, sent),) = found.values()
        assert sent == size
        assert 1 <= ran <= count


def test_a_pipeline_sends_what_a_middle_rank_is_planned_to() -> None:
    plan = plan_of(DENSE, "pp=4", 4)
    found = run_ranks(count_step, 4, plan)
    assert [totals["send_recv", "pp"] for totals in found[1:3]] == [
        planned(plan)["send_recv", "pp"]
    ] * 2


def test_full_recompute_gathers_inputs_once_more_and_no_third_time() -> None:
    plan = plan_of(DENSE, "tp=2 recompute=full", 2)
    layers, m = 4, plan.num_microbatches
    for found in run_ranks(count_step, 2, plan):
        # Forward, again, and the output's gradient of 2 blocks a layer; embedding 1, head 2.
        assert found["all_gather", "tp"][0] == m * (3 * 2 * layers + 3)
        # Forward and backward; again only the first, for nothing needs a layer's own output.
        assert found["reduce_scatter", "tp"][0] == m * (2 * 2 * layers + layers + 2)
