"""This machine, measured: matrix products, attention, memory passes and collectives.

As many processes work at once as a run would have, so that they share memory and cores as they do
there. `executor.fit` makes a profile of what comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from executor.launch import join, place_of_environment, start
from executor.measure import available_cores
from planner.errors import InputError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
# Rows, columns and depth of products, in turn: each is timed with the gradients it would have.
WIDTHS = (64, 128, 256, 512, 1024)
QUICK_WIDTHS = (64, 256, 1024)
ROWS = (64, 256, 1024)
ATTENTION = ((32, 64), (32, 256), (64, 128), (64, 512), (128, 256))  # head width, length
QUICK_ATTENTION = ((32, 64), (32, 256), (64, 128), (64, 512))
# Torch has renamed these; the old names warn.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TIME_LIMIT_S = {True: 45.0, False: 180.0}
NOISY_SPREAD = 1.5  # 90th over 10th percentile of one product, again and again
NOISY_DRIFT = 1.25  # slowest over fastest of its medians at start, middle and end


class Clock:
    """Times work on a device; its `budget_s` shrinks the number of repetitions."""

    def __init__(self, device: torch.device, repetitions: int) -> None:
        self.device = device
        self.repetitions = repetitions

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def samples(self, work: Callable[[], Any], most_s: float = 0.25) -> list[float]:
        """Seconds of single runs, after two to warm up; short work is run in a row."""
        work()
        self.wait()
        start_s = time.perf_counter()
        work()
        self.wait()
        once = max(time.perf_counter() - start_s, 1e-7)
        inner = max(1, min(100, int(2e-4 / once)))
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < self.repetitions and (
            len(found) < 3 or time.perf_counter() - begin < most_s
        ):
            start_s = time.perf_counter()
            for _ in range(inner):
                work()
            self.wait()
            found.append((time.perf_counter() - start_s) / inner)
        return found

    def seconds(self, work: Callable[[], Any]) -> float:
        return median(self.samples(work))


def gemm_rows(
    clock: Clock, dtype: torch.dtype, widths: tuple[int, ...], generator: torch.Generator
) -> list[tuple[int, int, int, float]]:
    """(m, n, k, seconds) of C[m, n] = A[m, k] B[k, n], as linear layers call it."""
    rows = []
    for m in ROWS:
        for n in widths:
            for k in widths:
                a = torch.randn(m, k, generator=generator).to(clock.device, dtype)
                b = torch.randn(n, k, generator=generator).to(clock.device, dtype)
                rows.append((m, n, k, clock.seconds(lambda a=a, b=b: functional.linear(a, b))))
    return rows


def attention_rows(
    clock: Clock, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]
) -> list[tuple[int, int, float, float]]:
    """(head width, length, forward FLOP/s, backward FLOP/s) of causal attention."""
    rows = []
    for width, length in shapes:
        batch, heads = 2, 4
        q, k, v = (
            torch.randn(
                batch, heads, length, width, device=clock.device, dtype=dtype, requires_grad=True
            )
            for _ in range(3)
        )
        flops = 2.0 * batch * heads * length * length * width  # the causal half of 4 b h s^2 d

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        up = torch.randn_like(out)

        def backward(out: Any = out, up: Any = up, q: Any = q, k: Any = k, v: Any = v) -> Any:
            return torch.autograd.grad(out, (q, k, v), up, retain_graph=True)

        rows.append(
            (width, length, flops / clock.seconds(forward), 2.5 * flops / clock.seconds(backward))
        )
    return rows


def memory_rows(clock: Clock) -> list[tuple[float, float]]:
    """(bytes read and written, seconds) of elementwise passes."""
    rows = []
    for elements in (2**10, 2**14, 2**17, 2**20, 2**23):
        a = torch.randn(elements, device=clock.device)
        b = torch.empty_like(a)
        rows.append((8.0 * elements, clock.seconds(lambda a=a, b=b: torch.mul(a, 1.5, out=b))))
    return rows


def launch_seconds(clock: Clock) -> float:
    """Host time of one small operation with its entry in the autograd graph, both ways [s]."""
    x = torch.randn(8, 8, device=clock.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(20):
            y = y * 1.01
        y.sum().backward()

    return clock.seconds(chain) / 42


def collective_call(op: str, num_bytes: int, group: Any, device: torch.device) -> Callable[[], Any]:
    """A call of the collective on buffers of that many bytes, counted as CommOp does."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    part = max(1, num_bytes // 4 // size)
    whole = torch.ones(part * size, device=device)
    piece = torch.ones(part, device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: ALL_GATHER(whole, piece, group=group)
    if op == "reduce_scatter":
        return lambda: REDUCE_SCATTER(piece, whole, group=group)
    if op == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    other = torch.empty_like(whole)
    after, before = (rank + 1) % size, (rank - 1) % size

    def exchange() -> None:
        sends = dist.P2POp(dist.isend, whole, group=group, group_peer=after)
        receives = dist.P2POp(dist.irecv, other, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return exchange


def collective_rows(
    clock: Clock, sizes: tuple[int, ...], num_bytes: tuple[int, ...]
) -> dict[str, list[list[list[float]]]]:
    """op -> group size -> bytes -> seconds of single calls; every group runs at once.

    All ranks make the same number of calls, so that none waits for a call that does not come.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {}
    for size in sizes:
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = group
    found: dict[str, list[list[list[float]]]] = {}
    for op in OPS:
        found[op] = []
        for size in sizes:
            table = []
            for length in num_bytes:
                call = collective_call(op, length, groups[size], clock.device)
                repetitions = clock.repetitions if length <= 2**20 else 5
                for _ in range(2):
                    call()
                dist.barrier()
                seconds = []
                for _ in range(repetitions):
                    clock.wait()
                    start_s = time.perf_counter()
                    call()
                    clock.wait()
                    seconds.append(time.perf_counter() - start_s)
                table.append(seconds)
            found[op].append(table)
    return found


def group_sizes(world_size: int) -> tuple[int, ...]:
    """Powers of two that divide the world, from 2.

    >>> group_sizes(8), group_sizes(6)
    ((2, 4, 8), (2, 6))
    """
    found = [size for size in (2, 4, 8, 16, 32, 64) if world_size % size == 0]
    if world_size > 1 and world_size not in found:
        found.append(world_size)
    return tuple(sorted(found))


def measure_rank(device_type: str, quick: bool) -> dict[str, Any]:
    """What one process measures, all of them at once."""
    place = place_of_environment()
    assert place is not None
    _, device = join(place, device_type, {"quick": quick}, TIME_LIMIT_S[quick])
    clock = Clock(device, 15 if quick else 41)
    generator = torch.Generator().manual_seed(0)
    probe = (
        torch.randn(256, 512, generator=generator).to(device),
        torch.randn(512, 512, generator=generator).to(device),
    )

    def steady() -> list[float]:
        dist.barrier()
        return [
            sample
            for _ in range(3)
            for sample in clock.samples(lambda: functional.linear(*probe), most_s=0.15)
        ]

    probes = [steady()]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    widths = QUICK_WIDTHS if quick else WIDTHS
    dist.barrier()
    gemm = {
        name: gemm_rows(clock, dtype, widths if name == "fp32" else QUICK_WIDTHS, generator)
        for name, dtype in types.items()
        if not (quick and name == "bf16" and device_type == "cpu")
    }
    probes.append(steady())
    attention = attention_rows(
        clock,
        torch.float32 if device_type == "cpu" else torch.bfloat16,
        QUICK_ATTENTION if quick else ATTENTION,
    )
    dist.barrier()
    memory = memory_rows(clock)
    launch = launch_seconds(clock)
    sizes = group_sizes(place.world_size)
    lengths = tuple(2**power for power in (range(10, 25, 2) if quick else range(10, 26)))
    collectives = collective_rows(clock, sizes, lengths) if sizes else {}
    probes.append(steady())
    return {
        "gemm": gemm,
        "attention": attention,
        "memory": memory,
        "launch": launch,
        "group_sizes": sizes,
        "num_bytes": lengths,
        "collectives": collectives,
        "probes": probes,
    }


def noise_of(probes: list[list[list[float]]]) -> dict[str, float]:
    """Spread and drift of one product that every rank timed at start, middle and end."""
    spread, drift = 1.0, 1.0
    for rank in probes:
        for samples in rank:
            low, high = np.percentile(samples, [10, 90])
            spread = max(spread, float(high / low))
        medians = [median(samples) for samples in rank]
        drift = max(drift, max(medians) / min(medians))
    return {"spread": spread, "drift": drift}


def calibrate(
    output: str | Path, *, device: str = "auto", nproc: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Measure this machine and write its profile; returns what a person should know of it.

    Raises
    ------
    InputError
        No such device here, or too few of them.
    """
    from executor.fit import cluster_of
    from hwprofiles.local import local_cluster
    from hwprofiles.writer import save_cluster

    has_cuda = torch.cuda.is_available()
    kind = ("cuda" if has_cuda else "cpu") if device == "auto" else device
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not has_cuda):
        raise InputError(
            f"--device {device}: this machine has {'CUDA and CPU' if has_cuda else 'only a CPU'}",
            values={"device": device},
            legal={"device": ["auto", "cpu", *(["cuda"] if has_cuda else [])]},
        )
    base = local_cluster(
        "local" if kind == "cuda" and not nproc else f"local:{nproc or available_cores()}"
    )
    world = nproc or base.gpus_per_node
    begin = time.monotonic()
    ranks = start(
        measure_rank,
        world,
        (kind, quick),
        time_limit_s=4 * TIME_LIMIT_S[quick],
        method="spawn" if kind == "cuda" else "fork",
    )
    noise = noise_of([rank["probes"] for rank in ranks])
    cluster, fitted = cluster_of(base, ranks, noise)
    save_cluster(cluster, Path(output))
    noisy = noise["spread"] > NOISY_SPREAD or noise["drift"] > NOISY_DRIFT
    return {
        "output": str(output),
        "device_type": kind,
        "processes": world,
        "seconds": time.monotonic() - begin,
        "noise": noise,
        "noisy": noisy,
        **fitted,
    }


def render(document: Mapping[str, Any]) -> str:
    """The result for a person."""
    noise = document["noise"]
    where = f"{document['processes']} processes on {document['device_type']}"
    lines = [f"Measured {where} in {document['seconds']:.0f} s"]
    for name, rate in document["gemm_flops_per_s"].items():
        error = document["gemm_error"][name]
        lines.append(
            f"  matrix products {name:<5} {rate / 1e9:8.1f} GFLOP/s   fit off by {error:.0%} "
            "(median)"
        )
    lines.append(f"  memory passes         {document['memory_bytes_per_s'] / 1e9:8.2f} GB/s")
    lines.append(f"  one small operation   {document['launch_s'] * 1e6:8.1f} us")
    for op, row in document["collectives"].items():
        lines.append(
            f"  {op:<21} {row['seconds_small'] * 1e6:8.0f} us   "
            f"{row['bytes_per_s'] / 1e9:.2f} GB/s of buffer, spread {row['spread']:.1f}"
        )
    if document["noisy"]:
        lines.append(
            f"  This machine is too noisy to trust: the same product took {noise['spread']:.2f} "
            f"times as long between its 10th and 90th percentile, and drifted by "
            f"{noise['drift']:.2f} from start to end; stop other work and measure again"
        )
    lines.append(f"Wrote {document['output']}: --cluster {document['output']}")
    return "\n".join(lines)
