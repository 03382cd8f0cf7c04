"""Trace one rank of a full-size plan without its GPUs: bytes, memory peak and every collective.

The process group is torch's fake one, which sends nothing, and tensors are fake ones, which have
shapes and no data; the code is that of a real run. Where a stage holds many layers, a stage with
two and one with four of each chunk's layers are traced, and their difference is taken as often as
there are layers: all layers of a chunk must then be alike.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from executor.compare import planned_stage
from executor.launch import start
from executor.measure import CollectiveCounter, axes_of_groups, local_bytes
from executor.mesh import build_mesh, coordinates
from executor.optimizer import make_optimizer
from executor.parallel.pipeline_parallel import build_pipeline, chunks_of_rank
from executor.parallelize import finish_gradients, loss_function, parallelize
from executor.transformer import Transformer
from planner.errors import InputError
from planner.plan import Plan
from planner.stages import StagePlan

FEW, MORE = 2, 4  # layers a chunk that stand for all
TIME_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Traced:
    """What one traced step held and sent. `collectives` counts (kind, axis, bytes)."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_peak_bytes: float
    collectives: Mapping[tuple[str, str, int], float]


class MemoryMeter(TorchDispatchMode):
    """Bytes of all storages that operations made while it was entered, and their peak.

    Those of the tensors `known` before, such as parameters, do not count.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = [value.untyped_storage() for value in known]
        self.live: dict[int, int] = {storage._cdata: 0 for storage in self.known}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            # A DTensor is as large as the whole and holds nothing: its part is seen by itself.
            if isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value):
                self.see(value)
        return result

    def see(self, value: Tensor) -> None:
        """Count a tensor's storage if it is new, until it is freed."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        size = storage.nbytes()
        self.live[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.freed, key)

    def freed(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew: FSDP empties and refills those of whole parameters."""
        key = storage._cdata
        if key in self.live:
            self.now += storage.nbytes() - self.live[key]
            self.live[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.resized(storage)
            return result

        self.restore = lambda: setattr(torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        super().__exit__(*error)


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group of any size in one process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shortened(plan: Plan, layers: int) -> Plan:
    """The plan with at most `layers` layers in every chunk."""

    def short(stage: StagePlan) -> StagePlan:
        chunks = tuple(
            replace(c, layers=c.layers[:layers], recompute=c.recompute[:layers])
            for c in stage.chunks
        )
        return replace(stage, chunks=chunks)

    return replace(plan, stages=tuple(short(stage) for stage in plan.stages))


def trace_rank(plan: Plan, rank: int) -> Traced:
    """One step of one rank on fake tensors."""
    with fake_group(rank, plan.num_gpus):
        meshes = build_mesh(plan, "cpu")
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def make_chunk(layers: tuple[int, ...], first: bool, last: bool) -> nn.Module:
            with mode:
                chunk = Transformer(
                    plan.model,
                    layers=layers,
                    has_embedding=first,
                    has_head=last,
                    max_seq_len=plan.train.seq_len,
                )
            for moe in chunk.moe_layers():
                moe.balanced = True
            chunk.to = lambda *_: chunk  # fake tensors have no other device, and cannot be moved
            return parallelize(chunk, plan, meshes, "cpu")

        pipeline = build_pipeline(plan, meshes, make_chunk, loss_function(plan, meshes), "cpu")
        parameters = [p for module in pipeline.modules for p in module.parameters()]
        rows = plan.num_microbatches * int(plan.layout.micro_batch)
        columns = plan.train.seq_len // int(plan.layout.cp)
        with mode:
            tokens = torch.zeros(rows, columns, dtype=torch.int64)
            labels = torch.zeros(rows, columns, dtype=torch.int64)
        counter = CollectiveCounter(axes_of_groups(meshes))
        meter = MemoryMeter([local_part(p) for p in parameters])
        with mode, counter, meter:
            pipeline.step(tokens, labels)
            finish_gradients(pipeline.modules, plan, meshes)
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradient_bytes = sum(map(local_bytes, gradients))
        peak = meter.peak
        with mode, counter:
            optimizer = make_optimizer(parameters, plan.train, int(plan.layout.zero))
            optimizer.step()
        state = sum(
            local_bytes(value)
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor) and value.ndim > 0
        )
        return Traced(
            parameter_bytes=float(sum(map(local_bytes, parameters))),
            gradient_bytes=float(gradient_bytes),
            optimizer_bytes=float(state),
            activation_peak_bytes=float(peak),
            collectives={key: float(count) for key, count in counter.counts.items()},
        )


def extrapolated(few: Traced, more: Traced, times: float) -> Traced:
    """few + times * (more - few)."""

    def number(name: str) -> float:
        low, high = getattr(few, name), getattr(more, name)
        return float(low + times * (high - low))

    counts: Counter[tuple[str, str, int]] = Counter()
    for key in {*few.collectives, *more.collectives}:
        low, high = few.collectives.get(key, 0.0), more.collectives.get(key, 0.0)
        counts[key] = low + times * (high - low)  # type: ignore[assignment]
    names = [name for name in Traced.__dataclass_fields__ if name != "collectives"]
    return Traced(**{name: number(name) for name in names}, collectives=dict(counts))


def check_alike(plan: Plan, pp_rank: int) -> int:
    """Layers of each chunk of a stage, which must be as many and alike to be extrapolated.

    Raises
    ------
    InputError
        They are not.
    """
    chunks = chunks_of_rank(plan, pp_rank)
    counts = {len(chunk.layers) for chunk in chunks}
    kinds = {plan.model.layer_kinds[index] for chunk in chunks for index in chunk.layers}
    policies = {policy for chunk in chunks for policy in chunk.recompute}
    if len(counts) > 1 or len(kinds) > 1 or len(policies) > 1:
        raise InputError(
            f"stage {pp_rank} has layers of {len(kinds)} kinds under {len(policies)} recompute "
            f"policies in chunks of {sorted(counts)}: what differs cannot be extrapolated; trace "
            "it whole",
            values={"stage": pp_rank},
        )
    return counts.pop()


def dry_run(
    plan: Plan, rank: int | None = None, *, whole: bool = False, method: str = "fork"
) -> dict[str, Any]:
    """Trace a step of one rank, and hold it against the plan; the document of it.

    Without `rank` it is the first of the slowest stage, whose collectives the plan lists. `method`
    is how the process that traces starts.

    Raises
    ------
    InputError
        The stage's layers differ, so that few cannot stand for all.
    """
    gc.collect()
    begin = time.monotonic()
    if rank is None:
        stage = planned_stage(plan)
        rank = next(r for r in range(plan.num_gpus) if coordinates(plan.layout, r)["pp"] == stage)
    pp_rank = coordinates(plan.layout, rank)["pp"]
    most = max(len(chunk.layers) for chunk in chunks_of_rank(plan, pp_rank))
    if whole or most <= MORE:
        limit_s = 10 * TIME_LIMIT_S
        (traced,) = start(trace_rank, 1, (plan, rank), time_limit_s=limit_s, method=method)
    else:
        count = check_alike(plan, pp_rank)
        few, more = (
            start(
                trace_rank,
                1,
                (shortened(plan, n), rank),
                time_limit_s=TIME_LIMIT_S,
                method=method,
            )[0]
            for n in (FEW, MORE)
        )
        traced = extrapolated(few, more, (count - FEW) / (MORE - FEW))
    planned = plan.prediction.memory_bytes[pp_rank]
    return {
        "rank": rank,
        "coordinates": coordinates(plan.layout, rank),
        "seconds": time.monotonic() - begin,
        "traced": {
            **{k: v for k, v in asdict(traced).items() if k != "collectives"},
            "collectives": [
                {"kind": kind, "axis": axis, "num_bytes": size, "count": count}
                for (kind, axis, size), count in sorted(traced.collectives.items())
            ],
        },
        "planned": {
            **dict(planned),
            "collectives": [
                {
                    "kind": op.kind,
                    "axis": op.axis,
                    "num_bytes": float(op.num_bytes),
                    "count": float(op.count),
                    "what": op.what,
                    "phase": op.phase,
                }
                for op in plan.comm_ops
            ],
        },
    }


def render(document: Mapping[str, Any]) -> str:
    """The trace for a person."""
    traced, planned = document["traced"], document["planned"]
    gib = 2.0**30
    state = sum(traced[f"{name}_bytes"] for name in ("parameter", "gradient", "optimizer"))
    plan_state = sum(planned[name] for name in ("weights", "gradients", "optimizer"))
    made = (planned["activations"] + planned["logits"]) / gib
    lines = [
        f"rank {document['rank']} traced in {document['seconds']:.0f} s",
        f"  parameters    {traced['parameter_bytes'] / gib:10.4f} GiB",
        f"  gradients     {traced['gradient_bytes'] / gib:10.4f} GiB",
        f"  optimizer     {traced['optimizer_bytes'] / gib:10.4f} GiB",
        f"  state         {state / gib:10.4f} GiB   planned {plan_state / gib:.4f}",
        f"  made by step  {traced['activation_peak_bytes'] / gib:10.4f} GiB   planned {made:.4f}",
    ]
    for row in traced["collectives"]:
        lines.append(
            f"  {row['kind']:<15} {row['axis']:<10} {row['num_bytes']:>14.0f} B x {row['count']:g}"
        )
    return "\n".join(lines)
