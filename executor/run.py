"""The whole run: plan -> process groups -> parallelized model -> training steps -> measurements."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.checkpoint import Checkpointer
from executor.data import make_data
from executor.launch import Place, join, place_of_environment, start, torchrun_line
from executor.measure import (
    Measurements,
    StepMeasure,
    count_collectives,
    gather_measurements,
    peak_memory,
    plan_digest,
    save_measurements,
)
from executor.mesh import Meshes, build_mesh
from executor.optimizer import Hyperparameters, make_optimizer
from executor.parallel.pipeline_parallel import Pipeline, build_pipeline
from executor.parallelize import finish_gradients, loss_function, parallelize, split_sequence
from executor.spans import trace_step
from executor.train import Log, Trainer
from executor.transformer import Transformer
from executor.watch import Watch
from planner.errors import InputError
from planner.plan import Plan, load_plan
from planner.version import VERSION


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run needs beside its plan; fields as the options of ``shardwise run``."""

    steps: int = 20
    data: str = "synthetic"
    seed: int = 0
    learning_rate: float = 3e-4
    checkpoint_dir: Path | None = None
    every: int = 100
    resume: bool = False
    init_from: Path | None = None
    save_hf: Path | None = None
    device: str = "auto"
    timeout_s: float = 300.0
    trace: Path | None = None
    output: Path | None = None
    log: Path | None = None
    quiet: bool = False


def run_plan(plan: Plan, options: RunOptions) -> Measurements:
    """Train by the plan on this rank, which others must do at the same time.

    Raises
    ------
    InputError
        Ranks differ, or the plan asks for what torch does not do right; before any collective.
    RunError
        A rank died, hung or diverged; names it.
    """
    place = place_of_environment() or alone()
    device_type = device_type_of(options.device)
    facts = {
        "plan": plan_digest(plan)[:12],
        "torch": torch.__version__,
        "shardwise": VERSION,
        "seed": options.seed,
    }
    store, device = join(place, device_type, facts, options.timeout_s)
    meshes = build_mesh(plan, device_type)
    watch = Watch(store, place.rank, place.world_size, named_coordinates(meshes))
    with watch.guard():
        pipeline = build_pipeline(
            plan,
            meshes,
            lambda *chunk: make_chunk(plan, meshes, device, options, *chunk),
            loss_function(plan, meshes),
            device,
        )
        hyper = Hyperparameters(
            learning_rate=options.learning_rate,
            warmup_steps=min(10, options.steps),
            total_steps=options.steps,
        )
        parameters = [p for module in pipeline.modules for p in module.parameters()]
        optimizer = make_optimizer(parameters, plan.train, plan.layout.zero, hyper)
        data = make_data(
            options.data,
            seq_len=plan.train.seq_len,
            vocab_size=plan.model.vocab_size,
            micro_batch=plan.layout.micro_batch,
            dp_rank=meshes.rank("dp"),
            dp_size=plan.layout.dp,
            seed=options.seed,
        )
        log = Log(options.log, quiet=options.quiet, total=options.steps)
        checkpointer, first_step = None, 0
        if options.checkpoint_dir is not None:
            checkpointer = Checkpointer(
                options.checkpoint_dir, plan, pipeline.modules, optimizer, data, report=log.say
            )
            first_step = (checkpointer.restore() or 0) if options.resume else 0
        trainer = Trainer(
            plan,
            meshes,
            pipeline,
            optimizer,
            data,
            device,
            hyper=hyper,
            log=log,
            checkpointer=checkpointer,
            every=options.every,
            peak_memory_bytes=lambda: peak_memory(device)[0],
            before_step=lambda step: watch.at(step + 1, "forward and backward"),
        )
        records = trainer.train(options.steps, first_step)
        watch.at(options.steps, "measuring")
        if options.save_hf is not None:
            save_weights(plan, pipeline, options.save_hf)
        batch = tuple(
            split_sequence(part, plan, meshes).to(device)
            for part in data.step_batch(plan.num_microbatches)
        )
        if options.trace is not None:
            trace_step(options.trace, meshes, pipeline, batch)
        finish = partial(finish_gradients, pipeline.modules, plan, meshes)
        counted = count_collectives(meshes, pipeline, optimizer, batch, finish)
        steps = tuple(
            StepMeasure(r.step, r.loss, r.step_time_s, r.tokens_per_s, r.mfu, r.peak_memory_bytes)
            for r in records
        )
        measurements = gather_measurements(
            plan, place, device, meshes, parameters, optimizer, counted, steps
        )
        log.close()
    if place.rank == 0 and options.output is not None:
        save_measurements(measurements, options.output)
    return measurements


