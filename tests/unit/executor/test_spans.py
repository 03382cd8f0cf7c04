"""Spans of a run become a trace with the planner's names."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from executor.parallel.pipeline_parallel import Recorder
from executor.spans import peak_in_flight, timeline_of
from planner.results import Action
from planner.schedules import build_schedule
from planner.trace import trace_events


def spans_of(schedule: str, pp: int, vpp: int, m: int) -> list[list[tuple[Action, float, float]]]:
    """A schedule's order with a second for every action."""
    ranks = build_schedule(schedule, pp, vpp, m)
    return [[(a, 10.0 + i, 11.0 + i) for i, a in enumerate(rank)] for rank in ranks]


def test_time_starts_with_the_first_action() -> None:
    timeline = timeline_of(spans_of("1f1b", 2, 1, 4))
    assert timeline.spans[0][0][1:] == (0.0, 1.0)
    assert timeline.total_s == 8.0
    assert timeline.bubble_fraction == 0.0


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "peaks"),
    [("gpipe", 2, 1, [8, 8]), ("1f1b", 2, 1, [2, 1]), ("zero-bubble", 2, 1, [2, 2])],
)
def test_micro_batches_in_flight(schedule: str, pp: int, vpp: int, peaks: list[float]) -> None:
    assert [peak_in_flight(rank) for rank in spans_of(schedule, pp, vpp, 8)] == peaks


def test_names_are_those_of_the_plan() -> None:
    spans = spans_of("interleaved", 2, 2, 4)
    events = trace_events(timeline_of(spans))
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names == {f"{op} chunk{c} mb{m}" for op in "FB" for c in (0, 1) for m in range(4)}


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    import torch

    recorder = Recorder(torch.device("cpu"))
    assert recorder.timed(Action(0, "F", 0), lambda: 3) == 3
    assert recorder.spans == []
    recorder.enabled = True
    assert recorder.timed(Action(0, "F", 1), lambda: 4) == 4
    ((action, start_s, end_s),) = recorder.spans
    assert action == Action(0, "F", 1)
    assert start_s <= end_s
