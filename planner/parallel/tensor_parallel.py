"""Tensor parallelism: collectives around the split matrix products of a layer.

Without sequence parallelism each block ends in an all-reduce of the full activation, forward, and
backward for the gradient of its input. With sequence parallelism the all-reduce becomes a
reduce-scatter at the end and an all-gather at the start; backward gathers the saved input once
more, under the input-gradient product (hidden).

References: Shoeybi2019; Korthikanti2022 section 4.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.results import CommOp
from planner.specs import LayerSpec, ModelSpec


def blocks(kind: LayerSpec) -> int:
    """Split blocks of a layer that end in a tensor-parallel reduction.

    A dense layer has two (attention, MLP), or one where they run in parallel. Routed experts reduce
    inside expert parallelism; a shared expert is a block of its own.

    >>> from planner.specs import AttentionSpec, MlpSpec
    >>> blocks(LayerSpec(AttentionSpec(8, 8, 64), mlp=MlpSpec(512)))
    2
    """
    count = 1
    has_mlp = kind.mlp is not None or (kind.moe is not None and kind.moe.shared_intermediate_size)
    if has_mlp and not kind.parallel:
        count += 1
    return count


def comm_ops(
    model: ModelSpec,
    kind: LayerSpec,
    tokens: Any,
    tp: Any,
    element_bytes: float,
    sequence_parallel: bool,
    gather_bytes: float | None = None,
) -> list[CommOp]:
    """Collectives of one layer and micro-batch; `tokens` is b s / c, bytes as nccl-tests counts.

    `gather_bytes` is the element size of what products gather, where it is not that of activations.

    >>> from planner.specs import AttentionSpec, MlpSpec
    >>> kind = LayerSpec(AttentionSpec(8, 8, 64), mlp=MlpSpec(2048))
    >>> model = ModelSpec("m", 512, 1000, (kind,), (0,))
    >>> [(op.kind, op.phase, int(op.num_bytes), int(op.count))
    ...  for op in comm_ops(model, kind, 1024, 2, 2.0, False)]
    [('all_reduce', 'forward', 1048576, 2), ('all_reduce', 'backward', 1048576, 2)]
    """
    size = tokens * model.hidden_size * element_bytes
    count = np.where(np.asarray(tp) > 1, blocks(kind), 0)
    if not sequence_parallel:
        return [
            CommOp("all_reduce", "tp", "forward", "block output", size, count),
            CommOp("all_reduce", "tp", "backward", "block input gradient", size, count),
        ]
    gathered = size if gather_bytes is None else size / element_bytes * gather_bytes
    return [
        CommOp("all_gather", "tp", "forward", "block input", gathered, count),
        CommOp("reduce_scatter", "tp", "forward", "block output", size, count),
        CommOp("all_gather", "tp", "backward", "block output gradient", gathered, count),
        CommOp("all_gather", "tp", "backward", "block input again, hidden", gathered, count),
        CommOp("reduce_scatter", "tp", "backward", "block input gradient", size, count),
    ]


def edge_comm_ops(
    model: ModelSpec, tokens: Any, tp: Any, element_bytes: float, sequence_parallel: bool
) -> tuple[list[CommOp], list[CommOp]]:
    """Collectives of the vocabulary-parallel embedding, and of the head with its loss.

    Embedding: one reduction of its output forward, a gather of its gradient backward. Head: a
    gather of its input, a reduction of its gradient; the loss reduces max, target logit and sum of
    exponentials, 4 bytes a token each.
    """
    size = tokens * model.hidden_size * element_bytes
    on = np.where(np.asarray(tp) > 1, 1, 0)
    loss = CommOp("all_reduce", "tp", "forward", "loss statistics", tokens * 4.0, 3 * on)
    if not sequence_parallel:
        return (
            [CommOp("all_reduce", "tp", "forward", "embedding output", size, on)],
            [CommOp("all_reduce", "tp", "backward", "head input gradient", size, on), loss],
        )
    return (
        [
            CommOp("reduce_scatter", "tp", "forward", "embedding output", size, on),
            CommOp("all_gather", "tp", "backward", "embedding gradient", size, on),
        ],
        [
            CommOp("all_gather", "tp", "forward", "head input", size, on),
            CommOp("all_gather", "tp", "backward", "head input again, hidden", size, on),
            CommOp("reduce_scatter", "tp", "backward", "head input gradient", size, on),
            loss,
        ],
    )
