"""Plans that the executor has no part for are refused before a message is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from executor.parallelize import check
from planner.errors import LayoutError
from planner.specs import LoraSpec
from tests.parity.models import dense_model
from tests.parity.training import plan_of


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora": LoraSpec(8)}, "LoRA of rank 8"),
        ({"precision": "fp8"}, "precision=fp8"),
        ({"seq_len": 31}, "seq_len=31"),
    ],
)
def test_training_that_is_not_run_is_refused(change: dict[str, Any], words: str) -> None:
    plan = plan_of(dense_model(), "tp=2", 2)
    check(plan)
    with pytest.raises(LayoutError, match=words):
        check(replace(plan, train=replace(plan.train, **change)))
