"""Rules about batch, pipeline, sharding and offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from planner.errors import LayoutError
from planner.layout import OFFLOADS, SCHEDULES, Layout
from planner.layout_text import divisors
from planner.legality_rules import (
    DUALPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Refusal,
    Situation,
    choices,
    listed,
    nearest,
)

EMPTY_ENDS = 2  # chunks that may hold no layer: the embedding and the head

# Batch -----------------------------------------------------------------------------------------


def batch_allowed(table: Layout, s: Situation) -> Any:
    return s.train.global_batch_size % np.asarray(table.micro_batch * table.dp) == 0


def batch_refuse(layout: Layout, s: Situation) -> Refusal:
    batch, step = s.train.global_batch_size, layout.micro_batch * layout.dp
    batches = [v for v in (batch // step * step, -(-batch // step) * step) if v > 0]
    legal: dict[str, Any] = {"global_batch_size": batches}
    offers = []
    if batch % layout.dp == 0:
        micro = divisors(batch // layout.dp)
        legal["micro_batch"] = nearest(micro, layout.micro_batch)
        offers.append(f"micro_batch may be {listed(micro, layout.micro_batch)}")
    degrees = [v for v in divisors(batch) if batch % (v * layout.micro_batch) == 0]
    if degrees:
        legal["dp"] = nearest(degrees, layout.dp)
        offers.append(f"or dp may be {listed(degrees, layout.dp)}")
    text = (
        f"global_batch_size={batch} is not micro_batch={layout.micro_batch} x dp={layout.dp} x a "
        f"whole number of micro-batches ({batch} / {step} = {batch / step:g}); with this batch "
        f"{' '.join(offers) or 'no micro_batch fits this dp'}; nearest legal batches: "
        f"{listed(batches)}."
    )
    values = {"global_batch_size": batch, "micro_batch": layout.micro_batch, "dp": layout.dp}
    return Refusal(text, values, legal)


# Pipeline --------------------------------------------------------------------------------------


def suggest_stages(
    num_layers: int, num_stages: int, first_weight: float = 0.0, last_weight: float = 0.0
) -> tuple[int, ...]:
    """Split layers over stages so that the heaviest stage is lightest; none is dropped.

    The embedding counts as `first_weight` layers on the first stage and the head as `last_weight`
    on the last. Stages that can hold one layer more are the earlier ones.

    Raises
    ------
    LayoutError
        Fewer layers than stages, or a stage's share is smaller than its embedding or head weight.

    Examples
    --------
    >>> suggest_stages(46, 4)
    (12, 12, 11, 11)
    >>> suggest_stages(94, 4, last_weight=2)
    (24, 24, 24, 22)
    """
    share = (num_layers + first_weight + last_weight) / num_stages
    if num_layers < num_stages:
        raise LayoutError(
            f"{num_layers} layers cannot fill {num_stages} stages; at most {num_layers} stages.",
            values={"num_hidden_layers": num_layers, "stages": num_stages},
            legal={"stages": [num_layers]},
        )
    if max(first_weight, last_weight) > share:
        most = int((num_layers + first_weight + last_weight) // max(first_weight, last_weight))
        raise LayoutError(
            f"A stage's share of {share:g} layers is smaller than what the embedding "
            f"({first_weight:g}) or the head ({last_weight:g}) weighs; at most {most} stages.",
            values={"stages": num_stages, "embedding": first_weight, "head": last_weight},
            legal={"stages": [most]},
        )
    load = [0.0] * num_stages
    load[0] += first_weight
    load[-1] += last_weight
    counts = [1] * num_stages
    load = [weight + 1 for weight in load]
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda i: (load[i], i))
        counts[stage] += 1
        load[stage] += 1
    return tuple(counts)


def suggest_chunks(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Split layers over the ``pp * vpp`` model chunks of an interleaved (or plain) pipeline.

    One or two layers short, the last chunk and then the first hold head and embedding alone.

    Examples
    --------
    >>> suggest_chunks(7, Layout(pp=4, vpp=2))
    (1, 1, 1, 1, 1, 1, 1, 0)
    """
    chunks = layout.pp * layout.vpp
    missing = chunks - num_layers
    if 0 < missing <= EMPTY_ENDS and layout.vpp > 1:
        return (2 - missing, *([1] * (chunks - 2)), 0)
    return suggest_stages(num_layers, chunks)


