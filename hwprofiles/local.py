"""The cluster ``local``: this machine, as far as its operating system describes it.

With NVIDIA GPUs (asked through nvidia-smi) it is one node of the shipped device of that name.
Without, each "GPU" is a process on the cores: one per core, or N of them with ``local:N``. Rates
of a CPU are assumed from its clock and vector width, and say so; ``shardwise calibrate`` measures
them.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwprofiles.build import build_cluster, build_device
from hwprofiles.errors import ProfileError
from hwprofiles.profile import AttentionCurve, Cluster, Device, Fact, GemmCurve

# marketing name as the driver prints it (a part of it) -> shipped device
GPU_NAMES = {
    "H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "H100 NVL": "h100-nvl",
    "H200": "h200-sxm",
    "H800": "h800-sxm",
    "H20": "h20",
    "GH200 480GB": "gh200-96gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "A100 80GB PCIe": "a100-pcie-80gb",
    "A800-SXM4-80GB": "a800-sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "B200": "b200-sxm",
    "B300": "b300-sxm",
    "L40S": "l40s",
    "RTX 4090": "rtx-4090",
    "V100-SXM2-32GB": "v100-sxm2-32gb",
}
# one-node cluster whose links a machine with that device has
GPU_CLUSTERS = {
    "h100-sxm": "dgx-h100",
    "h100-pcie": "h100-pcie",
    "h100-nvl": "h100-nvl",
    "h200-sxm": "dgx-h200",
    "h800-sxm": "hgx-h800",
    "h20": "hgx-h20",
    "gh200-96gb": "jupiter",
    "a100-sxm-40gb": "dgx-a100-40gb",
    "a100-sxm-80gb": "dgx-a100-80gb",
    "a100-pcie-80gb": "a100-pcie",
    "a800-sxm": "hgx-a800",
    "gb200": "gb200-nvl72",
    "gb300": "azure-nd-gb300-v6",
    "b200-sxm": "dgx-b200",
    "b300-sxm": "dgx-b300",
    "l40s": "l40s",
    "rtx-4090": "rtx4090",
    "v100-sxm2-32gb": "v100-dgx1",
}


def _fact(value: float, unit: str, si: float, kind: str, note: str = "", per: str = "") -> Fact:
    source = "operating-system" if kind == "measured" else "assumption"
    return Fact(si, value, unit, kind, source, per, note)


def parse_gpus(listing: str) -> tuple[str, int]:
    """Shipped device and count from ``nvidia-smi --query-gpu=name --format=csv,noheader``.

    >>> parse_gpus("NVIDIA H100 80GB HBM3\\nNVIDIA H100 80GB HBM3\\n")
    ('h100-sxm', 2)
    """
    names = [line.strip() for line in listing.splitlines() if line.strip()]
    if len(set(names)) != 1:
        raise ProfileError(
            f"this machine has GPUs of {len(set(names))} kinds ({', '.join(sorted(set(names)))}); "
            f"a cluster is of one device",
            values={"gpus": sorted(set(names))},
        )
    words = names[0].split()
    hits = [
        key
        for key in GPU_NAMES
        if any(words[at : at + len(key.split())] == key.split() for at in range(len(words)))
    ]
    if not hits:
        raise ProfileError(
            f"this machine has {len(names)} x {names[0]!r}, which no shipped device describes; "
            f"write a device file, or say 'local:N' for N processes on the CPU",
            values={"gpu": names[0]},
            legal={"gpu": list(GPU_NAMES)},
        )
    return GPU_NAMES[max(hits, key=len)], len(names)


def _nvidia_gpus() -> tuple[str, int] | None:
    program = shutil.which("nvidia-smi")
    if not program:
        return None
    try:
        answer = subprocess.run(  # noqa: S603  (a fixed command line)
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0 or not answer.stdout.strip():
        return None
    return parse_gpus(answer.stdout)


def _cpu_words() -> tuple[str, set[str], float, int]:
    """Model name, flags, clock [Hz] and physical cores that this process may use."""
    model, hertz = platform.processor() or platform.machine(), 0.0
    flags: set[str] = set()
    cores: set[tuple[str, str]] = set()
    processor = package = core = "0"
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in [*lines, ""]:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            processor, package, core = value, "0", value
        elif key == "model name":
            model = value
        elif key in ("flags", "Features"):
            flags = set(value.split())
        elif key == "cpu MHz":
            hertz = max(hertz, float(value) * 1e6)
        elif key == "physical id":
            package = value
        elif key == "core id":
            core = value
        elif not key and lines and (allowed is None or int(processor) in allowed):
            cores.add((package, core))
    return model, flags, _steady_hertz(model, hertz), len(cores) or os.cpu_count() or 1


def _steady_hertz(model: str, now_hertz: float) -> float:
    """A clock that does not change between two calls, because the cluster's digest holds it."""
    named = re.search(r"@ ([0-9.]+) ?GHz", model)
    if named:
        return float(named.group(1)) * 1e9
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()
        return float(text) * 1e3
    except (OSError, ValueError):
        return max(1, round(now_hertz / 1e8)) * 1e8 if now_hertz else 2.0e9