def make_chunk(
    plan: Plan,
    meshes: Meshes,
    device: torch.device,
    options: RunOptions,
    layers: tuple[int, ...],
    has_embedding: bool,
    has_head: bool,
) -> nn.Module:
    """One chunk of the model with its first weights, parallelized."""
    details = None
    if options.init_from is not None:
        from executor.hf_weights import read_details

        details = read_details(options.init_from)
    chunk = Transformer(
        plan.model,
        layers=layers,
        has_embedding=has_embedding,
        has_head=has_head,
        max_seq_len=plan.train.seq_len,
        details=details,
    )
    chunk.init_weights(options.seed)
    if options.init_from is not None:
        from executor.hf_weights import load_weights

        load_weights(chunk, plan.model, options.init_from)
    return parallelize(chunk, plan, meshes, device)


def save_weights(plan: Plan, pipeline: Pipeline, folder: Path) -> None:
    """Write the weights as a Hugging Face model."""
    from executor.hf_weights import save_weights as save

    save(pipeline.modules, plan.model, folder)


def device_type_of(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is CUDA where there is some."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name not in ("cpu", "cuda") or (name == "cuda" and not has_cuda):
        raise InputError(
            f"--device {name} is not here; legal: auto, cpu{', cuda' if has_cuda else ''}",
            values={"device": name},
            legal={"device": ["auto", "cpu", *(["cuda"] if has_cuda else [])]},
        )
    return name


def alone() -> Place:
    """The place of a process that nobody has started as one of several."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    return Place(0, 1, 0, 1)


def named_coordinates(meshes: Meshes) -> dict[str, int]:
    """This rank's coordinates on the axes that people name."""
    at = meshes.coordinates()
    return {axis: at[axis] for axis in ("pp", "dp", "cp", "tp")}


def run_command(
    path: Path, options: RunOptions, nproc: int | None, arguments: Sequence[str]
) -> dict[str, Any] | None:
    """``shardwise run``: join the processes that somebody has started, or start them here.

    Returns the document that rank 0 prints, None on other ranks.
    """
    plan = load_plan(path)
    place = place_of_environment()
    if place is not None:
        measurements = run_plan(plan, options)
        return summary(plan, measurements) if place.rank == 0 else None
    if nproc is not None and nproc != plan.num_gpus:
        raise InputError(
            f"--nproc {nproc}: the plan is for {plan.num_gpus} ranks; start as many, or plan again",
            values={"nproc": nproc},
            legal={"nproc": [plan.num_gpus]},
        )
    if not options.quiet:
        print(f"with torchrun: {torchrun_line(plan, arguments or [str(path)])}", file=sys.stderr)
    method = "spawn" if device_type_of(options.device) == "cuda" else "fork"
    measurements = start(run_plan, plan.num_gpus, (plan, options), method=method)[0]
    return summary(plan, measurements)


def summary(plan: Plan, measurements: Measurements) -> dict[str, Any]:
    """What a run came to."""
    last = measurements.steps[-1] if measurements.steps else None
    return {
        "steps": len(measurements.steps),
        "loss": last.loss if last else None,
        "step_time_s": measurements.step_time_s if last else None,
        "predicted_step_time_s": plan.prediction.step_time_s,
        "peak_memory_bytes": max(rank.peak_memory_bytes for rank in measurements.ranks),
        "world_size": measurements.world_size,
    }
