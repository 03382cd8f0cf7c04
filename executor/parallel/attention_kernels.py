"""Attention of one block of keys with its log-sum-exp, and the backward that takes a merged one.

Ring attention needs what `scaled_dot_product_attention` hides: the log-sum-exp of every row. These
are the kernels below it: flash on CPU and on CUDA in half precision, plain products elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def block_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of [b, a, s, d] to a block of keys, and the log-sum-exp [b, a, s] in fp32."""
    k, v = like_queries(k, q), like_queries(v, q)
    if uses_flash_cpu(q, v):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out.float(), lse
    if uses_flash_cuda(q, v):
        result = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return result[0].float(), result[1]
    scores = masked_scores(q, k, causal)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]) @ v.float(), lse


def block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by this block, given the whole row's output and log-sum-exp.

    With P = exp(S - lse) of the whole row: dV = P^T dO, dS = P (dO V^T - rowsum(dO O)).

    References: Dao2023.
    """
    kv_heads = k.shape[1]
    k, v = like_queries(k, q), like_queries(v, q)
    if uses_flash_cpu(q, v):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), 0.0, causal
        )
    elif uses_flash_cuda(q, v):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no dropout, so never read
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None,
            q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0],
        )  # fmt: skip
    else:
        dq, dk, dv = plain_backward(grad, q, k, v, out, lse, causal)
    return dq, summed_heads(dk, kv_heads), summed_heads(dv, kv_heads)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `block_backward`, by products in fp32."""
    grad = grad.float()
    weights = torch.exp(masked_scores(q, k, causal) - lse[..., None])
    share = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ v.float().transpose(-1, -2) - share) / math.sqrt(q.shape[-1])
    dq = grad_scores @ k.float()
    dk = grad_scores.transpose(-1, -2) @ q.float()
    dv = weights.transpose(-1, -2) @ grad
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d) in fp32, -inf above the diagonal where causal."""
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def like_queries(x: Tensor, q: Tensor) -> Tensor:
    """Repeat key-value heads so that there are as many as query heads."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def summed_heads(x: Tensor, heads: int) -> Tensor:
    """The gradient of `like_queries`."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


def uses_flash_cpu(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def uses_flash_cuda(q: Tensor, v: Tensor) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and half and q.shape[-1] == v.shape[-1] and not q.shape[-1] % 8
