"""Which layouts are legal for a model, a batch, a cluster and a runtime, and why not.

`legal_mask` judges a table of layouts for the search; `check` judges one and raises the sentence;
`check_fixed` says when degrees that a person fixed can never be legal. All three use `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from hwprofiles.profile import Cluster
from planner import legality_model as model_rules
from planner import legality_pipeline as pipeline_rules
from planner import legality_rules as rules
from planner.errors import LayoutError
from planner.layout import CP_KINDS, SCHEDULES, Layout
from planner.layout_text import (
    KEYS,
    LayoutRequest,
    divisors,
    format_layout,
    parse_layout,
    parse_request,
)
from planner.legality_pipeline import suggest_chunks, suggest_stages
from planner.legality_rules import Mask, Rule, Situation
from planner.legality_warnings import padded_vocab_size, statements, warnings_for
from planner.runtime import Runtime
from planner.specs import ModelSpec, TrainSpec

__all__ = [
    "RULES",
    "LayoutRequest",
    "Rule",
    "Situation",
    "check",
    "check_fixed",
    "format_layout",
    "legal_mask",
    "padded_vocab_size",
    "parse_layout",
    "parse_request",
    "statements",
    "suggest_chunks",
    "suggest_stages",
]

RULES: tuple[Rule, ...] = (
    Rule("degrees", rules.degrees_allowed, rules.degrees_refuse),
    Rule("training", rules.training_allowed, rules.training_refuse),
    Rule("limits", rules.limits_allowed, rules.limits_refuse),
    Rule("heads", model_rules.heads_allowed, model_rules.heads_refuse),
    Rule("kv_heads", model_rules.kv_allowed, model_rules.kv_refuse),
    Rule("widths", model_rules.widths_allowed, model_rules.widths_refuse),
    Rule("world", rules.world_allowed, rules.world_refuse),
    Rule("experts", rules.experts_allowed, rules.experts_refuse),
    Rule("expert_grid", rules.expert_grid_allowed, rules.expert_grid_refuse),
    Rule("context", model_rules.context_allowed, model_rules.context_refuse),
    Rule("ulysses", model_rules.ulysses_allowed, model_rules.ulysses_refuse),
    Rule("sequence", model_rules.sequence_allowed, model_rules.sequence_refuse),
    Rule("layers", pipeline_rules.layers_allowed, pipeline_rules.layers_refuse),
    Rule("schedule", pipeline_rules.schedule_allowed, pipeline_rules.schedule_refuse),
    Rule("batch", pipeline_rules.batch_allowed, pipeline_rules.batch_refuse),
    Rule("microbatches", pipeline_rules.microbatches_allowed, pipeline_rules.microbatches_refuse),
    Rule("zero", pipeline_rules.zero_allowed, pipeline_rules.zero_refuse),
    Rule("shard", pipeline_rules.shard_allowed, pipeline_rules.shard_refuse),
    Rule("offload", pipeline_rules.offload_allowed, pipeline_rules.offload_refuse),
    Rule("recompute", model_rules.recompute_allowed, model_rules.recompute_refuse),
    Rule("low_precision", model_rules.low_precision_allowed, model_rules.low_precision_refuse),
)


def _masks(table: Layout, situation: Situation) -> list[Mask]:
    """One mask a rule. Values that are no degrees are judged by the first rule alone."""
    shape = np.broadcast_shapes(*(np.shape(getattr(table, f.name)) for f in fields(table)))
    good = np.broadcast_to(np.asarray(RULES[0].allowed(table, situation), dtype=bool), shape)
    clean = table
    if not good.all():
        plain = Layout()
        clean = Layout(
            **{
                f.name: np.where(good, getattr(table, f.name), getattr(plain, f.name))
                for f in fields(table)
            }
        )
    others = [np.asarray(rule.allowed(clean, situation), dtype=bool) for rule in RULES[1:]]
    return [good, *(np.broadcast_to(mask, shape) for mask in others)]


def legal_mask(
    table: Layout,
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    runtime: Runtime,
    num_gpus: int | None = None,
) -> Mask:
    """Judge every row of a table of layouts.

    The number of GPUs of a row is the product of its degrees, unless `num_gpus` fixes it.
    """
    situation = Situation(model, train, cluster, runtime, num_gpus)
    masks = _masks(table, situation)
    return np.asarray(np.logical_and.reduce(masks), dtype=bool)


def check(
    layout: Layout,
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    num_gpus: int | None,
    runtime: Runtime,
    stage_layers: tuple[int, ...] | None = None,
) -> list[str]:
    """Accept one layout and return its warnings, or refuse it.

    `stage_layers` are layers of each pipeline rank, or of each of the ``pp * vpp`` model chunks;
    with vpp > 1 counts of a rank must divide into its chunks.

    Raises
    ------
    LayoutError
        The first rule of `RULES` that the layout breaks: what, values, rule, nearest legal values.
    """
    situation = Situation(
        model, train, cluster, runtime, num_gpus, tuple(stage_layers) if stage_layers else None
    )
    for rule in RULES:
        if not bool(np.all(rule.allowed(layout, situation))):
            raise _error(rule, layout, situation)
    return warnings_for(layout, situation)


def _error(rule: Rule, layout: Layout, situation: Situation) -> LayoutError:
    refusal = rule.refuse(layout, situation)
    return LayoutError(refusal.message, values=refusal.values, legal=refusal.legal)


_GRID = ("tp", "pp", "cp")
_CHUNKS = {"interleaved": [2, 3, 5, 7], "dualpipe": [2]}


def check_fixed(
    fix: Mapping[str, int],
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    gpus: int,
    runtime: Runtime,
) -> None:
    """Refuse degrees that no choice of the others can make legal.

    Tries the free degrees at their most permissive values and, where every layout is refused, gives
    the sentence of the layout that breaks fewest rules.

    Raises
    ------
    LayoutError
        As `check`, or an unknown key.
    """
    if unknown := [key for key in fix if key not in KEYS]:
        raise LayoutError(
            f"{unknown[0]!r} cannot be fixed; legal keys: {', '.join(KEYS)}.",
            values={"key": unknown[0]},
            legal={"key": list(KEYS)},
        )
    situation = Situation(model, train, cluster, runtime, gpus)
    alone = Layout(**dict(fix))
    if not bool(np.all(RULES[0].allowed(alone, situation))):
        raise _error(RULES[0], alone, situation)
    table = _completions(fix, train, gpus, runtime)
    masks = _masks(table, situation)
    broken = np.sum([~mask for mask in masks], axis=0)
    best = int(np.argmin(broken))
    if broken[best] == 0:
        return
    rule = next(rule for rule, mask in zip(RULES, masks, strict=True) if not mask[best])
    raise _error(rule, table.take(best), situation)


def _completions(fix: Mapping[str, int], train: TrainSpec, gpus: int, runtime: Runtime) -> Layout:
    """Layouts with `fix` and the other degrees free, as a table.

    A free degree that only ever restricts (ep, zero, micro_batch ...) is at its lowest, except
    where a fixed one or the precision may want it higher.
    """
    pipelined, sharded = {"schedule", "vpp"} & set(fix), {"shard", "offload", "schedule"} & set(fix)
    low = train.precision in ("fp8", "fp4")
    axes: dict[str, list[int]] = {
        "cp_kind": [i for i, kind in enumerate(CP_KINDS) if kind in runtime.cp_kinds] or [0],
        "micro_batch": [1, 2, 4, 8, 16] if low else [1, 2] if pipelined else [1],
        "zero": list(runtime.zero_stages) if sharded else [runtime.zero_stages[0]],
        "schedule": [SCHEDULES.index(name) for name in runtime.schedules],
        "vpp": _CHUNKS.get(SCHEDULES[fix["schedule"]], [1]) if "schedule" in fix else [1],
        "ep": [1],
        "etp": [1],
        "recompute": [0],
        "offload": [0],
    }
    axes |= {key: [fix[key]] for key in axes if key in fix}
    grid = _grids(fix, gpus)
    rest = np.meshgrid(*(np.asarray(values) for values in axes.values()), indexing="ij")
    count = rest[0].size
    column = {key: np.repeat(values, count) for key, values in grid.items()}
    for key, values in zip(axes, rest, strict=True):
        column[key] = np.tile(values.reshape(-1), grid["tp"].size)
    shards = np.where(column["zero"] > 0, column["dp"] * column["cp"], 1)
    column["shard"] = np.full(shards.shape, fix["shard"]) if "shard" in fix else shards
    return Layout(**column)


def _grids(fix: Mapping[str, int], gpus: int) -> dict[str, NDArray[np.int64]]:
    """Every (tp, pp, cp, dp) with `fix` on `gpus`, or the fixed ones alone where there is none."""
    parts = np.asarray(divisors(gpus), dtype=np.int64)
    axes = [np.asarray([fix[key]], dtype=np.int64) if key in fix else parts for key in _GRID]
    tp, pp, cp = (grid.reshape(-1) for grid in np.meshgrid(*axes, indexing="ij"))
    product = tp * pp * cp
    fits = gpus % product == 0
    if "dp" in fix:
        fits &= product * fix["dp"] == gpus
    if not fits.any():
        tp, pp, cp = (np.asarray([fix.get(key, 1)], dtype=np.int64) for key in _GRID)
        product, fits = tp * pp * cp, np.ones(1, dtype=bool)
    dp = np.maximum(1, gpus // product)
    if "dp" in fix:
        dp = np.full_like(product, fix["dp"])
    columns = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    return {key: values[fits] for key, values in columns.items()}
