"""A traced rank holds and sends what a real one does, and few layers stand for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor.dryrun import MemoryMeter, Traced, extrapolated, shortened, trace_rank
from executor.measure import local_bytes
from executor.mesh import build_mesh
from executor.optimizer import make_optimizer
from executor.parallel.pipeline_parallel import build_pipeline
from executor.parallelize import loss_function, parallelize
from executor.transformer import Transformer
from planner.errors import InputError
from planner.plan import Plan
from tests.parity.models import dense_model, moe_model
from tests.parity.ranks import PRELOADED, run_ranks
from tests.parity.training import plan_of

assert PRELOADED


def traces(plans: list[Plan]) -> list[Traced]:
    """One rank of each plan traced, in a process of its own that has no process group."""
    import torch.distributed as dist

    dist.destroy_process_group()
    return [trace_rank(plan, 0) for plan in plans]


def trace(*plans: Plan) -> list[Traced]:
    (found,) = run_ranks(traces, 1, list(plans))
    return found


def parameter_bytes(plan: Plan) -> tuple[float, float]:
    """Bytes of parameters and of optimizer state of this rank, in a real process group."""
    meshes = build_mesh(plan, "cpu")

    def make_chunk(layers: tuple[int, ...], first: bool, last: bool) -> Any:
        chunk = Transformer(
            plan.model, layers=layers, has_embedding=first, has_head=last, max_seq_len=32
        )
        chunk.init_weights(0)
        return parallelize(chunk, plan, meshes, "cpu")

    pipeline = build_pipeline(plan, meshes, make_chunk, loss_function(plan, meshes))
    parameters = [p for module in pipeline.modules for p in module.parameters()]
    optimizer = make_optimizer(parameters, plan.train, plan.layout.zero)
    rows = plan.num_microbatches * plan.layout.micro_batch
    tokens = torch.zeros(rows, 32 // plan.layout.cp, dtype=torch.int64)
    pipeline.step(tokens, tokens)
    optimizer.step()
    state = [
        local_bytes(v)
        for values in optimizer.state.values()
        for v in values.values()
        if isinstance(v, torch.Tensor) and v.ndim
    ]
    return float(sum(map(local_bytes, parameters))), float(sum(state))


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "pp=2"])
def test_a_traced_rank_holds_what_a_real_one_does(layout: str) -> None:
    plan = plan_of(dense_model(vocab_size=96), layout, 2)
    (traced,) = trace(plan)
    real, state = run_ranks(parameter_bytes, 2, plan)[0]
    assert (traced.parameter_bytes, traced.optimizer_bytes) == (real, state)
    assert traced.gradient_bytes == real


def test_few_layers_stand_for_many() -> None:
    plan = plan_of(dense_model(10, vocab_size=96), "dp=2 zero=3", 2)
    whole, few, more = trace(plan, shortened(plan, 2), shortened(plan, 4))
    guess = extrapolated(few, more, (10 - 2) / 2)
    assert guess.collectives == whole.collectives
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(guess, name) == getattr(whole, name)
    assert guess.activation_peak_bytes == pytest.approx(whole.activation_peak_bytes, rel=0.01)


def test_experts_are_traced_without_their_router() -> None:
    (traced,) = trace(plan_of(moe_model(3), "dp=2 ep=2", 2))
    exchanged = {k: v for k, v in traced.collectives.items() if k[0] == "all_to_all"}
    # 4 micro-batches, 2 layers, dispatch and combine each way, k = 2 rows of 32 floats a token
    assert exchanged == {("all_to_all", "ep", 2 * 32 * 32 * 4): 32.0}


def test_layers_that_differ_cannot_stand_for_each_other() -> None:
    from executor.dryrun import check_alike

    with pytest.raises(InputError, match="2 kinds"):
        check_alike(plan_of(moe_model(6), "dp=2", 2), 0)


def test_the_meter_counts_what_lives() -> None:
    known = torch.ones(100)
    meter = MemoryMeter([known])
    with meter:
        first = torch.zeros(256)
        view = first[:10] + known[:10]
        del first
        second = torch.zeros(512)
        seen = known.view(10, 10)
    assert seen is not None
    assert view.numel() + second.numel() == 522
    assert meter.now == 4 * (10 + 512)
    assert meter.peak == 4 * max(256 + 10, 10 + 512)
    second.untyped_storage().resize_(0)
    assert meter.now == 4 * (10 + 512)  # not entered any more
