"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

The expert grid (etp, ep, edp) is folded over the ranks of the attention grid (tp, cp, dp). Every
rank feeds its T / t tokens, k times each, to the dispatcher.

References: Shazeer2017; DeepSeekV3; parallel folding in Megatron-Core.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.results import CommOp
from planner.specs import ModelSpec, MoeSpec


def comm_ops(
    model: ModelSpec,
    moe: MoeSpec,
    tokens: Any,
    tp: Any,
    ep: Any,
    etp: Any,
    element_bytes: float,
    imbalance: float = 1.0,
    route_bytes: float = 0.0,
) -> list[CommOp]:
    """Collectives of one MoE layer and micro-batch; `tokens` is b s / c.

    Dispatch and combine are an all-to-all each of k (T / t) h elements; backward repeats both. With
    expert tensor parallelism the received rows are gathered over etp, and reduce-scattered after.
    `imbalance` stretches the fullest rank's share. Where a routed token's probability
    (`route_bytes`) goes apart, that is one more all-to-all each way, and counts are gathered.

    >>> moe = MoeSpec(8, 2, 512)
    >>> from planner.specs import AttentionSpec, LayerSpec
    >>> model = ModelSpec("m", 512, 1000, (LayerSpec(AttentionSpec(8, 8, 64), moe=moe),), (0,))
    >>> [(op.kind, op.phase, int(op.num_bytes), int(op.count))
    ...  for op in comm_ops(model, moe, 1024, 1, 4, 1, 2.0) if op.count]
    [('all_to_all', 'forward', 2097152, 2), ('all_to_all', 'backward', 2097152, 2)]
    """
    fed = tokens / np.asarray(tp)
    size = (
        fed
        * moe.num_experts_per_tok
        * (moe.latent_size or model.hidden_size)
        * element_bytes
        * imbalance
    )
    on = np.where(np.asarray(ep) > 1, 2, 0)
    split = np.where(np.asarray(etp) > 1, 1, 0)
    gathered = size * np.asarray(etp)
    apart = np.where(on > 0, 1, 0) if route_bytes else 0 * on
    routes = fed * moe.num_experts_per_tok * route_bytes
    counts = 8.0 * moe.num_experts * np.asarray(ep)
    return [
        CommOp("all_to_all", "ep", "forward", "dispatch and combine", size, on),
        CommOp("all_to_all", "ep", "backward", "dispatch and combine", size, on),
        CommOp("all_gather", "ep", "forward", "counts", counts, apart),
        CommOp("all_to_all", "ep", "forward", "probabilities", routes, apart),
        CommOp("all_to_all", "ep", "backward", "probability gradients", routes, apart),
        CommOp("all_gather", "etp", "forward", "expert rows", gathered, split),
        CommOp("reduce_scatter", "etp", "forward", "expert output", gathered, split),
        CommOp("all_gather", "etp", "backward", "expert output gradient", gathered, split),
        CommOp("reduce_scatter", "etp", "backward", "expert row gradient", gathered, split),
    ]
