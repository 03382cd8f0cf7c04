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
    return joined(parts)


def joined(parts: Tensor) -> Tensor:
    """[n, b, s / n, ...] as [b, s, ...]."""
    n, b, rows, *rest = parts.shape
    return parts.transpose(0, 1).reshape(b, n * rows, *rest)


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


class KeptRows:
    """Lets what is gathered be forgotten between forward and backward, and gathered again.

    Entered around the products of a gathered input, it keeps this rank's rows in place of all. The
    second gather starts when `prefetch` is called, beside the backward of what comes later.
    """

    def __init__(self, rows: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        self.rows = rows.detach()
        self.group = group
        self.storage = whole.untyped_storage()._cdata
        self.num_uses = 0
        self.num_used = 0
        self.pending: tuple[Tensor, Any] | None = None
        self.whole: Tensor | None = None

    def pack(self, saved: Tensor) -> Any:
        """Note where in the gathered input a saved tensor lies; others stay as they are."""
        if saved.untyped_storage()._cdata != self.storage:
            return saved
        self.num_uses += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """The saved tensor, from rows gathered once more for all of them."""
        if isinstance(packed, Tensor):
            return packed
        if self.whole is None:
            self.prefetch()
            assert self.pending is not None
            parts, work = self.pending
            work.wait()
            self.whole, self.pending = joined(parts), None
        found = self.whole.as_strided(*packed)
        self.num_used += 1
        if self.num_used % self.num_uses == 0:
            self.whole = None
        return found

    def prefetch(self) -> None:
        """Begin to gather."""
        if self.pending is None and self.whole is None and self.num_uses:
            parts = self.rows.new_empty((self.group.size(), *self.rows.shape))
            source = self.rows.contiguous()
            work = all_gather_single(parts.flatten(0, 1), source, group=self.group, async_op=True)
            self.pending = parts, work

    def entered(self) -> Any:
        """The context in which saved tensors pass through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class ScatterSumRows(torch.autograd.Function):
    """Sum and scatter rows forward, gather their gradient backward; then `kept` gathers again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, kept: KeptRows | None = None
    ) -> Tensor:
        ctx.group, ctx.kept = group, kept
        return scatter_sum_rows(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = gather_rows(grads[0], ctx.group)
        if ctx.kept is not None:
            ctx.kept.prefetch()
        return whole, None, None


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
