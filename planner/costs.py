"""Costs of a table of layouts, as named addends: the one place where all terms meet.

`row_costs` puts layer, edge, sharding, optimizer and memory terms together for the distinct
(degrees, sharding, offload) of a table; `planner.provider` adds what schedules change and hands the
sums to the search; `planner.estimate` reads the addends for one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.collectives import collective_s
from planner.layer import LayerCosts, Setting, edge_costs, layer_costs, unique_rows
from planner.layout import Layout
from planner.memory import MemoryItems, RankParameters, element_sizes, memory_items, rank_parameters
from planner.parallel import data_parallel, offload
from planner.parallel.data_parallel import Groups
from planner.results import CommOp

HIDING_SHARE = 0.9  # of the last backward, during which gradient buckets become ready


@dataclass(frozen=True, slots=True)
class StateTraffic:
    """Seconds of parameter and gradient traffic of a block of parameters (U,).

    `gather_s` is one all-gather, `reduce_s` one reduction; `per_microbatch` says how many of each run
    in a micro-batch, `per_step` how many once a step.
    """

    gather_s: Any
    reduce_s: Any
    gathers_per_microbatch: Any
    reduces_per_microbatch: Any
    gathers_per_step: Any
    reduces_per_step: Any
    ops: list[CommOp]


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
    traffic: list[StateTraffic]
    hidden_step_s: list[Any]


def num_microbatches(layout: Layout, setting: Setting) -> Any:
    """Micro-batches of a step on one model replica: global batch / (micro-batch dp)."""
    return setting.train.global_batch_size // (np.asarray(layout.micro_batch) * layout.dp)


def traffic_of(
    params: Any, trained: Any, layout: Layout, groups: Groups, setting: Setting, axis: str
) -> StateTraffic:
    """Time the collectives that shard and reduce `params` parameters."""
    runtime, size = setting.runtime, element_sizes(setting)
    m = num_microbatches(layout, setting)
    ops = data_parallel.comm_ops(params, trained, layout, groups, m, size, runtime, axis)
    bucket = runtime.bucket_elements

    def seconds(op: CommOp, members: Any, stride: Any) -> Any:
        """One pass over the buffer, in buckets where the runtime packs several layers in one."""
        call = np.maximum(op.num_bytes, bucket * size.reduce) if bucket else op.num_bytes
        each = collective_s(setting.cluster, op.kind, call, members, stride)
        scale = np.divide(op.num_bytes, np.maximum(call, 1.0))
        return np.where(np.asarray(op.count) > 0, each * scale, 0.0)

    everyone = np.where(
        np.asarray(layout.zero) == 0, groups.shard * groups.replicas, groups.replicas
    )
    stride = np.where(np.asarray(layout.zero) == 0, groups.shard_stride, groups.replica_stride)
    reduce_s = (
        seconds(ops[0], everyone, stride)
        + seconds(ops[1], groups.shard, groups.shard_stride)
        + seconds(ops[2], groups.shard, groups.shard_stride)
    )
    gather_s = seconds(ops[3], groups.shard, groups.shard_stride)
    gathers = np.where(gather_s > 0, data_parallel.gathers_per_step(layout, m, runtime), 0)
    reduces = np.where(reduce_s > 0, data_parallel.reduces_per_step(layout, m, runtime), 0)
    # With one micro-batch "every micro-batch" and "once a step" differ in what may hide them.
    streaming = np.asarray(layout.zero) >= (2 if runtime.weight_shard_is_master else 3)
    if runtime.zero3_pp_keeps_stage:
        streaming = streaming & (np.asarray(layout.pp) == 1)
    each_gather = np.where(streaming, gathers / m, 0.0)
    each_reduce = np.where(
        np.isin(np.asarray(layout.zero), runtime.reduce_every_microbatch) & (reduces >= m),
        reduces / m,
        0.0,
    )
    return StateTraffic(
        gather_s,
        reduce_s,
        each_gather,
        each_reduce,
        np.where(each_gather > 0, 0.0, gathers),
        np.where(each_reduce > 0, 0.0, reduces),
        ops,
    )


def exposed(total: Any, share: float, window: Any, setting: Setting) -> Any:
    """What remains of `total` seconds when `share` of it may hide under `window` seconds."""
    if setting.overlap == "all":
        return np.zeros_like(np.asarray(total, dtype=np.float64))
    if setting.overlap == "none":
        return total
    return total - np.minimum(share * np.asarray(total), window)


def streaming_s(
    traffic: list[StateTraffic], forward_s: Any, backward_s: Any, setting: Setting
) -> Any:
    """Exposed sharding traffic of a layer in one micro-batch [s].

    Forward gathers once, backward gathers again (ZeRO 3) and reduces. Each direction lasts
    max(compute + k traffic, traffic), where k is the share of the device that collectives take from
    compute beside them: traffic W beside compute C exposes max(0, o W - C) + (1 - o) W + k min(o W, C).
    """
    runtime = setting.runtime
    up = sum(np.where(t.gathers_per_microbatch >= 1, t.gather_s, 0.0) for t in traffic)
    again = sum(np.where(t.gathers_per_microbatch >= 2, t.gather_s, 0.0) for t in traffic)
    down = sum(t.reduces_per_microbatch * t.reduce_s for t in traffic)
    gather, reduce = runtime.overlap_param_gather, runtime.overlap_grad_reduce
    forward = exposed(up, gather, forward_s, setting)
    hidden = gather * again + reduce * down
    backward = exposed(again + down, 1.0, np.minimum(hidden, backward_s), setting)
    slowed = runtime.comm_sm_fraction * (up + again + down - forward - backward)
    if setting.overlap != "runtime":
        slowed = 0.0 * slowed
    return forward + backward + slowed


def step_addends(
    traffic: list[StateTraffic], forward_s: Any, backward_s: Any, optimizer_s: Any, setting: Setting
) -> dict[str, Any]:
    """Exposed addends once a step: gradient reduction, parameter gather, optimizer."""
    runtime = setting.runtime
    reduce_s = sum(t.reduces_per_step * t.reduce_s for t in traffic)
    gather_s = sum(t.gathers_per_step * t.gather_s for t in traffic)
    return {
        "gradient_reduction": exposed(
            reduce_s, runtime.overlap_grad_reduce, HIDING_SHARE * backward_s, setting
        ),
        "parameter_gather": exposed(
            gather_s, runtime.overlap_param_gather, HIDING_SHARE * forward_s, setting
        ),
        "optimizer": optimizer_s,
    }


def optimizer_s(params: Any, trained: Any, layout: Layout, groups: Groups, setting: Setting) -> Any:
    """Optimizer step of `trained` parameters [s]: HBM traffic, or the host's when offloaded.

    t = P (full + (owned + 2 moments) / n) / HBM rate; n the sharding group. References: runtime files.
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
            device.host_link_bytes_per_s,
            setting.cluster.host_memory_bytes_per_s / local,
            cluster.nvme_read_bytes_per_s / local,
            cluster.nvme_write_bytes_per_s / local,
            offload.is_one_of(layout.offload, offload.NVME),
        )
        result = np.where(np.asarray(layout.offload) > 0, host, result)
    return result


