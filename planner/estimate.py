"""One layout with its stages: step time and memory as named addends.

The sums are those that the search minimises (`planner.results.StageCosts`); here every term keeps
its name. `estimate` also gives the bounds with all communication hidden and with none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planner.costs import RowCosts, row_costs
from planner.host_memory import away_bytes_per_node
from planner.layer import LayerCosts
from planner.layout import RECOMPUTE, SCHEDULES, Layout, StageLayout
from planner.model_flops import model_flops_per_token
from planner.parallel import pipeline_parallel
from planner.provider import ModelProvider, total
from planner.results import CommOp, Estimate, StageCosts
from planner.setting import Setting
from planner.stages import layers_of_chunks, virtual_stage
from planner.tables import LayerSums, StateSums

COMMUNICATION = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "fsdp",
    "pipeline_sends",
    "gradient_reduction",
    "parameter_gather",
    "gradient_norm",
    "tied_embedding",
)
FITS_FRACTION = 0.95  # above this share of capacity a layout is called borderline


def scalar(value: Any) -> float:
    """The one number of a table of one row."""
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


@dataclass(frozen=True, slots=True)
class Row:
    """One layout's costs with all names kept."""

    layout: Layout
    setting: Setting
    provider: ModelProvider
    named: RowCosts
    sums: StageCosts
    in_flight: tuple[float, ...]

    @property
    def head_stage(self) -> int:
        return int(pipeline_parallel.head_stage(self.layout.schedule, self.layout.pp))

    @property
    def num_microbatches(self) -> float:
        return scalar(self.sums.num_microbatches)


def cost_row(layout: Layout, setting: Setting) -> Row:
    """Cost one layout (plain ints)."""
    provider = ModelProvider(setting)
    provider.policy_codes = tuple(range(len(RECOMPUTE)))
    table = provider.table(layout)
    named = row_costs(table, setting)
    sums = provider.assemble(table, *sums_of(named, setting))
    flight = provider.in_flight(table, np.arange(layout.pp)[None, :])
    return Row(layout, setting, provider, named, sums, tuple(np.reshape(flight, -1).tolist()))


def sums_of(named: RowCosts, setting: Setting) -> tuple[LayerSums, StateSums]:
    """The sums that the search sees, from the named addends of one row."""
    layers = named.layers

    def by_policy(name: str) -> Any:
        return np.array([[[scalar(v) for v in getattr(x, name)] for x in layers]])

    def by_kind(name: str) -> Any:
        return np.array([[scalar(getattr(x, name)) for x in layers]])

    def edge(x: LayerCosts) -> Any:
        return np.array([scalar(x.forward_total_s) + scalar(x.backward_total_s)])

    def blocks(name: str) -> Any:
        return np.array([[scalar(getattr(t, name)) for t in named.traffic]])

    stretch = 1.0 + setting.runtime.allocator_fraction
    memory = named.memory
    held = [*memory.layer, memory.first, memory.head]
    updates = [*named.step_s, named.first_step_s, named.head_step_s]
    first, head = named.first, named.head
    return (
        LayerSums(
            by_kind("forward_total_s"),
            by_kind("backward_total_s"),
            by_kind("weight_s"),
            by_policy("recompute_s"),
            stretch * by_policy("kept_bytes"),
            stretch * by_policy("working_bytes"),
            edge(first),
            edge(head),
            np.array([stretch * scalar(first.kept_bytes[0])]),
            np.array([stretch * scalar(head.kept_bytes[0])]),
            np.array([[scalar(x.kept_bytes[0]) for x in layers]]),
        ),
        StateSums(
            blocks("up_s"),
            blocks("again_s"),
            blocks("down_s"),
            blocks("copy_s"),
            blocks("slow_s"),
            blocks("reduce_s"),
            blocks("gather_s"),
            np.array([[scalar(items["optimizer"]) for items in updates]]),
            np.array([[scalar(total(items)) for items in held]]),
            np.array([scalar(total(memory.fixed))]),
            np.array([scalar(total(named.constant_s))]),
            np.array([[scalar(block) for block in memory.away]]),
        ),
    )


