"""Host memory and NVMe that offload takes on a node."""

from __future__ import annotations

from collections.abc import Sequence

from planner.layout import RECOMPUTE, StageLayout
from planner.results import StageCosts

OFFLOADED = RECOMPUTE.index("offload")


def away_bytes(
    costs: StageCosts, stage: StageLayout, first: bool, last: bool, in_flight: float
) -> dict[str, float]:
    """What one rank of the layout of `costs` keeps outside of its device, by where: `host`, `nvme`
    [bytes]. Policies are those of `planner.layout.RECOMPUTE`."""
    host = costs.host
    if host is None:
        return {"host": 0.0, "nvme": 0.0}
    state = sum(n * float(host.layer[0, k]) for k, n in enumerate(stage.layers))
    state += float(host.first[0]) * first + float(host.head[0]) * last
    sent = sum(
        policies[OFFLOADED] * float(host.act[0, k]) for k, policies in enumerate(stage.policies)
    )
    shared = float(host.shared[0])
    return {"host": shared * state + in_flight * sent, "nvme": (1.0 - shared) * state}


def away_bytes_per_node(
    costs: StageCosts,
    stages: Sequence[StageLayout],
    in_flight: Sequence[float],
    head_stage: int,
    gpus_on_node: int,
) -> dict[str, float]:
    """Host memory and NVMe that offload takes on one node, with the fullest stage on all of its
    GPUs [bytes]."""
    ranks = [
        away_bytes(costs, stage, rank == 0, rank == head_stage, in_flight[rank])
        for rank, stage in enumerate(stages)
    ]
    return {place: gpus_on_node * max(rank[place] for rank in ranks) for place in ("host", "nvme")}