def flops_per_cycle(flags: set[str]) -> tuple[int, int]:
    """Assumed FLOPs of one core and clock cycle, (fp32, bf16), from the CPU flags.

    Two fused multiply-adds a cycle on vectors of 256 bits (16 fp32 lanes, 32 FLOPs); 512-bit
    vectors count double only with AMX, which comes with two full units. bf16 runs at the fp32 rate
    unless the CPU multiplies it.

    >>> flops_per_cycle({"avx2", "fma"})
    (32, 32)
    """
    fp32 = 64 if "amx_tile" in flags else 32 if {"avx2", "fma"} <= flags else 16
    if "amx_bf16" in flags:
        return fp32, 1024
    return fp32, fp32 * 2 if "avx512_bf16" in flags else fp32


def _memory_bytes() -> float:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _gemm(peaks: dict[str, float]) -> dict[str, GemmCurve]:
    from hwprofiles.curves import assumed_gemm_curve

    return {precision: assumed_gemm_curve(peak, 1) for precision, peak in peaks.items()}


def _attention(peak: float) -> dict[str, AttentionCurve]:
    from hwprofiles.curves import assumed_attention_curve

    return {name: assumed_attention_curve(name, peak) for name in ("flash_attn_2", "unfused")}


def cpu_device(processes: int) -> Device:
    """One process of `processes` on this machine's cores, as a device."""
    model, flags, hertz, cores = _cpu_words()
    fp32, bf16 = flops_per_cycle(flags)
    share = min(1.0, cores / processes)  # of a core, where processes share the cores
    share *= max(1, cores // processes)
    memory = _memory_bytes() / processes
    note = f"{model}: {hertz / 1e9:.2f} GHz x {{}} FLOPs a cycle x {share:.3g} cores"
    bandwidth = 10e9 * cores / processes
    facts = {
        "memory": _fact(memory, "B", memory, "measured", "total memory / processes", "process"),
        "memory_bandwidth": _fact(
            bandwidth / 1e9, "GB/s", bandwidth, "assumed", "10 GB/s a core", "process"
        ),
        "achieved_memory_bandwidth": _fact(
            bandwidth / 1e9, "GB/s", bandwidth, "assumed", "10 GB/s a core", "process"
        ),
        "num_sms": _fact(1, "core", 1, "assumed", "a process is one unit", "process"),
        "l2": _fact(1, "MiB", 2.0**20, "assumed", "", "core"),
        "tdp": _fact(10, "W", 10, "assumed", "", "core"),
        "kernel_floor": _fact(2, "us", 2e-6, "assumed", "entry of a CPU kernel", "kernel"),
        "host_launch": _fact(5, "us", 5e-6, "assumed", "PyTorch dispatch", "kernel"),
        "host_link_bandwidth": _fact(
            bandwidth / 1e9, "GB/s", bandwidth, "assumed", "the same memory", "process"
        ),
    }
    peaks = {}
    for precision, per_cycle in (("fp32", fp32), ("bf16", bf16), ("fp16", fp32)):
        peaks[precision] = per_cycle * hertz * share
        facts[f"peak_{precision}"] = _fact(
            peaks[precision] / 1e9,
            "GFLOP/s",
            peaks[precision],
            "assumed",
            note.format(per_cycle),
            "process",
        )
    vendor = platform.machine() or "cpu"
    return build_device("local-cpu", vendor, "cpu", facts, _gemm(peaks), _attention(peaks["fp32"]))


def _requested(name: str) -> int | None:
    """The N of ``local:N``; None for ``local``."""
    _, colon, count = name.partition(":")
    if not colon:
        return None
    if not count.isdecimal() or not 1 <= int(count[:6]) <= 1024 or len(count) > 6:
        raise ProfileError(
            f"cluster {name[:40]!r}: after 'local:' comes the number of processes, 1 to 1024",
            values={"cluster": name[:40]},
            legal={"cluster": ["local", "local:2", "local:4", "local:8"]},
        )
    return int(count)


def local_cluster(name: str = "local") -> Cluster:
    """This machine as a cluster of one node.

    >>> local_cluster("local:4").gpus_per_node
    4
    """
    from hwprofiles.loader import load_cluster, load_link

    count = _requested(name)
    gpus = None if count else _nvidia_gpus()
    if gpus:
        return _gpu_node(load_cluster(GPU_CLUSTERS[gpus[0]]), gpus[1])
    processes = count or _cpu_words()[3]
    memory = _memory_bytes()
    disk = float(shutil.disk_usage("/").total)
    link = load_link("shared-memory")
    facts: dict[str, Fact] = {
        "gpus_per_node": _fact(
            processes, "GPU", processes, "measured", "processes that stand for GPUs", "node"
        ),
        "domain_gpus": _fact(processes, "GPU", processes, "measured", "one machine", "node"),
        "nics_per_node": _fact(1, "NIC", 1, "assumed", "loopback", "node"),
        "pair_bandwidth": replace(link.facts["bandwidth"], per="pair and direction"),
        "in_switch_reduction": _fact(0, "flag", 0, "assumed", "none"),
        "host_memory": _fact(memory, "B", memory, "measured", "total memory", "node"),
        # No host_memory_bandwidth: the processes' memory is the host's, offload frees nothing.
        "nvme": _fact(disk, "B", disk, "measured", "size of /, not what is free", "node"),
        "nvme_read_bandwidth": _fact(1, "GB/s", 1e9, "assumed", "not measured", "node"),
        "nvme_write_bandwidth": _fact(1, "GB/s", 1e9, "assumed", "not measured", "node"),
        "node_overhead": _fact(50, "W", 50, "assumed", "board and memory", "node"),
        "max_nodes": _fact(1, "node", 1, "measured", "this machine"),
    }
    return build_cluster(
        name,
        cpu_device(processes),
        link,
        load_link("loopback"),
        facts,
        (),
        transports=("gloo",),
        description="This machine: each GPU is a process on its cores; rates assumed until "
        "calibrated",
        curves={},
    )


def _gpu_node(like: Cluster, count: int) -> Cluster:
    """One node with `count` GPUs, its links as in the shipped cluster `like`."""
    words: dict[str, Any] = {"kind": "measured", "source": "operating-system"}
    facts = {key: fact for key, fact in like.facts.items() if not key.startswith("level.")}
    for key in ("gpus_per_node", "domain_gpus"):
        facts[key] = Fact(count, count, "GPU", per="node", note="as nvidia-smi lists", **words)
    memory = _memory_bytes()
    facts["host_memory"] = Fact(memory, memory, "B", per="node", **words)
    facts["max_nodes"] = Fact(1, 1, "node", note="this machine", **words)
    for key in ("nics_per_node", "nvme", "nvme_read_bandwidth", "nvme_write_bandwidth"):
        facts[key] = replace(facts[key], kind="assumed", note=f"as {like.name}: not looked up here")
    return build_cluster(
        "local",
        like.device,
        like.scale_up,
        like.scale_out,
        facts,
        (),
        transports=like.transports,
        description=f"This machine: {count} x {like.device.name}; links assumed as in {like.name}",
        curves={op: curve for op, curve in like.curves.items() if count > 1},
    )
