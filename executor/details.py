"""Details: what a model computes but no cost depends on, and a plan therefore leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import ModelError
from planner.specs import ModelSpec

ROUTER_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretched rotary frequencies: ``linear``, or ``llama3`` (by wavelength)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True)
class Details:
    """Constants of the forward pass; the defaults are those of Llama.

    `norm_topk_prob` rescales the chosen experts' weights to sum to 1, then multiplies them by
    `routed_scaling_factor`. `aux_loss_coefficient` weighs the load-balancing loss of each layer;
    `bias_update_speed` is how far a correction bias moves in a step, where there is one.
    `initializer_range` is the standard deviation of fresh weights.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    norm_topk_prob: bool = True
    router_score: str = "softmax"
    routed_scaling_factor: float = 1.0
    aux_loss_coefficient: float = 0.01
    bias_update_speed: float = 0.001
    initializer_range: float = 0.02


def details_of(model: ModelSpec) -> Details:
    """What a model trained from random weights uses: sigmoid scores where it balances by bias."""
    aux_free = any(kind.moe is not None and kind.moe.aux_free_bias for kind in model.kinds)
    if aux_free:
        return Details(router_score="sigmoid", aux_loss_coefficient=0.0)
    return Details()


def details_from_config(config: Mapping[str, Any]) -> Details:
    """The details in a Hugging Face config.

    Raises
    ------
    ModelError
        A rotary scaling or a router that the executor does not have.

    >>> details_from_config({"rope_theta": 5e5, "rms_norm_eps": 1e-6}).rope_theta
    500000.0
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    groups = config.get("n_group") or 1
    if groups != 1:
        raise ModelError(
            f"n_group={groups} (experts chosen within groups) is not run here; legal is 1",
            values={"n_group": groups},
            legal={"n_group": [1]},
        )
    score = config.get("scoring_func", "softmax")
    if score not in ROUTER_SCORES:
        raise ModelError(
            f"scoring_func={str(score)[:40]!r} is not run here; legal are "
            f"{', '.join(ROUTER_SCORES)}",
            values={"scoring_func": score},
            legal={"scoring_func": list(ROUTER_SCORES)},
        )
    # Mixtral has no such key and always rescales; the classes that have it leave it off by default.
    rescales = config.get("norm_topk_prob", config.get("model_type", "mixtral") == "mixtral")
    return Details(
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope),
        norm_eps=float(config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-5))),
        norm_topk_prob=bool(rescales),
        router_score=score,
        routed_scaling_factor=float(config.get("routed_scaling_factor") or 1.0),
        aux_loss_coefficient=float(config.get("router_aux_loss_coef") or 0.0),
        initializer_range=float(config.get("initializer_range") or 0.02),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"rope_type={str(kind)[:40]!r} is not run here; legal are default, linear, llama3",
            values={"rope_type": kind},
            legal={"rope_type": ["default", "linear", "llama3"]},
        )
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(kind, float(rope["factor"]), **{n: rope[n] for n in names if n in rope})