def even_counts(num_layers: int, pp: int) -> list[int]:
    """Layers per rank, as equal as can be; first and last rank, with embedding and head, get less.

    >>> even_counts(126, 16)
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]
    """
    base, extra = divmod(num_layers, pp)
    counts = [base] * pp
    order = [*range(1, pp - 1), 0, pp - 1] if pp > 1 else [0]
    for rank in order[:extra]:
        counts[rank] += 1
    return counts


def stage_layouts(
    layout: Layout, setting: Setting, counts: Sequence[int], policy: int
) -> tuple[StageLayout, ...]:
    """Stages that hold `counts` layers each, all under one recompute policy."""
    model = setting.model
    schedule = SCHEDULES[layout.schedule]
    placed = layers_of_chunks(counts, schedule, layout.vpp)
    stages = []
    for rank in range(layout.pp):
        held = [0] * len(model.kinds)
        for chunk in range(layout.vpp):
            for index in placed[virtual_stage(schedule, rank, chunk, layout.pp)]:
                held[model.layer_kinds[index]] += 1
        stages.append(
            StageLayout(
                tuple(held),
                tuple(tuple(n if p == policy else 0 for p in range(len(RECOMPUTE))) for n in held),
            )
        )
    return tuple(stages)


def stage_seconds(row: Row, stages: Sequence[StageLayout]) -> list[float]:
    """Time of one micro-batch on every rank [s]."""
    s = row.sums
    seconds = []
    for rank, stage in enumerate(stages):
        t = scalar(s.stage_s)
        t += scalar(s.first_s) if rank == 0 else 0.0
        t += scalar(s.head_s) if rank == row.head_stage else 0.0
        for k, policies in enumerate(stage.policies):
            t += sum(n * s.layer_s[0, k, p] for p, n in enumerate(policies) if n)
        seconds.append(float(t))
    return seconds


def step_addends(row: Row, rank: int, stage: StageLayout) -> dict[str, float]:
    """Addends once a step on one rank."""
    named = row.named
    items: dict[str, float] = {}

    def put(values: Mapping[str, Any], times: float) -> None:
        for name, value in values.items():
            items[name] = items.get(name, 0.0) + times * scalar(value)

    for k, count in enumerate(stage.layers):
        put(named.step_s[k], count)
    if rank == 0:
        put(named.first_step_s, 1.0)
    if rank == row.head_stage:
        put(named.head_step_s, 1.0)
    return items


def microbatch_addends(row: Row, rank: int, stage: StageLayout) -> dict[str, float]:
    """Addends of one micro-batch on one rank; they sum to its stage seconds."""
    named = row.named
    items: dict[str, float] = {}

    def put(name: str, value: Any) -> None:
        items[name] = items.get(name, 0.0) + scalar(value)

    for k, policies in enumerate(stage.policies):
        for name, value in named.layers[k].forward_s.items():
            put(name, stage.layers[k] * scalar(value))
        for name, value in named.layers[k].backward_s.items():
            put(name, stage.layers[k] * scalar(value))
        for p, n in enumerate(policies):
            if n:
                again = "activation_offload" if RECOMPUTE[p] == "offload" else "recompute"
                put(again, n * scalar(named.layers[k].recompute_s[p]))
                copies = scalar(named.traffic[k].copy_s)
                put("fsdp", n * (scalar(named.fsdp_s[k][p]) - copies))
                put("gradient_copies", n * copies)
    edges = []
    if rank == 0:
        edges.append((named.first, named.fsdp_first_s, named.traffic[-2]))
    if rank == row.head_stage:
        edges.append((named.head, named.fsdp_head_s, named.traffic[-1]))
    for costs, fsdp, traffic in edges:
        for part in (costs.forward_s, costs.backward_s):
            for name, value in part.items():
                put("head" if name == "memory_bound" else name, value)
        put("fsdp", scalar(fsdp) - scalar(traffic.copy_s))
        put("gradient_copies", traffic.copy_s)
    put("pipeline_sends", row.sums.stage_s)
    return items


