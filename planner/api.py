"""`plan` and `estimate` as function calls; the command line prints what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwprofiles.profile import Cluster
from planner.errors import InputError
from planner.estimate import (
    COMMUNICATION,
    FITS_FRACTION,
    cost_row,
    estimate_stages,
    even_counts,
    stage_layouts,
)
from planner.explain import memory_warnings, unverified_facts
from planner.forms import layout_document
from planner.halves import in_halves
from planner.infeasible import PLACES, nothing_fits
from planner.layout import RECOMPUTE, Layout, StageLayout
from planner.layout_text import parse_request
from planner.legality import Situation, check, check_fixed
from planner.legality_warnings import warnings_for
from planner.plan import Certificate, Plan, make_plan
from planner.problem import make_setting
from planner.provider import ModelProvider
from planner.results import Estimate
from planner.search.found import Found, Solved
from planner.search.search import search
from planner.setting import Setting
from planner.specs import ModelSpec
from planner.timeline import simulated, timeline_of
from planner.why_not import Neighbour, neighbours_of, why_not_rows
from planner.words import gib

Progress = Callable[[float, str], None]
NEAR = 0.005  # how much slower than the best an alternative may be


class Answer(dict[str, Any]):
    """The JSON document of an answer; `plan` is the Plan of its layout."""

    plan: Plan


def plan(
    model: str | Path | ModelSpec,
    *,
    cluster: str | Path | Cluster,
    nodes: int | None = None,
    gpus: int | None = None,
    global_batch_size: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    runtime: str = "megatron-core",
    fix: Mapping[str, int] | None = None,
    max_degree: Mapping[str, int] | None = None,
    top: int = 10,
    why_not: bool = True,
    memory_margin: float = 0.04,
    progress: Progress | None = None,
    **more: Any,
) -> Answer:
    """Find the best layout, and say why the others lose.

    `memory_margin` is the share of device memory that no layout may use: predictions of memory are
    not exact, and a run that dies costs more than a few per cent.

    Raises
    ------
    InputError
        Something asked for is wrong or can never be legal.
    DoesNotFit
        No legal layout fits; names the nearest one and the least number of GPUs.
    """
    setting = make_setting(
        model,
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        runtime=runtime,
        memory_margin_fraction=memory_margin,
        **more,
    )
    fixed, bounded = dict(fix or {}), dict(max_degree or {})
    for name in sorted(fixed.keys() & bounded.keys()):
        if fixed[name] > bounded[name]:
            raise InputError(
                f"{name} is fixed at {fixed[name]} and bounded by {bounded[name]}: one of the two "
                "must go",
                values={"fix": {name: fixed[name]}, "max_degree": {name: bounded[name]}},
                legal={name: [bounded[name]]},
            )
    if fixed:
        check_fixed(
            fixed, setting.model, setting.train, setting.cluster, setting.num_gpus, setting.runtime
        )
    provider = ModelProvider(setting, fixed, bounded)
    report = None
    if progress is not None:

        def report(what: str, done: int, total: int) -> None:
            progress(done / max(1, total), f"layouts {what}")

    found = search(provider, keep=top + 1, near=NEAR, progress=report)
    if found.best is None:
        raise nothing_fits(found, setting, fixed, bounded)
    best = found.best
    estimate_ = estimate_stages(best.layout, best.stages, setting)
    answer = Answer(request=request_of(setting))
    answer.update(document(best.layout, best.stages, estimate_, setting))
    others = found.near[1 : top + 1]
    asked = neighbours_of(provider, best) if why_not else []

    def explain(some: Sequence[Solved | Neighbour]) -> list[dict[str, Any]]:
        held = [one for one in some if not isinstance(one, Solved)]
        rows = iter(why_not_rows(provider, estimate_, held))
        return [
            alternative(one, best.time_s, setting) if isinstance(one, Solved) else next(rows)
            for one in some
        ]

    tasks: list[Solved | Neighbour] = [*others, *asked]
    explained = in_halves(explain, tasks)
    answer["alternatives"] = explained[: len(others)]
    answer["why_not"] = explained[len(others) :]
    answer["warnings"] = layout_warnings(best, setting) + warnings_of(estimate_, setting)
    answer["search"] = certificate_of(found)
    answer.plan = make_plan(
        setting.model,
        setting.train,
        setting.cluster,
        best.layout,
        best.stages,
        estimate_,
        Certificate(
            status=found.status,
            enumerated=found.counts.enumerated,
            legal=found.counts.legal,
            fits=found.counts.fits,
            excluded_by_bound=found.counts.excluded_by_bound,
            solved=found.counts.solved,
            lower_bound_s=found.bound_s,
            gap=found.gap,
        ),
    )
    return answer


def estimate(
    model: str | Path | ModelSpec,
    *,
    layout: str | Layout,
    cluster: str | Path | Cluster,
    nodes: int | None = None,
    gpus: int | None = None,
    global_batch_size: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    runtime: str = "megatron-core",
    trace: str | Path | None = None,
    plot: str | Path | None = None,
    **more: Any,
) -> Answer:
    """Time and memory of one layout; layers are split evenly unless it says `stages=`.

    Raises
    ------
    LayoutError
        The layout is not legal for model, cluster, batch or runtime.
    """
    setting = make_setting(
        model,
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        runtime=runtime,
        **more,
    )
    counts: tuple[int, ...] | None = None
    if isinstance(layout, str):
        wanted = parse_request(layout, setting.num_gpus)
        layout, counts = wanted.layout, wanted.stage_layers
    warnings = check(
        layout,
        setting.model,
        setting.train,
        setting.cluster,
        setting.num_gpus,
        setting.runtime,
        counts,
    )
    per_rank = rank_counts(layout, counts, setting)
    stages = stage_layouts(layout, setting, per_rank, layout.recompute)
    result = estimate_stages(layout, stages, setting)
    answer = Answer(request=request_of(setting))
    fit = fit_of(result, setting)
    answer["verdict"] = fit.pop("verdict")
    answer["fit"] = fit
    answer.update(document(layout, stages, result, setting))
    answer["warnings"] = warnings + warnings_of(result, setting)
    if trace is not None or plot is not None:
        timeline = timeline_of(cost_row(layout, setting), stages)
        answer["prediction"]["simulated"] = simulated(timeline)
        if trace is not None:
            from planner.trace import write_trace

            write_trace(timeline, trace)
        if plot is not None:
            from planner.plot import write_plot

            write_plot(timeline, plot)
    answer.plan = make_plan(setting.model, setting.train, setting.cluster, layout, stages, result)
    return answer


def rank_counts(layout: Layout, counts: tuple[int, ...] | None, setting: Setting) -> list[int]:
    """Layers of each rank, from what was asked for (by rank or by chunk) or evenly."""
    if counts is None:
        return even_counts(setting.model.num_hidden_layers, layout.pp)
    if len(counts) == layout.pp:
        return list(counts)
    return [sum(counts[rank :: layout.pp]) for rank in range(layout.pp)]


def request_of(setting: Setting) -> dict[str, Any]:
    """What was asked, for the head of the answer."""
    train, cluster = setting.train, setting.cluster
    return {
        "model": setting.model.name,
        "cluster": cluster.name,
        "num_nodes": -(-setting.num_gpus // cluster.gpus_per_node),
        "num_gpus": setting.num_gpus,
        "global_batch_size": train.global_batch_size,
        "seq_len": train.seq_len,
        "precision": train.precision,
        "optimizer": train.optimizer,
        "runtime": setting.runtime.name,
        "profile_digest": cluster.digest,
    }


def document(
    layout: Layout, stages: tuple[StageLayout, ...], result: Estimate, setting: Setting
) -> dict[str, Any]:
    """`layout` and `prediction` of an answer."""
    exposed = sum(result.breakdown_s.get(name, 0.0) for name in COMMUNICATION)
    names = kind_names(setting.model)
    return {
        "layout": layout_document(layout) | {"num_microbatches": result.detail["num_microbatches"]},
        "prediction": {
            "step_time_s": result.step_time_s,
            "lower_s": result.lower_s,
            "upper_s": result.upper_s,
            "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
            "mfu": result.mfu,
            "hfu": result.hfu,
            "peak_memory_bytes": result.peak_memory_bytes,
            "capacity_bytes": result.capacity_bytes,
            "memory_margin_fraction": setting.train.memory_margin_fraction,
            "breakdown_s": dict(result.breakdown_s),
            "communication": {
                "exposed_s": exposed,
                "hidden_s": max(0.0, result.detail["hidden_communication_s"]),
            },
            "memory_bytes": [dict(items) for items in result.memory_bytes],
            "host_bytes_per_node": result.host_bytes_per_node,
            "nvme_bytes_per_node": result.nvme_bytes_per_node,
            "stage_s": list(result.stage_s),
            "stages": [
                {
                    "layers": sum(stage.layers),
                    "layers_by_kind": dict(zip(names, stage.layers, strict=True)),
                    "recompute": layers_by_policy([stage]),
                }
                for stage in stages
            ],
        },
    }


def kind_names(model: ModelSpec) -> list[str]:
    """A name for each layer kind: dense or moe, and its window where kinds differ by it."""
    names: list[str] = []
    for kind in model.kinds:
        name = "moe" if kind.moe is not None else "dense" if kind.mlp is not None else "mixer"
        if kind.attention.kind not in ("gqa", "mla"):
            name += f" {kind.attention.kind}"
        elif kind.attention.window is not None:
            name += f" window {kind.attention.window}"
        names.append(name if name not in names else f"{name} {len(names)}")
    return names


def alternative(solved: Solved, best_s: float, setting: Setting) -> dict[str, Any]:
    """One line of the alternatives."""
    result = estimate_stages(solved.layout, solved.stages, setting, bounds=False)
    return {
        "layout": layout_document(solved.layout)
        | {"num_microbatches": result.detail["num_microbatches"]},
        "step_time_s": solved.time_s,
        "slower_fraction": solved.time_s / best_s - 1.0,
        "peak_memory_bytes": result.peak_memory_bytes,
        "recompute": layers_by_policy(solved.stages),
        "breakdown_s": dict(result.breakdown_s),
    }


def layers_by_policy(stages: Iterable[StageLayout]) -> dict[str, int]:
    """Layers under each recompute policy, of all kinds and stages."""
    return {
        name: sum(policies[p] for stage in stages for policies in stage.policies)
        for p, name in enumerate(RECOMPUTE)
    }


def layout_warnings(best: Solved, setting: Setting) -> list[str]:
    """What a person should know of the layout that the search found, and of its stages."""
    counts = tuple(sum(stage.layers) for stage in best.stages)
    found = warnings_for(
        best.layout,
        Situation(
            setting.model,
            setting.train,
            setting.cluster,
            setting.runtime,
            setting.num_gpus,
            counts,
        ),
    )
    if len(set(counts)) > 1:
        found.append(
            "The stages hold unequal numbers of layers, so the launch must state those above."
        )
    return found


def warnings_of(result: Estimate, setting: Setting) -> list[str]:
    """What a person should know of memory, and of the facts under the prediction."""
    found = memory_warnings(result, setting.cluster)
    device = setting.cluster.device
    curves = [
        (f"{p} matrix products", c.kind)
        for p, c in device.gemm.items()
        if p == setting.train.precision
    ]
    curves += [
        (f"{k} attention", c.kind) for k, c in device.attention.items() if k == setting.kernel
    ]
    curves += [(f"{op} inside the node", c.kind) for op, c in setting.cluster.curves.items()]
    facts = {f"{device.name} {k}": v for k, v in device.facts.items()}
    facts |= {f"{setting.cluster.name} {k}": v for k, v in setting.cluster.facts.items()}
    return found + unverified_facts(facts, curves)


def certificate_of(found: Found) -> dict[str, Any]:
    """Counts, status and rates of a search."""
    counts = found.counts
    return {
        "enumerated": counts.enumerated,
        "legal": counts.legal,
        "fits": counts.fits,
        "excluded_by_bound": counts.excluded_by_bound,
        "solved": counts.solved,
        "built": counts.built,
        "layouts_per_second": found.layouts_per_second,
        "status": found.status,
        "lower_bound_s": found.bound_s,
        "gap": found.gap,
        "wall_s": found.wall_s,
        "milp": dict(found.milp),
    }


def fit_of(result: Estimate, setting: Setting) -> dict[str, Any]:
    """fits, borderline or does-not-fit, by the memory that is fullest, with what is left of it.

    Host memory that is not known limits nothing.
    """
    cluster = setting.cluster
    memories = [("device", result.peak_memory_bytes, result.capacity_bytes)]
    for place, used, capacity in (
        ("host", result.host_bytes_per_node, cluster.host_memory_bytes),
        ("nvme", result.nvme_bytes_per_node, cluster.nvme_bytes),
    ):
        if used > 0 and capacity > 0:
            memories.append((place, used, capacity))
    place, used, capacity = max(memories, key=lambda m: m[1] / m[2])
    margin = gib(abs(capacity - used))
    where = "on the fullest stage" if place == "device" else f"of {PLACES[place]} a node"
    word, text = "fits", f"Fits: {margin} are left {where}."
    if used > capacity:
        word, text = "does-not-fit", f"Does not fit: {margin} are missing {where}."
    elif used > FITS_FRACTION * capacity:
        word, text = "borderline", f"Borderline: {margin} are left {where}."
    return {
        "verdict": word,
        "fits": used <= capacity,
        "memory": place,
        "text": text,
        "margin_bytes": capacity - used,
    }
