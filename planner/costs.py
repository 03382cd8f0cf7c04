"""Costs of a table of layouts, as named addends: the one place where all terms meet.

`row_costs` puts layer, edge, sharding, optimizer and memory terms together for the distinct
(degrees, sharding, offload) of a table; `planner.provider` adds what schedules change and hands the
sums to the search; `planner.estimate` reads the addends for one layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.collectives import collective_s
from planner.contention import contention_s
from planner.edges import edge_costs
from planner.layer import LayerCosts, layer_costs
from planner.layout import Layout
from planner.memory import MemoryItems, RankParameters, element_sizes, memory_items, rank_parameters
from planner.parallel import data_parallel, offload
from planner.parallel.data_parallel import Groups
from planner.results import CommOp
from planner.setting import Setting

HIDING_SHARE = 0.9  # of the last backward, during which gradient buckets become ready


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of parameter and gradient traffic of a block of parameters (U,).

    In a micro-batch: `up_s` gathers before forward, `again_s` before backward, `down_s` reduces.
    Once a step: `reduce_s`, `gather_s`.
    """

    up_s: Any
    again_s: Any
    down_s: Any
    copy_s: Any
    slow_s: Any
    reduce_s: Any
    gather_s: Any
    ops: tuple[CommOp, ...] = ()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.up_s + other.up_s,
            self.again_s + other.again_s,
            self.down_s + other.down_s,
            self.copy_s + other.copy_s,
            self.slow_s + other.slow_s,
            self.reduce_s + other.reduce_s,
            self.gather_s + other.gather_s,
            self.ops + other.ops,
        )


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Everything about U distinct rows; lists run over layer kinds, dicts over named addends.

    `fsdp_s[k][p]` is exposed sharding traffic in a micro-batch under policy p; `step_s[k]` exposed
    addends once a step; `first`, `head` the same for embedding and head.
    """

    layers: list[LayerCosts]
    first: LayerCosts
    head: LayerCosts
    fsdp_s: list[list[Any]]
    fsdp_first_s: Any
    fsdp_head_s: Any
    step_s: list[dict[str, Any]]
    first_step_s: dict[str, Any]
    head_step_s: dict[str, Any]
    constant_s: dict[str, Any]
    params: RankParameters
    memory: MemoryItems
    traffic: list[Traffic]
    hidden_step_s: list[Any]


def num_microbatches(layout: Layout, setting: Setting) -> Any:
    """Micro-batches of a step on one model replica: global batch / (micro-batch dp)."""
    return setting.train.global_batch_size // (np.asarray(layout.micro_batch) * layout.dp)


def traffic_of(
    params: Any, trained: Any, layout: Layout, groups: Groups, setting: Setting, axis: str
) -> Traffic:
    """Time the collectives that shard and reduce `params` parameters."""
    runtime, size = setting.runtime, element_sizes(setting)
    ops = data_parallel.comm_ops(
        params, trained, layout, groups, num_microbatches(layout, setting), size, runtime, axis
    )
    bucket = runtime.bucket_elements

    def seconds(op: CommOp, members: Any, stride: Any) -> Any:
        """One pass over the buffer, in buckets where the runtime packs several layers in one."""
        on = np.asarray(op.count) > 0
        if not np.any(on):
            return 0.0
        call = np.maximum(op.num_bytes, bucket * size.reduce) if bucket else op.num_bytes
        each = collective_s(setting.cluster, op.kind, call, members, stride)
        return np.where(on, each * np.divide(op.num_bytes, np.maximum(call, 1.0)), 0.0)

    zero = np.asarray(layout.zero)
    everyone = np.where(zero == 0, groups.shard * groups.replicas, groups.replicas)
    stride = np.where(zero == 0, groups.shard_stride, groups.replica_stride)
    members = (everyone, groups.shard, groups.shard, groups.shard)
    strides = (stride, groups.shard_stride, groups.shard_stride, groups.shard_stride)
    each = [seconds(*args) for args in zip(ops, members, strides, strict=True)]
    reduce_s, gather_s = each[0] + each[1] + each[2], each[3]
    gathers, reduces = data_parallel.per_microbatch(layout, runtime)
    several = np.asarray(groups.shard) > 1
    moved = (
        params * gathers * np.where(several, runtime.gather_copy_bytes, 0.0)
        + trained * np.where(reduces & several, runtime.reduce_copy_bytes, 0.0)
        + trained * runtime.accumulate_bytes
    )
    timed = tuple(replace(op, total_s=op.count * one) for op, one in zip(ops, each, strict=True))
    return Traffic(
        np.where(gathers >= 1, gather_s, 0.0),
        np.where(gathers >= 2, gather_s, 0.0),
        np.where(reduces, reduce_s, 0.0),
        moved / setting.cluster.device.achieved_memory_bytes_per_s,
        slowed_s(ops, each, gathers, reduces, groups, setting),
        np.where(reduces, 0.0, reduce_s),
        np.where(gathers >= 1, 0.0, gather_s),
        timed,
    )


def slowed_s(
    ops: list[CommOp], each: list[Any], gathers: Any, reduces: Any, groups: Groups, setting: Setting
) -> Any:
    """What the traffic of a micro-batch takes from compute when all of it runs beside it [s]."""
    times = (reduces, reduces, reduces, gathers)
    return sum(
        count * contention_s(op.kind, op.num_bytes, seconds, groups.shard, setting)
        for op, seconds, count in zip(ops, each, times, strict=True)
    )


def exposed(total: Any, share: float, window: Any, setting: Setting) -> Any:
    """What remains of `total` seconds when `share` of it may hide under `window` seconds."""
    if setting.overlap == "all":
        return np.zeros_like(np.asarray(total, dtype=np.float64))
    if setting.overlap == "none":
        return total
    return total - np.minimum(share * np.asarray(total), window)


def streaming_s(traffic: Traffic, forward_s: Any, backward_s: Any, setting: Setting) -> Any:
    """Exposed sharding traffic of a layer in one micro-batch [s].

    Forward gathers once, backward gathers again (ZeRO 3) and reduces. Each direction lasts
    max(compute + k traffic, traffic), where k is the share of the device that collectives take from
    compute beside them: traffic W beside compute C exposes
    max(0, o W - C) + (1 - o) W + k min(o W, C).
    """
    runtime = setting.runtime
    up, again, down = traffic.up_s, traffic.again_s, traffic.down_s
    gather, reduce = runtime.overlap_param_gather, runtime.overlap_grad_reduce
    forward = exposed(up, gather, forward_s, setting)
    hidden = gather * again + reduce * down
    backward = exposed(again + down, 1.0, np.minimum(hidden, backward_s), setting)
    result = forward + backward + traffic.copy_s
    if setting.overlap == "runtime":
        total = up + again + down
        hidden_share = 1.0 - np.divide(forward + backward, np.where(total > 0, total, 1.0))
        result = result + traffic.slow_s * np.where(total > 0, hidden_share, 0.0)
    return result


def step_addends(
    traffic: Traffic, forward_s: Any, backward_s: Any, optimizer: Any, setting: Setting
) -> dict[str, Any]:
    """Exposed addends once a step: gradient reduction, parameter gather, optimizer."""
    runtime = setting.runtime
    return {
        "gradient_reduction": exposed(
            traffic.reduce_s, runtime.overlap_grad_reduce, HIDING_SHARE * backward_s, setting
        ),
        "parameter_gather": exposed(
            traffic.gather_s, runtime.overlap_param_gather, HIDING_SHARE * forward_s, setting
        ),
        "optimizer": optimizer,
    }


def optimizer_s(params: Any, trained: Any, layout: Layout, groups: Groups, setting: Setting) -> Any:
    """Optimizer step of `trained` parameters [s]: HBM traffic, or the host's when offloaded.

    t = P (full + (owned + 2 moments) / n) / HBM rate; n the sharding group.

    References: runtime files.
    """
    runtime, device = setting.runtime, setting.cluster.device
    size = element_sizes(setting)
    n = np.where(np.asarray(layout.zero) >= 1, np.maximum(1, groups.shard), 1)
    rate = device.achieved_memory_bytes_per_s
    on_device = trained * (
        runtime.step_bytes_full + (runtime.step_bytes_owned + 2 * size.moments) / n
    )
    result = on_device / rate
    if np.any(np.asarray(layout.offload) > 0):
        cluster = setting.cluster
        local = cluster.gpus_per_node
        host = offload.step_s(
            trained / n,
            size.master + size.moments + (size.weight if size.master == 0 else 0.0),
            size.grad,
            size.weight,
            setting.host_link_bytes_per_s,
            setting.cluster.host_memory_bytes_per_s / local,
            cluster.nvme_read_bytes_per_s / local,
            cluster.nvme_write_bytes_per_s / local,
            offload.is_one_of(layout.offload, offload.NVME),
        )
        full = trained * runtime.step_bytes_full / rate
        result = np.where(np.asarray(layout.offload) > 0, full + host, result)
    return result


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Sharding of a table of layouts: parameters, memory, traffic and optimizer, by block.

    Blocks are one layer of each kind, then the embedding, then the head.
    """

    params: RankParameters
    memory: MemoryItems
    traffic: list[Traffic]
    optimizer_s: list[Any]
    constant_s: dict[str, Any]


