"""The values that each axis of the search may take, before legality rules combine them.

Degrees are divisors of the number of GPUs (of the experts for ep, of the batch for the
micro-batch), up to a stated largest value: tp and etp the scale-up domain or 16, whichever is
larger; cp 64; micro-batch 32 sequences in powers of two; vpp 16. `--fix` and `--max-degree` narrow
them, `--fix` may also name a value beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from hwprofiles.profile import Cluster
from planner.errors import LayoutError
from planner.layout import CP_KINDS, OFFLOADS, SCHEDULES
from planner.runtime import Runtime
from planner.specs import ModelSpec, TrainSpec

LARGEST_CP = 64
LARGEST_TP = 16
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def divisors(number: int, largest: int) -> list[int]:
    """Divisors of `number` up to `largest`, ascending.

    >>> divisors(12, 5)
    [1, 2, 3, 4]
    """
    return [d for d in range(1, min(number, largest) + 1) if number % d == 0]


def allowed_values(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    runtime: Runtime,
    num_gpus: int,
    *,
    fixed: Mapping[str, int] | None = None,
    max_degree: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Values by field of `Layout`; dp and shard appear only where the user fixed them."""
    heads = 0
    for kind in model.kinds:
        if kind.attention.kind != "none":
            heads = gcd(heads, kind.attention.num_attention_heads)
    experts = 0
    for kind in model.kinds:
        if kind.moe is not None:
            experts = gcd(experts, kind.moe.num_experts)
    largest_tp = max(cluster.domain_gpus, LARGEST_TP)
    layers = model.num_hidden_layers
    ring = ["ring", "all-gather"] if all(k.attention.kind != "none" for k in model.kinds) else []
    kinds = [
        i
        for i, name in enumerate(CP_KINDS)
        if name in runtime.cp_kinds and (name in ring or name == "ulysses")
    ]
    values: dict[str, list[int]] = {
        "pp": divisors(num_gpus, min(layers, runtime.max_pp)),
        "tp": [d for d in divisors(num_gpus, min(largest_tp, runtime.max_tp)) if heads % d == 0],
        "cp": [
            d for d in divisors(num_gpus, min(LARGEST_CP, runtime.max_cp)) if train.seq_len % d == 0
        ]
        if kinds
        else [1],
        "cp_kind": kinds or [0],
        "ep": [d for d in divisors(experts, min(experts, runtime.max_ep)) if num_gpus % d == 0]
        if experts
        else [1],
        "etp": [d for d in divisors(num_gpus, min(largest_tp, runtime.max_tp)) if d & (d - 1) == 0]
        if experts and runtime.expert_tp
        else [1],
        "micro_batch": [b for b in MICRO_BATCHES if train.global_batch_size % b == 0],
        "zero": list(runtime.zero_stages),
        "offload": [
            OFFLOADS.index(name)
            for name in runtime.offloads
            if name == "none" or cluster.host_memory_bytes_per_s > 0
        ],
        "schedule": [SCHEDULES.index(name) for name in runtime.schedules],
        "vpp": [v for v in CHUNKS if v <= max(1, layers)],
    }
    for name, most in (max_degree or {}).items():
        if name in values:
            values[name] = [v for v in values[name] if v <= most] or values[name][:1]
        elif name in ("dp", "shard"):
            values[name] = divisors(num_gpus, most)
    for name, value in (fixed or {}).items():
        if name != "recompute":
            values[name] = [value]
    for name, found in values.items():
        if not found:
            raise LayoutError(
                f"no value of {name} is possible for this model, cluster and batch under the "
                f"{runtime.name} runtime",
                values={"field": name},
            )
    return {name: tuple(sorted(set(found))) for name, found in values.items()}
