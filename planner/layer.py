"""Seconds and bytes of one layer on one rank: operations and collectives put on the hardware.

Everything broadcasts over a table of layouts (axis U). Costs are named addends; `overlap` says what
communication hides: ``runtime`` as the runtime file has it, ``all`` (lower bound), ``none``
(upper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.collectives import collective_s
from planner.contention import contention_s
from planner.feed_forward import moe_operations
from planner.flops import layer_operations
from planner.host import PHASES, drained_wait_s, layer_launches
from planner.layout import RECOMPUTE, Layout
from planner.operation_time import operation_s
from planner.operations import Operation, shard_of
from planner.parallel import context_parallel, expert_parallel, offload, recompute, tensor_parallel
from planner.parallel.data_parallel import QUANTIZED_BYTES
from planner.parameters import layer_parameters
from planner.results import Array, CommOp
from planner.roofline import memory_bound_s
from planner.setting import Setting
from planner.specs import LayerSpec

COMPUTE = ("attention_gemm", "attention_core", "mlp_gemm", "expert_gemm", "memory_bound", "head")
EXPOSED = ("tensor_parallel", "context_parallel", "expert_parallel", "launch")
AXIS_STRIDE: dict[str, Callable[[Layout], Any]] = {
    "tp": lambda x: 1,
    "cp": lambda x: x.tp,
    "etp": lambda x: 1,
    "ep": lambda x: x.etp,
}


@dataclass
class LayerCosts:
    """One layer on one rank and micro-batch; arrays (U,), policies as in `RECOMPUTE`.

    `forward_s` and `backward_s` are addends by part; `weight_s` is the share of backward that
    computes weight gradients; `recompute_s[p]` is extra time under policy p; `hidden_s` is
    communication that compute hides. `forward_flops` counts this rank's.
    """

    forward_s: dict[str, Array] = field(default_factory=dict)
    backward_s: dict[str, Array] = field(default_factory=dict)
    weight_s: Any = 0.0
    recompute_s: list[Any] = field(default_factory=lambda: [0.0] * len(RECOMPUTE))
    recompute_flops: list[Any] = field(default_factory=lambda: [0.0] * len(RECOMPUTE))
    kept_bytes: list[Any] = field(default_factory=lambda: [0.0] * len(RECOMPUTE))
    working_bytes: list[Any] = field(default_factory=lambda: [0.0] * len(RECOMPUTE))
    gradient_bytes: Any = 0.0
    hidden_s: Any = 0.0
    forward_flops: Any = 0.0
    comm_ops: list[CommOp] = field(default_factory=list)

    @property
    def forward_total_s(self) -> Any:
        return sum(self.forward_s.values())

    @property
    def backward_total_s(self) -> Any:
        return sum(self.backward_s.values())

    def gathered(self, index: Any) -> LayerCosts:
        """The same costs at rows `index` of the table."""

        def pick(value: Any) -> Any:
            return value[index] if np.ndim(value) else value

        return LayerCosts(
            {k: pick(v) for k, v in self.forward_s.items()},
            {k: pick(v) for k, v in self.backward_s.items()},
            pick(self.weight_s),
            [pick(v) for v in self.recompute_s],
            [pick(v) for v in self.recompute_flops],
            [pick(v) for v in self.kept_bytes],
            [pick(v) for v in self.working_bytes],
            pick(self.gradient_bytes),
            pick(self.hidden_s),
            pick(self.forward_flops),
            [
                replace(
                    op,
                    num_bytes=pick(op.num_bytes),
                    count=pick(op.count),
                    total_s=pick(op.total_s),
                    exposed_s=pick(op.exposed_s),
                )
                for op in self.comm_ops
            ],
        )


def add(target: dict[str, Any], name: str, value: Any) -> None:
    target[name] = target.get(name, 0.0) + value


def accumulate(costs: LayerCosts, operations: Sequence[Operation], setting: Setting) -> None:
    """Add operations: times by part, recompute and kept bytes by policy."""
    modules = setting.runtime.selective_modules
    for op in operations:
        forward, backward, weight = operation_s(op, setting)
        part = "expert_gemm" if op.part == "router" else op.part
        add(costs.forward_s, part, forward)
        add(costs.backward_s, part, backward + weight)
        costs.weight_s = costs.weight_s + weight
        costs.forward_flops = costs.forward_flops + op.flops
        dropped = recompute.dropped_fraction(op, modules)
        costs.recompute_s[1] = costs.recompute_s[1] + dropped * forward
        costs.recompute_flops[1] = costs.recompute_flops[1] + dropped * op.flops
        costs.recompute_s[2] = costs.recompute_s[2] + forward
        costs.recompute_flops[2] = costs.recompute_flops[2] + op.flops
    largest = recompute.gradient_bytes(operations, setting.element_bytes)
    costs.gradient_bytes = np.maximum(costs.gradient_bytes, largest)
    for p, policy in enumerate(RECOMPUTE):
        costs.kept_bytes[p] = costs.kept_bytes[p] + recompute.kept_bytes(
            operations, policy, modules
        )
        costs.working_bytes[p] = costs.working_bytes[p] + recompute.working_bytes(
            operations, policy, modules
        )


def hide(total: Any, fraction: float, compute: Any, setting: Setting) -> Any:
    """Exposed part of `total` seconds of traffic next to `compute` seconds that may hide it.

    At most `fraction` of it hides, and at most as long as the compute lasts.

    >>> from types import SimpleNamespace
    >>> float(hide(2.0, 0.5, 10.0, SimpleNamespace(overlap="runtime")))
    1.0
    """
    if setting.overlap == "all":
        return np.zeros_like(total)
    if setting.overlap == "none":
        return total
    return total - np.minimum(fraction * np.asarray(total), compute)


def time_comm(ops: Sequence[CommOp], layout: Layout, setting: Setting) -> list[CommOp]:
    """Fill in the seconds of all calls of each operation."""
    timed = []
    for op in ops:
        count = np.asarray(op.count)
        if not np.any(count > 0):
            continue
        size = getattr(layout, op.axis)
        each = collective_s(
            setting.cluster, op.kind, op.num_bytes, size, AXIS_STRIDE[op.axis](layout)
        )
        timed.append(replace(op, total_s=np.where(count > 0, count * each, 0.0)))
    return timed


def add_comm(
    costs: LayerCosts,
    ops: Sequence[CommOp],
    part: str,
    fraction: float,
    layout: Layout,
    setting: Setting,
    beside: Any,
    *,
    repeats: bool = True,
) -> None:
    """Add the exposed share of collectives; `beside` is compute by phase that may hide them."""
    for op in time_comm(ops, layout, setting):
        free = op.what.endswith("hidden") and setting.overlap != "none"
        exposed = (
            np.zeros_like(op.total_s)
            if free
            else hide(op.total_s, fraction, beside[op.phase], setting)
        )
        if setting.overlap == "runtime":
            exposed = exposed + contention_of(op, exposed, layout, setting)
        costs.comm_ops.append(replace(op, exposed_s=exposed))
        costs.hidden_s = costs.hidden_s + (op.total_s - exposed)
        if op.phase == "forward":
            add(costs.forward_s, part, exposed)
            if repeats:
                costs.recompute_s[2] = costs.recompute_s[2] + exposed
        else:
            add(costs.backward_s, part, exposed)


def contention_of(op: CommOp, exposed: Any, layout: Layout, setting: Setting) -> Any:
    """What the hidden share of an operation's calls takes from the compute beside them [s]."""
    count = np.maximum(1, np.asarray(op.count))
    each = op.total_s / count
    slowed = count * contention_s(op.kind, op.num_bytes, each, getattr(layout, op.axis), setting)
    hidden = 1.0 - np.divide(exposed, np.where(op.total_s > 0, op.total_s, 1.0))
    return np.where(op.total_s > 0, slowed * hidden, 0.0)