def state_costs(layout: Layout, setting: Setting) -> StateCosts:
    """What depends on degrees, sharding and offload, not on micro-batch, schedule or recompute."""
    params = rank_parameters(layout, setting)
    dense, expert = data_parallel.dense_groups(layout), data_parallel.expert_groups(layout)
    blocks = [*zip(params.dense, params.trained_dense, strict=True)]
    blocks += [(params.first, params.trained_first), (params.head, params.trained_head)]
    traffic = [
        traffic_of(held, trained, layout, dense, setting, "shard") for held, trained in blocks
    ]
    update = [optimizer_s(held, trained, layout, dense, setting) for held, trained in blocks]
    for k, (held, trained) in enumerate(zip(params.expert, params.trained_expert, strict=True)):
        if np.any(np.asarray(held) > 0):
            traffic[k] = traffic[k] + traffic_of(held, trained, layout, expert, setting, "edp")
            update[k] = update[k] + optimizer_s(held, trained, layout, expert, setting)
    return StateCosts(
        params,
        memory_items(layout, params, setting),
        traffic,
        update,
        constant_addends(layout, params, setting),
    )


def row_costs(layout: Layout, setting: Setting) -> RowCosts:
    """All addends of a table of distinct layouts, whatever their schedule, vpp and recompute."""
    state = state_costs(layout, setting)
    layers = [layer_costs(kind, layout, setting) for kind in setting.model.kinds]
    first, head = edge_costs(layout, setting, state.params.vocab)
    fsdp, steps, hidden = [], [], []
    for costs, traffic, update in zip(layers, state.traffic, state.optimizer_s, strict=False):
        forward, backward = costs.forward_total_s, costs.backward_total_s
        fsdp.append(
            [
                streaming_s(traffic, forward, backward + extra, setting)
                for extra in costs.recompute_s
            ]
        )
        steps.append(step_addends(traffic, forward, backward, update, setting))
        total = traffic.reduce_s + traffic.gather_s
        hidden.append(total - steps[-1]["gradient_reduction"] - steps[-1]["parameter_gather"])
    # Embedding and head are the first and last buckets: nothing runs beside them.
    edges = [
        (streaming_s(traffic, 0.0, 0.0, setting), step_addends(traffic, 0.0, 0.0, update, setting))
        for traffic, update in zip(state.traffic[-2:], state.optimizer_s[-2:], strict=True)
    ]
    return RowCosts(
        layers,
        first,
        head,
        fsdp,
        edges[0][0],
        edges[1][0],
        steps,
        edges[0][1],
        edges[1][1],
        state.constant_s,
        state.params,
        state.memory,
        state.traffic,
        hidden,
    )


