"""Mixture of experts on one device: router, dropless dispatch, experts, balancing loss.

`Moe.dispatch` is an attribute, so that expert parallelism can put its all-to-all in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.details import Details
from executor.norms import activation, gated_activation
from planner.specs import MoeSpec

Dispatch = Callable[["Moe", Tensor, Tensor, Tensor], Tensor]


def sort_by_expert(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order of the (token, choice) pairs by expert, stable, and how many pairs each expert has.

    >>> order, counts = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), 4)
    >>> order.tolist(), counts.tolist()
    ([1, 0, 2, 3], [1, 2, 1, 0])
    """
    flat = chosen.flatten()
    counts = flat.new_zeros(num_experts).index_add(0, flat, torch.ones_like(flat))
    return flat.argsort(stable=True), counts


def dispatch_local(moe: Moe, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every expert on its tokens [t, h]; tokens get the weighted sum of their experts' outputs."""
    order, counts = sort_by_expert(chosen, moe.spec.num_experts)
    top_k = chosen.shape[1]
    sizes = moe.balanced_counts(x.shape[0]) if moe.balanced else counts.tolist()
    rows = moe.experts(x[order // top_k], sizes, weights.flatten()[order])
    return by_token(rows, order, top_k).sum(dim=1)


def by_token(rows: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Rows [t, k, h] of each token, of rows [t k, h] sorted by expert.

    Adding them up from here keeps nothing for backward, where torch's index_add keeps all rows.
    """
    home = torch.empty_like(order)
    home[order] = torch.arange(order.shape[0], device=order.device)
    return rows[home].unflatten(0, (-1, top_k))


class Experts(nn.Module):
    """Expert feed-forward networks as stacked matrices [experts, out, in].

    The width of the first dimension is the number of experts here, which expert parallelism splits.
    """

    def __init__(
        self, spec: MoeSpec, hidden_size: int, kind: str, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.kind = kind
        width = spec.intermediate_size
        shape_up, shape_down = (spec.num_experts, width, hidden_size), (hidden_size, width)
        self.gate = nn.Parameter(torch.empty(shape_up, dtype=dtype)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(shape_up, dtype=dtype))
        self.down = nn.Parameter(torch.empty((spec.num_experts, *shape_down), dtype=dtype))

    def forward(self, x: Tensor, counts: Sequence[int], weights: Tensor | None = None) -> Tensor:
        """Outputs [n, h] of rows [n, h] sorted by expert, `counts[e]` of them for expert e.

        With `weights` [n] each row's output is multiplied by its weight; that happens before the
        last product, so that no output is kept for the weights' gradient.
        """
        gate, up, down = (_local(p) for p in (self.gate, self.up, self.down))
        scale = None if weights is None else weights.to(x.dtype)[:, None]
        if x.device.type == "cuda" and x.dtype == torch.bfloat16:
            return self._grouped(x, counts, scale, gate, up, down)
        outputs = []
        scales = [None] * len(counts) if scale is None else scale.split(list(counts))
        for expert, (rows, factor) in enumerate(zip(x.split(list(counts)), scales, strict=True)):
            # An expert without rows still takes part, or its gradient would be None.
            wide = functional.linear(rows, up[expert])
            kept = self._activate(
                functional.linear(rows, gate[expert]) if gate is not None else None, wide, factor
            )
            outputs.append(functional.linear(kept, down[expert]))
        return torch.cat(outputs)

    def _grouped(
        self, x: Tensor, counts: Sequence[int], scale: Tensor | None, gate: Any, up: Any, down: Any
    ) -> Tensor:
        ends = torch.tensor(counts, dtype=torch.int32, device=x.device).cumsum(0, dtype=torch.int32)
        wide = functional.grouped_mm(x, up.transpose(-2, -1), offs=ends)
        narrow = (
            None if gate is None else functional.grouped_mm(x, gate.transpose(-2, -1), offs=ends)
        )
        kept = self._activate(narrow, wide, scale)
        return functional.grouped_mm(kept, down.transpose(-2, -1), offs=ends)

    def _activate(self, gate: Tensor | None, up: Tensor, scale: Tensor | None) -> Tensor:
        if gate is not None:
            return gated_activation(self.kind, gate, up, scale)
        out: Tensor = activation(self.kind)(up)
        return out if scale is None else out * scale


def _local(parameter: Tensor | None) -> Any:
    """The experts here, as a plain tensor that gradients flow through."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()


class AddGradient(torch.autograd.Function):
    """Hands `x` through and, in backward, gives `loss` the gradient `scale`.

    So the balancing loss of a layer reaches its router under any pipeline schedule, without being
    carried to the last stage. It is booked there too: a recomputed forward does not count twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, moe: Moe) -> Tensor:
        ctx.moe = moe
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        ctx.moe.aux_loss = ctx.moe.aux_loss + loss.detach()
        return grads[0], torch.full_like(loss, ctx.moe.aux_scale), None


class Moe(nn.Module):
    """Top-k routed experts, dropless, and a shared expert where the model has one.

    Attributes
    ----------
    dispatch
        (moe, x [t, h], weights [t, k], chosen [t, k]) -> [t, h].
    aux_loss
        Sum over sequences of this layer's balancing loss, times its coefficient, since it was last
        set to 0.
    aux_scale
        Gradient of the training loss by `aux_loss`: what one sequence weighs in it. The step loop
        sets it to the weight it gives to the sum of a sequence's token losses, times seq_len.
    sum_over_sequence
        Sums a tensor over the ranks that hold parts of the same sequences; None: there are none.
    load
        Tokens of each expert since it was last set to None, where a correction bias balances them.
    balanced
        Deal the tokens out in turns, whatever the router says: for dry runs, whose tensors have no
        values.
    """

    def __init__(
        self,
        spec: MoeSpec,
        hidden_size: int,
        shared: nn.Module | None,
        details: Details,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.details = details
        self.router = nn.Linear(hidden_size, spec.num_experts, bias=spec.router_bias, dtype=dtype)
        self.experts = Experts(spec, hidden_size, "silu", dtype)
        self.shared = shared
        self.shared_gate = (
            nn.Linear(hidden_size, 1, bias=False, dtype=dtype) if spec.shared_gate else None
        )
        if spec.aux_free_bias:
            self.register_buffer("correction_bias", torch.zeros(spec.num_experts))
        self.dispatch: Dispatch = dispatch_local
        self.sum_over_sequence: Callable[[Tensor], Tensor] | None = None
        self.aux_loss: Tensor | float = 0.0
        self.aux_scale = 0.0
        self.load: Tensor | None = None
        self.balanced = False

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        probabilities, weights, chosen = self.route(flat)
        if self.training and self.spec.aux_free_bias and not self.balanced:
            # A recomputed layer counts twice, which the mean does too.
            load = torch.bincount(chosen.flatten(), minlength=self.spec.num_experts)
            self.load = load if self.load is None else self.load + load
        out = self.dispatch(self, flat, weights, chosen).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(x)) * shared
            out = out + shared
        if self.training and self.details.aux_loss_coefficient > 0.0:
            loss = self.balancing_loss(
                probabilities.unflatten(0, x.shape[:-1]), chosen.unflatten(0, x.shape[:-1])
            )
            out = AddGradient.apply(out, loss, self)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities [t, E] (each row sums to 1), weights [t, k] and experts [t, k], in fp32."""
        logits = self.router(x).float()
        if self.details.router_score == "sigmoid":
            scores = torch.sigmoid(logits)
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            scores = probabilities = logits.softmax(-1)
        chosen = self.choose(scores)
        weights = scores.gather(-1, chosen)
        if self.details.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return probabilities, weights * self.details.routed_scaling_factor, chosen

    def choose(self, scores: Tensor) -> Tensor:
        """The experts of each token: those of the highest score, after the correction bias."""
        top_k, num_experts = self.spec.num_experts_per_tok, self.spec.num_experts
        if self.balanced:
            turns = torch.arange(scores.shape[0] * top_k, device=scores.device)
            return (turns % num_experts).view(-1, top_k)
        ranked = scores.detach()
        if self.spec.aux_free_bias:
            ranked = ranked + self.correction_bias
        return ranked.topk(top_k, dim=-1).indices

    def balanced_counts(self, num_tokens: int) -> list[int]:
        """Rows of each expert when `balanced`: known without looking at a tensor."""
        rows, num_experts = num_tokens * self.spec.num_experts_per_tok, self.spec.num_experts
        return [rows // num_experts + (e < rows % num_experts) for e in range(num_experts)]

    def balancing_loss(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """The coefficient times the sum over sequences of E sum_e f_e p_e (1 if balanced).

        f_e is the share of a sequence's choices that went to expert e, p_e its mean probability.
        Taken by sequence it does not depend on how a batch is cut into micro-batches and replicas.

        References: Fedus2021; DeepSeekV3 (by sequence).
        """
        num_experts = self.spec.num_experts
        picks = functional.one_hot(chosen, num_experts).sum(dim=(1, 2)).to(probabilities.dtype)
        totals = probabilities.sum(dim=1)
        if self.sum_over_sequence is not None:
            picks, totals = self.sum_over_sequence(torch.stack((picks, totals))).unbind()
        length = picks.sum(-1, keepdim=True) / self.spec.num_experts_per_tok
        share, mean = picks / picks.sum(-1, keepdim=True), totals / length
        return self.details.aux_loss_coefficient * num_experts * (share.detach() * mean).sum()
