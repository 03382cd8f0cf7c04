"""Trains a tiny model under a plan for a few steps, and gives back all that can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from executor.data import Data, open_source
from executor.mesh import build_mesh
from executor.optimizer import Hyperparameters, clip_grad_norm, make_optimizer
from executor.parallel.pipeline_parallel import build_pipeline
from executor.parallelize import (
    finish_gradients,
    loss_function,
    parallelize,
    split_sequence,
    token_weight,
)
from executor.transformer import Transformer
from executor.weights import global_name
from planner import api
from planner.plan import Plan
from planner.specs import ModelSpec
from tests.parity.models import dense_model, moe_model

__all__ = ["dense_model", "moe_model", "plan_of", "train"]
STEPS = 3
SEED = 7
# A large eps and clipping that bites: so that neither hides an error of scale.
HYPER = Hyperparameters(
    learning_rate=1e-2, eps=1e-4, warmup_steps=1, total_steps=10, max_grad_norm=0.2
)


@dataclass
class Result:
    """What one rank saw: loss and norm by step, the last gradients, the parameters after."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    missing: list[str]


def plan_of(
    model: ModelSpec, layout: str, gpus: int, *, batch: int = 8, seq_len: int = 32, **more: Any
) -> Plan:
    """The plan of a layout given in words."""
    return api.estimate(
        model,
        layout=layout,
        cluster=f"local:{gpus}",
        gpus=gpus,
        global_batch_size=batch,
        seq_len=seq_len,
        runtime="shardwise",
        **{"precision": "fp32"} | more,
    ).plan


def full(value: torch.Tensor) -> np.ndarray:
    """All of a parameter or gradient; every rank of its mesh must call this."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().float().cpu().numpy().copy()


def train(plan: Plan, steps: int = STEPS) -> Result:
    """Train under the plan on this rank; ranks that hold the same parameters return the same."""
    meshes = build_mesh(plan, "cpu")
    dtype = torch.float32

    def make_chunk(layers: tuple[int, ...], has_embedding: bool, has_head: bool) -> nn.Module:
        model = Transformer(
            plan.model,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            max_seq_len=plan.train.seq_len,
            dtype=dtype,
        )
        model.init_weights(SEED)
        for moe in model.moe_layers():
            moe.aux_scale = token_weight(plan) * plan.train.seq_len
        return parallelize(model, plan, meshes, "cpu")

    pipeline = build_pipeline(plan, meshes, make_chunk, loss_function(plan, meshes))
    named = {
        global_name(name): p for chunk in pipeline.modules for name, p in chunk.named_parameters()
    }
    optimizer = make_optimizer(named.values(), plan.train, plan.layout.zero, HYPER)
    source = open_source("synthetic", plan.train.seq_len, plan.model.vocab_size, SEED)
    data = Data(
        source,
        micro_batch=plan.layout.micro_batch,
        dp_rank=meshes.rank("dp"),
        dp_size=plan.layout.dp,
        seed=SEED,
    )
    result = Result([], [], {}, {}, [])
    for step in range(steps):
        batches = [next(data) for _ in range(plan.num_microbatches)]
        tokens, labels = (
            split_sequence(torch.cat([batch[i] for batch in batches]), plan, meshes)
            for i in range(2)
        )
        loss = pipeline.step(tokens, labels)
        finish_gradients(pipeline.modules, plan, meshes)
        result.losses.append(total_loss(loss, plan))
        result.missing += [name for name, p in named.items() if p.grad is None]
        if step == steps - 1 and not result.missing:
            result.grads = {name: full(p.grad) for name, p in named.items()}
        norm = clip_grad_norm(list(named.values()), HYPER.max_grad_norm, plan.layout.pp)
        result.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    result.params = {name: full(p) for name, p in named.items()}
    return result


def total_loss(loss: torch.Tensor, plan: Plan) -> float:
    """The mean loss of the step: shares of all ranks, which tp ranks hold alike."""
    total = loss.detach().double().reshape(1)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(total)
    return float(total) / plan.layout.tp


def reference_plan(plan: Plan) -> Plan:
    """The same training on one rank, in one micro-batch."""
    more = {"optimizer": plan.train.optimizer}
    return plan_of(
        plan.model,
        f"micro_batch={plan.train.global_batch_size}",
        1,
        batch=plan.train.global_batch_size,
        seq_len=plan.train.seq_len,
        **more,
    )
