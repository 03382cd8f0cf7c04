"""What torch's schedules cannot run is refused before a message is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from executor.parallel.pipeline_parallel import check_pipeline, hidden_shape
from planner.errors import LayoutError
from planner.layout import SCHEDULES
from planner.plan import Plan
from tests.parity.models import dense_model
from tests.parity.training import plan_of


def changed(plan: Plan, num_microbatches: int, **layout: int) -> Plan:
    """A plan that the planner would not make."""
    return replace(plan, layout=plan.layout.with_(**layout), num_microbatches=num_microbatches)


REFUSED = [
    ("1f1b", {"pp": 4}, 3, "needs at least 4 micro-batches"),
    ("dualpipe", {"pp": 2, "vpp": 2}, 3, "needs at least 4 micro-batches"),
    ("interleaved", {"pp": 4, "vpp": 2}, 11, "2 does not divide 11"),
    ("zero-bubble", {"pp": 4}, 9, "2 does not divide 9"),
]


@pytest.mark.parametrize(("schedule", "degrees", "m", "words"), REFUSED)
def test_what_torch_cannot_run_is_refused(
    schedule: str, degrees: dict[str, int], m: int, words: str
) -> None:
    plan = plan_of(dense_model(), "pp=2", 2)
    wrong = changed(plan, m, schedule=SCHEDULES.index(schedule), **degrees)
    with pytest.raises(LayoutError, match=words) as refusal:
        check_pipeline(wrong)
    legal = refusal.value.legal["num_microbatches"]
    assert legal
    for good in legal:
        check_pipeline(changed(wrong, good))


def test_stages_send_their_rows_alone() -> None:
    plan = plan_of(dense_model(), "pp=2 tp=2 cp=2 micro_batch=2", 8)
    assert hidden_shape(plan) == (2, 32 // 4, 64)
    (forward,) = [op for op in plan.comm_ops if op.axis == "pp" and op.phase == "forward"]
    assert forward.num_bytes == 4 * 2 * 8 * 64