def dense_part(kind: LayerSpec, layout: Layout, setting: Setting, frozen: bool) -> LayerCosts:
    """Attention, norms, dense MLP, shared expert; with tensor and context parallel traffic."""
    model, train, runtime = setting.model, setting.train, setting.runtime
    x = shard_of(layout, model, train, runtime, flash=setting.flash)
    costs = LayerCosts()
    ops = layer_operations(model, replace(kind, moe=None), x, cp_kind=layout.cp_kind, frozen=frozen)
    accumulate(costs, ops, setting)
    gemm = {
        "forward": costs.forward_s.get("attention_gemm", 0.0)
        + costs.forward_s.get("mlp_gemm", 0.0),
        "backward": costs.backward_s.get("attention_gemm", 0.0)
        + costs.backward_s.get("mlp_gemm", 0.0),
    }
    core = {
        "forward": costs.forward_s.get("attention_core", 0.0),
        "backward": costs.backward_s.get("attention_core", 0.0),
    }
    tp_ops = tensor_parallel.comm_ops(
        model,
        kind,
        x.tokens,
        layout.tp,
        x.element_bytes,
        runtime.sequence_parallel,
        runtime.fp8_tp_gather_bytes if x.quantized else None,
    )
    add_comm(costs, tp_ops, "tensor_parallel", runtime.tp_overlap_fraction, layout, setting, gemm)
    cp_ops = context_parallel.comm_ops(
        kind.attention, x.tokens, layout.tp, layout.cp, layout.cp_kind, x.element_bytes
    )
    for op in cp_ops:
        fraction = runtime.cp_overlap_fraction if op.kind == "send_recv" else 0.0
        add_comm(costs, [op], "context_parallel", fraction, layout, setting, core)
    return costs


