"""Tensor and sequence parallelism: DTensor holds the shards, plain kernels work on them.

Every parameter of a tensor-parallel model is a DTensor on the tp axis, so that FSDP, checkpoints
and clipping know how it is cut. Its module computes with the local shard, and between modules each
rank has a block of rows of the sequence: gathered where a column-parallel block begins, summed and
scattered where a row-parallel one ends. Parameters that are whole on every rank (norms, routers)
see a part of the rows or heads alone; their gradients are partial sums until
`data_parallel.finish_gradients`.

References: Shoeybi2019; Korthikanti2022 section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from executor.mesh import Meshes
from executor.moe import Experts, Moe
from executor.parallel.collectives import GatherRows, KeptRows, ScatterSumRows
from planner.errors import LayoutError
from planner.plan import Plan

LEAF = "lent_leaf"  # attribute of a parameter
COLUMN, ROW = 0, 1  # dimension of a Linear's weight that is cut
# Linears that grow from what all ranks hold, by their name in attention and feed-forward modules.
COLUMNS = ("q", "k", "v", "kv", "gate", "up")
ROWS = ("out", "down")


def apply(model: nn.Module, plan: Plan, meshes: Meshes, policies: Mapping[int, str]) -> None:
    """Cut every parameter but the routed experts over tp, and put the collectives in place.

    `policies` are the recompute policies by global index of a layer: one that runs its forward
    again has its inputs gathered then, and the others keep their rows and gather in backward.

    Raises
    ------
    LayoutError
        Query and key norms over all heads, which no rank sees.
    """
    mesh = meshes.tp
    if plan.layout.tp == 1 or mesh is None:
        return
    if any(kind.attention.qk_norm == "full" for kind in plan.model.kinds):
        raise LayoutError(
            f"tp={plan.layout.tp} does not run with qk_norm=full: a norm over all heads spans the "
            "tensor ranks; legal here: tp=1",
            values={"tp": plan.layout.tp, "qk_norm": "full"},
            legal={"tp": [1]},
        )
    cut = ends_of(model, mesh)
    for index, layer in model.layers.items():
        again = policies[int(index)] != "full"
        for module in layer.modules():
            if hasattr(module, "core") or is_mlp(module):
                cut |= split_block(module, mesh, again=again)
            elif isinstance(module, Moe):
                sequence_sum(module, mesh.get_group())
            elif isinstance(module, Experts):
                cut.add(module)  # expert parallelism's, or whole on every rank
    for module in model.modules():
        if module not in cut and list(module.parameters(recurse=False)):
            distribute(module, mesh, {})
            localize(module)


def is_mlp(module: nn.Module) -> bool:
    """A dense or shared feed-forward block; routed experts hold tensors and no Linears."""
    return isinstance(getattr(module, "up", None), nn.Linear)


def split_block(block: nn.Module, mesh: DeviceMesh, *, again: bool) -> set[nn.Module]:
    """Cut the Linears of attention or feed-forward, gather at its start, scatter at its end."""
    group = mesh.get_group()
    done: set[nn.Module] = set()
    for name, linear in block.named_children():
        if name in COLUMNS:
            distribute(linear, mesh, {"weight": Shard(COLUMN), "bias": Shard(0)})
            localize(linear)
            done.add(linear)
        elif name in ROWS:
            distribute(linear, mesh, {"weight": Shard(ROW)})
            linear.forward = partial(row_linear, linear, block, group)
            done.add(linear)
    block.forward = partial(with_gathered_input, block, block.forward, group, again)
    return done


def ends_of(model: nn.Module, mesh: DeviceMesh) -> set[nn.Module]:
    """Cut embedding and head over the vocabulary."""
    found: set[nn.Module] = set()
    embedding, head, places = model.embedding, model.head, model.position_embedding
    if embedding is not None:
        distribute(embedding, mesh, {"weight": Shard(0)})
        embedding.forward = partial(vocabulary_embedding, embedding, mesh)
        found.add(embedding)
    if places is not None:
        places.register_forward_pre_hook(partial(own_rows, mesh))
    if head is not None:
        if model.tied:
            head.weight = embedding.weight
        distribute(head, mesh, {"weight": Shard(0), "bias": Shard(0)})
        localize(head)
        head.forward = partial(with_gathered_input, head, head.forward, mesh.get_group(), True)
        found.add(head)
    return found


def distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make DTensors of a module's own parameters; what is not named in `placements` stays whole."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            continue
        placement = placements.get(name, Replicate())
        module.register_parameter(name, sharded(parameter, mesh, placement))


def sharded(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a parameter, as torch.chunk cuts it, without a message."""
    whole = parameter.detach()
    part = whole
    if isinstance(placement, Shard):
        start, length = cut_of(whole.shape[placement.dim], mesh.size(), mesh.get_local_rank())
        part = whole.narrow(placement.dim, start, length).clone(
            memory_format=torch.contiguous_format
        )
    value = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def cut_of(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of one part of a dimension, as torch.chunk cuts it.

    >>> [cut_of(10, 4, i) for i in range(4)]
    [(0, 3), (3, 3), (6, 3), (9, 1)]
    """
    each = -(-length // parts)
    start = min(index * each, length)
    return start, min(each, length - start)


def local(parameter: Tensor | None) -> Any:
    """The local shard, through which gradients flow back as one of the same placement.

    Those of a whole parameter are this rank's addend, until `finish_gradients` sums them.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    leaf = getattr(parameter, LEAF, None)
    return parameter.to_local() if leaf is None else leaf


def lend_leaves(model: nn.Module) -> None:
    """Give every DTensor parameter a plain leaf over the same memory, to compute with.

    A DTensor's way from its shard and back costs more than a small product does. Not for FSDP,
    which brings new parameters, nor for schedules that split backward, which look for the
    parameters themselves in the graph.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            leaf = parameter.to_local().detach().requires_grad_(parameter.requires_grad)
            setattr(parameter, LEAF, leaf)


def collect_leaves(parameters: Iterable[nn.Parameter]) -> None:
    """Move the gradients of lent leaves to their parameters."""
    for parameter in parameters:
        leaf = getattr(parameter, LEAF, None)
        if leaf is None or leaf.grad is None:
            continue
        grad = DTensor.from_local(
            leaf.grad,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        leaf.grad = None


def localize(module: nn.Module) -> None:
    """Let a module compute with local shards: they stand in its parameters' place in `forward`."""
    inner = module.forward
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            module.__dict__[name] = local(module._parameters[name])
        try:
            return inner(*args, **kwargs)
        finally:
            for name in names:
                del module.__dict__[name]

    module.forward = forward  # type: ignore[method-assign]


def with_gathered_input(
    block: nn.Module,
    inner: Callable[..., Tensor],
    group: dist.ProcessGroup,
    again: bool,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run a column-parallel block on the rows of all ranks; keep those of this rank if `again`."""
    whole = GatherRows.apply(x, group)
    if not again or not torch.is_grad_enabled():
        return inner(whole, *args, **kwargs)
    kept = KeptRows(x, whole, group)
    block.__dict__["kept_rows"] = kept
    with kept.entered():
        out = inner(whole, *args, **kwargs)
    del block.__dict__["kept_rows"]
    return out


def row_linear(linear: nn.Linear, block: nn.Module, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """A row-parallel product: partial sums of all rows, then this rank's rows of the sum."""
    kept = block.__dict__.get("kept_rows")
    out = ScatterSumRows.apply(functional.linear(x, local(linear.weight)), group, kept)
    return out if linear.bias is None else out + local(linear.bias)


def vocabulary_embedding(embedding: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
    """Look up the rows of the table held here, zero elsewhere; sum over ranks and scatter."""
    start, length = cut_of(embedding.weight.shape[0], mesh.size(), mesh.get_local_rank())
    table = local(embedding.weight)
    index = tokens - start
    elsewhere = (index < 0) | (index >= length)
    found = functional.embedding(index.masked_fill(elsewhere, 0), table)
    found = found.masked_fill(elsewhere[..., None], 0.0)
    return ScatterSumRows.apply(found, mesh.get_group())


def own_rows(mesh: DeviceMesh, module: nn.Module, args: Any) -> Any:
    """This rank's block of positions, which stand in the last dimension."""
    (positions,) = args
    return (positions.chunk(mesh.size(), dim=-1)[mesh.get_local_rank()],)


# Balancing loss -----------------------------------------------------------------------------------


class SumForward(torch.autograd.Function):
    """Sum over ranks; every rank's gradient is its own, since each counts its own rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def sequence_sum(moe: Moe, group: dist.ProcessGroup) -> None:
    """Let a router's balancing loss see the rows of other ranks too."""
    before: Callable[[Tensor], Tensor] | None = moe.sum_over_sequence

    def summed(x: Tensor) -> Tensor:
        return SumForward.apply(x if before is None else before(x), group)

    moe.sum_over_sequence = summed


# Loss ---------------------------------------------------------------------------------------------


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token over a vocabulary cut over ranks; never gathers the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup
    ) -> Tensor:
        largest = logits.amax(-1) if logits.shape[-1] else logits.new_full(labels.shape, -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        index = labels - start
        elsewhere = (index < 0) | (index >= logits.shape[-1])
        index = index.masked_fill(elsewhere, 0)
        if logits.shape[-1]:
            target = shifted.gather(-1, index[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        else:
            target = torch.zeros_like(largest)
        dist.all_reduce(target, group=group)
        weights = shifted.exp_()
        total = weights.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(weights.div_(total[:, None]), index, elsewhere)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, index, elsewhere = ctx.saved_tensors
        if weights.shape[-1]:
            ones = torch.where(elsewhere, 0.0, 1.0).to(weights.dtype)
            weights = weights.scatter_add(-1, index[:, None], -ones[:, None])
        return weights * grads[0][:, None], None, None, None


def vocabulary_loss_sum(
    logits: Tensor, labels: Tensor, vocab_size: int, mesh: DeviceMesh, ignored: int
) -> Tensor:
    """Cross-entropy summed over tokens [nats] of logits [b, s, vocab / tp]; alike on tp ranks."""
    start, _ = cut_of(vocab_size, mesh.size(), mesh.get_local_rank())
    flat = labels.flatten()
    losses = VocabularyCrossEntropy.apply(
        logits.flatten(0, -2).float(), flat, start, mesh.get_group()
    )
    return losses.masked_fill(flat == ignored, 0.0).sum()
