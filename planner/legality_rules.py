"""The rules of legality: each a mask over a table of layouts and the sentence for one of them.

`RULES` is the only list. `planner.legality` ANDs the masks for the search and raises the sentence
of the first mask that is false for one layout, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwprofiles.profile import Cluster
from planner.layout import CP_KINDS, OFFLOADS, RECOMPUTE, SCHEDULES, Int, Layout
from planner.layout_text import MAX_DEGREE
from planner.runtime import Runtime
from planner.specs import AttentionSpec, ModelSpec, MoeSpec, TrainSpec

Mask = NDArray[np.bool_]
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, DUALPIPE = range(len(SCHEDULES))
RING, ALL_GATHER, ULYSSES = range(len(CP_KINDS))
FP8_MULTIPLE = 16  # elements: cuBLAS fp8 and fp4 GEMMs want 16-byte rows


@dataclass(frozen=True)
class Situation:
    """What a layout is judged against. `stage_layers` only where one layout is judged."""

    model: ModelSpec
    train: TrainSpec
    cluster: Cluster
    runtime: Runtime
    num_gpus: int | None = None
    stage_layers: tuple[int, ...] | None = None

    @cached_property
    def attentions(self) -> list[tuple[str, AttentionSpec]]:
        """Distinct attention of every layer kind and of the tower, with the name of its part."""
        found = [("", kind.attention) for kind in self.model.kinds]
        if self.model.tower is not None:
            found.append(("the vision tower's ", self.model.tower.layer.attention))
        return list(dict.fromkeys(pair for pair in found if pair[1].kind != "none"))

    @cached_property
    def heads(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys((part, a.num_attention_heads) for part, a in self.attentions))

    @cached_property
    def mlp_widths(self) -> list[int]:
        """Widths that tensor parallelism splits: dense MLPs and shared experts, the tower's too."""
        layers = list(self.model.kinds)
        if self.model.tower is not None:
            layers.append(self.model.tower.layer)
        widths = [layer.mlp.intermediate_size for layer in layers if layer.mlp is not None]
        widths += [layer.moe.shared_intermediate_size for layer in layers if layer.moe is not None]
        return sorted({width for width in widths if width})

    @cached_property
    def moes(self) -> list[MoeSpec]:
        return list(dict.fromkeys(kind.moe for kind in self.model.kinds if kind.moe is not None))

    @cached_property
    def has_windows(self) -> bool:
        return any(kind.attention.window is not None for kind in self.model.kinds)

    def num_microbatches(self, table: Layout) -> Int:
        """Micro-batches of a step; meaningful where the batch rule holds."""
        return self.train.global_batch_size // (table.micro_batch * table.dp)

    def seq_multiple(self, table: Layout) -> Int:
        """Number that the sequence must be a multiple of: cp * lcm(2 if ring, tp if split)."""
        halves = np.where((np.asarray(table.cp) > 1) & (np.asarray(table.cp_kind) != ULYSSES), 2, 1)
        split = table.tp if self.runtime.sequence_parallel else 1
        return table.cp * np.lcm(halves, split)


@dataclass(frozen=True)
class Refusal:
    """One sentence, the offending values and the legal ones."""

    message: str
    values: dict[str, Any]
    legal: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """`allowed` works on tables, with every degree at least 1; `refuse` on one layout."""

    name: str
    allowed: Callable[[Layout, Situation], Any]
    refuse: Callable[[Layout, Situation], Refusal]


def listed(values: Iterable[Any], near: int | None = None, most: int = 12) -> str:
    """Values as text, all of them if few, else those nearest to `near`."""
    return ", ".join(map(str, nearest(values, near, most))) or "none"


def nearest(values: Iterable[Any], near: int | None = None, most: int = 12) -> list[Any]:
    found = list(values)
    if len(found) > most and near is not None:
        found = sorted(sorted(found, key=lambda v: (abs(v - near), v))[:most])
    return found[:most]


def choices(
    allowed: Callable[[Layout, Situation], Any],
    layout: Layout,
    s: Situation,
    key: str,
    candidates: Sequence[int],
) -> list[int]:
    """The values of one degree that this rule allows, all else as in `layout`."""
    values = np.asarray(candidates, dtype=np.int64)
    mask = np.broadcast_to(allowed(layout.with_(**{key: values}), s), values.shape)
    return [int(v) for v in values[mask]]


def _all(masks: Iterable[Any]) -> Any:
    result: Any = np.True_
    for mask in masks:
        result = result & mask
    return result


# Degrees by themselves -------------------------------------------------------------------------

