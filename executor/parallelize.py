"""Parallelize one chunk of the model: the one place that fixes the order of techniques.

Tensor and expert parallelism cut parameters, recompute wraps layers or their attention kernels,
context parallelism goes around the kernel, so that selective recompute sends nothing again, and
data parallelism goes around all of it; the optimizer comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from executor.mesh import Meshes
from executor.parallel import (
    context_parallel,
    data_parallel,
    expert_parallel,
    recompute,
    tensor_parallel,
)
from executor.parallel.context_parallel import split_sequence
from executor.parallel.pipeline_parallel import sum_tied
from executor.transformer import IGNORED_LABEL, Transformer, loss_sum
from planner.errors import LayoutError
from planner.plan import Plan

__all__ = [
    "finish_gradients",
    "loss_function",
    "parallelize",
    "split_sequence",
    "token_weight",
]


def parallelize(
    model: Transformer, plan: Plan, meshes: Meshes, device: torch.device | str
) -> nn.Module:
    """Make one stage's chunk run as the plan says, on `device`.

    Raises
    ------
    LayoutError
        The plan asks for something that torch does not do right.
    """
    check(plan)
    policies = recompute_policies(plan)
    tensor_parallel.apply(model, plan, meshes, policies)
    expert_parallel.apply(model, plan, meshes)
    recompute.apply(model, policies)
    context_parallel.apply(model, plan, meshes)
    model.to(device)
    return data_parallel.apply(model, plan, meshes)


def recompute_policies(plan: Plan) -> dict[int, str]:
    """Policy of every layer of the model by its global index."""
    return {
        index: policy
        for stage in plan.stages
        for chunk in stage.chunks
        for index, policy in zip(chunk.layers, chunk.recompute, strict=True)
    }


def check(plan: Plan) -> None:
    """Refuse, before any message is sent, what would fail or come out wrong.

    Raises
    ------
    LayoutError
        With the rule and the legal values.
    """
    layout = plan.layout
    if plan.train.precision not in ("fp32", "bf16"):
        raise LayoutError(
            f"precision={plan.train.precision} is not run here; legal: fp32, bf16",
            values={"precision": plan.train.precision},
            legal={"precision": ["fp32", "bf16"]},
        )
    if plan.train.lora is not None:
        raise LayoutError(
            f"LoRA of rank {plan.train.lora.rank} is planned but not run here; legal here: a plan "
            "without adapters, which trains every parameter",
            values={"lora": plan.train.lora.rank},
            legal={"lora": [None]},
        )
    rows = plan.train.seq_len
    pieces = layout.cp * (2 if layout.cp > 1 and layout.cp_kind == 0 else 1)
    if rows % pieces or (rows // layout.cp) % layout.tp:
        raise LayoutError(
            f"seq_len={rows} does not divide into {pieces} pieces for cp={layout.cp} and, on each "
            f"rank, {layout.tp} for tp={layout.tp}",
            values={"seq_len": rows, "cp": layout.cp, "tp": layout.tp},
        )
    if plan.model.tie_word_embeddings and layout.pp > 1 and plan.schedule == "dualpipe":
        raise LayoutError(
            "schedule=dualpipe does not run with tied embeddings: its first rank would hold the "
            "shared weight twice, and a checkpoint once; legal here: schedule=1f1b",
            values={"schedule": "dualpipe", "tie_word_embeddings": True},
            legal={"schedule": ["1f1b", "gpipe", "interleaved", "zero-bubble"]},
        )


def finish_gradients(modules: Sequence[nn.Module], plan: Plan, meshes: Meshes) -> None:
    """Sum over ranks what is still in parts; once a step, after the last backward."""
    data_parallel.finish_gradients(modules, plan, meshes)
    sum_tied(modules, meshes)


def token_weight(plan: Plan) -> float:
    """What one token's loss weighs in the loss of a step: they all weigh the same."""
    return 1.0 / (plan.train.global_batch_size * plan.train.seq_len)


def loss_function(plan: Plan, meshes: Meshes) -> Callable[[Tensor, Tensor], Tensor]:
    """This rank's share of the step's mean loss; shares add up over micro-batches, dp and cp."""
    weight, mesh = token_weight(plan), meshes.tp
    if mesh is None:
        return lambda logits, labels: weight * loss_sum(logits, labels)
    vocab = plan.model.vocab_size
    return lambda logits, labels: (
        weight * tensor_parallel.vocabulary_loss_sum(logits, labels, vocab, mesh, IGNORED_LABEL)
    )
