"""Memory of one rank as named addends: what is fixed, what grows with layers, what is in flight.

References: Korthikanti2022; Rajbhandari2020; the runtime files for buffers and windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.layout import Layout
from planner.lora import adapter_parameters
from planner.parallel import data_parallel, offload
from planner.parallel.data_parallel import ElementBytes, Groups
from planner.parameters import (
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    padded_vocab,
    tower_parameters,
)
from planner.setting import Setting

ITEMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "unsharded",
    "buffers",
    "context",
)


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters on one rank of a table of layouts: arrays (U,), lists over layer kinds.

    `trained_*` have gradients: all of them, or the adapters alone under LoRA.
    """

    dense: list[Any]
    expert: list[Any]
    trained_dense: list[Any]
    trained_expert: list[Any]
    gemm: list[Any]  # weights of products that run in fp8
    first: Any
    head: Any
    trained_first: Any
    trained_head: Any
    vocab: Any


def rank_parameters(layout: Layout, setting: Setting) -> RankParameters:
    """Parameters that one rank holds, per layer of each kind, and on first and last stage.

    Tied embeddings exist twice as soon as first and last stage differ (pp > 1).
    """
    model, runtime, lora = setting.model, setting.runtime, setting.train.lora
    tp = np.asarray(layout.tp)
    vocab = padded_vocab(model, runtime.vocab_multiple, layout.tp)
    dense, expert, trained_dense, trained_expert, gemm = [], [], [], [], []
    for kind in model.kinds:
        counts = layer_parameters(model, kind)
        d, e = counts.dense_per_rank(tp), counts.expert_per_rank(layout.ep, layout.etp)
        gemm.append(counts.dense_tp / tp + e)
        if lora is not None:
            a, b = adapter_parameters(model, kind, lora, layout)
            trained_dense.append(a)
            trained_expert.append(b)
            dense.append(d + a)
            expert.append(e + b)
        else:
            dense.append(d + 0.0 * tp)
            expert.append(e + 0.0 * tp)
            trained_dense.append(dense[-1])
            trained_expert.append(expert[-1])
    first = embedding_parameters(model, vocab) / tp + tower_parameters(model)
    head = head_parameters(model, vocab) / tp + final_norm_parameters(model)
    if model.tie_word_embeddings and model.lm_head:
        twice = vocab * model.hidden_size / tp
        head = head + np.where(np.asarray(layout.pp) > 1, twice, 0.0)
    share = 0.0 if lora is not None else 1.0
    return RankParameters(
        dense,
        expert,
        trained_dense,
        trained_expert,
        gemm,
        first,
        head,
        share * first,
        share * head,
        vocab,
    )


def split_state(
    params: Any,
    trained: Any,
    layout: Layout,
    groups: Groups,
    size: ElementBytes,
    setting: Setting,
    gemm_share: Any = 0.0,
) -> dict[str, Any]:
    """Bytes by item of `params` parameters, of which `trained` have gradients.

    Frozen weights (LoRA) are kept in `frozen` bytes, sharded where ZeRO 3 shards parameters.
    """
    runtime, train = setting.runtime, setting.train
    each = data_parallel.state_bytes(layout, groups, size, runtime)
    items = {name: trained * value for name, value in each.items()}
    if train.precision == "fp8" and runtime.fp8_weight_copy_bytes:
        whole = np.where(np.asarray(layout.zero) >= 3, 0.0, runtime.fp8_weight_copy_bytes)
        items["weights"] = items["weights"] + gemm_share * whole
    if train.lora is not None:
        frozen = (params - trained) * size.frozen
        n = np.where(np.asarray(layout.zero) >= 3, np.maximum(1, groups.shard), 1)
        items["weights"] = items["weights"] + frozen / n
    return items


@dataclass(frozen=True, slots=True)
class MemoryItems:
    """Named addends of static memory: of a layer of each kind, every rank, first and head rank.

    `away` is what offload keeps in host memory or on NVMe: by layer kind, then first and head rank.
    """

    layer: list[dict[str, Any]]
    fixed: dict[str, Any]
    first: dict[str, Any]
    head: dict[str, Any]
    away: list[Any]


def away_bytes(
    params: RankParameters, layout: Layout, setting: Setting, size: ElementBytes
) -> list[Any]:
    """Bytes of state that this rank offloads, by block: layer kinds, embedding, head."""
    dense, expert = data_parallel.dense_groups(layout), data_parallel.expert_groups(layout)
    one = data_parallel.host_bytes(layout, dense, size)
    two = data_parallel.host_bytes(layout, expert, size)
    layers = [
        one * d + two * e for d, e in zip(params.trained_dense, params.trained_expert, strict=True)
    ]
    return [*layers, one * params.trained_first, one * params.trained_head]


def element_sizes(setting: Setting) -> ElementBytes:
    """Bytes per parameter of each copy in this run."""
    train = setting.train
    return data_parallel.element_bytes(
        setting.runtime,
        train.precision,
        train.optimizer,
        train.lora is not None and train.lora.quantized,
    )


