"""Counts the collectives of one step that ran, beside those that the plan says."""

from __future__ import annotations

from collections import defaultdict

from executor.measure import CollectiveCounter, axes_of_groups
from executor.moe import Moe
from planner.plan import Plan
from tests.parity.training import Trainer

Totals = dict[tuple[str, str], tuple[int, int]]


def count_step(plan: Plan) -> Totals:
    """(kind, axis) -> calls and bytes of this rank's third step."""
    trainer = Trainer(plan)
    for chunk in trainer.pipeline.modules:
        for module in chunk.modules():
            if isinstance(module, Moe):
                module.balanced = True  # the plan's bytes are those of even routing
    for _ in range(2):  # DDP sorts its buckets anew in the second step
        trainer.gradients()
        trainer.update()
    counter = CollectiveCounter(axes_of_groups(trainer.meshes))
    with counter:
        trainer.gradients()
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for (kind, axis, size), count in counter.counts.items():
        found[kind, axis][0] += count
        found[kind, axis][1] += count * size
    return {key: (count, size) for key, (count, size) in found.items()}


def planned(plan: Plan) -> Totals:
    """(kind, axis) -> calls and bytes of a step on a rank of the slowest stage."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op in plan.comm_ops:
        found[op.kind, op.axis][0] += float(op.count)
        found[op.kind, op.axis][1] += float(op.count) * float(op.num_bytes)
    return {key: (round(count), round(size)) for key, (count, size) in found.items()}
