"""Pairs, triples and four axes together do what a single process does."""

import pytest

from tests.parity.compare import assert_parity
from tests.parity.models import dense_model, moe_model
from tests.parity.training import plan_of

PAIRS = [
    (4, "tp=2 dp=2"),
    (4, "tp=2 dp=2 zero=1"),
    (4, "tp=2 dp=2 zero=2"),
    (4, "tp=2 dp=2 zero=3"),
    (4, "cp=2 dp=2"),
    (4, "cp=2 dp=2 zero=3"),
    (4, "cp=2 dp=2 zero=3 shard=2"),
    (4, "cp=4 zero=1 shard=2"),
    (4, "cp=2 dp=2 cp_kind=ulysses zero=2"),
    (4, "cp=2 tp=2"),
    (4, "cp=2 tp=2 cp_kind=ulysses"),
    (4, "pp=2 dp=2"),
    (4, "pp=2 dp=2 zero=1"),
    (4, "pp=2 dp=2 zero=2"),
    (4, "pp=2 dp=2 zero=3"),
    (4, "pp=2 tp=2"),
    (4, "pp=2 cp=2"),
    (4, "pp=2 cp=2 cp_kind=ulysses"),
    (4, "tp=2 dp=2 recompute=full"),
    (4, "tp=2 cp=2 recompute=selective"),
    (4, "pp=2 tp=2 recompute=full"),
    (4, "pp=2 dp=2 stages=1/3"),
]
SCHEDULES = [
    (2, "pp=2 schedule=zero-bubble recompute=full"),
    (4, "pp=2 dp=2 zero=2 schedule=gpipe"),
    (4, "pp=2 dp=2 zero=3 vpp=2 schedule=interleaved"),
    (4, "pp=2 dp=2 zero=3 schedule=zero-bubble"),
    (4, "pp=2 dp=2 zero=3 vpp=2 schedule=dualpipe"),
    (4, "pp=2 tp=2 schedule=zero-bubble"),
    (4, "pp=2 tp=2 vpp=2 schedule=dualpipe"),
    (4, "pp=2 cp=2 schedule=zero-bubble zero=2"),
]
MOE_PAIRS = [
    (4, "tp=2 dp=2 ep=2"),
    (4, "tp=2 dp=2 ep=4"),
    (4, "tp=2 dp=2 zero=3"),
    (4, "tp=2 dp=2 ep=2 zero=3"),
    (4, "cp=2 dp=2 ep=2"),
    (4, "cp=2 tp=2 ep=4"),
    (4, "pp=2 dp=2 ep=2"),
    (4, "pp=2 dp=2 ep=2 zero=3"),
    (4, "pp=2 tp=2 ep=2"),
]
TRIPLES = [
    (8, "pp=2 tp=2 dp=2"),
    (8, "pp=2 tp=2 dp=2 zero=3"),
    (8, "pp=2 tp=2 cp=2"),
    (8, "pp=2 dp=2 cp=2 zero=3"),
    (8, "dp=2 cp=2 tp=2"),
    (8, "dp=2 cp=2 tp=2 zero=3"),
    (8, "dp=4 tp=2 zero=3 shard=2"),
]
MOE_TRIPLES = [
    (8, "pp=2 dp=4 ep=2 zero=3"),
    (8, "pp=2 tp=2 dp=2 ep=2 zero=3"),
    (8, "pp=2 cp=2 tp=2 ep=4"),
    (8, "dp=2 cp=2 tp=2 ep=4 zero=3"),
]


def names(cases: list[tuple[int, str]]) -> list[str]:
    return [layout for _, layout in cases]


@pytest.mark.parametrize(("gpus", "layout"), PAIRS, ids=names(PAIRS))
def test_pairs(gpus: int, layout: str) -> None:
    assert_parity(plan_of(dense_model(), layout, gpus))


@pytest.mark.parametrize(("gpus", "layout"), SCHEDULES, ids=names(SCHEDULES))
def test_schedules_beside_other_axes(gpus: int, layout: str) -> None:
    assert_parity(plan_of(dense_model(), layout, gpus))


@pytest.mark.parametrize(("gpus", "layout"), MOE_PAIRS, ids=names(MOE_PAIRS))
def test_pairs_with_experts(gpus: int, layout: str) -> None:
    assert_parity(plan_of(moe_model(3, shared=64), layout, gpus))


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "layout"), TRIPLES, ids=names(TRIPLES))
def test_triples(gpus: int, layout: str) -> None:
    assert_parity(plan_of(dense_model(), layout, gpus))


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "layout"), MOE_TRIPLES, ids=names(MOE_TRIPLES))
def test_three_and_four_axes_with_experts(gpus: int, layout: str) -> None:
    assert_parity(plan_of(moe_model(3, shared=64), layout, gpus))
