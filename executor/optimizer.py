"""Optimizer, learning rate and gradient clipping, right under every mesh.

Parameters may be plain tensors, or DTensors on different meshes, side by side. Updates work
element by element, so they run on the local shards; the state keeps the parameter's form, so that
a distributed checkpoint knows how it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.errors import InputError
from planner.specs import TrainSpec


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What a plan does not say, for it changes no cost.

    The learning rate rises over `warmup_steps`, then falls along a cosine to `final_fraction` of
    its peak at `total_steps`. Weight decay applies to matrices only. `max_grad_norm` 0 does not
    clip.
    """

    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 10
    total_steps: int = 1000
    final_fraction: float = 0.1
    max_grad_norm: float = 1.0


def learning_rate(step: int, hyper: Hyperparameters) -> float:
    """The rate of a step, counted from 0.

    >>> hyper = Hyperparameters(1.0, warmup_steps=2, total_steps=10, final_fraction=0.0)
    >>> [round(learning_rate(step, hyper), 3) for step in (0, 1, 2, 6, 10, 11)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if step < hyper.warmup_steps:
        return hyper.learning_rate * (step + 1) / hyper.warmup_steps
    span = max(1, hyper.total_steps - hyper.warmup_steps)
    done = min(1.0, (step - hyper.warmup_steps) / span)
    share = 0.5 * (1.0 + math.cos(math.pi * done))
    low = hyper.final_fraction
    return hyper.learning_rate * (low + (1.0 - low) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Use `value` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = value


class LocalShards:
    """Makes an optimizer of torch update the local shards of DTensors.

    torch's fused and foreach kernels take plain tensors of any shapes together; as DTensors they
    would be updated one operation at a time, and not mixed with plain ones.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[misc]
        for values in lists:
            values[:] = [value._local_tensor if is_dtensor(value) else value for value in values]
        return found


class AdamW(LocalShards, torch.optim.AdamW):
    """AdamW on local shards."""


class Adam(LocalShards, torch.optim.Adam):
    """Adam on local shards."""


class Sgd(LocalShards, torch.optim.SGD):
    """Plain gradient descent on local shards."""


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adamw": AdamW, "adam": Adam, "sgd": Sgd}


def make_optimizer(
    params: Iterable[Tensor],
    train: TrainSpec,
    zero: int = 0,
    hyper: Hyperparameters | None = None,
) -> torch.optim.Optimizer:
    """The plan's optimizer over `params`.

    DTensors bring their sharding along: under ZeRO the state is cut as they are.

    Raises
    ------
    InputError
        An optimizer that is not run here, or whole parameters under ZeRO.
    """
    if train.optimizer not in OPTIMIZERS:
        raise InputError(
            f"optimizer={train.optimizer!r} is not run here; legal are {', '.join(OPTIMIZERS)}",
            values={"optimizer": train.optimizer},
            legal={"optimizer": list(OPTIMIZERS)},
        )
    params = [parameter for parameter in params if parameter.requires_grad]
    if zero and params and not any(is_dtensor(parameter) for parameter in params):
        raise InputError(
            f"zero={zero} wants parameters that are sharded already, and these are whole",
            values={"zero": zero},
        )
    hyper = hyper or Hyperparameters()
    kind = OPTIMIZERS[train.optimizer]
    groups = decay_groups(params, hyper.weight_decay)
    options: dict[str, Any] = {"lr": hyper.learning_rate, "fused": True}
    if train.optimizer != "sgd":
        options |= {"betas": hyper.betas, "eps": hyper.eps}
    return kind(groups, **options)


def decay_groups(params: Sequence[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases do not."""
    matrices = [p for p in params if p.ndim >= 2]
    vectors = [p for p in params if p.ndim < 2]
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": some, "weight_decay": decay} for some, decay in groups if some]


@torch.no_grad()
def clip_grad_norm(
    params: Iterable[Tensor], max_norm: float, pp: int = 1, *, beside: Tensor | None = None
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`.

    Every rank adds the squares of its shards, each divided by the number of ranks that hold the
    same shard, and one all-reduce over the world sums them: so it is right for any mixture of
    meshes, and over the `pp` stages. Gradients must be
    summed already. Returns the norm before [same
    unit as the loss]. With ``max_norm <= 0`` nothing is scaled.
    """
    held = [p for p in params if p.grad is not None]
    ranks = dist.get_world_size() // pp if dist.is_initialized() else 1
    device = next((local(p.grad).device for p in held), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for copies, grads in by_copies(held, ranks):
        norms = torch._foreach_norm(grads, 2.0, torch.float32)
        total += torch.stack([norm.to(device) for norm in norms]).square().sum() / copies
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = total.reshape(1) if beside is None else torch.cat((total.reshape(1), beside))
        parts = sum_over_world(parts).to(device)
        total = parts[0]
        if beside is not None:
            beside.copy_(parts[1:])
    norm = total.sqrt()
    if max_norm > 0.0 and held:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, grads in by_copies(held, ranks):
            torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm


def sum_over_world(value: Tensor) -> Tensor:
    """All-reduce over all ranks; on the GPU where that is what the backend speaks."""
    if dist.get_backend() == "nccl":
        value = value.cuda()
    dist.all_reduce(value)
    return value


def by_copies(params: Iterable[Tensor], ranks: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Local gradients that hold anything, by how many of `ranks` ranks hold the same shard.

    A parameter that several stages hold says how many in `num_copies`.
    """
    found: dict[tuple[int, torch.device], list[Tensor]] = {}
    for parameter in params:
        assert parameter.grad is not None
        grad = local(parameter.grad)
        if grad.numel():
            copies = ranks // num_shards(parameter) * getattr(parameter, "num_copies", 1)
            found.setdefault((copies, grad.device), []).append(grad)
    for (copies, _), grads in found.items():
        yield copies, grads


def num_shards(parameter: Tensor) -> int:
    """Into how many pieces the ranks of a stage cut a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    cuts = [mesh.size(axis) for axis, p in enumerate(parameter.placements) if hasattr(p, "dim")]
    return math.prod(cuts)


def is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def local(value: Any) -> Tensor:
    """A DTensor's local shard, or the tensor itself."""
    return value._local_tensor if isinstance(value, DTensor) else value