def memory_of(row: Row, rank: int, stage: StageLayout) -> dict[str, float]:
    """Memory of one rank by item [bytes]."""
    named, sums, setting = row.named, row.sums, row.setting
    items = dict.fromkeys(
        (
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "logits",
            "unsharded",
            "buffers",
            "context",
        ),
        0.0,
    )

    def put(values: Mapping[str, Any], times: float) -> None:
        for name, value in values.items():
            items[name] += times * scalar(value)

    for k, count in enumerate(stage.layers):
        put(named.memory.layer[k], count)
    put(named.memory.fixed, 1.0)
    flight = row.in_flight[rank]
    working = 0.0
    for k, policies in enumerate(stage.policies):
        for p, n in enumerate(policies):
            if n:
                items["activations"] += flight * n * float(sums.layer_act_bytes[0, k, p])
                working = max(working, float(sums.working_bytes[0, k, p]))
    items["activations"] += working
    if rank == 0:
        put(named.memory.first, 1.0)
        items["activations"] += flight * scalar(sums.first_act_bytes)
    if rank == row.head_stage:
        put(named.memory.head, 1.0)
        items["logits"] += scalar(sums.head_bytes) - scalar(total(named.memory.head))
    del setting
    return items


def comm_ops_of(row: Row, rank: int, stage: StageLayout) -> tuple[CommOp, ...]:
    """Collectives of one rank per step, with counts."""
    m = row.num_microbatches
    found: dict[tuple[str, str, str, str, float], CommOp] = {}

    def put(op: CommOp, times: float) -> None:
        count = times * scalar(op.count)
        if count <= 0:
            return
        key = (op.kind, op.axis, op.phase, op.what, scalar(op.num_bytes))
        old = found.get(key)
        found[key] = replace(
            op,
            num_bytes=key[4],
            count=count + (old.count if old else 0.0),
            total_s=times * scalar(op.total_s) + (old.total_s if old else 0.0),
            exposed_s=times * scalar(op.exposed_s) + (old.exposed_s if old else 0.0),
        )

    named = row.named
    for k, policies in enumerate(stage.policies):
        again = sum(n for p, n in enumerate(policies) if RECOMPUTE[p] == "full")
        for op in named.layers[k].comm_ops:
            put(op, m * stage.layers[k])
            if op.phase == "forward" and again:
                put(replace(op, phase="recompute"), m * again)
        for op in named.traffic[k].ops:
            put(op, stage.layers[k])
    if rank == 0:
        for op in named.first.comm_ops:
            put(op, m)
        for op in named.traffic[-2].ops:
            put(op, 1.0)
    if rank == row.head_stage:
        for op in named.head.comm_ops:
            put(op, m)
        for op in named.traffic[-1].ops:
            put(op, 1.0)
    layout, setting = row.layout, row.setting
    tokens = layout.micro_batch * setting.train.seq_len / layout.cp
    size = pipeline_parallel.send_bytes(
        setting.model, tokens, layout.tp, setting.element_bytes, setting.runtime
    )
    for op in pipeline_parallel.comm_ops(size, layout.pp, layout.vpp, m):
        put(op, 1.0)
    return tuple(found.values())


def step_time(row: Row, stages: Sequence[StageLayout]) -> float:
    """T = (m - beta) M + beta S + E + C [s]."""
    t = stage_seconds(row, stages)
    e = [sum(step_addends(row, rank, stage).values()) for rank, stage in enumerate(stages)]
    beta, m = scalar(row.sums.beta), row.num_microbatches
    return (m - beta) * max(t) + beta * sum(t) + max(e) + scalar(row.sums.constant_s)