_CODES = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "cp_kind": CP_KINDS, "offload": OFFLOADS}
_COUNTS = ("dp", "tp", "pp", "cp", "vpp", "ep", "etp", "shard", "micro_batch")


def degrees_allowed(table: Layout, s: Situation) -> Any:
    masks = [
        (np.asarray(getattr(table, k)) >= 1) & (np.asarray(getattr(table, k)) <= MAX_DEGREE)
        for k in _COUNTS
    ]
    masks.append((np.asarray(table.zero) >= 0) & (np.asarray(table.zero) <= 3))
    for key, words in _CODES.items():
        code = np.asarray(getattr(table, key))
        masks.append((code >= 0) & (code < len(words)))
    return _all(masks)


def degrees_refuse(layout: Layout, s: Situation) -> Refusal:
    for key in _COUNTS:
        value = getattr(layout, key)
        if not 1 <= value <= MAX_DEGREE:
            text = (
                f"{key}={value} is not a degree: it must be a whole number from 1 to {MAX_DEGREE}."
            )
            return Refusal(text, {key: value}, {key: [1]})
    if not 0 <= layout.zero <= 3:
        text = f"zero={layout.zero} is not a ZeRO stage; legal: 0, 1, 2, 3."
        return Refusal(text, {"zero": layout.zero}, {"zero": [0, 1, 2, 3]})
    key = next(k for k, w in _CODES.items() if not 0 <= getattr(layout, k) < len(w))
    text = f"{key}={getattr(layout, key)} is not a code; legal: {', '.join(_CODES[key])}."
    return Refusal(text, {key: getattr(layout, key)}, {key: list(_CODES[key])})


_LIMITED = ("tp", "pp", "cp", "ep")


def limits_allowed(table: Layout, s: Situation) -> Any:
    return _all(np.asarray(getattr(table, k)) <= getattr(s.runtime, f"max_{k}") for k in _LIMITED)


def limits_refuse(layout: Layout, s: Situation) -> Refusal:
    key = next(k for k in _LIMITED if getattr(layout, k) > getattr(s.runtime, f"max_{k}"))
    most = getattr(s.runtime, f"max_{key}")
    name = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}[key]
    what = f"at most {key}={most}" if most > 1 else f"no {name} parallelism, so {key}=1"
    return Refusal(
        f"{key}={getattr(layout, key)} is not legal: runtime {s.runtime.name} offers {what}.",
        {key: getattr(layout, key), "runtime": s.runtime.name},
        {key: [most]},
    )


# The training itself ---------------------------------------------------------------------------


def _device_has(s: Situation, precision: str) -> bool:
    peaks = s.cluster.device.peak_flops_per_s
    return precision == "fp32" or any(
        key == precision or key.startswith((f"{precision}-", f"{precision}_")) for key in peaks
    )


def training_allowed(table: Layout, s: Situation) -> Any:
    return np.bool_(
        s.train.precision in s.runtime.precisions
        and _device_has(s, s.train.precision)
        and s.train.optimizer in s.runtime.optimizers
        and s.train.global_batch_size >= 1
        and s.train.seq_len >= 1
    )


def training_refuse(layout: Layout, s: Situation) -> Refusal:
    train, runtime, device = s.train, s.runtime, s.cluster.device
    if train.precision not in runtime.precisions:
        text = (
            f"precision {train.precision} is not offered by runtime {runtime.name}; "
            f"legal here: {', '.join(runtime.precisions)}."
        )
        return Refusal(
            text, {"precision": train.precision}, {"precision": list(runtime.precisions)}
        )
    if not _device_has(s, train.precision):
        legal = [p for p in runtime.precisions if _device_has(s, p)]
        text = (
            f"precision {train.precision} is not legal: {device.name} has no {train.precision} "
            f"tensor cores; legal here: {', '.join(legal)}."
        )
        return Refusal(
            text, {"precision": train.precision, "device": device.name}, {"precision": legal}
        )
    if train.optimizer not in runtime.optimizers:
        text = (
            f"optimizer {train.optimizer} is not offered by runtime {runtime.name}; "
            f"legal here: {', '.join(runtime.optimizers)}."
        )
        return Refusal(
            text, {"optimizer": train.optimizer}, {"optimizer": list(runtime.optimizers)}
        )
    key = "global_batch_size" if train.global_batch_size < 1 else "seq_len"
    text = f"{key}={getattr(train, key)} must be at least 1."
    return Refusal(text, {key: getattr(train, key)}, {key: [1]})


# The two grids over the GPUs -------------------------------------------------------------------


