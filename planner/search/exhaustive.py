"""The same question answered by trying everything, in plain Python: the oracle of the search.

Shares with the search the costs it is given and nothing else: layouts, splits and recompute mixes
come from loops over their definitions. Small spaces only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from planner.layout import SCHEDULES, Layout
from planner.results import StageCosts
from planner.search.provider import CostProvider

Answer = tuple[float, Layout]


def every_layout(provider: CostProvider) -> list[Layout]:
    """All legal layouts of the provider's space."""
    space = provider.space()
    gpus, batch = space.num_gpus, space.global_batch_size

    def values(name: str) -> tuple[int, ...]:
        return space.values.get(name, (int(getattr(Layout(), name)),))

    # On one rank all schedules are the same: one of them is enough, 1f1b if it is offered.
    names = [SCHEDULES[s] for s in sorted(values("schedule"))]
    plain = [n for n in names if n not in ("interleaved", "dualpipe")]
    alone = "1f1b" if "1f1b" in plain else next(iter(plain), None)
    found = []
    for pp, tp, cp, ep, etp, micro_batch, cp_kind in product(
        *(values(n) for n in ("pp", "tp", "cp", "ep", "etp", "micro_batch", "cp_kind"))
    ):
        if gpus % (pp * tp * cp):
            continue
        dp = gpus // (pp * tp * cp)
        if batch % (dp * micro_batch) or (dp * tp * cp) % (ep * etp):
            continue
        if cp == 1 and cp_kind != min(values("cp_kind")):
            continue
        if "dp" in space.values and dp not in space.values["dp"]:
            continue
        shards = [s for s in range(1, dp * cp + 1) if dp * cp % s == 0]
        for zero, shard, offload in product(values("zero"), shards, values("offload")):
            if "shard" in space.values and shard not in space.values["shard"]:
                continue
            sharded = shard > 1 or (dp * cp == 1 and (offload > 0 or 0 not in values("zero")))
            if (zero == 0 and shard > 1) or (zero > 0 and not sharded):
                continue
            for schedule, vpp in product(values("schedule"), values("vpp")):
                name = SCHEDULES[schedule]
                if (vpp > 1) != (name in ("interleaved", "dualpipe")):
                    continue
                if (name == "dualpipe" and vpp != 2) or (pp == 1 and name != alone):
                    continue
                if pp * vpp > len(provider.layer_kinds):
                    continue
                layout = Layout(
                    dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep, etp=etp, zero=zero, shard=shard,
                    micro_batch=micro_batch, schedule=schedule, cp_kind=cp_kind, offload=offload,
                )  # fmt: skip
                if bool(provider.legal(as_table(layout))[0]):
                    found.append(layout)
    return found


def as_table(layout: Layout) -> Layout:
    """A table of one row."""
    return Layout(**{n: np.array([getattr(layout, n)]) for n in Layout.__dataclass_fields__})


def best_layout(provider: CostProvider) -> Answer | None:
    """Least step time [s] over all legal layouts, and the layout; None where nothing fits."""
    best: Answer | None = None
    for layout in every_layout(provider):
        value = best_time(provider, layout)
        if value is not None and (best is None or value < best[0]):
            best = (value, layout)
    return best


def best_time(provider: CostProvider, layout: Layout) -> float | None:
    """Least step time of one layout [s] over all splits and mixes; None where none fits."""
    table = as_table(layout)
    costs = provider.stage_costs(table)
    head = int(provider.head_stage(table)[0])
    in_flight = [float(provider.in_flight(table, s)[0]) for s in range(layout.pp)]
    m, beta = float(costs.num_microbatches[0]), float(costs.beta[0])
    known: dict[tuple[int, tuple[int, ...]], tuple[float, float] | None] = {}
    best: float | None = None
    for split in splits(provider.layer_kinds, provider.num_kinds, layout, head == 0):
        ranks = []
        for stage, counts in enumerate(split):
            key = (stage, counts)
            if key not in known:
                known[key] = best_stage(
                    costs, stage, head, in_flight[stage], counts, provider.layer_kinds
                )
            ranks.append(known[key])
        if any(rank is None for rank in ranks):
            continue
        times = [rank[0] for rank in ranks if rank]
        steps = [rank[1] for rank in ranks if rank]
        value = (m - beta) * max(times) + beta * sum(times) + max(steps)
        value += float(costs.constant_s[0])
        if best is None or value < best:
            best = value
    return best


