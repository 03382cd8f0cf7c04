"""Context parallelism: the sequence over ranks; ring attention (zig-zag) or Ulysses.

Ring: the sequence is cut into 2c pieces and rank r holds pieces r and 2c - 1 - r, so that every
rank attends to as many pairs under a causal mask. Keys and values go round; results merge by their
log-sum-exp. Own code, because torch's has no CPU kernel. Ulysses: rank r holds block r, and an
all-to-all trades the sequence for heads around ordinary attention.

References: Liu2023; Jacobs2023; Dao2023.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.mesh import Meshes
from executor.parallel.attention_kernels import block_backward, block_forward
from executor.parallel.collectives import AllToAll
from planner.errors import LayoutError
from planner.layout import CP_KINDS
from planner.plan import Plan


def apply(model: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Swap the attention kernel of every layer, and give every forward pass its positions."""
    if plan.layout.cp == 1:
        return
    group = meshes.group("cp")
    kind = CP_KINDS[plan.layout.cp_kind]
    for module in model.modules():
        if hasattr(module, "core"):
            core = module.core
            if kind == "ulysses":
                module.core = partial(ulysses_attention, group=group, core=core)
            else:
                module.core = partial(ring_attention, group=group)
    positions = local_positions(plan, meshes)
    model.register_forward_pre_hook(partial(fill_positions, positions), with_kwargs=True)


def fill_positions(positions: Tensor, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Give the forward pass this rank's positions where it was given none."""
    if len(args) > 1 or kwargs.get("positions") is not None:
        return args, kwargs
    return args, {**kwargs, "positions": positions.to(args[0].device)}


def local_positions(plan: Plan, meshes: Meshes) -> Tensor:
    """Positions in the sequence of the rows that this rank holds."""
    return split_sequence(torch.arange(plan.train.seq_len)[None], plan, meshes)[0]


def split_sequence(x: Tensor, plan: Plan, meshes: Meshes) -> Tensor:
    """This rank's columns of [b, s]: zig-zag pieces for ring attention, one block for Ulysses."""
    size, rank = plan.layout.cp, meshes.rank("cp")
    if size == 1:
        return x
    if CP_KINDS[plan.layout.cp_kind] == "ulysses":
        return x.chunk(size, dim=1)[rank].contiguous()
    pieces = x.chunk(2 * size, dim=1)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dim=1)


# Ulysses ------------------------------------------------------------------------------------------


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, group: Any, core: Any
) -> Tensor:
    """Attention over the whole sequence on a share of the heads; tensors are [b, heads, s, d]."""
    whole = heads_for_sequence([q, k, v], group)
    out = core(*whole, causal=causal, window=window)
    return sequence_for_heads(out, group)


