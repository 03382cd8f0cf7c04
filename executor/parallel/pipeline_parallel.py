"""Pipeline parallelism by `torch.distributed.pipelining`, and gradient accumulation without it.

`build_pipeline` makes the chunks that this rank holds and the schedule that runs them. A
schedule's `step` takes this rank's sequences of a whole step, and gives the sum of the losses of
its micro-batches, or zero on a rank that does not hold the head. Gradients are summed over
micro-batches and never divided here: the loss function brings the weight of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from executor.mesh import TIED
from planner.errors import LayoutError
from planner.plan import Plan
from planner.results import Action
from planner.stages import ChunkPlan

# Makes one parallelized chunk: global layer indices, has the embedding, has the head.
MakeChunk = Callable[[tuple[int, ...], bool, bool], nn.Module]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Span = tuple[Action, float, float]

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,  # with one chunk a rank: ZB-H1
    "dualpipe": ScheduleDualPipeV,
}


@dataclass
class Recorder:
    """When every action of this rank ran [s], where `enabled`."""

    device: torch.device
    enabled: bool = False
    spans: list[Span] = field(default_factory=list)

    def now(self) -> float:
        """The time at which all work so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, action: Action, work: Callable[[], Any]) -> Any:
        """Do the work, and note when where recording is on."""
        if not self.enabled:
            return work()
        start_s = self.now()
        result = work()
        self.spans.append((action, start_s, self.now()))
        return result


class Pipeline(Protocol):
    """What `build_pipeline` returns."""

    modules: list[nn.Module]
    recorder: Recorder

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor: ...