def layers_allowed(table: Layout, s: Situation) -> Any:
    pp, vpp, layers = np.asarray(table.pp), np.asarray(table.vpp), s.model.num_hidden_layers
    if s.runtime.uneven_stages:
        # Embedding and head may be chunks of their own: 126 layers run as 128 chunks.
        fits = (layers >= pp) & (layers + np.where(vpp > 1, EMPTY_ENDS, 0) >= pp * vpp)
    else:
        fits = (layers >= pp * vpp) & (layers % (pp * vpp) == 0)
    return fits if s.stage_layers is None else fits & (_stage_fault(table, s) is None)


def _stage_fault(layout: Layout, s: Situation) -> str | None:
    """Say what is wrong with the given layers of each stage, if anything."""
    counts = s.stage_layers or ()
    layers, pp, vpp = s.model.num_hidden_layers, int(layout.pp), int(layout.vpp)
    if len(counts) not in (pp, pp * vpp):
        chunks = f" or {pp * vpp} chunks" if vpp > 1 else ""
        return f"they are {len(counts)} counts for pp={pp} stages{chunks}"
    if sum(counts) != layers:
        return f"they add up to {sum(counts)}, not to the {layers} layers, none of which is dropped"
    inner = counts[1:-1] if len(counts) == pp * vpp and vpp > 1 else counts
    if min(counts) < 0 or min(inner) < 1:
        return "every stage needs at least one layer"
    if len(counts) == pp and vpp > 1 and any(count % vpp for count in counts):
        odd = next(count for count in counts if count % vpp)
        return f"{odd} layers of a stage do not divide into vpp={vpp} chunks"
    if not s.runtime.uneven_stages and len(set(counts)) > 1:
        return f"runtime {s.runtime.name} wants the same number on every stage"
    return None


def layers_refuse(layout: Layout, s: Situation) -> Refusal:
    layers, chunks = s.model.num_hidden_layers, layout.pp * layout.vpp
    values: dict[str, Any] = {"num_hidden_layers": layers, "pp": layout.pp, "vpp": layout.vpp}
    if bool(np.all(layers_allowed(layout, replace(s, stage_layers=None)))):
        counts = list(s.stage_layers or ())
        split = suggest_chunks(layers, layout)
        text = (
            f"Stages of {listed(counts, most=99)} layers are not legal with pp={layout.pp} "
            f"vpp={layout.vpp}: {_stage_fault(layout, s)}; legal for example: "
            f"{listed(split, most=99)}."
        )
        return Refusal(text, values | {"stage_layers": counts}, {"stage_layers": list(split)})
    even, alone = not s.runtime.uneven_stages, replace(s, stage_layers=None)
    legal = {
        key: choices(layers_allowed, layout, alone, key, range(1, layers + 1))
        for key in ("pp", "vpp")
    }
    if layers < chunks:
        why = f"every one of the {chunks} model chunks needs at least one layer"
    else:
        why = (
            f"runtime {s.runtime.name} wants the same number on each of the {chunks} model chunks, "
            f"{layers / chunks:.4g} each is not whole, and no layer may be dropped"
        )
    offers = [
        f"with this {other}, {key} may be {listed(legal[key], getattr(layout, key))}"
        for key, other in (("pp", "vpp"), ("vpp", "pp"))
        if legal[key]
    ]
    text = f"{layers} layers do not fit pp={layout.pp} x vpp={layout.vpp}: {why}; " + "; ".join(
        offers
    )
    if even and layers >= layout.pp and layout.vpp == 1:
        text += (
            "; a runtime with uneven stages takes "
            f"{listed(suggest_stages(layers, layout.pp), most=99)}"
        )
    return Refusal(text + ".", values, legal)


def schedule_allowed(table: Layout, s: Situation) -> Any:
    pp, vpp, code = np.asarray(table.pp), np.asarray(table.vpp), np.asarray(table.schedule)
    offered = np.isin(code, [SCHEDULES.index(name) for name in s.runtime.schedules])
    chunks = np.where(code == INTERLEAVED, vpp > 1, vpp == np.where(code == DUALPIPE, 2, 1))
    deep = (code != INTERLEAVED) | (pp >= _least_interleaved_pp(s))
    plain = (vpp == 1) & (code != INTERLEAVED) & (code != DUALPIPE)
    return offered & np.where(pp == 1, plain, chunks & deep)


def _least_interleaved_pp(s: Situation) -> int:
    """Megatron without overlapped sends refuses two interleaved ranks."""
    waits = s.runtime.interleaved_multiple and "interleaved" not in s.runtime.overlap_p2p
    return 3 if waits else 2


