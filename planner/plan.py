"""Plan: the whole recipe of a run as one versioned JSON file, the only contract with the executor.

A plan needs no preset, profile or search to be understood: it holds the full model and training
specs, the layout, which layers sit on which stage under which recompute policy, where every rank
sits in the mesh, every collective that will run, and what was predicted. It holds no dates and no
wall-clock times, so that equal plans are equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwprofiles.profile import Cluster
from planner import codec, forms  # noqa: F401  forms registers how layouts are written
from planner.codec import decode, encode
from planner.errors import PlanFileError
from planner.files import write_whole
from planner.layout import SCHEDULES, Layout, StageLayout
from planner.mesh import MeshPlan, mesh_of
from planner.plan_checks import check_plan
from planner.results import CommOp, Estimate
from planner.specs import ModelSpec, TrainSpec
from planner.stages import StagePlan, plan_stages
from planner.version import VERSION

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the planner expects of the run; names as in `planner.results.Estimate`."""

    step_time_s: float
    lower_s: float
    upper_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    hfu: float
    breakdown_s: Mapping[str, float]
    stage_s: tuple[float, ...]
    memory_bytes: tuple[Mapping[str, float], ...]
    capacity_bytes: float
    host_bytes_per_node: float
    nvme_bytes_per_node: float = 0.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the search did to know that the layout is best.

    Counts are layouts; `gap` is the relative distance between the step time and `lower_bound_s`,
    below which no layout of the space can be.
    """

    status: str
    enumerated: int
    legal: int
    fits: int
    excluded_by_bound: int
    solved: int
    lower_bound_s: float
    gap: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned run.

    `certificate` is None when a person chose the layout. `cluster_digest` identifies the facts that
    the predictions rest on.
    """

    schema_version: int
    shardwise_version: str
    model: ModelSpec
    train: TrainSpec
    cluster: str
    cluster_digest: str
    num_gpus: int
    gpus_per_node: int
    layout: Layout
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    mesh: MeshPlan
    prediction: Prediction
    comm_ops: tuple[CommOp, ...]
    certificate: Certificate | None

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return SCHEDULES[self.layout.schedule]


def make_plan(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    layout: Layout,
    stages: Sequence[StageLayout],
    estimate: Estimate,
    certificate: Certificate | None = None,
) -> Plan:
    """The plan of one layout with its stages and its estimate, checked.

    Raises
    ------
    PlanFileError
        The parts contradict one another.
    """
    numbers = {name: getattr(estimate, name) for name in Prediction.__dataclass_fields__}
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        shardwise_version=VERSION,
        model=model,
        train=train,
        cluster=cluster.name,
        cluster_digest=cluster.digest,
        num_gpus=int(layout.num_gpus),
        gpus_per_node=cluster.gpus_per_node,
        layout=layout,
        num_microbatches=train.global_batch_size // (layout.dp * layout.micro_batch),
        stages=plan_stages(model, layout, stages),
        mesh=mesh_of(layout),
        prediction=Prediction(**numbers),
        comm_ops=tuple(estimate.comm_ops),
        certificate=certificate,
    )
    # Through its own file form, so that a plan in memory equals the one that is read back.
    return parse_plan(encode(plan))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all."""
    write_whole(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The bytes of the plan file: equal plans, equal text."""
    return codec.dumps(encode(plan)) + "\n"


def load_plan(path: str | Path) -> Plan:
    """Read and check a plan file.

    Raises
    ------
    PlanFileError
        Not JSON, another version, a key missing or unknown, a wrong type, or parts that contradict
        one another.
    """
    return parse_plan(codec.read_json(Path(path)))


def parse_plan(data: Any) -> Plan:
    """As `load_plan`, from the document."""
    items = codec.expect(dict, data, "")
    if "schema_version" not in items:
        raise PlanFileError("this is not a plan: it has no schema_version")
    version = items["schema_version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise PlanFileError(
            f"the plan has schema version {str(version)[:20]}, and this shardwise ({VERSION}) "
            f"reads {SCHEMA_VERSION}; make the plan again",
            values={"schema_version": version},
            legal={"schema_version": [SCHEMA_VERSION]},
        )
    plan = decode(Plan, items)
    check_plan(plan)
    return plan
