"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Experts are cut over the ep axis as DTensors. Rows go out sorted by expert in one all-to-all with
uneven lengths, and come back in a second; a small exchange of lengths comes before. The weights of
a token's experts stay where the token is.

References: Shazeer2017.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from executor.mesh import Meshes
from executor.moe import Moe, sort_by_expert
from executor.parallel.collectives import AllToAll, all_to_all
from executor.parallel.tensor_parallel import sequence_sum, sharded
from planner.plan import Plan


def apply(model: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Keep this rank's experts of every layer, and send tokens to theirs."""
    for moe in model.modules():
        if not isinstance(moe, Moe):
            continue
        if plan.layout.cp > 1:
            sequence_sum(moe, meshes.group("cp"))
        if plan.layout.ep > 1:
            mesh = meshes.ep
            for name, parameter in list(moe.experts.named_parameters(recurse=False)):
                moe.experts.register_parameter(name, sharded(parameter, mesh, Shard(0)))
            moe.dispatch = partial(dispatch, group=mesh.get_group())


def dispatch(
    moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Every expert of every rank on its tokens [t, h]; as `executor.moe.dispatch_local`."""
    ep, top_k = group.size(), chosen.shape[1]
    order, counts = sort_by_expert(chosen, moe.spec.num_experts)
    sent, received = exchange_counts(moe, counts, x.shape[0], group)
    token = order // top_k
    rows = AllToAll.apply(x[token], row_sums(sent), row_sums(received), group)
    # Rows lie by source, then by expert; experts want them by expert.
    by_expert, sizes = expert_order(received, x.device)
    rows = moe.experts(rows[by_expert], sizes)
    home = torch.empty_like(by_expert)
    home[by_expert] = torch.arange(by_expert.shape[0], device=x.device)
    rows = AllToAll.apply(rows[home], row_sums(received), row_sums(sent), group)
    rows = rows * weights.flatten()[order, None].to(rows.dtype)
    assert len(sent) == ep
    return torch.zeros_like(x).index_add(0, token, rows)


def exchange_counts(
    moe: Moe, counts: Tensor, num_tokens: int, group: dist.ProcessGroup
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows per local expert that go to each rank, and that come from each."""
    ep = group.size()
    if moe.balanced:
        even = moe.balanced_counts(num_tokens)
        each = len(even) // ep
        mine = even[group.rank() * each : (group.rank() + 1) * each]
        return [even[r * each : (r + 1) * each] for r in range(ep)], [mine] * ep
    arriving = all_to_all(counts, None, None, group)
    both = torch.stack((counts, arriving)).view(2, ep, -1).tolist()
    return both[0], both[1]


def row_sums(counts: list[list[int]]) -> list[int]:
    """Rows by rank."""
    return [sum(row) for row in counts]


def expert_order(received: list[list[int]], device: Any) -> tuple[Tensor, list[int]]:
    """Index that sorts rows by local expert, rows of one expert by source; and rows per expert.

    >>> order, sizes = expert_order([[1, 2], [2, 1]], "cpu")
    >>> order.tolist(), sizes
    ([0, 3, 4, 1, 2, 5], [3, 3])
    """
    sources, experts = len(received), len(received[0])
    ends = list(accumulate(count for row in received for count in row))
    pieces = [
        torch.arange(end - received[r][e], end, device=device)
        for e in range(experts)
        for r in range(sources)
        for end in [ends[r * experts + e]]
    ]
    return torch.cat(pieces), [sum(row[e] for row in received) for e in range(experts)]
