"""Values of parameters, whole or sharded: fresh ones from a seed, and given ones.

A parameter is known by its global name: that of the module tree, without what wrappers add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from planner.specs import ModelSpec

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def global_name(name: str) -> str:
    """A parameter's name without the wrappers of data parallelism, recompute and compilation.

    >>> global_name("module.layers.3._checkpoint_wrapped_module.mlp.up.weight")
    'layers.3.mlp.up.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and lasting buffers by global name."""
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            yield global_name(name), value


def local_shard(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that this rank holds of `like`: all of it, or its shard of a DTensor.

    A dimension may be cut twice: by tensor (or expert) parallelism and, inside of that, by FSDP,
    which torch marks with a strided placement on the outer axis. So plain cuts come first.
    """
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(like, DTensor):
        return full
    mesh, placements = like.device_mesh, like.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank outside of the mesh {mesh} holds a shard on it")
    axes = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    plain = [axis for axis in axes if type(placements[axis]) is Shard]
    strided = [axis for axis in axes if axis not in plain]
    for axis in [*plain, *reversed(strided)]:
        dim = placements[axis].dim
        full = _chunks(full, mesh.size(axis), dim)[coordinate[axis]]
    return full


def _chunks(full: Tensor, count: int, dim: int) -> list[Tensor]:
    """As torch.chunk, with empty pieces where it would give fewer."""
    pieces = list(full.chunk(count, dim))
    return pieces + [full.narrow(dim, full.shape[dim], 0)] * (count - len(pieces))


@torch.no_grad()
def assign(target: Tensor, full: Tensor) -> None:
    """Copy a whole value into a parameter, or this rank's share of it into its shard."""
    from torch.distributed.tensor import DTensor

    if tuple(target.shape) != tuple(full.shape):
        raise ValueError(f"a value of shape {tuple(full.shape)} for one of {tuple(target.shape)}")
    local = target.to_local() if isinstance(target, DTensor) else target
    local.copy_(local_shard(full, target))


def seed_of(seed: int, name: str) -> int:
    """A seed for one parameter: 63 bits of a hash of the run's seed and the name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@torch.no_grad()
def init_weights(module: nn.Module, model: ModelSpec, seed: int, deviation: float) -> None:
    """Normal values, of deviation less by sqrt(2 layers) where a matrix adds to
    the residual stream; norms 1 and biases 0.

    The numbers come from the parameter's own device: equal on all ranks, not on CPU and GPU.
    """
    from torch.distributed.tensor import DTensor

    adds = deviation / (2 * model.num_hidden_layers) ** 0.5
    for name, value in named_values(module):
        if value.ndim < 2:
            value.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        key = stored_name(name, model)
        local = value.to_local() if isinstance(value, DTensor) else value
        generator = torch.Generator(local.device).manual_seed(seed_of(seed, key))
        full = torch.empty(value.shape, dtype=torch.float32, device=local.device)
        into_stream = name.endswith(("attention.out.weight", "down.weight", "experts.down"))
        full.normal_(0.0, adds if into_stream else deviation, generator=generator)
        assign(value, full)


def stored_name(name: str, model: ModelSpec) -> str:
    """The name under which a value is seeded and stored: a tied head is the embedding."""
    return "embedding.weight" if name == "head.weight" and model.tie_word_embeddings else name