def moe_part(
    kind: LayerSpec, layout: Layout, setting: Setting, frozen: bool, dense: LayerCosts
) -> LayerCosts:
    """Router, permutation, experts, shared experts, with expert parallel traffic.

    Where a runtime overlaps that traffic it runs beside the layer of another micro-batch, so that
    the compute of all of the layer, its `dense` part too, may hide it.
    """
    model, train, runtime = setting.model, setting.train, setting.runtime
    costs = LayerCosts()
    if kind.moe is None:
        return costs
    x = shard_of(layout, model, train, runtime, flash=setting.flash)
    accumulate(costs, moe_operations(model, kind.moe, x, frozen), setting)
    compute = {
        "forward": costs.forward_total_s + dense.forward_total_s,
        "backward": costs.backward_total_s + dense.backward_total_s,
    }
    ops = expert_parallel.comm_ops(
        model,
        kind.moe,
        x.tokens,
        layout.tp,
        layout.ep,
        layout.etp,
        x.element_bytes,
        train.router_imbalance,
        runtime.route_bytes,
    )
    fraction = runtime.ep_overlap_fraction
    if not fraction and runtime.shared_expert_overlap:
        # The shared experts run on a stream of their own, beside dispatch and combine alone.
        fraction = runtime.shared_expert_overlap
        shared = {"forward": costs.forward_s, "backward": costs.backward_s}
        compute = {phase: part.get("mlp_gemm", 0.0) for phase, part in shared.items()}
        add_comm(costs, ops[:2], "expert_parallel", fraction, layout, setting, compute)
        ops, fraction = ops[2:], 0.0
    add_comm(costs, ops, "expert_parallel", fraction, layout, setting, compute)
    return costs


def merged(first: LayerCosts, second: LayerCosts) -> LayerCosts:
    """Sum of two parts of a layer."""
    total = LayerCosts()
    for part in (first, second):
        for name, value in part.forward_s.items():
            add(total.forward_s, name, value)
        for name, value in part.backward_s.items():
            add(total.backward_s, name, value)
    total.weight_s = first.weight_s + second.weight_s
    for target, one, two in (
        (total.recompute_s, first.recompute_s, second.recompute_s),
        (total.recompute_flops, first.recompute_flops, second.recompute_flops),
        (total.kept_bytes, first.kept_bytes, second.kept_bytes),
        (total.working_bytes, first.working_bytes, second.working_bytes),
    ):
        target[:] = [a + b for a, b in zip(one, two, strict=True)]
    total.gradient_bytes = np.maximum(first.gradient_bytes, second.gradient_bytes)
    total.hidden_s = first.hidden_s + second.hidden_s
    total.forward_flops = first.forward_flops + second.forward_flops
    total.comm_ops = [*first.comm_ops, *second.comm_ops]
    return total


