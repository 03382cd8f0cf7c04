"""Models with other parts do under several axes what they do in a single process."""

import pytest

from planner.specs import ModelSpec
from tests.parity.compare import assert_parity
from tests.parity.models import DEEPSEEK2, DEEPSEEK3, GEMMA2, GPT2, NEOX, QWEN2_MOE, QWEN3
from tests.parity.training import plan_of

CASES = [
    (GPT2, "tp=2 dp=2 zero=2"),
    (GPT2, "cp=2 dp=2 zero=3"),
    (NEOX, "tp=2 dp=2"),
    (QWEN3, "tp=2 dp=2 zero=3"),
    (GEMMA2, "tp=2 dp=2"),
    (GEMMA2, "cp=2 dp=2 cp_kind=ulysses"),
    (DEEPSEEK2, "cp=2 tp=2 zero=3"),
    (DEEPSEEK3, "tp=2 dp=2 ep=4"),
    (DEEPSEEK3, "dp=4 ep=2 zero=3"),
    (QWEN2_MOE, "tp=2 dp=2 ep=2 recompute=full"),
]


@pytest.mark.parametrize(
    ("model", "layout"), CASES, ids=[f"{model.name} {layout}" for model, layout in CASES]
)
def test_models(model: ModelSpec, layout: str) -> None:
    assert_parity(plan_of(model, layout, 4))