def estimate_stages(
    layout: Layout, stages: Sequence[StageLayout], setting: Setting, *, bounds: bool = True
) -> Estimate:
    """Estimate one layout whose stages are given.

    MFU counts the FLOPs of the model (causal attention counted once, no recompute) against the
    device's peak in the training precision; HFU adds what recompute repeats.
    """
    row = cost_row(layout, setting)
    seconds = stage_seconds(row, stages)
    slowest = int(np.argmax(seconds))
    steps = [step_addends(row, rank, stage) for rank, stage in enumerate(stages)]
    last = max(range(len(stages)), key=lambda rank: sum(steps[rank].values()))
    beta, m = scalar(row.sums.beta), row.num_microbatches
    breakdown = {
        name: m * value for name, value in microbatch_addends(row, slowest, stages[slowest]).items()
    }
    breakdown["pipeline_bubble"] = beta * (sum(seconds) - max(seconds))
    fill = scalar(row.sums.constant_s) - scalar(total(row.named.constant_s))
    breakdown["pipeline_sends"] += fill
    for items in (steps[last], {k: scalar(v) for k, v in row.named.constant_s.items()}):
        for name, value in items.items():
            breakdown[name] = breakdown.get(name, 0.0) + value
    breakdown = {name: value for name, value in breakdown.items() if value > 0}
    time = sum(breakdown.values())
    lower = upper = time
    if bounds:
        lower = step_time(cost_row(layout, replace(setting, overlap="all")), stages)
        upper = step_time(cost_row(layout, replace(setting, overlap="none")), stages)
    away = away_bytes_per_node(
        row.sums, stages, row.in_flight, row.head_stage, setting.gpus_on_node
    )
    train, num_gpus = setting.train, setting.num_gpus
    tokens = train.global_batch_size * train.seq_len
    peak = setting.cluster.device.peak_flops_per_s[peak_precision(setting)]
    model_total = useful_flops_per_token(setting) * tokens
    share = recomputed_flops(row, stages)
    hidden = sum(
        m * n * scalar(row.named.layers[k].hidden_s) + n * scalar(row.named.hidden_step_s[k])
        for k, n in enumerate(stages[slowest].layers)
    )
    return Estimate(
        step_time_s=time,
        lower_s=min(lower, time),
        upper_s=max(upper, time),
        breakdown_s=breakdown,
        stage_s=tuple(seconds),
        memory_bytes=tuple(memory_of(row, rank, stage) for rank, stage in enumerate(stages)),
        capacity_bytes=setting.cluster.device.memory_bytes,
        tokens_per_s_per_gpu=tokens / time / num_gpus,
        mfu=model_total / (time * num_gpus * peak),
        hfu=(model_total + share) / (time * num_gpus * peak),
        comm_ops=comm_ops_of(row, slowest, stages[slowest]),
        host_bytes_per_node=away["host"],
        nvme_bytes_per_node=away["nvme"],
        detail={
            "slowest_stage": slowest,
            "num_microbatches": int(m),
            "beta": beta,
            "hidden_communication_s": hidden,
        },
    )


def useful_flops_per_token(setting: Setting) -> float:
    """Model FLOPs of a token, forward and backward; frozen linears have no weight gradient."""
    flops = model_flops_per_token(setting.model, setting.train.seq_len)
    if setting.train.lora is None:
        return flops.total_flops
    return flops.total_flops - (flops.forward_flops - flops.forward["attention_scores"])


def peak_precision(setting: Setting) -> str:
    """Precision whose peak MFU is measured against; bf16 where the device has no other peak."""
    name = setting.train.precision
    peaks = setting.cluster.device.peak_flops_per_s
    return name if name in peaks else "bf16"


def recomputed_flops(row: Row, stages: Sequence[StageLayout]) -> float:
    """FLOPs per step of the whole job that recompute repeats."""
    per_rank = 0.0
    for stage in stages:
        for k, policies in enumerate(stage.policies):
            per_rank += sum(
                n * scalar(row.named.layers[k].recompute_flops[p])
                for p, n in enumerate(policies)
                if n
            )
    ranks = float(row.layout.tp * row.layout.cp * row.layout.dp)
    return per_rank * row.num_microbatches * ranks