def may_hold(setting: Setting, zero_stages: Sequence[int], offloads: Sequence[int]) -> bool:
    """Whether the devices and hosts of a job have room to keep the state of its layers once.

    Necessary, not enough: each parameter of a layer is kept at least once in the whole job, so that
    some GPU keeps at least P bytes_per_parameter / num_gpus; with offload the same holds of its
    share of host memory. What gathers, activations and copies need comes on top.
    """
    if setting.train.lora is not None:
        return True
    size, cluster = element_sizes(setting), setting.cluster
    params = rank_parameters(Layout(), setting)
    count = [setting.model.layer_kinds.count(k) for k in range(len(setting.model.kinds))]
    whole = sum(
        n * float(np.max(dense + expert))
        for n, dense, expert in zip(count, params.dense, params.expert, strict=True)
    )
    share = whole / setting.num_gpus
    room = cluster.device.memory_bytes * (1.0 - setting.train.memory_margin_fraction)
    host_room = cluster.host_memory_bytes / setting.gpus_on_node
    for zero in zero_stages:
        for code in offloads:
            layout = Layout(zero=zero, offload=code)
            groups = data_parallel.dense_groups(layout)
            kept = data_parallel.state_bytes(layout, groups, size, setting.runtime)
            device = sum(float(kept[name]) for name in ("weights", "gradients", "optimizer"))
            away = float(data_parallel.host_bytes(layout, groups, size))
            limited = cluster.host_memory_bytes > 0 and code not in offload.NVME
            if share * device <= room and (not limited or share * away <= host_room):
                return True
    return False


def communicators(layout: Layout) -> Any:
    """Process groups of a rank that hold buffers: the world and every axis larger than one."""
    axes = (
        layout.tp,
        layout.cp,
        layout.pp,
        layout.ep,
        layout.etp,
        np.asarray(layout.dp) * layout.cp,
    )
    return 1 + sum(np.where(np.asarray(size) > 1, 1, 0) for size in axes)


def window_bytes(
    params: RankParameters, layout: Layout, setting: Setting, size: ElementBytes
) -> Any:
    """Unsharded parameters and gradients of the layers alive at once under ZeRO 3.

    max(forward units x weight, backward units x weight + gradient bytes) of the largest layer.
    Nothing where a pipeline stage keeps its parameters (charged per layer then).
    """
    runtime = setting.runtime
    largest = np.zeros_like(np.asarray(layout.tp, dtype=np.float64))
    for dense, expert in zip(params.dense, params.expert, strict=True):
        largest = np.maximum(largest, dense + expert)
    weight = size.frozen if setting.train.lora is not None else size.gather
    grads = 0.0 if setting.train.lora is not None else runtime.fsdp_backward_grad_bytes
    each = max(
        runtime.fsdp_forward_units * weight, runtime.fsdp_backward_weight_units * weight + grads
    )
    kept = runtime.zero3_pp_keeps_stage & (np.asarray(layout.pp) > 1)
    sharded = (np.asarray(layout.zero) >= 3) & (np.asarray(layout.shard) > 1) & ~kept
    return np.where(sharded, largest * each, 0.0)


def memory_items(layout: Layout, params: RankParameters, setting: Setting) -> MemoryItems:
    """Static memory of a table of layouts, by item; activations are added by `planner.costs`.

    Everything the allocator serves is stretched by its overhead; context and communicator buffers
    are outside it.
    """
    runtime, size = setting.runtime, element_sizes(setting)
    dense, expert = data_parallel.dense_groups(layout), data_parallel.expert_groups(layout)
    stretch = 1.0 + runtime.allocator_fraction
    layers = []
    for k in range(len(setting.model.kinds)):
        one = split_state(
            params.dense[k], params.trained_dense[k], layout, dense, size, setting, params.gemm[k]
        )
        two = split_state(params.expert[k], params.trained_expert[k], layout, expert, size, setting)
        layers.append({name: stretch * (one[name] + two[name]) for name in one})
    first = split_state(params.first, params.trained_first, layout, dense, size, setting)
    head = split_state(params.head, params.trained_head, layout, dense, size, setting)
    root = (np.asarray(layout.zero) >= 3) & (np.asarray(layout.shard) > 1)
    kept = runtime.zero3_pp_keeps_stage & (np.asarray(layout.pp) > 1)
    alive = np.where(root & ~kept, size.gather, 0.0)
    first["unsharded"] = first["unsharded"] + alive * params.first
    head["unsharded"] = (
        head["unsharded"]
        + (alive + np.where(root & ~kept & (setting.train.lora is None), size.reduce, 0.0))
        * params.head
    )
    reducing = np.asarray(layout.dp) * layout.cp > 1
    several = setting.num_gpus > 1
    fixed = {
        "unsharded": stretch * window_bytes(params, layout, setting, size),
        "buffers": (runtime.comm_base_bytes if several else 0.0)
        + runtime.comm_bytes_per_group * communicators(layout)
        + stretch * np.where(reducing, runtime.reduce_buffer_bytes, 0.0)
        + runtime.cublas_workspace_bytes,
        "context": runtime.context_bytes + 0.0 * np.asarray(layout.tp),
    }
    return MemoryItems(
        layers,
        fixed,
        {k: stretch * v for k, v in first.items()},
        {k: stretch * v for k, v in head.items()},
        away_bytes(params, layout, setting, size),
    )
