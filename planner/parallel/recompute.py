"""Recompute: what a policy keeps of a layer, and what it does again in backward.

Policies are those of `planner.layout.RECOMPUTE`: ``none`` keeps everything an operation saves;
``full`` keeps the layer's input alone and repeats the whole forward, collectives included;
``selective`` drops the operations that the runtime names; ``offload`` sends what is kept to host
memory.

References: Chen2016; Korthikanti2022 section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.operations import Operation

HALF_OF_PRODUCTS = "matmul_half"


def dropped_fraction(operation: Operation, modules: Sequence[str]) -> float:
    """Share of an operation that the selective policy drops and repeats.

    ``matmul_half`` is the selective policy of torchtitan: every second matrix product, and all the
    memory-bound work.

    >>> dropped_fraction(Operation("act", "memory_bound", modules=("activation",)), ["activation"])
    1.0
    """
    if any(module in modules for module in operation.modules):
        return 1.0
    if HALF_OF_PRODUCTS in modules and operation.part not in ("attention_core", "router"):
        if operation.gemm is not None:
            return 0.5
        return 0.0 if operation.name.endswith(("block_input", "residual")) else 1.0
    return 0.0


def kept_bytes(operations: Sequence[Operation], policy: str, modules: Sequence[str]) -> Any:
    """Bytes kept on the device per micro-batch and layer under a policy.

    >>> ops = [Operation("block_input", "memory_bound", kept_bytes=10.0),
    ...        Operation("act", "memory_bound", kept_bytes=4.0, modules=("activation",))]
    >>> policies = ("none", "selective", "full", "offload")
    >>> [float(kept_bytes(ops, policy, ["activation"])) for policy in policies]
    [14.0, 10.0, 10.0, 0.0]
    """
    if policy == "offload":
        return 0.0 * sum_bytes(operations)
    if policy == "full":
        return sum_bytes([op for op in operations if op.name == "block_input"])
    if policy == "selective":
        return sum((1.0 - dropped_fraction(op, modules)) * op.kept_bytes for op in operations)
    return sum_bytes(operations)


def sum_bytes(operations: Sequence[Operation]) -> Any:
    """Total that a layer saves when nothing is recomputed."""
    return sum(op.kept_bytes for op in operations)


def working_bytes(operations: Sequence[Operation], policy: str, modules: Sequence[str]) -> Any:
    """What a policy brings back of one layer while it runs backward.

    Under full recompute or offload one whole layer's set; under selective what was dropped.
    """
    whole = sum_bytes(operations)
    if policy == "none":
        return 0.0 * whole
    if policy == "offload":
        return 2.0 * whole  # one layer in use, the next on its way
    return whole - kept_bytes(operations, policy, modules)


def gradient_bytes(operations: Sequence[Operation], element_bytes: float) -> Any:
    """Largest gradients alive at once in backward: of one product's output and of its input.

    max over products of e g m (n + k).

    >>> from planner.operations import Gemm
    >>> float(gradient_bytes([Operation("fc1", "mlp_gemm", gemm=Gemm(8, 4, 2))], 2.0))
    96.0
    """
    largest: Any = 0.0
    for op in operations:
        if op.gemm is not None:
            g = op.gemm
            largest = np.maximum(largest, element_bytes * g.groups * g.m * (g.n + g.k))
    return largest
