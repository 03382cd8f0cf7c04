"""Blocks of attention, merged by their log-sum-exp, are attention to all keys; so is backward."""

import math

import pytest

pytest.importorskip("torch")

import torch

from executor.parallel.attention_kernels import block_backward, block_forward
from executor.parallel.context_parallel import merge, visible

SHAPES = [(4, 4, 16, 16), (4, 2, 16, 16), (4, 4, 24, 16)]  # heads, kv heads, width, value width


def inputs(shape: tuple[int, int, int, int], length: int = 12) -> list[torch.Tensor]:
    heads, kv_heads, width, v_width = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [
        (2, heads, length, width),
        (2, kv_heads, length, width),
        (2, kv_heads, length, v_width),
    ]
    return [torch.randn(size, generator=generator, dtype=torch.float32) for size in sizes]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention written out, in fp64."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_one_block(shape: tuple[int, int, int, int], causal: bool) -> None:
    q, k, v = inputs(shape)
    out, lse = block_forward(q, k, v, causal=causal)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = exact(*wide, causal)
    torch.testing.assert_close(out.double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    wanted.backward(grad.double())
    found = block_backward(grad, q, k, v, out, lse, causal=causal)
    for value, x in zip(found, wide, strict=True):
        torch.testing.assert_close(value.double(), x.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_two_blocks_merge(shape: tuple[int, int, int, int]) -> None:
    q, k, v = inputs(shape)
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    lse = torch.full(q.shape[:3], -torch.inf)
    for rows in (slice(0, 5), slice(5, None)):
        merge(out, lse, *block_forward(q, k[:, :, rows], v[:, :, rows], causal=False))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = exact(*wide, False)
    torch.testing.assert_close(out.double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    # Each block's backward takes the output and log-sum-exp of the whole row.
    grad = torch.ones_like(out)
    wanted.backward(grad.double())
    dq, dk, dv = block_backward(grad, q, k[:, :, 5:], v[:, :, 5:], out, lse, causal=False)
    torch.testing.assert_close(dk.double(), wide[1].grad[:, :, 5:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dv.double(), wide[2].grad[:, :, 5:], atol=1e-5, rtol=1e-5)
    dq = dq + block_backward(grad, q, k[:, :, :5], v[:, :, :5], out, lse, causal=False)[0]
    torch.testing.assert_close(dq.double(), wide[0].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zig_zag_sees_what_a_causal_mask_shows(size: int) -> None:
    """Of all pairs of pieces, those that `visible` admits are those at or below the diagonal."""
    pieces = {rank: (rank, 2 * size - 1 - rank) for rank in range(size)}
    for rank in range(size):
        work = 0.0
        for step in range(size):
            late, early, masked = visible(step, rank, causal=True)
            queries = pieces[rank][1:] if late else pieces[rank]
            keys = pieces[(rank - step) % size][:1] if early else pieces[(rank - step) % size]
            admitted = {(q, k) for q in queries for k in keys if not masked or k <= q}
            every = {(q, k) for q in pieces[rank] for k in pieces[(rank - step) % size] if k <= q}
            assert admitted == every
            work += sum(0.5 if q == k else 1.0 for q, k in admitted)
        assert work == 2 * size  # as much on every rank