class Stage(PipelineStage):
    """A PipelineStage that notes when its parts run."""

    recorder: Recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        action = Action(self.stage_index, "F", fwd_chunk_id)
        run = super().forward_one_chunk
        return self.recorder.timed(action, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        action = Action(self.stage_index, "B", bwd_chunk_id)
        run = super().backward_one_chunk
        return self.recorder.timed(action, lambda: run(bwd_chunk_id, *args, **kwargs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        action = Action(self.stage_index, "W", bwd_chunk_id)
        run = super().backward_weight_one_chunk
        return self.recorder.timed(action, lambda: run(bwd_chunk_id, *args, **kwargs))


class ManyStages:
    """One of torch's pipeline schedules over this rank's stages."""

    def __init__(
        self,
        schedule: Any,
        stages: list[Stage],
        num_microbatches: int,
        recorder: Recorder,
    ) -> None:
        self.schedule = schedule
        self.stages = stages
        self.modules: list[nn.Module] = [stage.submod for stage in stages]
        self.num_microbatches = num_microbatches
        self.recorder = recorder

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of all micro-batches."""
        holds_first = any(stage.is_first for stage in self.stages)
        holds_last = any(stage.is_last for stage in self.stages)
        inputs = [(part,) for part in tokens.chunk(self.num_microbatches)]
        losses: list[Tensor] = []
        self.schedule.step(
            arg_mbs=inputs if holds_first else [()] * self.num_microbatches,
            target_mbs=list(labels.chunk(self.num_microbatches)) if holds_last else None,
            losses=losses,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=self.recorder.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


class OneStage:
    """Gradient accumulation on a rank that holds the whole model."""

    def __init__(
        self, module: nn.Module, loss: LossFunction, plan: Plan, recorder: Recorder
    ) -> None:
        self.module = module
        self.modules = [module]
        self.loss = loss
        self.num_microbatches = plan.num_microbatches
        self.zero = int(plan.layout.zero)
        self.recorder = recorder

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of all micro-batches."""
        total = torch.zeros((), device=self.recorder.device)
        pairs = zip(
            tokens.chunk(self.num_microbatches), labels.chunk(self.num_microbatches), strict=True
        )
        for index, (inputs, targets) in enumerate(pairs):
            last = index == self.num_microbatches - 1
            total += self.microbatch(index, inputs, targets, last)
        return total

    def microbatch(self, index: int, inputs: Tensor, targets: Tensor, last: bool) -> Tensor:
        """One forward and backward; gradients are reduced with the last one."""
        module = self.module
        if isinstance(module, FSDPModule):
            # ZeRO 3 has no room for a whole gradient between micro-batches, ZeRO 1 keeps its
            # parameters whole until the update.
            module.set_requires_gradient_sync(last or self.zero == 3)
            module.set_reshard_after_backward(last or self.zero != 1)
        if isinstance(module, DistributedDataParallel):
            module.require_backward_grad_sync = last
        loss = self.recorder.timed(
            Action(0, "F", index), lambda: self.loss(module(inputs), targets)
        )
        self.recorder.timed(Action(0, "B", index), loss.backward)
        return loss.detach()


def check_pipeline(plan: Plan) -> None:
    """Refuse what torch's schedules cannot run.

    Raises
    ------
    LayoutError
        Too few micro-batches, or a number of them that the schedule cannot group.
    """
    layout, m, schedule = plan.layout, plan.num_microbatches, plan.schedule
    pp = int(layout.pp)
    if pp == 1:
        return
    values = {"schedule": schedule, "pp": pp, "num_microbatches": m}
    least = {"1f1b": pp, "zero-bubble": pp, "dualpipe": 2 * pp}.get(schedule, 1)
    if m < least:
        raise LayoutError(
            f"schedule={schedule} with pp={pp} needs at least {least} micro-batches, and the plan "
            f"has {m}; legal here: num_microbatches={least}, or schedule=gpipe",
            values=values,
            legal={"num_microbatches": [least], "schedule": ["gpipe"]},
        )
    rounds = max(1, m // pp)
    if schedule in ("interleaved", "zero-bubble") and m % rounds:
        near = [m - m % pp, m - m % pp + pp]
        raise LayoutError(
            f"schedule={schedule} with pp={pp} runs {m} micro-batches in {rounds} rounds of equal "
            f"size, and {rounds} does not divide {m}; legal here: "
            f"num_microbatches={near[0]} or {near[1]}",
            values=values,
            legal={"num_microbatches": near},
        )


def chunks_of_rank(plan: Plan, pp_rank: int) -> tuple[ChunkPlan, ...]:
    """The chunks that a pipeline rank holds, in order of virtual stage."""
    return tuple(sorted(plan.stages[pp_rank].chunks, key=lambda chunk: chunk.virtual_stage))


def activation_dtype(plan: Plan) -> torch.dtype:
    """Type of what stages send each other."""
    return torch.float32 if plan.train.precision == "fp32" else torch.bfloat16


def hidden_shape(plan: Plan) -> tuple[int, int, int]:
    """Shape of the residual stream of one micro-batch on one rank.

    Context parallelism splits the sequence, and so does tensor parallelism, which is always with
    sequence parallelism here.
    """
    layout = plan.layout
    rows = plan.train.seq_len // (int(layout.cp) * int(layout.tp))
    return int(layout.micro_batch), rows, plan.model.hidden_size


def build_pipeline(
    plan: Plan,
    meshes: Any,
    make_chunk: MakeChunk,
    loss_fn: LossFunction,
    device: torch.device | str = "cpu",
) -> Pipeline:
    """This rank's part of the model, parallelized, and what runs it.

    Raises
    ------
    LayoutError
        Torch cannot run the schedule with these degrees.
    """
    check_pipeline(plan)
    device = torch.device(device)
    recorder = Recorder(device)
    pp = int(plan.layout.pp)
    if pp == 1 and int(plan.layout.vpp) == 1:
        (chunk,) = plan.stages[0].chunks
        return OneStage(make_chunk(chunk.layers, True, True), loss_fn, plan, recorder)
    group = meshes.group("pp")
    num_stages = pp * int(plan.layout.vpp)
    stages = []
    for chunk in chunks_of_rank(plan, dist.get_rank(group)):
        first, last = chunk.virtual_stage == 0, chunk.virtual_stage == num_stages - 1
        stage = Stage(
            make_chunk(chunk.layers, first, last),
            chunk.virtual_stage,
            num_stages,
            device,
            **boundary_tensors(plan, first=first),
            group=group,
        )
        stage.recorder = recorder
        stages.append(stage)
    if plan.model.tie_word_embeddings:
        for weight in tied_weights([stage.submod for stage in stages], meshes):
            weight.num_copies = 2  # clipping counts its gradient once
    schedule = make_schedule(plan, stages, loss_fn)
    return ManyStages(schedule, stages, plan.num_microbatches, recorder)


def tied_weights(modules: Sequence[nn.Module], meshes: Any) -> list[nn.Parameter]:
    """The embedding's weight where a stage looks it up, or its copy where one multiplies by it.

    Empty where one stage holds both, or the model has two weights.
    """
    if meshes.group(TIED) is None:
        return []
    ends = ("embedding.weight", "head.weight")
    return [
        parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if name.endswith(ends) and not name.endswith("position_embedding.weight")
    ]


def sum_tied(modules: Sequence[nn.Module], meshes: Any) -> None:
    """Give both copies of a tied weight the sum of both gradients; they begin and stay alike.

    To be called once a step, when each is summed over its replicas.
    """
    for weight in tied_weights(modules, meshes):
        grad = weight.grad
        assert grad is not None
        dist.all_reduce(
            grad.to_local() if isinstance(grad, DTensor) else grad, group=meshes.group(TIED)
        )


def boundary_tensors(plan: Plan, *, first: bool) -> dict[str, Tensor]:
    """Shapes of a stage's input and output, so that torch need not run the model to learn them.

    Nothing receives the output of the last stage, so that its shape is of no consequence.
    """
    hidden = torch.empty(
        hidden_shape(plan), dtype=activation_dtype(plan), device="meta", requires_grad=True
    )
    tokens = torch.empty(
        (int(plan.layout.micro_batch), plan.train.seq_len // int(plan.layout.cp)),
        dtype=torch.int64,
        device="meta",
    )
    return {"input_args": tokens if first else hidden, "output_args": hidden}


def make_schedule(plan: Plan, stages: Sequence[Stage], loss_fn: LossFunction) -> Any:
    """Torch's schedule of that name over the stages."""
    m = plan.num_microbatches
    if plan.schedule in SINGLE:
        (stage,) = stages
        return SINGLE[plan.schedule](stage, m, loss_fn=loss_fn, scale_grads=False)
    return MULTI[plan.schedule](list(stages), m, loss_fn=loss_fn, scale_grads=False)