def heads_for_sequence(parts: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """[b, a, s / c, d] each to [b, a / c, s, d], in one exchange."""
    c = group.size()
    b, _, rows, _ = parts[0].shape
    # to [c, b, s / c, widths of this destination's heads side by side]
    packed = torch.cat(
        [x.unflatten(1, (c, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in parts], dim=-1
    )
    packed = AllToAll.apply(packed, None, None, group)
    packed = packed.transpose(0, 1).reshape(b, c * rows, -1)
    widths = [x.shape[1] // c * x.shape[3] for x in parts]
    return [
        piece.unflatten(-1, (-1, x.shape[3])).transpose(1, 2)
        for piece, x in zip(packed.split(widths, -1), parts, strict=True)
    ]


def sequence_for_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, a / c, s, d] to [b, a, s / c, d]."""
    c = group.size()
    packed = x.unflatten(2, (c, -1)).permute(2, 0, 3, 1, 4)  # [c, b, s / c, a / c, d]
    packed = AllToAll.apply(packed, None, None, group)
    return packed.permute(1, 0, 3, 2, 4).flatten(1, 2)


# Ring ---------------------------------------------------------------------------------------------


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, group: Any
) -> Tensor:
    """Attention of this rank's rows to the rows of all ranks.

    Raises
    ------
    LayoutError
        A sliding window, which rings do not know.
    """
    if window is not None:
        raise LayoutError(
            f"ring attention has no sliding windows and a layer has one of {window} tokens; "
            "legal here: cp_kind=ulysses",
            values={"window": window},
            legal={"cp_kind": ["ulysses"]},
        )
    return RingAttention.apply(q, k, v, causal, group)


class Ring:
    """Neighbours of this rank: what is sent goes to the next, what comes is from the one before."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.to = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self.of = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def start(self, x: Tensor) -> tuple[Tensor, Any]:
        """Send `x` on and begin to receive one like it."""
        incoming = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x, self.to, self.group),
            dist.P2POp(dist.irecv, incoming, self.of, self.group),
        ]
        return incoming, dist.batch_isend_irecv(ops)

    @staticmethod
    def finish(pending: tuple[Tensor, Any]) -> Tensor:
        """The tensor that `start` began to receive."""
        incoming, works = pending
        for work in works:
            work.wait()
        return incoming


def visible(step: int, rank: int, causal: bool) -> tuple[bool, bool, bool]:
    """What is seen of the block that came after `step` hops, which is that of ``rank - step``.

    (The first half of the queries sees nothing, the second half of the keys is seen by none, the
    mask within the block is causal.) An earlier rank's first piece lies before both of ours and its
    second after both; of a later rank our second piece sees both.
    """
    if not causal:
        return False, False, False
    if step == 0:
        return False, False, True
    earlier = rank - step >= 0
    return not earlier, earlier, False


class RingAttention(torch.autograd.Function):
    """Keys and values go round, c - 1 hops; backward again, and their gradients with them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup
    ) -> Tensor:
        ring = Ring(group)
        half, half_kv = q.shape[2] // 2, k.shape[2] // 2
        kv = torch.cat((k, v), dim=-1)  # one message
        out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=torch.float32)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for step in range(ring.size):
            pending = ring.start(kv) if step < ring.size - 1 else None
            late, early, masked = visible(step, ring.rank, causal)
            rows = slice(half, None) if late else slice(None)
            block = kv[:, :, :half_kv] if early else kv
            keys, values = block.split([k.shape[-1], v.shape[-1]], -1)
            o, s = block_forward(q[:, :, rows], keys, values, causal=masked)
            merge(out[:, :, rows], lse[:, :, rows], o, s)
            if pending is not None:
                kv = ring.finish(pending)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.group = causal, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        ring = Ring(ctx.group)
        grad = grads[0].contiguous()
        half, half_kv = q.shape[2] // 2, k.shape[2] // 2
        widths = [k.shape[-1], v.shape[-1]]
        kv = torch.cat((k, v), dim=-1)
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        own = torch.zeros_like(kv)
        carried: Tensor | None = None  # gradient of the block at hand, begun by ranks before
        pending_grad: tuple[Tensor, Any] | None = None
        for step in range(ring.size):
            pending = ring.start(kv) if step < ring.size - 1 else None
            late, early, masked = visible(step, ring.rank, ctx.causal)
            rows = slice(half, None) if late else slice(None)
            columns = slice(None, half_kv) if early else slice(None)
            keys, values = kv[:, :, columns].split(widths, -1)
            dq, dk, dv = block_backward(
                grad[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows],
                causal=masked,
            )  # fmt: skip
            grad_q[:, :, rows] += dq
            if step == 0:
                own[:, :, columns] += torch.cat((dk, dv), -1)
            else:
                if pending_grad is not None:
                    carried = ring.finish(pending_grad)
                carried = torch.zeros_like(kv) if carried is None else carried
                carried[:, :, columns] += torch.cat((dk, dv), -1)
                pending_grad = ring.start(carried)
            if pending is not None:
                kv = ring.finish(pending)
        if pending_grad is not None:
            own += ring.finish(pending_grad)  # its last hop brings each block's gradient home
        grad_k, grad_v = own.split(widths, -1)
        return grad_q.to(q.dtype), grad_k.contiguous(), grad_v.contiguous(), None, None


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Add one block's attention to what is there, in place, weighted by sums of exponentials."""
    total = torch.logaddexp(lse, new_lse)
    out.mul_(torch.exp(lse - total)[..., None])
    out.add_(new_out * torch.exp(new_lse - total)[..., None])
    lse.copy_(total)