def splits(
    kinds: tuple[int, ...], num_kinds: int, layout: Layout, head_first: bool
) -> Iterator[list[tuple[int, ...]]]:
    """Layers per kind of every rank, for every split in the space of the search."""
    pp, vpp, num_layers = layout.pp, layout.vpp, len(kinds)
    v_shape = head_first and pp > 1
    changes = sum(a != b for a, b in pairwise(kinds))
    first_run = next((i for i, k in enumerate(kinds) if k != kinds[0]), num_layers)
    equal_only = vpp > 1 and not (changes == 0 or (changes == 1 and first_run <= 8))
    for numbers in compositions(num_layers, pp, vpp):
        if equal_only and any(n * pp != num_layers or n % vpp for n in numbers):
            continue
        counts = [[0] * num_kinds for _ in range(pp)]
        position = 0
        for chunk in range(vpp):
            ranks = range(pp - 1, -1, -1) if v_shape and chunk % 2 else range(pp)
            for rank in ranks:
                size = numbers[rank] // vpp + (1 if chunk >= vpp - numbers[rank] % vpp else 0)
                for kind in kinds[position : position + size]:
                    counts[rank][kind] += 1
                position += size
        yield [tuple(c) for c in counts]


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Ordered ways to write `total` as `parts` numbers of at least `least`.

    >>> list(compositions(4, 2, 1))
    [(1, 3), (2, 2), (3, 1)]
    """
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for number in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - number, parts - 1, least):
            yield (number, *rest)


def best_stage(
    costs: StageCosts,
    stage: int,
    head: int,
    in_flight: float,
    counts: tuple[int, ...],
    kinds: tuple[int, ...],
) -> tuple[float, float] | None:
    """Least time of one stage and its step cost [s]; None where no mix fits."""
    first, last = stage == 0, stage == head
    num_policies = costs.layer_s.shape[2]
    totals = [kinds.count(k) for k in range(len(counts))]
    main = totals.index(max(totals))
    others = [k for k in range(len(counts)) if k != main]
    best: float | None = None
    for other in range(num_policies):
        for mix in compositions(counts[main], num_policies, 0):
            used = [(main, p, n) for p, n in enumerate(mix) if n]
            used += [(k, other, counts[k]) for k in others if counts[k]]
            time = float(costs.stage_s[0])
            num_bytes = float(costs.fixed_bytes[0])
            if first:
                time += float(costs.first_s[0])
                num_bytes += float(costs.first_bytes[0])
                num_bytes += in_flight * float(costs.first_act_bytes[0])
            if last:
                time += float(costs.head_s[0])
                num_bytes += float(costs.head_bytes[0])
            for k, p, n in used:
                time += n * float(costs.layer_s[0, k, p])
                num_bytes += n * float(costs.layer_static_bytes[0, k])
                num_bytes += in_flight * n * float(costs.layer_act_bytes[0, k, p])
            num_bytes += max((float(costs.working_bytes[0, k, p]) for k, p, _ in used), default=0.0)
            fits = num_bytes <= costs.capacity_bytes * (1 + 1e-12)
            fits &= fits_host(costs, first, last, in_flight, counts, used)
            if fits and time < float("inf") and (best is None or time < best):
                best = time
    if best is None:
        return None
    step = sum(n * float(costs.layer_step_s[0, k]) for k, n in enumerate(counts))
    step += float(costs.first_step_s[0]) * first + float(costs.head_step_s[0]) * last
    return best, step


def fits_host(
    costs: StageCosts,
    first: bool,
    last: bool,
    in_flight: float,
    counts: tuple[int, ...],
    used: list[tuple[int, int, int]],
) -> bool:
    """Whether a rank's share of host memory (or NVMe) holds what offload sends there; `used` are
    (kind, policy, layers)."""
    host = costs.host
    if host is None:
        return True
    state = float(host.first[0]) * first + float(host.head[0]) * last
    state += sum(n * float(host.layer[0, k]) for k, n in enumerate(counts))
    if state > float(host.state_capacity[0]) * (1 + 1e-12):
        return False
    sent = sum(n * float(host.act[0, k]) for k, p, n in used if p == host.act_policy)
    held = float(host.shared[0]) * state + in_flight * sent
    return held <= float(host.act_capacity[0]) * (1 + 1e-12)
