"""Data parallelism: replicas and ZeRO sharding, what they keep and what they send.

Weights, gradients and optimizer state of dense layers shard over `shard` neighbours of the joined
cp x dp axis; the rest of it replicates (HSDP). Experts shard over the same fraction of their own
edp axis. ZeRO 1 shards optimizer state, 2 gradients too, 3 parameters too (FSDP).

References: Rajbhandari2020; Zhao2023 (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.layout import Layout
from planner.parallel import offload
from planner.results import CommOp
from planner.runtime import Runtime

MOMENT_BYTES = {
    "adamw": 8.0,
    "adam": 8.0,
    "adamw-bf16": 4.0,
    "adamw-8bit": 2.0,
    "sgd": 4.0,
    "muon": 4.0,
    "lion": 4.0,
    "adafactor": 0.02,
}  # state beside the master weight, bytes per parameter (adafactor: rows and columns only)

QUANTIZED_BYTES = 0.516  # a 4-bit weight with its share of twice-quantised scales


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per parameter of each copy, for one precision, optimizer and runtime."""

    weight: float
    grad: float
    master: float
    moments: float
    step_grad: float
    reduce: float
    gather: float
    frozen: float


def element_bytes(
    runtime: Runtime, precision: str, optimizer: str, quantized: bool
) -> ElementBytes:
    """Copies per parameter; in fp32 training the weights are their own master.

    `frozen` is a LoRA base weight: 2 bytes, or 4 bits and a scale of 8 bits every 64 elements and
    their own scales (double quantisation: 0.516 bytes).

    References: Dettmers2023.
    """
    moments = MOMENT_BYTES[optimizer]
    frozen = QUANTIZED_BYTES if quantized else 2.0
    if precision == "fp32":
        return ElementBytes(4.0, 4.0, 0.0, moments, 0.0, 4.0, 4.0, 4.0 if not quantized else frozen)
    return ElementBytes(
        runtime.weight_bytes,
        runtime.grad_bytes,
        runtime.master_bytes,
        moments,
        runtime.step_grad_bytes,
        runtime.reduce_bytes,
        runtime.gather_bytes,
        frozen,
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """Sizes and strides (in ranks) of the groups that dense and expert parameters use."""

    shard: Any
    replicas: Any
    shard_stride: Any
    replica_stride: Any


def dense_groups(layout: Layout) -> Groups:
    """Groups of dense parameters over the joined cp x dp axis.

    >>> g = dense_groups(Layout(dp=8, tp=4, cp=2, shard=4, zero=3))
    >>> int(g.shard), int(g.replicas), int(g.shard_stride), int(g.replica_stride)
    (4, 4, 4, 16)
    """
    total = np.asarray(layout.dp) * layout.cp
    shard = np.asarray(layout.shard)
    return Groups(shard, total // shard, np.asarray(layout.tp), layout.tp * shard)


def expert_groups(layout: Layout) -> Groups:
    """Groups of expert parameters: the same fraction of the edp axis, at least one rank.

    >>> g = expert_groups(Layout(dp=8, tp=1, ep=4, shard=8, zero=1))
    >>> int(g.shard), int(g.replicas), int(g.shard_stride)
    (2, 1, 4)
    """
    total = np.asarray(layout.dp) * layout.cp
    edp = total * layout.tp // (np.asarray(layout.ep) * layout.etp)
    shard = np.maximum(1, edp * np.asarray(layout.shard) // total)
    stride = np.asarray(layout.ep) * layout.etp
    return Groups(shard, np.maximum(1, edp // shard), stride, stride * shard)


def state_bytes(
    layout: Layout, groups: Groups, size: ElementBytes, runtime: Runtime, *, fp8_copy: bool = False
) -> dict[str, Any]:
    """Persistent bytes per trainable parameter of this rank, by item.

    With n = shard: ZeRO 0 w + g + o; 1 w + g + o / n; 2 w + (g + o) / n; 3 (w + g + o) / n, where
    o = master + moments (+ the gradient copy at the step). Where a runtime keeps only the master
    shard, ZeRO 2 holds the compute copy unsharded from forward to backward and ZeRO 3 only in a
    window (`planner.memory`), unless a pipeline stage keeps it. Offloaded state is not on the
    device.

    References: Rajbhandari2020 section 3.
    """
    zero, n = np.asarray(layout.zero), np.maximum(1, groups.shard)
    state = size.master + size.moments + size.step_grad
    optimizer = np.where(zero >= 1, state / n, state)
    gradients = np.where(zero >= 2, size.grad / n, size.grad)
    weights = np.where(zero >= 3, size.weight / n, size.weight)
    unsharded = np.zeros_like(weights)
    if runtime.weight_shard_is_master and size.master > 0:
        unsharded = np.where(zero == 2, size.weight, 0.0)
        weights = np.where(zero >= 2, 0.0, weights)
    if 2 not in runtime.reduce_every_microbatch:
        # Reduced once a step, gradients add up unsharded until then.
        unsharded = np.where(zero == 2, unsharded + size.reduce, unsharded)
    if runtime.zero3_pp_keeps_stage:
        keeps = (zero >= 2) & (np.asarray(layout.pp) > 1)
        unsharded = np.where(keeps, size.weight + size.reduce, unsharded)
    if fp8_copy:
        copy = runtime.fp8_weight_copy_bytes
        weights = weights + np.where(zero >= 3, 0.0, copy)
    down = offload.is_one_of(layout.offload, offload.OPTIMIZER)
    away = offload.is_one_of(layout.offload, offload.PARAMS)
    optimizer = np.where(down, 0.0, optimizer)
    gradients = np.where(down & (zero >= 2), 0.0, gradients)
    weights = np.where(away, 0.0, weights)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "unsharded": unsharded,
    }


def host_bytes(layout: Layout, groups: Groups, size: ElementBytes) -> Any:
    """Host (or NVMe) bytes per trainable parameter of this rank under offload.

    >>> size = ElementBytes(2, 2, 4, 8, 0, 2, 2, 2)
    >>> g = Groups(8, 1, 1, 8)
    >>> float(host_bytes(Layout(dp=8, zero=3, shard=8, offload=3), g, size))
    2.0
    """
    down = offload.is_one_of(layout.offload, offload.OPTIMIZER)
    away = offload.is_one_of(layout.offload, offload.PARAMS)
    state = size.grad + size.master + size.moments
    return np.where(
        down, (state + np.where(away, size.weight, 0.0)) / np.maximum(1, groups.shard), 0.0
    )


def per_microbatch(layout: Layout, runtime: Runtime) -> tuple[Any, Any]:
    """Parameter gathers and whether gradients reduce, in every micro-batch of a layout.

    ZeRO 3 gathers before forward and again before backward; ZeRO 2 with a sharded master once;
    others never (they gather once a step, after the optimizer). Gradients reduce where the runtime
    says so. A pipeline stage that keeps its parameters does both once a step.

    >>> from types import SimpleNamespace
    >>> runtime = SimpleNamespace(zero3_pp_keeps_stage=True, weight_shard_is_master=True,
    ...     reduce_every_microbatch=(2, 3))
    >>> [int(x) for x in per_microbatch(Layout(zero=3), runtime)]
    [2, 1]
    >>> [int(x) for x in per_microbatch(Layout(zero=3, pp=2), runtime)]
    [0, 0]
    """
    zero = np.asarray(layout.zero)
    kept = (np.asarray(layout.pp) > 1) & runtime.zero3_pp_keeps_stage
    gathers = np.where(zero >= 3, 2, np.where((zero == 2) & runtime.weight_shard_is_master, 1, 0))
    return np.where(kept, 0, gathers), np.isin(zero, runtime.reduce_every_microbatch) & ~kept


def gathers_per_step(layout: Layout, num_microbatches: Any, runtime: Runtime) -> Any:
    """Parameter all-gathers per training step: by micro-batch, or once where ZeRO is on."""
    each, _ = per_microbatch(layout, runtime)
    return np.where(each > 0, each * num_microbatches, np.where(np.asarray(layout.zero) >= 1, 1, 0))


def reduces_per_step(layout: Layout, num_microbatches: Any, runtime: Runtime) -> Any:
    """Gradient reductions per training step: one, or one a micro-batch where the runtime says."""
    _, each = per_microbatch(layout, runtime)
    return np.where(each, num_microbatches, 1)


def comm_ops(
    params: Any,
    trained: Any,
    layout: Layout,
    groups: Groups,
    num_microbatches: Any,
    size: ElementBytes,
    runtime: Runtime,
    axis: str,
) -> list[CommOp]:
    """Collectives of `params` parameters per step; `trained` of them have gradients.

    ZeRO 0: all-reduce. Above: reduce-scatter over the shard group (or the all-reduce that some
    runtimes use), all-reduce of the shard over its replicas, all-gather of parameters.

    >>> from types import SimpleNamespace
    >>> runtime = SimpleNamespace(zero3_pp_keeps_stage=False, weight_shard_is_master=False,
    ...     reduce_every_microbatch=(), reduce_op="reduce_scatter")
    >>> layout = Layout(dp=4, zero=1, shard=4)
    >>> size = ElementBytes(2, 4, 4, 8, 0, 4, 2, 2)
    >>> ops = comm_ops(1e9, 1e9, layout, dense_groups(layout), 8, size, runtime, "shard")
    >>> [(op.kind, float(op.num_bytes), int(op.count)) for op in ops if np.any(op.count)]
    [('reduce_scatter', 4000000000.0, 1), ('all_gather', 2000000000.0, 1)]
    """
    zero, n, r = np.asarray(layout.zero), groups.shard, groups.replicas
    reduces = reduces_per_step(layout, num_microbatches, runtime)
    gathers = gathers_per_step(layout, num_microbatches, runtime)
    grads = trained * size.reduce
    scatter = runtime.reduce_op == "reduce_scatter"
    sharded = (zero >= 1) & (n > 1)
    by_scatter = sharded & (scatter | (zero >= 3))
    frozen = params - trained
    moved = trained * size.gather + frozen * size.frozen
    moved = np.where(zero >= 3, moved, trained * size.gather)
    return [
        CommOp(
            "all_reduce",
            "replicate",
            "step",
            "gradients",
            np.where(zero == 0, grads, grads / n),
            np.where(r * np.where(zero == 0, n, 1) > 1, reduces, 0),
        ),
        CommOp(
            "reduce_scatter", axis, "backward", "gradients", grads, np.where(by_scatter, reduces, 0)
        ),
        CommOp(
            "all_reduce",
            axis,
            "step",
            "gradients",
            grads,
            np.where(sharded & ~by_scatter, reduces, 0),
        ),
        CommOp("all_gather", axis, "forward", "parameters", moved, np.where(sharded, gathers, 0)),
    ]
