"""Measurements: what a run did, as one JSON file that `compare` reads, and how it is counted.

Collectives are counted where PyTorch dispatches them, whoever calls: DDP's reducer, FSDP, DTensor,
the pipeline's sends or our own attention. Bytes count as `planner.results.CommOp` counts them.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.launch import Place
from executor.mesh import AXES, TIED, Meshes
from planner.codec import decode, dumps, encode, read_json
from planner.errors import InputError, PlanFileError
from planner.files import write_whole
from planner.plan import Plan, plan_text

MEASUREMENTS_VERSION = 1
WARM_UP_STEPS = 2  # allocation, sharding propagation and first connections happen in these


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """One training step, the slowest rank's time."""

    step: int
    loss: float
    step_time_s: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: float


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind, axis and size that a rank issued in one step."""

    kind: str
    axis: str
    num_bytes: float
    count: int


@dataclass(frozen=True, slots=True)
class RankMeasure:
    """What one rank held and sent. `memory_kind` says what its peak counts."""

    rank: int
    coordinates: Mapping[str, int]
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    peak_memory_bytes: float
    memory_kind: str  # allocated (CUDA) | resident (the whole process)
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class Measurements:
    """A run: its steps, and what every rank held and sent."""

    measurements_version: int
    plan_digest: str
    device_type: str
    world_size: int
    ranks_per_node: int
    cores_per_node: int
    torch_version: str
    steps: tuple[StepMeasure, ...]
    ranks: tuple[RankMeasure, ...]

    @property
    def timed_steps(self) -> tuple[StepMeasure, ...]:
        """Steps after the warm-up, or all of them where there are no more."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def step_time_s(self) -> float:
        """Median time of the timed steps [s]."""
        return median(step.step_time_s for step in self.timed_steps)

    @property
    def shares_cores(self) -> bool:
        """Whether processes stood for GPUs on fewer cores than there were processes."""
        return self.device_type == "cpu" and self.ranks_per_node > self.cores_per_node


def plan_digest(plan: Plan) -> str:
    """Identity of a plan: SHA-256 of its file."""
    return hashlib.sha256(plan_text(plan).encode()).hexdigest()


def save_measurements(measurements: Measurements, path: str | Path) -> None:
    """Write the file, whole or not at all."""
    write_whole(path, dumps(encode(measurements)) + "\n")


def load_measurements(path: str | Path) -> Measurements:
    """Read the file strictly.

    Raises
    ------
    InputError
        Not JSON, another version, or a key missing, unknown or of the wrong type.
    """
    try:
        data = read_json(Path(path))
        version = data.get("measurements_version") if isinstance(data, dict) else None
        if version != MEASUREMENTS_VERSION:
            raise InputError(
                f"{path} is not a measurements file of version {MEASUREMENTS_VERSION}; "
                f"'shardwise run PLAN -o FILE' writes one",
                values={"measurements_version": version},
                legal={"measurements_version": [MEASUREMENTS_VERSION]},
            )
        return decode(Measurements, data)
    except PlanFileError as error:
        raise InputError(f"{path}: {error.message}", values=error.values) from error


# --- collectives ----------------------------------------------------------------------------------

