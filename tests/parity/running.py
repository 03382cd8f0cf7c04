"""Runs with checkpoints, as `executor.run` puts them together, that tests can start on ranks."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from executor.checkpoint import Checkpointer
from executor.data import make_data
from executor.hf_weights import load_weights, save_weights
from executor.launch import RunError
from executor.mesh import build_mesh
from executor.optimizer import Hyperparameters, local, make_optimizer
from executor.parallel.pipeline_parallel import build_pipeline
from executor.parallelize import loss_function, parallelize
from executor.train import StepRecord, Trainer
from executor.transformer import Transformer
from executor.weights import global_name, init_weights
from planner.plan import Plan
from tests.parity.training import full

SEED = 7
HYPER = Hyperparameters(
    learning_rate=1e-2, eps=1e-4, warmup_steps=2, total_steps=8, max_grad_norm=0.2
)


@dataclass
class Run:
    """What came of a run: where it began, its steps, parameters, and what it said."""

    first_step: int
    records: list[StepRecord]
    params: dict[str, Any]
    said: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]


def trainer_of(plan: Plan, said: list[str], folder: str = "", **options: Any) -> Trainer:
    """A trainer with fresh weights, with a checkpointer where there is a folder."""
    meshes = build_mesh(plan, "cpu")
    init_from = options.pop("init_from", "")

    def make_chunk(layers: tuple[int, ...], has_embedding: bool, has_head: bool) -> nn.Module:
        model = Transformer(
            plan.model,
            layers=layers,
            has_embedding=has_embedding,
            has_head=has_head,
            max_seq_len=plan.train.seq_len,
        )
        model.init_weights(SEED)
        if init_from == "later":
            for parameter in model.parameters():
                parameter.data.fill_(0.123)
        elif init_from:
            load_weights(model, plan.model, init_from)
        return parallelize(model, plan, meshes, "cpu")

    pipeline = build_pipeline(plan, meshes, make_chunk, loss_function(plan, meshes))
    params = [p for module in pipeline.modules for p in module.parameters()]
    optimizer = make_optimizer(params, plan.train, plan.layout.zero, HYPER)
    data = make_data(
        options.pop("source", "synthetic"),
        seq_len=plan.train.seq_len,
        vocab_size=plan.model.vocab_size,
        micro_batch=plan.layout.micro_batch,
        dp_rank=meshes.rank("dp"),
        dp_size=plan.layout.dp,
        seed=SEED,
    )
    checkpointer = None
    if folder:
        checkpointer = Checkpointer(
            folder, plan, pipeline.modules, optimizer, data, report=said.append
        )
    return Trainer(
        plan,
        meshes,
        pipeline,
        optimizer,
        data,
        torch.device("cpu"),
        hyper=HYPER,
        checkpointer=checkpointer,
        **options,
    )


def parameters(trainer: Trainer) -> dict[str, Any]:
    """All parameters that this rank has a part of, whole."""
    return {
        global_name(name): full(p)
        for module in trainer.pipeline.modules
        for name, p in module.named_parameters()
    }


def run(plan: Plan, steps: int, folder: str = "", every: int = 0, **options: Any) -> Run:
    """Go on from the newest whole checkpoint of the folder, if there is one, up to `steps`."""
    said: list[str] = []
    trainer = trainer_of(plan, said, folder, every=every, **options)
    first_step = 0
    if trainer.checkpointer is not None:
        first_step = trainer.checkpointer.restore() or 0
    try:
        records = trainer.train(steps, first_step)
    except RunError as error:
        return Run(first_step, [], parameters(trainer), said, error.message)
    return Run(first_step, records, parameters(trainer), said)


def run_asked_to_stop(plan: Plan, folder: str, at_step: int) -> Run:
    """Rank 1 alone is sent SIGTERM before a step."""
    said: list[str] = []

    def before_step(step: int) -> None:
        if step == at_step and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of(plan, said, folder, before_step=before_step)
    try:
        trainer.train(100)
    except RunError as error:
        return Run(0, [], parameters(trainer), said, error.message)
    return Run(0, [], {}, said)


def run_into_nan(plan: Plan, folder: str, at_step: int) -> Run:
    """One rank's weights turn to NaN before a step."""
    said: list[str] = []
    trainer = trainer_of(plan, said, folder, every=1)

    def poison(step: int) -> None:
        if step == at_step and torch.distributed.get_rank() == 1:
            weight = next(iter(trainer.params))
            with torch.no_grad():
                weight.mul_(float("nan"))

    trainer.before_step = poison
    try:
        trainer.train(100)
    except RunError as error:
        return Run(0, [], parameters(trainer), said, error.message)
    return Run(0, [], {}, said)


def run_short_of_space(plan: Plan, steps: int, folder: str, at_step: int) -> Run:
    """Files of rank 1 may not grow while one step's checkpoint is written."""
    said: list[str] = []
    trainer = trainer_of(plan, said, folder, every=1)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def before_step(step: int) -> None:
        trainer.checkpointer.finish()
        if torch.distributed.get_rank() == 1:
            limit = 2000 if step == at_step else most
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))

    trainer.before_step = before_step
    first_step = trainer.checkpointer.restore() or 0
    return Run(first_step, trainer.train(steps, first_step), parameters(trainer), said)


def run_leaving_out(plan: Plan, left_out: str) -> str:
    """What a run says whose backward passes by some parameters."""
    trainer = trainer_of(plan, [])
    (module,) = trainer.pipeline.modules
    for name, parameter in module.named_parameters():
        if left_out in name:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    try:
        trainer.train(2)
    except RunError as error:
        return error.message
    return ""


def correction_biases(plan: Plan, steps: int) -> dict[str, Any]:
    """The biases that balance the experts of this rank's layers, after training."""
    trainer = trainer_of(plan, [])
    trainer.train(steps)
    return {
        global_name(name): value.numpy().copy()
        for module in trainer.pipeline.modules
        for name, value in module.named_buffers()
    }


def exported(plan: Plan, folder: str) -> dict[str, Any]:
    """Train a step, write the weights as Hugging Face does; this rank's parameters."""
    trainer = trainer_of(plan, [])
    trainer.train(1)
    save_weights(trainer.pipeline.modules, plan.model, folder)
    return parameters(trainer)


def refilled(plan: Plan, folder: str) -> list[str]:
    """Names of parameters that differ after being filled, sharded as they are, with what they held.

    From the seed, then from a folder with the same weights.
    """
    trainer = trainer_of(plan, [])
    held = [p.detach().clone() for p in trainer.params]
    names = [n for module in trainer.pipeline.modules for n, _ in module.named_parameters()]
    wrong = []
    for fill in ("seed", "folder"):
        for p in trainer.params:
            (p.to_local() if hasattr(p, "to_local") else p).detach().zero_()
        for module in trainer.pipeline.modules:
            if fill == "folder":
                load_weights(module, plan.model, folder)
            else:
                init_weights(module, plan.model, SEED, 0.02)
        pairs = zip(names, trainer.params, held, strict=True)
        wrong += [f"{fill}: {n}" for n, p, q in pairs if not torch.equal(local(p), local(q))]
    return wrong