def schedule_refuse(layout: Layout, s: Situation) -> Refusal:
    name = SCHEDULES[layout.schedule]
    values = {"pp": layout.pp, "vpp": layout.vpp, "schedule": name}
    offers = list(s.runtime.schedules)
    if name not in offers:
        text = (
            f"schedule={name} is not offered by runtime {s.runtime.name}; "
            f"legal here: {', '.join(offers)}."
        )
        return Refusal(text, values, {"schedule": offers})
    if layout.pp == 1:
        text = (
            f"schedule={name} vpp={layout.vpp} is not legal with pp=1: one stage has nothing to "
            "interleave, so vpp=1 and schedule=1f1b."
        )
        return Refusal(text, values, {"vpp": [1], "schedule": [SCHEDULES[ONE_F_ONE_B]]})
    if name == "interleaved" and layout.vpp > 1:
        least = _least_interleaved_pp(s)
        text = (
            f"pp={layout.pp} is too few for schedule=interleaved: runtime {s.runtime.name} does "
            f"not overlap its pipeline sends and needs pp >= {least}."
        )
        return Refusal(text, values, {"pp": [least]})
    if name == "interleaved":
        rule, legal = "needs vpp of at least 2", [2]
    elif name == "dualpipe":
        rule, legal = "places two chunks a rank in a V, so vpp=2", [2]
    else:
        rule, legal = "holds one chunk a rank, so vpp=1 (vpp > 1 is schedule=interleaved)", [1]
    text = f"schedule={name} with vpp={layout.vpp} is not legal: it {rule}."
    return Refusal(text, values, {"vpp": legal})


