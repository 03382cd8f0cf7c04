"""A layout's pipeline schedule with its real stage times, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.estimate import Row, scalar
from planner.layout import SCHEDULES, StageLayout
from planner.results import Timeline
from planner.schedules import build_schedule
from planner.simulate import simulate
from planner.stages import layers_of_chunks, virtual_stage


def schedule_durations(
    row: Row, stages: Sequence[StageLayout]
) -> tuple[list[float], list[float], list[float]]:
    """Forward, input-backward and weight-backward seconds of every virtual stage."""
    layout, named = row.layout, row.named
    pp, vpp = layout.pp, layout.vpp
    schedule = SCHEDULES[layout.schedule]
    placed = layers_of_chunks([sum(stage.layers) for stage in stages], schedule, vpp)
    forward, backward, weight = ([0.0] * (pp * vpp) for _ in range(3))
    kinds = row.setting.model.layer_kinds
    for rank, stage in enumerate(stages):
        for k, policies in enumerate(stage.policies):
            costs = named.layers[k]
            count = max(1, stage.layers[k])
            extra = (
                sum(
                    n * (scalar(costs.recompute_s[p]) + scalar(named.fsdp_s[k][p]))
                    for p, n in enumerate(policies)
                )
                / count
            )
            for chunk in range(vpp):
                virtual = virtual_stage(schedule, rank, chunk, pp)
                here = sum(1 for index in placed[virtual] if kinds[index] == k)
                forward[virtual] += here * scalar(costs.forward_total_s)
                weight[virtual] += here * scalar(costs.weight_s)
                backward[virtual] += here * (
                    scalar(costs.backward_total_s) - scalar(costs.weight_s) + extra
                )
    for virtual, costs, fsdp in (
        (0, named.first, named.fsdp_first_s),
        (pp * vpp - 1, named.head, named.fsdp_head_s),
    ):
        forward[virtual] += scalar(costs.forward_total_s)
        weight[virtual] += scalar(costs.weight_s)
        backward[virtual] += scalar(costs.backward_total_s) - scalar(costs.weight_s) + scalar(fsdp)
    return forward, backward, weight


def timeline_of(row: Row, stages: tuple[StageLayout, ...]) -> Timeline:
    """Simulate the pipeline schedule of a layout."""
    layout = row.layout
    actions = build_schedule(
        SCHEDULES[layout.schedule], layout.pp, layout.vpp, int(row.num_microbatches)
    )
    forward, backward, weight = schedule_durations(row, stages)
    send, _ = row.provider.send_s(row.provider.table(layout))
    hidden = layout.schedule in row.provider.overlapping
    return simulate(actions, forward, backward, weight, float(send[0]), p2p_exposed=not hidden)


def simulated(timeline: Timeline) -> dict[str, Any]:
    """What the simulator says of the pipeline part of a step."""
    return {
        "pipeline_s": timeline.total_s,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_in_flight": list(timeline.peak_in_flight),
    }