def constant_addends(layout: Layout, params: RankParameters, setting: Setting) -> dict[str, Any]:
    """Once a step on every rank: gradient norm, tied embedding all-reduce, optimizer launches."""
    cluster, runtime, model = setting.cluster, setting.runtime, setting.model
    world = setting.num_gpus
    norm = collective_s(cluster, "all_reduce", 8.0, world, 1) if world > 1 else 0.0
    tied: Any = 0.0
    if model.tie_word_embeddings and model.lm_head and setting.train.lora is None:
        pp = np.asarray(layout.pp)
        size = (
            params.vocab * model.hidden_size / np.asarray(layout.tp) * element_sizes(setting).reduce
        )
        # First and last stage: the two ends of the job, in one domain only if all of it is.
        apart = np.maximum(1, world // pp * np.maximum(pp - 1, 1))
        stride = np.where(world <= cluster.domain_gpus, 1, apart)
        pair = collective_s(cluster, "all_reduce", size, np.where(pp > 1, 2, 1), stride)
        tied = np.where(pp > 1, pair, 0.0)
    zeros = 0.0 * np.asarray(layout.tp)
    hidden = setting.overlap == "all"
    return {
        "gradient_norm": (0.0 if hidden else norm) + zeros,
        "tied_embedding": (0.0 if hidden else tied) + zeros,
        "optimizer": runtime.launches["optimizer"] * cluster.device.host_launch_s + zeros,
    }
