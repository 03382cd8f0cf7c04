"""The Chrome trace says what the timeline says, and is written whole or not at all."""

import json

import numpy as np
import pytest

from planner.errors import InputError
from planner.schedules import build_schedule
from planner.simulate import simulate
from planner.trace import StepSpan, trace_events, write_trace, write_whole

STAGES = np.full(8, 1e-3)


@pytest.fixture(name="timeline")
def _timeline():
    return simulate(build_schedule("dualpipe", 4, 2, 9), STAGES, STAGES, STAGES, 1e-4)


def test_every_span_is_there_in_microseconds(timeline, tmp_path):
    path = tmp_path / "step.json"
    write_trace(timeline, path)
    document = json.loads(path.read_text())
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == sum(len(mine) for mine in timeline.spans)
    by_key = {
        (e["pid"], e["name"][0], e["args"]["stage"], e["args"]["microbatch"]): e for e in spans
    }
    for rank, mine in enumerate(timeline.spans):
        for action, start_s, end_s in mine:
            event = by_key[rank, action.op, action.stage, action.microbatch]
            assert event["ts"] == pytest.approx(start_s * 1e6)
            assert event["dur"] == pytest.approx((end_s - start_s) * 1e6)
            chunk = 0 if action.stage < 4 else 1
            assert event["name"] == f"{action.op} chunk{chunk} mb{action.microbatch}"
    assert document["otherData"]["pipeline_s"] == timeline.total_s


def test_a_process_per_rank(timeline):
    names = {
        e["pid"]: e["args"]["name"] for e in trace_events(timeline) if e["name"] == "process_name"
    }
    assert names == {rank: f"pipeline rank {rank}" for rank in range(4)}


def test_in_flight_counter_peaks_where_the_simulator_says_and_ends_empty(timeline):
    counters = [e for e in trace_events(timeline) if e["ph"] == "C"]
    for rank, peak in enumerate(timeline.peak_in_flight):
        held = [e["args"]["in flight"] for e in counters if e["pid"] == rank]
        assert max(held) == peak
        assert held[-1] == 0


def test_step_spans_have_their_own_thread(timeline):
    end = timeline.total_s
    events = trace_events(timeline, [StepSpan(2, "reduce_scatter grads", end, end + 2e-3)])
    (extra,) = [e for e in events if e["ph"] == "X" and e["name"] == "reduce_scatter grads"]
    assert (extra["pid"], extra["tid"]) == (2, 1)
    assert extra["dur"] == pytest.approx(2000)
    threads = [(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("span", [StepSpan(4, "x", 0.0, 1.0), StepSpan(0, "x", 1.0, 0.5)])
def test_impossible_step_spans_are_refused(timeline, span):
    with pytest.raises(InputError, match="step span 'x'"):
        trace_events(timeline, [span])


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "trace.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_one_sentence(timeline, tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*nowhere"):
        write_trace(timeline, tmp_path / "nowhere" / "trace.json")