def row_costs(layout: Layout, setting: Setting) -> RowCosts:
    """All addends of a table of distinct layouts (schedule, vpp and recompute are not looked at)."""
    model = setting.model
    first_rows, inverse = unique_rows(
        layout.tp, layout.cp, layout.cp_kind, layout.micro_batch, layout.ep, layout.etp
    )
    cells = layout.take(first_rows)
    layers = [layer_costs(kind, cells, setting).gathered(inverse) for kind in model.kinds]
    params = rank_parameters(layout, setting)
    edges = edge_costs(cells, setting, np.asarray(params.vocab)[first_rows])
    first, head = (one.gathered(inverse) for one in edges)
    dense, expert = data_parallel.dense_groups(layout), data_parallel.expert_groups(layout)
    fsdp, steps, traffics, hidden = [], [], [], []
    for k, costs in enumerate(layers):
        traffic = [
            traffic_of(params.dense[k], params.trained_dense[k], layout, dense, setting, "shard")
        ]
        update = optimizer_s(params.dense[k], params.trained_dense[k], layout, dense, setting)
        if np.any(np.asarray(params.expert[k]) > 0):
            traffic.append(
                traffic_of(
                    params.expert[k], params.trained_expert[k], layout, expert, setting, "edp"
                )
            )
            update = update + optimizer_s(
                params.expert[k], params.trained_expert[k], layout, expert, setting
            )
        forward, backward = costs.forward_total_s, costs.backward_total_s
        fsdp.append(
            [
                streaming_s(traffic, forward, backward + extra, setting)
                for extra in costs.recompute_s
            ]
        )
        steps.append(step_addends(traffic, forward, backward, update, setting))
        traffics.append(
            StateTraffic(
                *[sum_of(traffic, name) for name in ("gather_s", "reduce_s")],
                0,
                0,
                0,
                0,
                [op for t in traffic for op in t.ops],
            )
        )
        total = sum(
            t.reduces_per_step * t.reduce_s + t.gathers_per_step * t.gather_s for t in traffic
        )
        hidden.append(total - steps[-1]["gradient_reduction"] - steps[-1]["parameter_gather"])
    edge = []
    for block, costs, trained in (
        (params.first, first, params.trained_first),
        (params.head, head, params.trained_head),
    ):
        traffic = [traffic_of(block, trained, layout, dense, setting, "shard")]
        update = optimizer_s(block, trained, layout, dense, setting)
        # Embedding and head are the first and last buckets: nothing runs beside them.
        edge.append(
            (
                streaming_s(traffic, 0.0, 0.0, setting),
                step_addends(traffic, 0.0, 0.0, update, setting),
            )
        )
        traffics.append(traffic[0])
    return RowCosts(
        layers,
        first,
        head,
        fsdp,
        edge[0][0],
        edge[1][0],
        steps,
        edge[0][1],
        edge[1][1],
        constant_addends(layout, params, setting),
        params,
        memory_items(layout, params, setting),
        traffics,
        hidden,
    )


def sum_of(traffic: list[StateTraffic], name: str) -> Any:
    return sum(getattr(t, name) for t in traffic)


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
        stride = np.maximum(1, world // pp * np.maximum(pp - 1, 1))
        pair = collective_s(cluster, "all_reduce", size, np.where(pp > 1, 2, 1), stride)
        tied = np.where(pp > 1, pair, 0.0)
    zeros = 0.0 * np.asarray(layout.tp)
    hidden = setting.overlap == "all"
    return {
        "gradient_norm": (0.0 if hidden else norm) + zeros,
        "tied_embedding": (0.0 if hidden else tied) + zeros,
        "optimizer": runtime.launches["optimizer"] * cluster.device.host_launch_s + zeros,
    }