def microbatches_allowed(table: Layout, s: Situation) -> Any:
    count = np.asarray(s.num_microbatches(table))
    pp, code = np.asarray(table.pp), np.asarray(table.schedule)
    strict = [SCHEDULES.index(name) for name in s.runtime.microbatches_at_least_pp]
    mask = ~np.isin(code, strict) | (count >= pp)
    mask = mask & ((code != DUALPIPE) | (count >= 2 * pp))
    rounds = np.maximum(1, count // pp)
    unit = pp if s.runtime.interleaved_multiple else rounds
    mask = mask & ((code != INTERLEAVED) | (count % unit == 0))
    mask = mask & ((code != ZERO_BUBBLE) | (count % rounds == 0))
    return (pp == 1) | mask


def microbatches_refuse(layout: Layout, s: Situation) -> Refusal:
    count, pp = int(s.num_microbatches(layout)), layout.pp
    name, step = SCHEDULES[layout.schedule], layout.micro_batch * layout.dp
    around = range(max(1, count - 4 * pp), count + 4 * pp)
    legal = [v for v in around if _count_allowed(layout, s, v)]
    legal = nearest(legal, count, 6)
    if name == "dualpipe":
        rule = f"dualpipe needs at least 2 pp = {2 * pp}"
    elif count < pp and name in s.runtime.microbatches_at_least_pp:
        rule = f"it needs at least pp={pp} in runtime {s.runtime.name}, or the run hangs"
    elif s.runtime.interleaved_multiple and name == "interleaved":
        rule = f"runtime {s.runtime.name} wants a multiple of pp={pp}"
    else:
        rule = f"they must divide into {max(1, count // pp)} equal rounds"
    batches = [v * step for v in legal]
    text = (
        f"{count} micro-batches do not fit schedule={name} with pp={pp}: {rule}; legal here: "
        f"{listed(legal)} micro-batches, which is global_batch_size {listed(batches)} "
        f"at micro_batch={layout.micro_batch} x dp={layout.dp}."
    )
    values = {
        "num_microbatches": count,
        "pp": pp,
        "schedule": name,
        "global_batch_size": s.train.global_batch_size,
    }
    return Refusal(text, values, {"num_microbatches": legal, "global_batch_size": batches})


def _count_allowed(layout: Layout, s: Situation, count: int) -> bool:
    train = replace(s.train, global_batch_size=count * layout.micro_batch * layout.dp)
    return bool(np.all(microbatches_allowed(layout, replace(s, train=train))))


# Sharding and offload --------------------------------------------------------------------------


def zero_allowed(table: Layout, s: Situation) -> Any:
    zero, pp, code = np.asarray(table.zero), np.asarray(table.pp), np.asarray(table.schedule)
    mask = np.isin(zero, s.runtime.zero_stages)
    mask = mask & ((pp == 1) | np.isin(zero, s.runtime.zero_with_pp))
    split = (pp > 1) & ((code == ZERO_BUBBLE) | (code == DUALPIPE))
    alone = np.asarray(table.dp * table.cp) == 1
    return mask & (~split | alone | np.isin(zero, s.runtime.split_backward_zero))


def zero_refuse(layout: Layout, s: Situation) -> Refusal:
    name = s.runtime.name
    legal = [z for z in range(4) if bool(np.all(zero_allowed(layout.with_(zero=z), s)))]
    values = {"zero": layout.zero, "pp": layout.pp, "runtime": name}
    options: dict[str, Any] = {"zero": legal}
    if layout.zero not in s.runtime.zero_stages:
        why = f"runtime {name} offers zero={listed(s.runtime.zero_stages)}"
    elif layout.pp > 1 and layout.zero not in s.runtime.zero_with_pp:
        why = f"runtime {name} cannot combine it with pipeline parallelism, so pp must be 1"
        options["pp"] = [1]
    else:
        why = (
            f"in runtime {name} schedule={SCHEDULES[layout.schedule]} splits the backward pass, "
            "and gradients of replicated or state-sharded ranks come out wrong"
        )
    ends = f"; with these degrees zero may be {listed(legal)}" if legal else ""
    text = f"zero={layout.zero} with pp={layout.pp} is not legal: {why}{ends}."
    return Refusal(text, values, options)


def shard_allowed(table: Layout, s: Situation) -> Any:
    zero, shard = np.asarray(table.zero), np.asarray(table.shard)
    ranks = np.asarray(table.dp * table.cp)
    part = (ranks % shard == 0) & (shard > 1) if s.runtime.hsdp else shard == ranks
    return np.where(zero == 0, shard == 1, (shard == ranks) | part)


def shard_refuse(layout: Layout, s: Situation) -> Refusal:
    ranks = layout.dp * layout.cp
    candidates = divisors(ranks)
    legal = [v for v in candidates if bool(np.all(shard_allowed(layout.with_(shard=v), s)))]
    if layout.zero == 0:
        why = "zero=0 shards nothing, so shard=1"
    elif s.runtime.hsdp:
        why = f"it must be a divisor above 1 of dp x cp = {layout.dp} x {layout.cp} = {ranks}"
    else:
        why = f"runtime {s.runtime.name} shards over all of dp x cp = {ranks}"
    text = (
        f"shard={layout.shard} is not legal with zero={layout.zero}: {why}; "
        f"legal here: {listed(legal, layout.shard)}."
    )
    values = {k: getattr(layout, k) for k in ("shard", "zero", "dp", "cp")}
    return Refusal(text, values, {"shard": legal})


def offload_allowed(table: Layout, s: Situation) -> Any:
    code, zero = np.asarray(table.offload), np.asarray(table.zero)
    mask = np.isin(code, [OFFLOADS.index(name) for name in s.runtime.offloads])
    params = np.isin(code, [i for i, name in enumerate(OFFLOADS) if name.startswith("params")])
    mask = mask & (~params | (zero == 3)) & ((code == 0) | (zero >= 1))
    if s.cluster.host_memory_bytes_per_s <= 0:
        mask = mask & (code == 0)
    if s.cluster.nvme_bytes <= 0:
        mask = mask & ~np.isin(code, [i for i, n in enumerate(OFFLOADS) if n.endswith("nvme")])
    return mask


def offload_refuse(layout: Layout, s: Situation) -> Refusal:
    name = OFFLOADS[layout.offload]
    legal = [
        word
        for code, word in enumerate(OFFLOADS)
        if bool(np.all(offload_allowed(layout.with_(offload=code), s)))
    ]
    options: dict[str, Any] = {"offload": legal}
    if name not in s.runtime.offloads:
        why = f"runtime {s.runtime.name} does not offer it"
    elif s.cluster.host_memory_bytes_per_s <= 0:
        why = f"{s.cluster.name} states no host memory bandwidth, at which the optimizer would run"
    elif name.endswith("nvme") and s.cluster.nvme_bytes <= 0:
        why = f"the nodes of {s.cluster.name} have no NVMe"
    else:
        least = 3 if name.startswith("params") else 1
        why = f"what is not sharded is not offloaded, so it needs zero >= {least}"
        options["zero"] = [z for z in range(least, 4) if z in s.runtime.zero_stages]
    text = (
        f"offload={name} with zero={layout.zero} is not legal: {why}; "
        f"legal here: {', '.join(legal) or 'none'}."
    )
    return Refusal(text, {"offload": name, "zero": layout.zero}, options)
