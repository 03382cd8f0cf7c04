"""Norms of the residual stream, and the gated activation, that keep no more than backward needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import ModelError

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


class RmsNormFunction(torch.autograd.Function):
    """RMS norm that keeps its input and one number a row.

    On CPU torch composes the norm of small operations and keeps the normalised rows as well; on a
    GPU it has a kernel of its own, which is used there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        rows = x.float() * scale
        wide = grad.float()
        weighted = wide * weight
        grad_x = scale * (weighted - rows * (weighted * rows).mean(-1, keepdim=True))
        grad_weight = (wide * rows).sum(dim=tuple(range(x.ndim - 1)))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, in fp32.

    References: Zhang2019.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return RmsNormFunction.apply(x, self.weight, self.eps)


def make_norm(
    kind: str, width: int, eps: float, *, bias: bool, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A norm by the name that `ModelSpec.norm` has for it."""
    if kind == "rmsnorm":
        return RmsNorm(width, eps, dtype)
    affine = kind == "layernorm"
    return nn.LayerNorm(width, eps, elementwise_affine=affine, bias=affine and bias, dtype=dtype)


class GatedSilu(torch.autograd.Function):
    """silu(gate) * up, and times `weight` where there is one; keeps its inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        out = functional.silu(gate).mul_(up)
        return out if weight is None else out.mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        gate, up, weight = ctx.saved_tensors
        share = torch.sigmoid(gate)
        silu = gate * share
        grad_weight = None
        if weight is not None:
            grad_weight = (grad * silu * up).sum(-1, keepdim=True).to(weight.dtype)
            grad = grad * weight
        grad_up = grad * silu
        # silu'(g) = s + g s (1 - s), with s = sigmoid(g)
        slope = silu.mul_(1 - share).add_(share)
        return slope.mul_(grad).mul_(up), grad_up, grad_weight


def gated_activation(kind: str, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
    """act(gate) * up, times `weight` (one number a row) where given."""
    if kind == "silu":
        return GatedSilu.apply(gate, up, weight)
    out = activation(kind)(gate) * up
    return out if weight is None else out * weight


def activation(kind: str) -> Any:
    """The function by its Hugging Face name.

    Raises
    ------
    ModelError
        No such activation.
    """
    if kind not in ACTIVATIONS:
        raise ModelError(
            f"activation {kind[:40]!r} is not run here; legal are {', '.join(ACTIVATIONS)}",
            values={"activation": kind},
            legal={"activation": list(ACTIVATIONS)},
        )
    return ACTIVATIONS[kind]
