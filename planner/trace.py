"""A Timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

A process per pipeline rank with two threads, compute and step end, and a counter of the
micro-batches whose activations it holds. Format: the "Trace Event Format" document of the Chromium
project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import InputError
from planner.files import write_whole
from planner.results import Action, Timeline

__all__ = [
    "StepSpan",
    "action_name",
    "check_step_spans",
    "chunk_of_stage",
    "trace_events",
    "write_trace",
]

COMPUTE, STEP_END = 0, 1  # thread ids
OP_WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}


@dataclass(frozen=True, slots=True)
class StepSpan:
    """What a rank does once per step besides its actions: a collective, the optimizer."""

    rank: int
    name: str
    start_s: float
    end_s: float


def action_name(action: Action, chunk: int) -> str:
    """The name of an action in traces, planned or measured.

    >>> action_name(Action(stage=5, op="F", microbatch=3), chunk=1)
    'F chunk1 mb3'
    """
    return f"{action.op} chunk{chunk} mb{action.microbatch}"


def chunk_of_stage(timeline: Timeline) -> dict[int, int]:
    """Chunk number of every virtual stage: its place among the stages of its rank."""
    chunks: dict[int, int] = {}
    for spans in timeline.spans:
        stages = sorted({action.stage for action, _, _ in spans})
        chunks.update({stage: chunk for chunk, stage in enumerate(stages)})
    return chunks


def trace_events(timeline: Timeline, step_spans: Sequence[StepSpan] = ()) -> list[dict[str, Any]]:
    """The events of a Chrome trace; times in microseconds, as the format wants.

    >>> from planner.results import Timeline
    >>> one = Timeline((((Action(0, "F", 0), 0.0, 2e-3),),), 2e-3, 0.0, (1.0,))
    >>> [(e["name"], e["ts"], e["dur"]) for e in trace_events(one) if e["ph"] == "X"]
    [('F chunk0 mb0', 0.0, 2000.0)]
    """
    check_step_spans(timeline, step_spans)
    chunks = chunk_of_stage(timeline)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events += _names(rank, has_step_end=any(span.rank == rank for span in step_spans))
        for action, start_s, end_s in spans:
            events.append(
                {
                    "name": action_name(action, chunks[action.stage]),
                    "cat": OP_WORDS[action.op],
                    "ph": "X",
                    "pid": rank,
                    "tid": COMPUTE,
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {
                        "stage": action.stage,
                        "chunk": chunks[action.stage],
                        "microbatch": action.microbatch,
                    },
                }
            )
        for time_s, alive in _in_flight_steps(spans):
            events.append(
                {
                    "name": "micro-batches in flight",
                    "ph": "C",
                    "pid": rank,
                    "ts": time_s * 1e6,
                    "args": {"in flight": alive},
                }
            )
    for span in step_spans:
        events.append(
            {
                "name": span.name,
                "cat": "step end",
                "ph": "X",
                "pid": span.rank,
                "tid": STEP_END,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    return events


def check_step_spans(timeline: Timeline, step_spans: Sequence[StepSpan]) -> None:
    """Raise InputError for a span of a rank that is not there or that ends before it starts."""
    for span in step_spans:
        if not 0 <= span.rank < len(timeline.spans) or not 0 <= span.start_s <= span.end_s:
            raise InputError(
                f"step span {span.name!r} on rank {span.rank}, {span.start_s} s to {span.end_s} s: "
                f"its rank must be one of the {len(timeline.spans)} and it must not end before it "
                "starts",
                values={"rank": span.rank, "start_s": span.start_s, "end_s": span.end_s},
                legal={"rank": [0, len(timeline.spans) - 1]},
            )


def write_trace(
    timeline: Timeline, path: str | os.PathLike[str], step_spans: Sequence[StepSpan] = ()
) -> None:
    """Write `timeline` and what follows it in the step as a Chrome trace."""
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "pipeline_s": timeline.total_s,
            "bubble_fraction": timeline.bubble_fraction,
            "peak_in_flight": list(timeline.peak_in_flight),
        },
        "traceEvents": trace_events(timeline, step_spans),
    }
    write_whole(path, json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")


def _names(rank: int, *, has_step_end: bool) -> Iterator[dict[str, Any]]:
    threads = [(COMPUTE, "compute")] + ([(STEP_END, "step end")] if has_step_end else [])
    common = {"ph": "M", "pid": rank}
    yield {**common, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": rank}}
    for tid, name in threads:
        yield {**common, "name": "thread_name", "tid": tid, "args": {"name": name}}


def _in_flight_steps(spans: Sequence[tuple[Action, float, float]]) -> Iterator[tuple[float, float]]:
    """When the activations a rank holds change, and how many micro-batches they are from then."""
    chunks = max(1, len({action.stage for action, _, _ in spans}))
    weights = {(action.stage, action.microbatch) for action, _, _ in spans if action.op == "W"}
    held = 0
    for action, start_s, end_s in spans:
        if action.op == "F":
            held += 1
            yield start_s, held / chunks
        elif action.op == "W" or (action.stage, action.microbatch) not in weights:
            held -= 1
            yield end_s, held / chunks
