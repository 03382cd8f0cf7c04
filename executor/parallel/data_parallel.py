"""Data parallelism: DDP, FSDP2 (ZeRO 1 to 3, HSDP), and the sums that neither of them takes.

Gradients are sums everywhere, never means: the loss brings the weight of a token, so that experts,
which see the tokens of other ranks too, need no factor of their own.

| zero | fp32 | bf16 |
| 0 | DDP if all parameters are plain; else one sum a block at the end | FSDP2 over shards of one |
| 1, 2, 3 | FSDP2; 3 reshards after forward, unless a pipeline keeps its stage | the same |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from executor.mesh import Meshes
from executor.moe import Experts
from executor.parallel import offload, tensor_parallel
from planner.plan import Plan

# Name of the option not to broadcast buffers before each forward, which torch has changed.
NO_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
SPLITS_BACKWARD = ("zero-bubble", "dualpipe")


def apply(model: nn.Module, plan: Plan, meshes: Meshes) -> nn.Module:
    """Wrap or shard one chunk; returns the module to call."""
    if uses_fsdp(plan):
        return shard(model, plan, meshes)
    offload.apply(plan, meshes.device_type)
    if uses_ddp(plan):
        return replicate(model, meshes)
    if not splits_backward(plan):
        tensor_parallel.lend_leaves(model)
    return model


def uses_fsdp(plan: Plan) -> bool:
    """Whether FSDP2 holds the parameters: any ZeRO stage, and all half precision."""
    return plan.layout.zero > 0 or plan.train.precision != "fp32"


def uses_ddp(plan: Plan) -> bool:
    """DDP knows plain parameters of one group, and backward passes in one piece."""
    layout = plan.layout
    return (
        not uses_fsdp(plan)
        and layout.dp * layout.cp > 1
        and layout.tp == 1
        and layout.ep == 1
        and not splits_backward(plan)
    )


def splits_backward(plan: Plan) -> bool:
    """Whether the pipeline runs backward in two parts."""
    return plan.layout.pp > 1 and plan.schedule in SPLITS_BACKWARD


def replicate(model: nn.Module, meshes: Meshes) -> nn.Module:
    """DDP over the joined dp x cp axis."""
    wrapped = DistributedDataParallel(
        model,
        process_group=meshes.group("replicate"),
        init_sync=False,
        gradient_as_bucket_view=True,
        **{NO_BUFFERS: False},
    )
    wrapped.register_comm_hook(meshes.group("replicate"), sum_bucket)
    return wrapped


# DDP reads the annotation of `bucket`, and as text it would refuse it.
def sum_bucket(state: Any, bucket):  # type: ignore[no-untyped-def]
    """Sum a bucket of gradients, where DDP by itself would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda _: bucket.buffer())  # summed in place


# Sharding -----------------------------------------------------------------------------------------


def shard(model: nn.Module, plan: Plan, meshes: Meshes) -> nn.Module:
    """FSDP2: experts over their own axes, then each layer, embedding and head, then the rest."""
    settings = {
        "mp_policy": precision_policy(plan.train.precision),
        "offload_policy": offload.apply(plan, meshes.device_type),
        "reshard_after_forward": plan.layout.zero == 3 and plan.layout.pp == 1,
    }
    experts = meshes.expert_fsdp
    for layer in model.layers.values():
        if layer.moe is not None and experts is not None:
            shard_experts(layer.moe.experts, experts, settings)
        fully_shard(layer, mesh=meshes.fsdp, **settings)
    if not getattr(model, "tied", False):
        for block in edges(model):
            fully_shard(block, mesh=meshes.fsdp, **settings)
    fully_shard(model, mesh=meshes.fsdp, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def edges(model: nn.Module) -> list[list[nn.Module]]:
    """Embedding, and head, each with what belongs to it."""
    names = (("embedding", "position_embedding"), ("final_norm", "head"))
    parts = [[getattr(model, name, None) for name in group] for group in names]
    return [found for part in parts if (found := [m for m in part if m is not None])]


def shard_experts(experts: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    """Cut experts along a width that the ranks divide, else over the experts themselves."""
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.shape[1] % ranks == 0 else Shard(0)

    fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **settings)


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Compute in bf16 and reduce in fp32, or all in fp32."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Sums at the end of a step ------------------------------------------------------------------------


@torch.no_grad()
def finish_gradients(modules: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Sum what is still partial: over tp, and over replicas that neither DDP nor FSDP serves.

    To be called once a step, after the last backward and before clipping.
    """
    for module in modules:
        tensor_parallel.collect_leaves(module.parameters())
        sum_whole(module.parameters(), meshes)
        if uses_fsdp(plan) or isinstance(module, DistributedDataParallel):
            continue  # it has summed over replicas
        experts = experts_of(module, meshes)
        for block in blocks(module):
            sum_block(block, experts, meshes)


def blocks(module: nn.Module) -> list[list[nn.Parameter]]:
    """Parameters of each layer, of the embedding and of the head: what is reduced together."""
    units = [[layer] for layer in module.layers.values()] + edges(module)
    seen: set[int] = set()
    found = []
    for unit in units:
        parameters = [p for part in unit for p in part.parameters() if id(p) not in seen]
        seen.update(id(p) for p in parameters)
        found.append(parameters)
    return found


def sum_whole(parameters: Iterable[nn.Parameter], meshes: Meshes) -> None:
    """Sum over tp the gradients of parameters that are whole on every rank, in one message.

    Each tensor rank has seen its own rows or heads alone.
    """
    grads = [local_grad(p) for p in parameters if p.grad is not None and whole_over_tp(p)]
    if grads:
        sum_together(grads, meshes.group("tp"))


def whole_over_tp(parameter: nn.Parameter) -> bool:
    """Whether every tensor-parallel rank holds all of a parameter (or of its FSDP shard)."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in names and parameter.placements[names.index("tp")].is_replicate()


def experts_of(module: nn.Module, meshes: Meshes) -> set[int]:
    """Identities of the parameters of routed experts, where those have axes of their own."""
    if meshes.expert is None:
        return set()
    experts = [part for part in module.modules() if isinstance(part, Experts)]
    return {id(p) for part in experts for p in part.parameters()}


def sum_block(parameters: Sequence[nn.Parameter], experts: set[int], meshes: Meshes) -> None:
    """Sum one block's gradients over the ranks that hold the same parameters."""
    dense, expert = [], []
    for p in parameters:
        if p.grad is not None:
            (expert if id(p) in experts else dense).append(local_grad(p))
    for grads, axis in ((dense, "replicate"), (expert, "edp")):
        group = meshes.group(axis)
        if grads and group is not None:
            sum_together(grads, group)


def local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def sum_together(grads: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce several gradients in place, in one message."""
    joined = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(joined, group=group)
    parts = joined.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