def world_allowed(table: Layout, s: Situation) -> Any:
    if s.num_gpus is None:
        return np.True_
    return np.asarray(table.num_gpus) == s.num_gpus


def world_refuse(layout: Layout, s: Situation) -> Refusal:
    gpus = s.num_gpus or 1
    dense = layout.tp * layout.pp * layout.cp
    factors = f"tp={layout.tp} x pp={layout.pp} x cp={layout.cp}"
    values = {k: getattr(layout, k) for k in ("tp", "pp", "cp", "dp")} | {"num_gpus": gpus}
    if gpus % dense:
        fitting = [v for v in range(1, layout.tp + 1) if gpus % (v * layout.pp * layout.cp) == 0]
        hint = f"; with this pp and cp, tp may be {listed(fitting, layout.tp)}" if fitting else ""
        text = (
            f"{factors} = {dense} does not divide the {gpus} GPUs, which tp x pp x cp must{hint}."
        )
        return Refusal(text, values, {"tp": fitting})
    text = (
        f"{factors} x dp={layout.dp} = {dense * layout.dp} is not the {gpus} GPUs; "
        f"with these degrees dp is {gpus} / {dense} = {gpus // dense}."
    )
    return Refusal(text, values, {"dp": [gpus // dense]})


def expert_grid_allowed(table: Layout, s: Situation) -> Any:
    return np.asarray(table.dp * table.tp * table.cp) % (table.ep * table.etp) == 0


def expert_grid_refuse(layout: Layout, s: Situation) -> Refusal:
    world, product = layout.num_gpus, layout.etp * layout.ep * layout.pp
    sizes = [moe.num_experts for moe in s.moes] or [1]
    legal = [
        v
        for v in range(1, max(sizes) + 1)
        if expert_grid_allowed(layout.with_(ep=v), s) and experts_allowed(layout.with_(ep=v), s)
    ]
    text = (
        f"The expert grid does not fit: etp={layout.etp} x ep={layout.ep} x pp={layout.pp} = "
        f"{product} does not divide the {world} GPUs (dp={layout.dp} x tp={layout.tp} x "
        f"pp={layout.pp} x cp={layout.cp} = {world}), as both the dense grid tp x pp x cp and the "
        f"expert grid etp x ep x pp must; ep may be {listed(legal, layout.ep)}."
    )
    keys = ("etp", "ep", "pp", "tp", "cp", "dp")
    return Refusal(text, {k: getattr(layout, k) for k in keys} | {"world": world}, {"ep": legal})


def experts_allowed(table: Layout, s: Situation) -> Any:
    ep, etp = np.asarray(table.ep), np.asarray(table.etp)
    if not s.moes:
        return (ep == 1) & (etp == 1)
    masks = [moe.num_experts % ep == 0 for moe in s.moes]
    masks += [moe.intermediate_size % etp == 0 for moe in s.moes]
    if not s.runtime.expert_tp:
        masks.append(etp == 1)
    return _all(masks)


def experts_refuse(layout: Layout, s: Situation) -> Refusal:
    values = {"ep": layout.ep, "etp": layout.etp}
    if not s.moes:
        text = (
            f"ep={layout.ep} etp={layout.etp} is not legal: {s.model.name} has no experts, "
            "so both must be 1."
        )
        return Refusal(text, values, {"ep": [1], "etp": [1]})
    for moe in s.moes:
        if moe.num_experts % layout.ep:
            legal = choices(
                lambda t, s: experts_allowed(t.with_(etp=1), s),
                layout,
                s,
                "ep",
                range(1, moe.num_experts + 1),
            )
            text = (
                f"ep={layout.ep} does not divide num_experts={moe.num_experts}; "
                f"legal here: {listed(legal, layout.ep)}."
            )
            return Refusal(text, values | {"num_experts": moe.num_experts}, {"ep": legal})
    if not s.runtime.expert_tp and layout.etp > 1:
        text = (
            f"etp={layout.etp} is not legal: runtime {s.runtime.name} does not split experts over "
            "tensor-parallel ranks of their own, so etp=1."
        )
        return Refusal(text, values, {"etp": [1]})
    moe = next(moe for moe in s.moes if moe.intermediate_size % layout.etp)
    legal = [v for v in range(1, 65) if moe.intermediate_size % v == 0]
    text = (
        f"etp={layout.etp} does not divide the expert width {moe.intermediate_size}; "
        f"legal here: {listed(legal, layout.etp)}."
    )
    return Refusal(text, values | {"intermediate_size": moe.intermediate_size}, {"etp": legal})
