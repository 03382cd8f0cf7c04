"""Step time of `shardwise run` over that of a plain torch loop of the same model, run in turns.

    python tests/benchmarks/steps.py [--rounds 12]

For one process, DDP on 2 ranks and FSDP2 on 2 ranks it prints the median of the paired ratios: in
each round both loops do the same steps on the same batches, first one, then the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from executor.data import make_data
from executor.launch import join, place_of_environment, start
from executor.mesh import build_mesh
from executor.optimizer import make_optimizer
from executor.parallel.pipeline_parallel import build_pipeline
from executor.parallelize import loss_function, parallelize
from executor.train import Trainer
from executor.transformer import Transformer
from planner import api
from planner.plan import Plan
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

LAYER = LayerSpec(AttentionSpec(8, 4, 32), mlp=MlpSpec(768))
MODEL = ModelSpec("medium", 256, 1024, (LAYER,), (0,) * 4)
CASES = {"one process": (1, "micro_batch=8"), "DDP 2": (2, "dp=2 micro_batch=4")}
CASES["FSDP2 2"] = (2, "dp=2 micro_batch=4 zero=3")
LIMIT = 1.03
STEPS = 3  # of each loop in a round


def plan_of(layout: str, gpus: int) -> Plan:
    return api.estimate(
        MODEL,
        layout=layout,
        cluster=f"local:{gpus}",
        gpus=gpus,
        global_batch_size=8,
        seq_len=128,
        runtime="shardwise",
        precision="fp32",
    ).plan


def fresh(plan: Plan, *chunk: Any) -> Transformer:
    """The model, or the chunk of it that a pipeline asks for."""
    names = ("layers", "has_embedding", "has_head")
    model = Transformer(
        plan.model, max_seq_len=plan.train.seq_len, **dict(zip(names, chunk, strict=False))
    )
    model.init_weights(0)
    return model


def data_of(plan: Plan) -> object:
    return make_data(
        "synthetic",
        seq_len=plan.train.seq_len,
        vocab_size=plan.model.vocab_size,
        micro_batch=plan.layout.micro_batch,
        dp_rank=dist.get_rank(),
        dp_size=plan.layout.dp,
        seed=0,
    )


def ours(plan: Plan) -> Callable[[], float]:
    """A step of the executor, as `executor.run` puts it together."""
    meshes = build_mesh(plan, "cpu")
    pipeline = build_pipeline(
        plan,
        meshes,
        lambda *chunk: parallelize(fresh(plan, *chunk), plan, meshes, "cpu"),
        loss_function(plan, meshes),
    )
    params = [p for module in pipeline.modules for p in module.parameters()]
    optimizer = make_optimizer(params, plan.train, plan.layout.zero)
    trainer = Trainer(plan, meshes, pipeline, optimizer, data_of(plan), torch.device("cpu"))
    count = iter(range(1 << 30))
    return lambda: trainer.step(next(count))[0].loss


def plain(plan: Plan) -> Callable[[], float]:
    """The loop that one writes by hand."""
    model: nn.Module = fresh(plan)
    if plan.layout.zero == 3:
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
    elif plan.layout.dp > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    data = data_of(plan)

    def step() -> float:
        tokens, labels = next(data)
        optimizer.zero_grad(set_to_none=True)
        logits: Tensor = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def seconds(step: Callable[[], float]) -> tuple[float, float]:
    """Wall and processor time of a step on this rank."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        step()
    cpu_s = (time.process_time() - start_cpu_s) / STEPS
    dist.barrier()
    return (time.perf_counter() - start_s) / STEPS, cpu_s


def measure(plan: Plan, rounds: int) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """What `seconds` says of both loops, by round."""
    join(place_of_environment(), "cpu", {}, 60.0)
    loops = ours(plan), plain(plan)
    for loop in loops:
        seconds(loop)
    found = []
    for index in range(rounds):
        # Who goes first changes, so that neither has the warmer caches.
        order = (0, 1) if index % 2 == 0 else (1, 0)
        times = {which: seconds(loops[which]) for which in order}
        found.append((times[0], times[1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    code = 0
    print(f"{'':14} {'shardwise':>10} {'plain':>10} {'ratio':>7} {'CPU':>7}   limit {LIMIT}")
    for name, (gpus, layout) in CASES.items():
        pairs = start(measure, gpus, (plan_of(layout, gpus), rounds), time_limit_s=600)[0]
        ratio, cpu_ratio = (statistics.median(a[i] / b[i] for a, b in pairs) for i in range(2))
        own, other = (statistics.median(pair[i][0] for pair in pairs) * 1e3 for i in range(2))
        print(f"{name:14} {own:7.1f} ms {other:7.1f} ms {ratio:7.3f} {cpu_ratio:7.3f}", flush=True)
        code |= ratio > LIMIT
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
