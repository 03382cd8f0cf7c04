"""What must hold in a plan beside the types: its parts say the same thing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planner.codec import encode
from planner.errors import LayoutError, PlanFileError
from planner.layout import StageLayout
from planner.mesh import mesh_of
from planner.specs import OPTIMIZERS, PRECISIONS
from planner.stages import plan_stages

if TYPE_CHECKING:
    from planner.plan import Plan

TOLERANCE = 1e-6  # relative; above what twelve digits lose in a sum
STATUSES = ("optimal", "feasible", "chosen")


def check_plan(plan: Plan) -> None:
    """Refuse a plan that contradicts itself.

    Raises
    ------
    PlanFileError
        With the values and the rule.
    """
    check_signs(plan)
    check_model(plan)
    check_degrees(plan)
    check_stages(plan)
    check_prediction(plan)
    check_certificate(plan)


def check_signs(plan: Plan) -> None:
    for place, number in numbers(encode(plan), ""):
        if number < -1e-9:
            raise PlanFileError(
                f"{place} is {number}, and no number of a plan is negative", values={place: number}
            )


def numbers(data: Any, where: str) -> Iterator[tuple[str, float]]:
    """Every number of a document with its place."""
    if isinstance(data, Mapping):
        for key, item in data.items():
            yield from numbers(item, f"{where}.{key}" if where else key)
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from numbers(item, f"{where}[{index}]")
    elif isinstance(data, int | float):
        yield where, data


def check_model(plan: Plan) -> None:
    model, train = plan.model, plan.train
    if not model.kinds or not model.layer_kinds or max(model.layer_kinds) >= len(model.kinds):
        raise PlanFileError(
            f"the model's layers must each be of one of its {len(model.kinds)} kinds",
            values={"layer_kinds": list(model.layer_kinds)},
        )
    require_positive(
        {
            "model.hidden_size": model.hidden_size,
            "model.vocab_size": model.vocab_size,
            "train.global_batch_size": train.global_batch_size,
            "train.seq_len": train.seq_len,
            "gpus_per_node": plan.gpus_per_node,
            "num_microbatches": plan.num_microbatches,
            "prediction.step_time_s": plan.prediction.step_time_s,
            "prediction.capacity_bytes": plan.prediction.capacity_bytes,
        }
    )
    for name, value, known in (
        ("precision", train.precision, PRECISIONS),
        ("optimizer", train.optimizer, OPTIMIZERS),
    ):
        if value not in known:
            raise PlanFileError(
                f"train.{name} is {value[:40]!r}; known: {', '.join(known)}",
                values={name: value},
                legal={name: known},
            )


def require_positive(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if value <= 0:
            raise PlanFileError(f"{name} is {value}, and must be positive", values={name: value})


def check_degrees(plan: Plan) -> None:
    layout = plan.layout
    if layout.num_gpus != plan.num_gpus:
        raise PlanFileError(
            f"dp * tp * pp * cp = {layout.dp} * {layout.tp} * {layout.pp} * {layout.cp} = "
            f"{layout.num_gpus}, but num_gpus is {plan.num_gpus}",
            values={"num_gpus": plan.num_gpus},
            legal={"num_gpus": [layout.num_gpus]},
        )
    divisions = (
        ("ep * etp", layout.ep * layout.etp, "tp * cp * dp", layout.tp * layout.cp * layout.dp),
        ("shard", layout.shard, "cp * dp", layout.cp * layout.dp),
    )
    for part, divisor, whole, number in divisions:
        if number % divisor:
            raise PlanFileError(
                f"{part} = {divisor} does not divide {whole} = {number}",
                values={part: divisor, whole: number},
            )
    batch = layout.dp * layout.micro_batch * plan.num_microbatches
    if batch != plan.train.global_batch_size:
        raise PlanFileError(
            f"dp * micro_batch * num_microbatches = {layout.dp} * {layout.micro_batch} * "
            f"{plan.num_microbatches} = {batch}, but global_batch_size is "
            f"{plan.train.global_batch_size}",
            values={"global_batch_size": plan.train.global_batch_size},
            legal={"global_batch_size": [batch]},
        )
    if plan.mesh != mesh_of(layout):
        raise PlanFileError("mesh is not the mesh of the layout's degrees")


def check_stages(plan: Plan) -> None:
    layout, num_layers = plan.layout, plan.model.num_hidden_layers
    if len(plan.stages) != layout.pp or layout.pp * layout.vpp > num_layers:
        raise PlanFileError(
            f"{len(plan.stages)} stages and {num_layers} layers do not fit pp={layout.pp} and "
            f"vpp={layout.vpp}: a stage per pipeline rank, a layer per chunk at least",
            values={"stages": len(plan.stages), "pp": layout.pp, "vpp": layout.vpp},
        )
    kinds, policies = len(plan.model.kinds), 4
    for rank, stage in enumerate(plan.stages):
        if len(stage.layers) != kinds or [len(p) for p in stage.policies] != [policies] * kinds:
            raise PlanFileError(
                f"stages[{rank}] must count layers for {kinds} kinds, {policies} policies each"
            )
    try:
        placed = plan_stages(
            plan.model, layout, [StageLayout(stage.layers, stage.policies) for stage in plan.stages]
        )
    except LayoutError as error:
        raise PlanFileError(error.message, values=error.values, legal=error.legal) from error
    for rank, (stage, expected) in enumerate(zip(plan.stages, placed, strict=True)):
        if stage != expected:
            raise PlanFileError(
                f"stages[{rank}].chunks do not hold the layers and policies that the counts of the "
                "stages and the order of the model give"
            )


def check_prediction(plan: Plan) -> None:
    prediction, pp = plan.prediction, plan.layout.pp
    if len(prediction.memory_bytes) != pp or len(prediction.stage_s) != pp:
        raise PlanFileError(
            f"prediction has {len(prediction.memory_bytes)} stages of memory and "
            f"{len(prediction.stage_s)} of time where pp is {pp}"
        )
    total = math.fsum(prediction.breakdown_s.values())
    if not math.isclose(total, prediction.step_time_s, rel_tol=TOLERANCE):
        raise PlanFileError(
            f"the addends of prediction.breakdown_s sum to {total:.9g} s, but step_time_s is "
            f"{prediction.step_time_s:.9g} s",
            values={"step_time_s": prediction.step_time_s},
            legal={"step_time_s": [total]},
        )
    slack = TOLERANCE * prediction.step_time_s
    if not prediction.lower_s - slack <= prediction.step_time_s <= prediction.upper_s + slack:
        raise PlanFileError(
            f"prediction.step_time_s = {prediction.step_time_s:.9g} lies outside its bounds "
            f"{prediction.lower_s:.9g} to {prediction.upper_s:.9g}"
        )


def check_certificate(plan: Plan) -> None:
    certificate = plan.certificate
    if certificate is None:
        return
    if certificate.status not in STATUSES:
        raise PlanFileError(
            f"certificate.status is {certificate.status[:40]!r}; known: {', '.join(STATUSES)}",
            legal={"status": STATUSES},
        )
    if not certificate.enumerated >= certificate.legal >= certificate.fits:
        raise PlanFileError(
            f"certificate counts {certificate.enumerated} enumerated, {certificate.legal} legal "
            f"and {certificate.fits} fitting layouts, and each must be at most the one before"
        )
