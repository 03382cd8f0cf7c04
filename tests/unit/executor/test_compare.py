"""Predicted against measured: what counts, what is equal, what is another plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from executor.compare import compare, num_sends, planned_totals, render
from executor.measure import (
    MEASUREMENTS_VERSION,
    Collective,
    Measurements,
    RankMeasure,
    StepMeasure,
    plan_digest,
)
from planner.errors import InputError
from planner.plan import Plan
from tests.parity.models import dense_model
from tests.parity.training import plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(dense_model(vocab_size=96), "dp=2 zero=3", 2)


def run_of(plan: Plan, *, cores: int = 2, steps: int = 5, extra: float = 0.0) -> Measurements:
    """Measurements as planned; `extra` bytes are sent on top."""
    rows = [
        Collective(kind, axis, size / count, count)
        for (kind, axis), (count, size) in planned_totals(plan, 0).items()
    ]
    if extra:
        rows.append(Collective("all_reduce", "tp", extra, 1))
    time_s = plan.prediction.step_time_s * 2
    records = tuple(StepMeasure(i, 1.0, time_s, 1.0, 0.1, 1.0) for i in range(steps))
    at = {"pp": 0}
    ranks = tuple(
        RankMeasure(r, at, 4.0, 4.0, 8.0, 10.0, "resident", tuple(rows)) for r in range(2)
    )
    return Measurements(
        MEASUREMENTS_VERSION, plan_digest(plan), "cpu", 2, 2, cores, "2.14", records, ranks
    )


def test_a_run_as_planned_is_equal(plan: Plan) -> None:
    document = compare(plan, run_of(plan))
    assert document["collectives_equal"]
    assert document["time"]["counts"]
    assert document["time"]["error"] == pytest.approx(-0.5)
    assert {(row["kind"], row["axis"]) for row in document["collectives"]} == {
        ("all_gather", "shard"),
        ("reduce_scatter", "shard"),
    }
    assert "differ" not in render(document)


def test_one_collective_more_is_seen(plan: Plan) -> None:
    document = compare(plan, run_of(plan, extra=4096.0))
    assert not document["collectives_equal"]
    (row,) = [row for row in document["collectives"] if not row["equal"]]
    assert (row["planned_count"], row["measured_count"]) == (0, 1)
    assert "differ" in render(document)


def test_a_few_bytes_of_control_are_not_traffic(plan: Plan) -> None:
    assert compare(plan, run_of(plan, extra=4.0))["collectives_equal"]


@pytest.mark.parametrize(
    ("changes", "words"), [({"cores": 1}, "shared 1 cores"), ({"steps": 2}, "only 2 steps")]
)
def test_times_that_say_nothing_do_not_count(
    plan: Plan, changes: dict[str, int], words: str
) -> None:
    document = compare(plan, run_of(plan, **changes))
    assert not document["time"]["counts"]
    assert words in render(document)


def test_measurements_of_another_plan_are_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="measurements are of the plan"):
        compare(plan, replace(run_of(plan), plan_digest="0" * 64))


@pytest.mark.parametrize(
    ("layout", "sends"),
    [
        ("pp=2", [(1, 0), (0, 1)]),
        ("pp=2 vpp=2 schedule=interleaved", [(2, 1), (1, 2)]),
        ("pp=2 vpp=2 schedule=dualpipe", [(1, 1), (1, 1)]),
    ],
)
def test_stages_at_the_ends_send_less(layout: str, sends: list[tuple[int, int]]) -> None:
    plan = plan_of(dense_model(), layout, 2)
    found = [tuple(num_sends(plan, rank, p) for p in ("forward", "backward")) for rank in range(2)]
    assert found == sends
