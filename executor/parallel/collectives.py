"""Collectives with a gradient: each is the other's backward.

The sequence is dimension 1 of ``[batch, rows, ...]``. Buffers are laid out so that one call moves a
tensor, whatever dimension it is cut along.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer names first: torch 2.14 warns of the older ones.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the row blocks of all ranks: [b, s / n, ...] to [b, s, ...]."""
    n = group.size()
    parts = x.new_empty((n, *x.shape))
    all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).reshape(x.shape[0], n * x.shape[1], *x.shape[2:])


def scatter_sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep this rank's block of rows: [b, s, ...] to [b, s / n, ...]."""
    n = group.size()
    parts = x.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    out = torch.empty_like(parts[0])
    reduce_scatter_single(out, parts.flatten(0, 1), group=group)
    return out


class GatherRows(torch.autograd.Function):
    """Gather rows forward, sum and scatter their gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return scatter_sum_rows(grads[0], ctx.group), None


class ScatterSumRows(torch.autograd.Function):
    """Sum and scatter rows forward, gather their gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sum_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather_rows(grads[0], ctx.group), None


class AllToAll(torch.autograd.Function):
    """Exchange blocks of dimension 0, of the given lengths; backward sends them home."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int] | None, received: list[int] | None, group: Any
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(
    x: Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """Rows of each rank to each other rank; lengths None where all are equal."""
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
