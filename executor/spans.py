"""A step that really ran, as Chrome traces with the names that the planner's have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from executor.mesh import Meshes
from executor.parallel.pipeline_parallel import Pipeline, Span
from planner.errors import InputError
from planner.results import Timeline
from planner.trace import write_trace


def trace_step(folder: Path, meshes: Meshes, pipeline: Pipeline, batch: tuple[Tensor, ...]) -> None:
    """Run forward and backward of one batch and write when each action ran, a file a pipeline.

    The ranks of a pipeline stand side by side. Files are named by the place of the pipeline on the
    other axes, ``step-dp0-cp0-tp0.json``.
    """
    recorder = pipeline.recorder
    recorder.spans.clear()
    dist.barrier()
    recorder.enabled = True
    try:
        pipeline.step(*batch)
    finally:
        recorder.enabled = False
    spans = pipeline_spans(meshes, recorder.spans)
    if meshes.rank("pp") != 0:
        return
    at = meshes.coordinates()
    name = "-".join(["step", *(f"{axis}{at[axis]}" for axis in ("dp", "cp", "tp"))])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write traces into {folder}: {error.strerror}") from error
    write_trace(timeline_of(spans), folder / f"{name}.json")


def pipeline_spans(meshes: Meshes, mine: list[Span]) -> list[list[Span]]:
    """The spans of all ranks of this pipeline, by pipeline rank."""
    group = meshes.group("pp")
    if group is None:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def timeline_of(spans: list[list[Span]]) -> Timeline:
    """Spans of one pipeline as the planner's Timeline, from its first action on.

    Ranks of one machine share a clock; across machines theirs may differ by as much as NTP leaves.

    >>> from planner.results import Action
    >>> timeline_of([[(Action(0, "F", 0), 5.0, 6.0), (Action(0, "B", 0), 6.0, 8.0)]]).total_s
    3.0
    """
    begin = min((start for rank in spans for _, start, _ in rank), default=0.0)
    end = max((stop for rank in spans for _, _, stop in rank), default=0.0)
    moved = tuple(
        tuple((action, start - begin, stop - begin) for action, start, stop in rank)
        for rank in spans
    )
    total_s = end - begin
    busy = sum(stop - start for rank in spans for _, start, stop in rank)
    bubble = 1.0 - busy / (total_s * len(spans)) if total_s else 0.0
    return Timeline(moved, total_s, bubble, tuple(peak_in_flight(list(rank)) for rank in spans))


def peak_in_flight(spans: list[Span]) -> float:
    """Most micro-batches whose activations a rank held, in whole-rank micro-batches."""
    chunks = max(1, len({action.stage for action, _, _ in spans}))
    split = {(a.stage, a.microbatch) for a, _, _ in spans if a.op == "W"}
    held = most = 0
    for action, _, _ in spans:
        if action.op == "F":
            held += 1
        elif action.op == "W" or (action.stage, action.microbatch) not in split:
            held -= 1
        most = max(most, held)
    return most / chunks
