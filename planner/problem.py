"""What a person gives, as a Setting: model, cluster, recipe, runtime, checked before any cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hwprofiles.loader import load_cluster
from hwprofiles.profile import Cluster
from planner.errors import InputError
from planner.presets_index import load_model
from planner.runtime import Runtime, load_runtime
from planner.setting import Setting
from planner.specs import OPTIMIZERS, PRECISIONS, LoraSpec, ModelSpec, TrainSpec

UNFUSED = "unfused"
# Beyond these whole numbers of 64 bits overflow somewhere, and nobody has such a job.
LARGEST = {
    "gpus": 10_000_000,
    "nodes": 10_000_000,
    "global_batch_size": 10**12,
    "seq_len": 10**9,
    "lora": 10**6,
}


def whole_number(name: str, value: Any) -> int:
    """`value` as a positive whole number, or a sentence."""
    most = LARGEST.get(name)
    if isinstance(value, int) and most is not None and value > most:
        raise InputError(
            f"{name} is {value:.3g}, and must be at most {most:,}"
            if value < 10**300
            else f"{name} has {len(str(value)) if value < 10**4000 else 'thousands of'} digits, "
            f"and must be at most {most:,}",
            values={name: str(value)[:40] if value < 10**4000 else "too large to show"},
            legal={name: [most]},
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{name} is {value!r}, and must be a whole number of at least 1",
            values={name: value},
            legal={name: [1]},
        )
    return value


def size_of_job(cluster: Cluster, nodes: int | None, gpus: int | None) -> int:
    """Number of GPUs, from nodes or GPUs; whole nodes as soon as there is more than one."""
    if (nodes is None) == (gpus is None):
        raise InputError(
            "say the size of the job with one of nodes and gpus",
            values={"nodes": nodes, "gpus": gpus},
            legal=["nodes", "gpus"],
        )
    each = cluster.gpus_per_node
    count = whole_number("nodes", nodes) * each if nodes is not None else whole_number("gpus", gpus)
    whole_number("gpus", count)
    if count > each and count % each:
        near = [count // each * each, (count // each + 1) * each]
        raise InputError(
            f"gpus={count} is not a whole number of nodes of {each} GPUs on {cluster.name}; "
            f"nearest are {near[0]} and {near[1]}",
            values={"gpus": count, "gpus_per_node": each},
            legal={"gpus": near},
        )
    if cluster.max_nodes is not None and count > cluster.max_nodes * each:
        raise InputError(
            f"{count} GPUs are more than {cluster.name} has: {cluster.max_nodes} nodes of {each}",
            values={"gpus": count},
            legal={"gpus": [cluster.max_nodes * each]},
        )
    return count


def attention_kernel(cluster: Cluster, runtime: Runtime, wanted: str | None) -> str:
    """The kernel that attention runs: as asked for, else the runtime's on this architecture."""
    device = cluster.device
    name = wanted or runtime.attention_kernels.get(
        device.arch, runtime.attention_kernels.get("default", UNFUSED)
    )
    if name not in device.attention and name != UNFUSED:
        have = sorted({*device.attention, UNFUSED})
        if wanted:
            raise InputError(
                f"attention kernel {name} has no rate on {device.name}; those that have are "
                f"{', '.join(have)}",
                values={"attention_kernel": name},
                legal={"attention_kernel": have},
            )
        name = next(
            (k for k in ("flash_attn_2", "flash", "sdpa") if k in device.attention), UNFUSED
        )
    return name


def one_of(name: str, value: str, legal: tuple[str, ...] | list[str]) -> str:
    """`value` if it is among `legal`, or a sentence."""
    if value not in legal:
        raise InputError(
            f"{name}={value} is not known; it must be one of {', '.join(legal)}",
            values={name: value},
            legal={name: list(legal)},
        )
    return value


def make_setting(
    model: str | Path | ModelSpec,
    *,
    cluster: str | Path | Cluster,
    nodes: int | None = None,
    gpus: int | None = None,
    global_batch_size: int,
    seq_len: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    runtime: str | Runtime = "megatron-core",
    attention_kernel_name: str | None = None,
    lora_rank: int | None = None,
    qlora: bool = False,
    **more: Any,
) -> Setting:
    """Check and gather everything that a cost needs.

    Raises
    ------
    InputError
        With the legal values, for whatever is wrong first.
    """
    spec = model if isinstance(model, ModelSpec) else load_model(str(model))
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(str(cluster))
    behaviour = runtime if isinstance(runtime, Runtime) else load_runtime(runtime)
    num_gpus = size_of_job(machine, nodes, gpus)
    one_of("precision", precision, PRECISIONS)
    one_of("optimizer", optimizer, OPTIMIZERS)
    if qlora and lora_rank is None:
        raise InputError(
            "qlora needs the rank of its adapters: give --lora RANK",
            values={"qlora": True},
            legal={"lora": [8, 16, 32, 64]},
        )
    lora = None if lora_rank is None else LoraSpec(whole_number("lora", lora_rank), quantized=qlora)
    if lora is not None and lora.rank > spec.hidden_size:
        raise InputError(
            f"lora is {lora.rank}, and a rank above hidden_size={spec.hidden_size} is not low",
            values={"lora": lora.rank, "hidden_size": spec.hidden_size},
            legal={"lora": [8, 16, 32, 64]},
        )
    margin = more.get("memory_margin_fraction", 0.0)
    if not 0.0 <= margin < 1.0:
        raise InputError(
            f"memory-margin is {margin}, and must be at least 0 and below 1",
            values={"memory_margin": margin},
            legal={"memory_margin": [0.0, 0.04, 0.1]},
        )
    train = TrainSpec(
        global_batch_size=whole_number("global_batch_size", global_batch_size),
        seq_len=whole_number("seq_len", seq_len),
        precision=precision,
        optimizer=optimizer,
        runtime=behaviour.name,
        lora=lora,
        **more,
    )
    kernel = attention_kernel(machine, behaviour, attention_kernel_name)
    return Setting(spec, train, machine, behaviour, num_gpus, kernel=kernel)
