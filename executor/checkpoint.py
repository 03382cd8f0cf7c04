"""Checkpoints that any layout can load: tensors by global name, cut as the layout cuts them.

Saving copies the state to the host and writes it beside the training; a checkpoint counts when
every rank has vouched for its files (`executor.checkpoint_files`). Restoring takes the newest
whole one.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from executor import checkpoint_files as files
from executor.data import Data
from executor.launch import RunError
from executor.weights import global_name, named_values, stored_name
from planner.codec import encode
from planner.errors import InputError
from planner.files import write_whole
from planner.plan import Plan

STATE = ("step", "exp_avg", "exp_avg_sq")  # of an optimizer, by parameter
SAVE_TIMEOUT = timedelta(minutes=30)


def run_state(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, plan: Plan
) -> dict[str, Tensor]:
    """Every tensor of this rank's share of the run, by its global name.

    The optimizer's are ``optimizer.NAME.exp_avg`` and so on: those that this rank keeps, which
    under ZeRO-1 are those of some parameters.
    """
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, value in named_values(module):
            found[f"model.{stored_name(name, plan.model)}"] = value.detach()
    for name, state in optimizer_state(modules, optimizer):
        for key in STATE:
            if key in state:
                found[f"optimizer.{stored_name(name, plan.model)}.{key}"] = state[key]
    return found


def optimizer_state(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Name of each parameter and its optimizer state, created where missing."""
    names = {id(p): global_name(n) for module in modules for n, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and "betas" in group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            yield names[id(parameter)], state


class Checkpointer:
    """Saves and restores the state of a run; all ranks call its methods together.

    Parameters
    ----------
    keep
        Whole checkpoints that are left in the folder.
    report
        Told in words what went wrong with a save that does not stop the run.
    """

    def __init__(
        self,
        root: str | Path,
        plan: Plan,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        data: Data,
        *,
        keep: int = 2,
        report: Callable[[str], None] = print,
    ) -> None:
        self.root = Path(root)
        self.plan = plan
        self.modules = list(modules)
        self.optimizer = optimizer
        self.data = data
        self.keep = keep
        self.report = report
        self.last_good: int | None = None
        # Saving goes on beside the training: its messages must not mix with the training's.
        self.group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
        self._pending: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pending_step = 0

    def save(self, step: int) -> None:
        """Start saving the state after `step` steps; returns when it is copied."""
        self.finish()
        folder = files.step_folder(self.root, step)
        dist.barrier(self.group)  # all ranks have vouched for the one before
        faults = [self._prepare(folder, step) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(faults, src=0, group=self.group)
        if faults[0] is not None:
            self._failed(step, faults[0])
            return
        state = run_state(self.modules, self.optimizer, self.plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental
            try:
                future = dcp.async_save(
                    state,
                    storage_writer=dcp.FileSystemWriter(folder, overwrite=False),
                    process_group=self.group,
                )
            except Exception as error:
                self._failed(step, error)
                return
        self._pending_step = step
        self._pending = threading.Thread(target=self._complete, args=(future, folder), daemon=True)
        self._pending.start()

    def _prepare(self, folder: Path, step: int) -> Exception | None:
        """Make the folder, and room for it; returns what went wrong."""
        run = {
            "format": files.FORMAT,
            "step": step,
            "world_size": dist.get_world_size(),
            "model": encode(self.plan.model),
            "layout": encode(self.plan.layout),
            "data": self.data.state_dict(),
            "torch": str(torch.__version__),
        }
        try:
            self._prune()
            files.remove(folder)  # one that was not finished
            folder.mkdir(parents=True)
            write_whole(folder / files.RUN, json.dumps(run))
        except (OSError, InputError) as error:
            return error
        return None

    def _complete(self, future: Any, folder: Path) -> None:
        try:
            future.result()
            files.write_manifest(folder, dist.get_rank())
        except BaseException as error:
            self._error = error

    def _failed(self, step: int, error: BaseException) -> None:
        kept = "none" if self.last_good is None else f"step {self.last_good}"
        self.report(
            f"the checkpoint of step {step} could not be written ({reason_of(error)}); the last "
            f"good one is {kept}"
        )

    def poll(self) -> None:
        """Take note of a save that has ended."""
        if self._pending is not None and not self._pending.is_alive():
            self._pending.join()
            self._pending = None
            if self._error is None:
                self.last_good = self._pending_step
            else:
                self._failed(self._pending_step, self._error)
                self._error = None

    def finish(self) -> None:
        """Wait until the last save has ended on all ranks."""
        if self._pending is not None:
            self._pending.join()
            self.poll()

    def _prune(self) -> None:
        """Delete whole checkpoints but the newest `keep`, less the one that now comes."""
        whole = [step for step in files.stored_steps(self.root) if self._vouched(step)]
        for step in whole[max(1, self.keep - 1) :]:
            files.remove(files.step_folder(self.root, step))

    def _vouched(self, step: int) -> bool:
        folder = files.step_folder(self.root, step)
        try:
            ranks = int(files.read_run(folder)["world_size"])
        except (InputError, KeyError, TypeError, ValueError):
            return False
        return all(files.manifest_path(folder, rank).exists() for rank in range(ranks))

    def restore(self) -> int | None:
        """Load the newest whole checkpoint; returns its step, None where there is none.

        Raises
        ------
        InputError
            It is of another model, or its data cannot go on here.
        """
        for step in self._agreed_steps():
            folder = files.step_folder(self.root, step)
            fault = self._shared_fault(folder)
            if fault:
                if dist.get_rank() == 0:
                    self.report(f"{fault}; an older one is used, if there is one")
                continue
            self.load(folder)
            self.last_good = step
            return step
        return None

    def _agreed_steps(self) -> list[int]:
        """Rank 0's list: file systems may show the ranks different folders for a moment."""
        steps = [files.stored_steps(self.root)]
        dist.broadcast_object_list(steps, src=0, group=self.group)
        return steps[0]

    def _shared_fault(self, folder: Path) -> str:
        faults: list[str] = [""] * dist.get_world_size()
        own = files.fault_of(folder, part=dist.get_rank(), parts=dist.get_world_size())
        dist.all_gather_object(faults, own, group=self.group)
        return next(filter(None, faults), "")

    def load(self, folder: Path) -> None:
        """Load one checkpoint into model, optimizer and data.

        Raises
        ------
        InputError
            It holds another model, or lacks a tensor that this rank needs.
        """
        run = files.read_run(folder)
        if run.get("model") != encode(self.plan.model):
            name = run.get("model", {}).get("name")
            raise InputError(
                f"{folder} is of model {name!r}, and the plan's {self.plan.model.name!r} differs "
                "from it",
                values={"checkpoint": name, "plan": self.plan.model.name},
            )
        state = run_state(self.modules, self.optimizer, self.plan)
        reader = files.SafeReader(folder)
        stored = reader.tensors()
        for name, value in state.items():
            if stored.get(name) != tuple(value.shape):
                raise InputError(
                    f"{folder} holds {name} as {stored.get(name, 'nothing')}, and this run "
                    f"needs it as {tuple(value.shape)}",
                    values={"name": name},
                )
        dcp.load(state, storage_reader=reader, process_group=self.group)
        self.data.load_state_dict(run["data"])


def reason_of(error: BaseException) -> str:
    """The innermost reason of a failed save, on one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__


def stop_without_checkpoint(step: int, what: str, last_good: int | None) -> RunError:
    """The error of a run that cannot go on, with where it can."""
    kept = "there is no checkpoint" if last_good is None else f"go on from step {last_good}"
    return RunError(f"{what} in step {step}; {kept}", values={"step": step, "last_good": last_good})
