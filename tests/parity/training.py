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
    """The plan of a layout given in words.

    Offload is planned for GPUs: on a CPU, whose memory is the host's, it frees nothing and the
    planner refuses it, but its results can be compared there all the same.
    """
    return api.estimate(
        model,
        layout=layout,
        cluster="dgx-h100" if "offload" in layout else f"local:{gpus}",
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


class Trainer:
    """This rank's part of a run under a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.meshes = build_mesh(plan, "cpu")
        loss = loss_function(plan, self.meshes)
        self.pipeline = build_pipeline(plan, self.meshes, self.make_chunk, loss)
        self.named = {
            global_name(name): p
            for chunk in self.pipeline.modules
            for name, p in chunk.named_parameters()
        }
        self.optimizer = make_optimizer(self.named.values(), plan.train, plan.layout.zero, HYPER)
        self.data = Data(
            open_source("synthetic", plan.train.seq_len, plan.model.vocab_size, SEED),
            micro_batch=plan.layout.micro_batch,
            dp_rank=self.meshes.rank("dp"),
            dp_size=plan.layout.dp,
            seed=SEED,
        )

    def make_chunk(self, layers: tuple[int, ...], has_embedding: bool, has_head: bool) -> nn.Module:
        model = Transformer(
            self.plan.model,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            max_seq_len=self.plan.train.seq_len,
        )
        model.init_weights(SEED)
        for moe in model.moe_layers():
            moe.aux_scale = token_weight(self.plan) * self.plan.train.seq_len
        return parallelize(model, self.plan, self.meshes, "cpu")

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a step, as far as this rank sees them."""
        pairs = [next(self.data) for _ in range(self.plan.num_microbatches)]
        tokens, labels = (
            split_sequence(torch.cat([pair[i] for pair in pairs]), self.plan, self.meshes)
            for i in range(2)
        )
        return tokens, labels

    def gradients(self) -> torch.Tensor:
        """Forward and backward of a step; gradients are whole afterwards."""
        loss = self.pipeline.step(*self.batch())
        finish_gradients(self.pipeline.modules, self.plan, self.meshes)
        return loss

    def update(self) -> float:
        """Clip and step; the norm before clipping."""
        parameters = list(self.named.values())
        norm = clip_grad_norm(parameters, HYPER.max_grad_norm, self.plan.layout.pp)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def train(plan: Plan, steps: int = STEPS) -> Result:
    """Train under the plan on this rank; ranks that hold the same parameters return the same."""
    trainer = Trainer(plan)
    named = trainer.named
    result = Result([], [], {}, {}, [])
    for step in range(steps):
        result.losses.append(total_loss(trainer.gradients(), plan))
        result.missing += [name for name, p in named.items() if p.grad is None]
        if step == steps - 1 and not result.missing:
            result.grads = {name: full(p.grad) for name, p in named.items()}
        result.norms.append(trainer.update())
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
