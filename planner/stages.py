"""Which layers sit where: the counts of a stage split as global layer indices, chunk by chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import LayoutError
from planner.layout import RECOMPUTE, SCHEDULES, Layout, StageLayout
from planner.specs import ModelSpec

# Layers that recompute most come first in a stage, as Megatron's block recompute has it.
RECOMPUTE_ORDER = ("full", "offload", "selective", "none")


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One model chunk: its virtual stage, its layers in order, and the recompute policy of each.

    Virtual stage 0 also holds the embedding, the last one the head.
    """

    virtual_stage: int
    layers: tuple[int, ...]
    recompute: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one pipeline rank holds.

    `layers[k]` counts layers of kind k, `policies[k][p]` those of them under ``RECOMPUTE[p]``.
    """

    layers: tuple[int, ...]
    policies: tuple[tuple[int, ...], ...]
    chunks: tuple[ChunkPlan, ...]


def virtual_stage(schedule: str, rank: int, chunk: int, pp: int) -> int:
    """The place in the model of a rank's chunk: in turns, or in a V for dualpipe.

    >>> [virtual_stage("interleaved", 1, chunk, 4) for chunk in range(2)]
    [1, 5]
    >>> [virtual_stage("dualpipe", 1, chunk, 4) for chunk in range(2)]
    [1, 6]
    """
    if schedule == "dualpipe" and chunk == 1:
        return 2 * pp - 1 - rank
    return chunk * pp + rank


def chunk_sizes(num_layers: int, vpp: int) -> tuple[int, ...]:
    """Layers per chunk of a rank: as equal as possible, longer ones later.

    >>> chunk_sizes(7, 3)
    (2, 2, 3)
    """
    short, longer = divmod(num_layers, vpp)
    return (short,) * (vpp - longer) + (short + 1,) * longer


def layers_of_chunks(
    layers_per_rank: Sequence[int], schedule: str, vpp: int
) -> dict[int, tuple[int, ...]]:
    """Global layer indices of every virtual stage, given how many layers each rank holds.

    >>> layers_of_chunks([2, 2], "interleaved", 2)
    {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    """
    pp = len(layers_per_rank)
    sizes = {
        virtual_stage(schedule, rank, chunk, pp): size
        for rank, count in enumerate(layers_per_rank)
        for chunk, size in enumerate(chunk_sizes(count, vpp))
    }
    placed: dict[int, tuple[int, ...]] = {}
    first = 0
    for stage in sorted(sizes):
        placed[stage] = tuple(range(first, first + sizes[stage]))
        first += sizes[stage]
    return placed


def plan_stages(
    model: ModelSpec, layout: Layout, stages: Sequence[StageLayout]
) -> tuple[StagePlan, ...]:
    """Place every layer of the model.

    Raises
    ------
    LayoutError
        Stages that do not hold each layer once, or whose kinds do not lie in the model's order.
    """
    counts = [sum(stage.layers) for stage in stages]
    if len(stages) != layout.pp or sum(counts) != model.num_hidden_layers:
        raise LayoutError(
            f"{len(stages)} stages with {sum(counts)} layers do not make pp={layout.pp} stages of "
            f"a model with {model.num_hidden_layers} layers",
            values={"stages": len(stages), "layers": sum(counts)},
            legal={"stages": [layout.pp], "layers": [model.num_hidden_layers]},
        )
    schedule = SCHEDULES[layout.schedule]
    placed = layers_of_chunks(counts, schedule, layout.vpp)
    return tuple(
        plan_stage(
            model,
            rank,
            stage,
            {
                virtual: placed[virtual]
                for chunk in range(layout.vpp)
                for virtual in [virtual_stage(schedule, rank, chunk, layout.pp)]
            },
        )
        for rank, stage in enumerate(stages)
    )


def plan_stage(
    model: ModelSpec, rank: int, stage: StageLayout, chunks: dict[int, tuple[int, ...]]
) -> StagePlan:
    """One rank's part of `plan_stages`; `chunks` are its layers by virtual stage."""
    held = Counter(model.layer_kinds[index] for layers in chunks.values() for index in layers)
    found = tuple(held[kind] for kind in range(len(model.kinds)))
    if found != tuple(stage.layers) or any(
        sum(policies) != count for policies, count in zip(stage.policies, found, strict=True)
    ):
        raise LayoutError(
            f"stage {rank} asks for {list(stage.layers)} layers by kind under policies "
            f"{[list(p) for p in stage.policies]}, but in the model's order it holds {list(found)}",
            values={"stage": rank, "layers": list(stage.layers)},
            legal={"layers": list(found)},
        )
    supply = [policy_order(policies) for policies in stage.policies]
    return StagePlan(
        layers=tuple(int(count) for count in stage.layers),
        policies=tuple(tuple(int(n) for n in policies) for policies in stage.policies),
        chunks=tuple(
            ChunkPlan(
                virtual_stage=virtual,
                layers=layers,
                recompute=tuple(supply[model.layer_kinds[index]].pop() for index in layers),
            )
            for virtual, layers in chunks.items()
        ),
    )


def policy_order(policies: Sequence[int]) -> list[str]:
    """Policies of one kind's layers, last layer first, to be popped in layer order.

    >>> policy_order((1, 0, 2, 0))
    ['none', 'full', 'full']
    """
    counts = dict(zip(RECOMPUTE, policies, strict=True))
    return [name for name in reversed(RECOMPUTE_ORDER) for _ in range(int(counts[name]))]
