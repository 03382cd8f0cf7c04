"""Device, Link and Cluster: what the hardware is, in SI units.

Everything is frozen. Numbers are bytes, seconds, FLOP/s and bytes/s; `Fact` keeps how a number was
written, of what kind it is and where it comes from. Curves are measured (or derived, and then say
from what) and are evaluated by `planner.roofline` and `planner.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its birth certificate.

    `value` is SI; `written` and `unit` are as in the file; `kind` is datasheet, measured, derived
    or assumed; `source` is an id in sources.toml; `per` says of what (GPU, direction, node).
    """

    value: float
    written: float
    unit: str
    kind: str
    source: str
    per: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Rate of C[m,n] = A[m,k] B[k,n] on one device in one precision.

    t = launch_s + max(min over tiles (x, y, e) of waves * 2 x y (k + prologue_k) * num_sms /
    (tile_flops_per_s e), 2 m n k / cap_flops_per_s, bytes / memory bandwidth), with waves =
    ceil(ceil(m/x) ceil(n/y) / num_sms). Evaluated in planner/roofline.py.
    """

    tile_flops_per_s: float
    prologue_k: float
    launch_s: float
    tiles: tuple[tuple[int, int, float], ...]  # (rows, columns, efficiency)
    cap_flops_per_s: float
    num_sms: int
    kind: str  # measured | derived | assumed
    source: str
    residual_median: float = 0.0
    residual_p90: float = 0.0
    note: str = ""
    sustained_fraction: float = 1.0  # of the rate of short runs that is left at the power limit
    # Rate where a row of an operand or of the result is no multiple of 16 bytes; 0: no such limit.
    unaligned_flops_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """Rate of one attention kernel, FLOP/s over (head_dim, seq_len), forward and backward.

    FLOPs are counted as forward 4 b h s^2 d (half of it when causal), backward 2.5 times that.
    """

    kernel: str
    head_dims: tuple[int, ...]
    seq_lens: tuple[int, ...]
    forward_flops_per_s: Array  # (head_dims, seq_lens)
    backward_flops_per_s: Array
    kind: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Seconds of one collective inside a scale-up domain, over group size and bytes.

    `num_bytes` counts as nccl-tests does: all_reduce buffer per rank; all_gather gathered total;
    reduce_scatter input total; all_to_all send buffer per rank; send_recv bytes sent.
    """

    op: str
    group_sizes: tuple[int, ...]
    num_bytes: tuple[float, ...]
    seconds: Array  # (group_sizes, num_bytes)
    kind: str
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as the runtime sees it (for a two-die package, one die)."""

    name: str
    vendor: str
    arch: str
    memory_bytes: float  # total that the driver reports
    memory_bytes_per_s: float  # data sheet
    achieved_memory_bytes_per_s: float  # a long device copy, read + write counted
    peak_flops_per_s: Mapping[str, float]  # dense, by precision
    num_sms: int
    l2_bytes: float
    tdp_w: float
    kernel_floor_s: float  # shortest kernel on the device
    host_launch_s: float  # host time to launch one kernel from Python
    host_link_bytes_per_s: float  # per GPU and direction, to host memory
    price_usd_per_hour: tuple[float, float] | None
    gemm: Mapping[str, GemmCurve] = field(default_factory=dict)  # by precision
    attention: Mapping[str, AttentionCurve] = field(default_factory=dict)  # by kernel
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link: NVLink generation, PCIe, InfiniBand port, Ethernet.

    `bytes_per_s` is one direction: per GPU for a scale-up link (all lanes), per port for a NIC.
    `achieved_fraction` is the share of it that a long transfer reaches.
    """

    name: str
    bytes_per_s: float
    achieved_fraction: float
    latency_s: float  # per hop of a ring, as NCCL counts it
    base_latency_s: float  # per collective
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkLevel:
    """One level of the network above the scale-up domain.

    Below this level `nodes` nodes are joined; `oversubscription` is downlink over uplink bandwidth
    of traffic that leaves them (1: non-blocking).
    """

    name: str
    nodes: int
    oversubscription: float = 1.0
    hop_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster: equal nodes of one device, joined by a network.

    `domain_gpus` is the number of GPUs in one scale-up domain (8 in a DGX node, 72 in an NVL72
    rack, which holds 18 nodes of 4). `pair_bytes_per_s` is what two GPUs of a domain can use
    between them: all links behind a switch, one link in a mesh.
    """

    name: str
    device: Device
    gpus_per_node: int
    domain_gpus: int
    scale_up: Link
    scale_out: Link
    nics_per_node: float
    pair_bytes_per_s: float
    in_switch_reduction: bool  # NVLink SHARP: reductions inside the switch
    levels: tuple[NetworkLevel, ...]
    host_memory_bytes: float  # per node
    nvme_bytes: float  # per node
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    node_overhead_w: float
    max_nodes: int | None
    curves: Mapping[str, CollectiveCurve] = field(default_factory=dict)  # by op
    transports: tuple[str, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    description: str = ""
    digest: str = ""
    gpus_per_host_link: float = 1.0  # GPUs that share one uplink to the host
    host_memory_bytes_per_s: float = 0.0  # per node, achieved; 0: not stated, no offload

    @property
    def node_scale_out_bytes_per_s(self) -> float:
        """NIC bandwidth of one node and direction, achieved."""
        return self.nics_per_node * self.scale_out.bytes_per_s * self.scale_out.achieved_fraction
