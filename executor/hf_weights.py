"""Weights from and to Hugging Face folders: safetensors and a config, of Llama, Qwen and Mixtral.

Nothing in a folder is executed. Each rank reads what its parameters need and keeps its shard;
saving, each pipeline stage writes its own files and rank 0 the index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.details import Details, details_from_config
from executor.hf_names import FAMILIES, config_of, experts_of, is_stack, theirs
from executor.weights import assign, named_values
from planner.errors import InputError, ModelError
from planner.files import write_whole
from planner.specs import ModelSpec

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 4 << 30


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config of a folder, of a family whose weights are known here.

    Raises
    ------
    ModelError
        No readable config, or another family.
    """
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", values={"path": str(path)}) from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in FAMILIES:
        raise ModelError(
            f"{path} is of model_type={str(family)[:40]!r}, whose weights are not known here; "
            f"legal are {', '.join(FAMILIES)}",
            values={"model_type": family},
            legal={"model_type": list(FAMILIES)},
        )
    return dict(config)


def read_details(folder: str | Path) -> Details:
    """Rotary base, norm epsilon and so on of the model in a folder."""
    return details_from_config(read_config(folder))


class Folder:
    """The tensors of a folder by name; files are mapped, and tensors read when asked for."""

    def __init__(self, folder: str | Path, stack: ExitStack) -> None:
        self.path = Path(folder)
        self.stack = stack
        self.files: dict[str, Any] = {}
        self.file_of = self._file_names()

    def _file_names(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): str(file) for name, file in named.items()}
            except (ValueError, KeyError, AttributeError) as error:
                raise InputError(
                    f"{index} is no index of weights", values={"path": str(index)}
                ) from error
        if not (self.path / WHOLE).is_file():
            raise InputError(
                f"{self.path} has neither {WHOLE} nor {INDEX}; weights are read from safetensors "
                "alone",
                values={"path": str(self.path)},
            )
        return dict.fromkeys(self._open(WHOLE).keys(), WHOLE)

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self.files:
            path = self.path / name
            if Path(name).name != name or not path.is_file():
                raise InputError(f"{self.path} lacks its file {name[:80]}", values={"file": name})
            try:
                opened = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise InputError(
                    f"{path} is damaged: {error}", values={"path": str(path)}
                ) from error
            self.files[name] = self.stack.enter_context(opened)
        return self.files[name]

    def read(self, names: Sequence[str], *, stacked: bool = False) -> Tensor:
        """One tensor, or several of one shape `stacked`."""
        tensors = []
        for name in names:
            if name not in self.file_of:
                raise InputError(
                    f"{self.path} lacks {name}, which the plan's model has",
                    values={"name": name},
                )
            tensors.append(self._open(self.file_of[name]).get_tensor(name))
        return torch.stack(tensors) if stacked else tensors[0]


def load_weights(module: nn.Module, model: ModelSpec, folder: str | Path) -> None:
    """Fill the parameters of a part of the model from a folder, whole or sharded.

    Raises
    ------
    InputError
        A file or tensor is missing or damaged, or has another shape than the model says.
    """
    family = read_config(folder)["model_type"]
    with ExitStack() as stack:
        source = Folder(folder, stack)
        for name, value in named_values(module):
            if name == "head.weight" and model.tie_word_embeddings:
                full = source.read(theirs("embedding.weight", family, 0))
            else:
                names = theirs(name, family, experts_of(name, model))
                full = source.read(names, stacked=is_stack(name))
            if tuple(full.shape) != tuple(value.shape):
                raise InputError(
                    f"{folder} has {name} as {tuple(full.shape)}, and the plan's model as "
                    f"{tuple(value.shape)}",
                    values={"name": name},
                )
            assign(value, full.to(value.dtype))


def whole_values(modules: Iterable[nn.Module], model: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Every value of these parts, gathered; all ranks that share them must ask together."""
    for module in modules:
        for name, value in named_values(module):
            if name == "head.weight" and model.tie_word_embeddings:
                continue
            full = value.detach()
            full_tensor = getattr(full, "full_tensor", None)
            yield name, (full if full_tensor is None else full_tensor()).cpu()


def save_weights(
    modules: Sequence[nn.Module],
    model: ModelSpec,
    folder: str | Path,
    *,
    config: dict[str, Any] | None = None,
) -> None:
    """Write the model as a Hugging Face folder; all ranks call it together, each with its parts.

    `config` is that of the folder that the weights came from; None: made from the model.

    Raises
    ------
    ModelError
        No family of Hugging Face's that is known here can hold the model.
    InputError
        The folder cannot be written.
    """
    target = Path(folder)
    kept = config if config is not None else config_of(model, details_of_parts(modules))
    family = kept["model_type"]
    part, is_writer = part_of_rank([name for m in modules for name, _ in named_values(m)])
    shards = ShardWriter(target, part) if is_writer else None
    for name, full in whole_values(modules, model):
        if shards is None:
            continue
        names = theirs(name, family, experts_of(name, model))
        for key, value in zip(names, full.unbind() if is_stack(name) else [full], strict=True):
            shards.add(key, value)
    files: dict[str, tuple[str, int]] = {}
    for found in of_all_ranks({} if shards is None else shards.finish()):
        files |= found
    if not dist.is_initialized() or dist.get_rank() == 0:
        index = {
            "metadata": {"total_size": sum(size for _, size in files.values())},
            "weight_map": {key: file for key, (file, _) in sorted(files.items())},
        }
        write_whole(target / INDEX, json.dumps(index, indent=2) + "\n")
        write_whole(target / CONFIG, json.dumps(kept, indent=2) + "\n")


def details_of_parts(modules: Iterable[nn.Module]) -> Details:
    """The details that these parts of a model were built with."""
    from executor.transformer import Transformer

    parts = (part for module in modules for part in module.modules())
    return next(part.details for part in parts if isinstance(part, Transformer))


def of_all_ranks(value: Any) -> list[Any]:
    """What every rank has to say."""
    if not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def part_of_rank(names: list[str]) -> tuple[int, bool]:
    """Which of the model's distinct parts this rank holds, and whether it writes it."""
    every = of_all_ranks(names)
    rank = dist.get_rank() if dist.is_initialized() else 0
    firsts = [r for r, held in enumerate(every) if every.index(held) == r]
    mine = every.index(names)
    return firsts.index(mine), mine == rank


class ShardWriter:
    """Writes tensors into files of a few GiB, each whole or not at all."""

    def __init__(self, folder: Path, stage: int) -> None:
        self.folder = folder
        self.stage = stage
        self.held: dict[str, Tensor] = {}
        self.held_bytes = 0
        self.written: dict[str, tuple[str, int]] = {}
        self.count = 0

    def add(self, name: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        if self.held and self.held_bytes + size > MAX_FILE_BYTES:
            self.flush()
        self.held[name] = value.contiguous()
        self.held_bytes += size

    def flush(self) -> None:
        from safetensors.torch import save_file

        file = f"model-stage{self.stage:03d}-{self.count:05d}.safetensors"
        temporary = self.folder / f".{file}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(self.held, temporary, metadata={"format": "pt"})
            os.replace(temporary, self.folder / file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            reason = error.strerror or error
            raise InputError(f"cannot write {self.folder / file}: {reason}") from error
        for name, value in self.held.items():
            self.written[name] = (file, value.numel() * value.element_size())
        self.held, self.held_bytes = {}, 0
        self.count += 1

    def finish(self) -> dict[str, tuple[str, int]]:
        """Name of every tensor written -> its file and bytes."""
        if self.held:
            self.flush()
        return self.written