# Name of the dispatched operator -> (kind, where the tensors stand that its bytes count).
OPERATORS = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.send": ("send_recv", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
    "_c10d_functional.broadcast_": ("broadcast", 0),
    # Here the input is a part of what is gathered: bytes are times the size of the group.
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_dtensor.shard_dim_alltoall": ("all_to_all", 0),
}
GATHERS_OF_PARTS = {
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.all_gather_into_tensor_coalesced",
}


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists.

    >>> tensor_bytes([torch.zeros(3), [torch.zeros(2, dtype=torch.int64)]])
    28
    """
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def group_name_of(arguments: tuple[Any, ...]) -> str:
    """Name of the process group among an operator's arguments."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            try:
                return str(torch.distributed.ProcessGroup.unbox(value).group_name)
            except RuntimeError:
                continue  # a ReduceOp
        if isinstance(value, torch.distributed.ProcessGroup):
            return str(value.group_name)
    names = [value for value in arguments if isinstance(value, str)]
    return names[-1] if names else ""  # functional forms end in the name of the group


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run while it is entered.

    `axes` maps the name of a process group to its mesh axes; groups that it lacks are ``other``.
    Entered, it slows every operation down: count in a step that is not timed.
    """

    def __init__(self, axes: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.axes = dict(axes)
        self.counts: Counter[tuple[str, str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func.overloadpacket)
        if name in OPERATORS:
            self.count(name, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def count(self, name: str, arguments: tuple[Any, ...]) -> None:
        kind, place = OPERATORS[name]
        group = group_name_of(arguments)
        size = tensor_bytes(arguments[place])
        if name in GATHERS_OF_PARTS:
            size *= torch.distributed.distributed_c10d._resolve_process_group(group).size()
        self.counts[kind, axis_of(kind, self.axes.get(group, ())), size] += 1

    def collectives(self) -> tuple[Collective, ...]:
        """What was counted, in order of kind, axis and size."""
        return tuple(
            Collective(kind, axis, float(size), count)
            for (kind, axis, size), count in sorted(self.counts.items())
        )


def axes_of_groups(meshes: Meshes) -> dict[str, tuple[str, ...]]:
    """Name of every process group of the meshes -> its axes, which share it where ranks agree."""
    found: dict[str, tuple[str, ...]] = {}
    for axis in (*AXES, TIED):
        group = meshes.group(axis)
        if group is not None:
            name = str(group.group_name)
            found[name] = (*found.get(name, ()), axis)
    return found


# Which of the axes of one group a collective serves: parameters never go by all-to-all, and
# tokens never by anything else over ep.
PREFERRED = {
    "all_to_all": ("ep", "cp"),
    "send_recv": ("pp", "cp"),
    "all_reduce": ("tp", "replicate", "shard", "dp", "edp", "edp_replicate", "edp_shard"),
    "all_gather": ("tp", "shard", "edp_shard", "replicate"),
    "reduce_scatter": ("tp", "shard", "edp_shard", "replicate"),
}


def axis_of(kind: str, axes: Sequence[str]) -> str:
    """The axis of a collective as `planner.results.CommOp` names it.

    >>> axis_of("all_to_all", ("shard", "ep")), axis_of("all_gather", ("shard", "ep"))
    ('ep', 'shard')
    >>> axis_of("all_reduce", ("edp",)), axis_of("all_gather", ())
    ('replicate', 'other')
    """
    axis = next((a for a in PREFERRED.get(kind, ()) if a in axes), next(iter(axes), "other"))
    if axis.startswith("edp"):  # planned as one axis, whose sums count among the replicas'
        return "replicate" if kind == "all_reduce" else "edp"
    return axis


# --- memory ---------------------------------------------------------------------------------------


def peak_memory(device: torch.device) -> tuple[float, str]:
    """Peak bytes of this process so far, and what they count."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)), "allocated"
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit), "resident"


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the part of a tensor that this rank holds."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's state on this rank, its step counters left out."""
    return sum(
        local_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    )


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counted:
    """One step that was counted and not timed."""

    collectives: tuple[Collective, ...]
    gradient_bytes: float


def count_collectives(
    meshes: Meshes,
    pipeline: Any,
    optimizer: Any,
    batch: tuple[torch.Tensor, torch.Tensor],
    finish: Callable[[], None],
) -> Counted:
    """Forward, backward and update of one batch, with every collective counted.

    The update is a real one: what is measured is what training does. So it comes after the last
    checkpoint and before nothing.
    """
    counter = CollectiveCounter(axes_of_groups(meshes))
    optimizer.zero_grad(set_to_none=True)
    with counter:
        pipeline.step(*batch)
        finish()
        optimizer.step()
    gradients = [p.grad for m in pipeline.modules for p in m.parameters() if p.grad is not None]
    return Counted(counter.collectives(), float(sum(map(local_bytes, gradients))))


def gather_measurements(
    plan: Plan,
    place: Place,
    device: torch.device,
    meshes: Meshes,
    parameters: Sequence[torch.Tensor],
    optimizer: Any,
    counted: Counted,
    steps: tuple[StepMeasure, ...],
) -> Measurements:
    """Measurements of all ranks, on every rank."""
    peak, memory_kind = peak_memory(device)
    unique = {id(p): p for p in parameters}.values()
    mine = RankMeasure(
        rank=place.rank,
        coordinates=meshes.coordinates(),
        parameter_bytes=float(sum(map(local_bytes, unique))),
        gradient_bytes=counted.gradient_bytes,
        optimizer_bytes=float(state_bytes(optimizer)),
        peak_memory_bytes=peak,
        memory_kind=memory_kind,
        collectives=counted.collectives,
    )
    ranks: list[Any] = [None] * place.world_size
    torch.distributed.all_gather_object(ranks, mine)
    return Measurements(
        measurements_version=MEASUREMENTS_VERSION,
        plan_digest=plan_digest(plan),
        device_type=device.type,
        world_size=place.world_size,
        ranks_per_node=place.ranks_per_node,
        cores_per_node=available_cores(),
        torch_version=str(torch.__version__),
        steps=steps,
        ranks=tuple(ranks),
    )


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
