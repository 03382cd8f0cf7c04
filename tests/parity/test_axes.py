"""Each axis alone, at 2 and 4 ranks, does what a single process does."""

import pytest

from tests.parity.compare import assert_parity
from tests.parity.models import dense_model, moe_model
from tests.parity.training import plan_of

DENSE = [
    (2, "dp=2"),
    (2, "dp=2 micro_batch=4"),
    (4, "dp=4"),
    (2, "dp=2 zero=1"),
    (4, "dp=4 zero=1"),
    (2, "dp=2 zero=2"),
    (4, "dp=4 zero=2"),
    (2, "dp=2 zero=3"),
    (4, "dp=4 zero=3"),
    (4, "dp=4 zero=1 shard=2"),
    (4, "dp=4 zero=2 shard=2"),
    (4, "dp=4 zero=3 shard=2"),
    (2, "dp=2 zero=3 offload=params-cpu"),
    (2, "tp=2"),
    (4, "tp=4"),
    (2, "cp=2"),
    (4, "cp=4"),
    (2, "cp=2 cp_kind=ulysses"),
    (4, "cp=4 cp_kind=ulysses"),
    (2, "cp=2 recompute=full"),
    (2, "cp=2 cp_kind=ulysses recompute=selective"),
    (2, "pp=2 schedule=gpipe"),
    (2, "pp=2 schedule=gpipe micro_batch=4"),
    (2, "pp=2 schedule=1f1b"),
    (2, "pp=2 schedule=1f1b stages=3/1"),
    (2, "pp=2 vpp=2 schedule=interleaved"),
    (2, "pp=2 schedule=zero-bubble"),
    (2, "pp=2 vpp=2 schedule=dualpipe"),
    (4, "pp=4 schedule=gpipe"),
    (4, "pp=4 schedule=1f1b"),
    (4, "pp=4 schedule=zero-bubble"),
    (2, "dp=2 recompute=full"),
    (2, "dp=2 recompute=selective"),
    (2, "dp=2 zero=3 recompute=full"),
]
DEEP = [
    (4, "pp=4 vpp=2 schedule=interleaved"),
    (4, "pp=4 vpp=2 schedule=dualpipe"),
    (4, "pp=4 schedule=1f1b stages=1/4/2/1"),
]
MOE = [
    (2, "dp=2"),
    (4, "dp=4"),
    (2, "dp=2 zero=3"),
    (2, "dp=2 ep=2"),
    (4, "dp=4 ep=4"),
    (4, "dp=4 ep=2"),
    (4, "dp=4 ep=2 zero=1"),
    (4, "dp=4 ep=2 zero=2"),
    (4, "dp=4 ep=2 zero=3"),
    (4, "dp=4 ep=2 zero=3 shard=2"),
    (2, "dp=2 ep=2 recompute=full"),
    (2, "tp=2"),
    (2, "tp=2 ep=2"),
]


@pytest.mark.parametrize(("gpus", "layout"), DENSE, ids=[layout for _, layout in DENSE])
def test_dense(gpus: int, layout: str) -> None:
    assert_parity(plan_of(dense_model(), layout, gpus))


@pytest.mark.parametrize(("gpus", "layout"), MOE, ids=[layout for _, layout in MOE])
def test_mixture_of_experts(gpus: int, layout: str) -> None:
    assert_parity(plan_of(moe_model(), layout, gpus))


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "layout"), DEEP, ids=[layout for _, layout in DEEP])
def test_pipelines_of_eight_layers(gpus: int, layout: str) -> None:
    assert_parity(plan_of(dense_model(8), layout, gpus))