def add_host(costs: LayerCosts, kind: LayerSpec, layout: Layout, setting: Setting) -> None:
    """Time that the GPU waits for the host: forward and backward each last max(GPU, launches).

    host = launches * time per launch. Where a dropless MoE layer reads its split sizes, the queue
    is empty and launches cannot hide behind the layers before (`planner.host`); a runtime that
    overlaps the exchange has another micro-batch's kernels queued. Where every launch blocks until
    its kernel has run (CUDA_LAUNCH_BLOCKING), nothing overlaps and the runtime's factor multiplies.
    """
    runtime, each = setting.runtime, setting.cluster.device.host_launch_s
    count = {phase: layer_launches(kind, layout, setting, phase) for phase in PHASES}
    again = each * (count["forward"] + runtime.launches["recompute"])
    blocking = runtime.blocking_launch_factor
    drained: Any = 0.0
    skew = 0.0
    if kind.moe is not None and runtime.moe_drains and not runtime.ep_overlap_fraction:
        drained = runtime.moe_drains * drained_wait_s(
            kind.moe,
            count["forward"],
            costs.forward_total_s,
            costs.forward_s["expert_gemm"],
            costs.forward_s.get("expert_parallel", 0.0),
            layout,
            setting,
        )
        skew = runtime.moe_drains * runtime.moe_drain_s / 2
    for phase, part in (("forward", costs.forward_s), ("backward", costs.backward_s)):
        wait = np.maximum(0.0, each * count[phase] - sum(part.values()))
        if phase == "forward":
            wait = np.maximum(wait, drained)
        add(part, "launch", blocking * each * count[phase] if blocking else wait + skew)
    costs.recompute_s[2] = (
        costs.recompute_s[2] + blocking * again
        if blocking
        else np.maximum(costs.recompute_s[2] + drained, again) + skew
    )


def unique_rows(*columns: Any) -> tuple[Any, Any]:
    """Indices of the distinct rows of integer columns, and for every row which one it is.

    >>> first, inverse = unique_rows([1, 1, 2], [5, 5, 5])
    >>> first.tolist(), inverse.tolist()
    ([0, 2], [0, 0, 1])
    """
    arrays = np.broadcast_arrays(*[np.atleast_1d(np.asarray(c, dtype=np.int64)) for c in columns])
    key = np.zeros(arrays[0].shape, dtype=np.int64)
    for column in arrays:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def add_dequantization(
    costs: LayerCosts, kind: LayerSpec, layout: Layout, setting: Setting
) -> None:
    """QLoRA unpacks frozen weights before every use: reads 4 bits and scales, writes 2 bytes.

    References: Dettmers2023.
    """
    lora = setting.train.lora
    if lora is None or not lora.quantized:
        return
    counts = layer_parameters(setting.model, kind)
    held = counts.dense_per_rank(layout.tp) + counts.expert_per_rank(layout.ep, layout.etp)
    seconds = memory_bound_s(setting.cluster.device, held * (QUANTIZED_BYTES + 2.0))
    for phase in (costs.forward_s, costs.backward_s):
        add(phase, "memory_bound", seconds)
    costs.recompute_s[2] = costs.recompute_s[2] + seconds


def layer_costs(kind: LayerSpec, layout: Layout, setting: Setting) -> LayerCosts:
    """One layer of `kind` for a table of layouts; what ep and etp do not touch is done once."""
    frozen = setting.train.lora is not None
    first, inverse = unique_rows(layout.tp, layout.cp, layout.cp_kind, layout.micro_batch)
    dense = dense_part(kind, layout.take(first), setting, frozen).gathered(inverse)
    costs = merged(dense, moe_part(kind, layout, setting, frozen, dense))
    add_dequantization(costs, kind, layout, setting)
    compute = costs.forward_total_s
    add_host(costs, kind, layout, setting)
    costs.working_bytes = [work + costs.gradient_bytes for work in costs.working_bytes]
    if setting.runtime.passing_grad_bytes:
        params = layer_parameters(setting.model, kind)
        held = params.dense_per_rank(layout.tp) + params.expert_per_rank(layout.ep, layout.etp)
        passing = setting.runtime.passing_grad_bytes * held
        costs.kept_bytes = [np.maximum(kept, passing) for kept in costs.kept_bytes]
    link = setting.host_link_bytes_per_s
    whole = costs.kept_bytes[0]
    backward = costs.backward_total_s
    costs.recompute_s[3] = offload.activation_exposed_s(
        whole, compute, link
    ) + offload.activation_exposed_s(whole, backward, link)
    return costs
