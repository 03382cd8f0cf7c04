"""Context parallelism: the sequence split over ranks, keys and values exchanged in attention.

Three kinds, codes of `planner.layout.CP_KINDS`: ring (keys and values go round while attention runs
on the block at hand), all-gather (once, before attention), Ulysses (all-to-all trades sequence for
heads).

References: Liu2023; Jacobs2023.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.operations import local_kv_heads
from planner.results import CommOp
from planner.specs import AttentionSpec

RING, ALL_GATHER, ULYSSES = 0, 1, 2


def comm_ops(
    spec: AttentionSpec, tokens: Any, tp: Any, cp: Any, cp_kind: Any, element_bytes: float
) -> list[CommOp]:
    """Collectives of one layer and micro-batch on one rank; `tokens` is b s / c.

    Ring: c - 1 sends of the local K and V forward; backward sends K and V round again and dK and dV
    with them. All-gather: gathers K and V (c times the local bytes), again in backward, which also
    reduce-scatters dK and dV. Ulysses: q, k, v in and the output back, each way.

    >>> from planner.specs import AttentionSpec
    >>> ops = comm_ops(AttentionSpec(8, 8, 64), 1024, 1, 2, RING, 2.0)
    >>> [(op.phase, int(op.num_bytes), int(op.count)) for op in ops if op.count]
    [('forward', 2097152, 1), ('backward', 4194304, 1)]
    """
    if spec.kind == "none":
        return []
    cp = np.asarray(cp)
    cp_kind = np.asarray(cp_kind)
    kv = (
        local_kv_heads(spec.num_key_value_heads, tp)
        if spec.kind == "gqa"
        else (spec.num_attention_heads / np.asarray(tp))
    )
    kv_bytes = tokens * kv * (spec.head_dim + spec.v_dim) * element_bytes
    heads = spec.num_attention_heads / np.asarray(tp)
    exchanged = (
        tokens
        * element_bytes
        * (heads * (spec.head_dim + spec.v_dim) + kv * (spec.head_dim + spec.v_dim))
    )
    on = cp > 1
    ring = np.where(on & (cp_kind == RING), cp - 1, 0)
    gather = np.where(on & (cp_kind == ALL_GATHER), 1, 0)
    trade = np.where(on & (cp_kind == ULYSSES), 2, 0)
    half = exchanged / 2
    return [
        CommOp("send_recv", "cp", "forward", "keys and values", kv_bytes, ring),
        CommOp("send_recv", "cp", "backward", "keys, values and gradients", 2 * kv_bytes, ring),
        CommOp("all_gather", "cp", "forward", "keys and values", kv_bytes * cp, gather),
        CommOp("all_gather", "cp", "backward", "keys and values", kv_bytes * cp, gather),
        CommOp(
            "reduce_scatter", "cp", "backward", "key and value gradients", kv_bytes * cp, gather
        ),
        CommOp("all_to_all", "cp", "forward", "heads for sequence, and back", half, trade),
        CommOp("all_to_all", "cp", "backward", "heads for sequence, and back", half, trade),
    ]
