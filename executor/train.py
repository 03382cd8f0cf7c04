"""The step loop: batch, forward and backward, clipping, update, and what is said of each step."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from executor.balancing import BiasBalancing
from executor.checkpoint import Checkpointer, stop_without_checkpoint
from executor.data import Data
from executor.launch import RunError
from executor.mesh import Meshes
from executor.moe import Moe
from executor.optimizer import Hyperparameters, clip_grad_norm, learning_rate, set_learning_rate
from executor.parallelize import finish_gradients, split_sequence, token_weight
from executor.weights import global_name
from planner.plan import Plan


class Pipeline(Protocol):
    """Runs forward and backward of a step; as `executor.parallel.pipeline_parallel` has it."""

    modules: list[torch.nn.Module]

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step. `loss` is the mean over the global batch [nats per token]."""

    step: int
    loss: float
    aux_loss: float
    grad_norm: float
    learning_rate: float
    step_time_s: float
    tokens_per_s: float
    mfu: float
    peak_memory_bytes: float


class Log:
    """Says a line a step on a terminal, and writes it as JSON to a file; on rank 0 alone."""

    def __init__(
        self, path: str | Path | None = None, *, quiet: bool = False, total: int = 0
    ) -> None:
        self.is_speaker = not dist.is_initialized() or dist.get_rank() == 0
        self.quiet = quiet
        self.total = total
        self.file: TextIO | None = None
        if path is not None and self.is_speaker:
            # Appended, line by line: a run that goes on leaves what was before.
            self.file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115  close()

    def step(self, record: StepRecord) -> None:
        if self.file is not None:
            plain = {
                name: value if not isinstance(value, float) or math.isfinite(value) else None
                for name, value in asdict(record).items()
            }
            self.file.write(json.dumps(plain, allow_nan=False) + "\n")
        self.say(step_line(record, self.total))

    def say(self, line: str) -> None:
        if self.is_speaker and not self.quiet:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def step_line(record: StepRecord, total: int) -> str:
    """A step in words, for people.

    >>> step_line(StepRecord(4, 2.5, 0.0, 1.25, 3e-4, 0.5, 8192.0, 0.412, 2.0**31), 20)
    'step 5/20  loss 2.5000  grad norm 1.25  8,192 tokens/s  MFU 41.2 %  500 ms  2.00 GiB'
    """
    return (
        f"step {record.step + 1}/{total}  loss {record.loss:.4f}  grad norm "
        f"{record.grad_norm:.3g}  {record.tokens_per_s:,.0f} tokens/s  MFU {record.mfu:.1%}"
        f"  {record.step_time_s * 1e3:.0f} ms  {record.peak_memory_bytes / 2**30:.2f} GiB"
    ).replace("%", " %")


def moe_layers(modules: Sequence[torch.nn.Module]) -> list[Moe]:
    return [part for module in modules for part in module.modules() if isinstance(part, Moe)]


def set_aux_scale(modules: Sequence[torch.nn.Module], plan: Plan) -> None:
    """Let a sequence's balancing loss weigh as its tokens' losses together.

    The objective is then mean token loss + sum over layers of the mean over sequences of their
    balancing loss.
    """
    for moe in moe_layers(modules):
        moe.aux_scale = token_weight(plan) * plan.train.seq_len


@contextmanager
def noticing_sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread hears signals
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


class Trainer:
    """Everything that a step needs, put together by `executor.run`.

    `peak_memory_bytes` tells the process's peak; `before_step` is called with each step's number.
    """

    def __init__(
        self,
        plan: Plan,
        meshes: Meshes,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        data: Data,
        device: torch.device,
        *,
        hyper: Hyperparameters | None = None,
        log: Log | None = None,
        checkpointer: Checkpointer | None = None,
        every: int = 0,
        peak_memory_bytes: Callable[[], float] = lambda: 0.0,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.plan = plan
        self.meshes = meshes
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.data = data
        self.device = device
        self.hyper = hyper or Hyperparameters()
        self.log = log or Log(quiet=True)
        self.checkpointer = checkpointer
        self.every = every
        self.peak_memory_bytes = peak_memory_bytes
        self.before_step = before_step
        self.params = [p for module in pipeline.modules for p in module.parameters()]
        self.has_all_gradients = False  # looked at once
        self.moe = moe_layers(pipeline.modules)
        self.balancing = BiasBalancing(pipeline.modules, plan.model)
        set_aux_scale(pipeline.modules, plan)

    def train(self, steps: int, first_step: int = 0) -> list[StepRecord]:
        """Run steps `first_step` to ``steps - 1``; returns what is known of each.

        On SIGTERM of any rank all stop after the step, and save where there is a checkpointer.

        Raises
        ------
        RunError
            The loss or the gradients are no numbers any more; SIGTERM.
        """
        records: list[StepRecord] = []
        saved = first_step
        if self.plan.model.dropout and self.plan.train.dropout is not False:
            self.log.say("note: the model trains without dropout, which the plan counts")
        with noticing_sigterm() as asked:
            for step in range(first_step, steps):
                self.before_step(step)
                record, is_asked = self.step(step, stop=asked.is_set())
                records.append(record)
                self.log.step(record)
                done = step + 1
                if self.checkpointer is not None:
                    self.checkpointer.poll()
                    due = self.every > 0 and done % self.every == 0
                    if due or is_asked or done == steps:
                        self.checkpointer.save(done)
                        saved = done
                if is_asked and done < steps:
                    self.stop_as_asked(step, saved)
        if self.checkpointer is not None:
            self.checkpointer.finish()
        return records

    def stop_as_asked(self, step: int, saved: int) -> None:
        if self.checkpointer is not None:
            self.checkpointer.finish()
            saved = self.checkpointer.last_good or 0
        raise stop_without_checkpoint(step, "SIGTERM was received", saved or None)

    def step(self, step: int, *, stop: bool = False) -> tuple[StepRecord, bool]:
        """One step; with it, whether any rank was asked to `stop`."""
        start_s = self.now()
        tokens, labels = self.data.step_batch(self.plan.num_microbatches)
        tokens, labels = (
            split_sequence(part, self.plan, self.meshes).to(self.device)
            for part in (tokens, labels)
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.pipeline.step(tokens, labels)
        finish_gradients(self.pipeline.modules, self.plan, self.meshes)
        self.check_gradients(step)
        totals = torch.cat((self.local_totals(loss, stop), self.balancing.take_counts(self.device)))
        norm = clip_grad_norm(
            self.params, self.hyper.max_grad_norm, self.plan.layout.pp, beside=totals
        )
        mean_loss, aux_loss, stops = totals[:3].tolist()
        self.check_finite(step, mean_loss, float(norm))
        rate = learning_rate(step, self.hyper)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.balancing.update(totals[3:])
        step_time_s = self.now() - start_s
        rate_tokens = self.plan.train.global_batch_size * self.plan.train.seq_len / step_time_s
        expected = self.plan.prediction
        # MFU goes with tokens per second: the plan says how.
        per_gpu = rate_tokens / self.plan.num_gpus
        mfu = expected.mfu * per_gpu / expected.tokens_per_s_per_gpu
        record = StepRecord(
            step=step,
            loss=mean_loss,
            aux_loss=aux_loss,
            grad_norm=float(norm),
            learning_rate=rate,
            step_time_s=step_time_s,
            tokens_per_s=rate_tokens,
            mfu=mfu,
            peak_memory_bytes=self.peak_memory_bytes(),
        )
        return record, stops > 0

    def local_totals(self, loss: Tensor, stop: bool) -> Tensor:
        """This rank's part of [mean loss, mean balancing loss, ranks asked to stop].

        The ranks of a tensor-parallel group hold the same loss, and all ranks of a sequence book
        the whole of its balancing loss.
        """
        layout, batch = self.plan.layout, self.plan.train.global_batch_size
        aux: Any = sum((moe.aux_loss for moe in self.moe), torch.zeros((), device=self.device))
        for moe in self.moe:
            moe.aux_loss = 0.0
        aux_share = aux / (batch * layout.cp * layout.tp)
        parts = [loss.detach() / layout.tp, aux_share, torch.tensor(float(stop))]
        return torch.stack([part.to(self.device, torch.float32) for part in parts])

    def check_gradients(self, step: int) -> None:
        """Stop where a parameter was left out, which torch does not tell: it would stay as it
        is."""
        if self.has_all_gradients:
            return
        missing = [
            global_name(name)
            for module in self.pipeline.modules
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        if missing:
            raise RunError(
                f"step {step} gave no gradient to {len(missing)} parameters, the first of them "
                f"{missing[0]}: under this layout they would not be trained",
                values={"step": step, "parameters": missing[:10]},
            )
        self.has_all_gradients = True

    def check_finite(self, step: int, loss: float, norm: float) -> None:
        """Stop before the update where the numbers have gone; equal on all ranks."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        last_good = None
        if self.checkpointer is not None:
            self.checkpointer.finish()
            last_good = self.checkpointer.last_good
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        raise stop_without_checkpoint(step, what, last_good)

    def now(self) -> float:
        """The time at which all work so far is done [s]."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
