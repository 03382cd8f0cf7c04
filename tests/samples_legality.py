"""Small clusters, models and trainings for tests of legality; nothing here is a measured fact."""

from __future__ import annotations

from typing import Any

from hwprofiles.profile import Cluster, Device, Link, NetworkLevel
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, TrainSpec

PEAKS = {"fp32": 6e13, "bf16": 1e15, "fp16": 1e15, "fp8": 2e15}


def cluster(
    *,
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8"),
    network: str = "ib-ndr",
    nics: float = 8,
    nic_bytes_per_s: float = 50e9,
    nvme_bytes: float = 0.0,
    transports: tuple[str, ...] = (),
) -> Cluster:
    device = Device(
        name="sample-gpu",
        vendor="nobody",
        arch="hopper",
        memory_bytes=80e9,
        memory_bytes_per_s=3.35e12,
        achieved_memory_bytes_per_s=2.5e12,
        peak_flops_per_s={name: PEAKS[name] for name in precisions},
        num_sms=132,
        l2_bytes=50e6,
        tdp_w=700,
        kernel_floor_s=2e-6,
        host_launch_s=1e-5,
        host_link_bytes_per_s=5e10,
        price_usd_per_hour=None,
    )
    return Cluster(
        name="sample",
        device=device,
        gpus_per_node=8,
        domain_gpus=8,
        scale_up=Link("nvlink4", 450e9, 0.8, 3e-6, 8e-6),
        scale_out=Link(network, nic_bytes_per_s, 0.9, 1e-5, 8e-6),
        nics_per_node=nics,
        pair_bytes_per_s=450e9,
        in_switch_reduction=False,
        levels=(NetworkLevel("leaf", 32),),
        host_memory_bytes=2e12,
        nvme_bytes=nvme_bytes,
        nvme_read_bytes_per_s=1e10,
        nvme_write_bytes_per_s=1e10,
        node_overhead_w=3000,
        max_nodes=None,
        host_memory_bytes_per_s=2e11,
        transports=transports,
    )


def model(
    name: str = "sample",
    *,
    layers: int = 32,
    hidden: int = 4096,
    ffn: int = 14336,
    heads: int = 32,
    kv_heads: int | None = None,
    vocab: int = 32000,
    experts: int = 0,
    top_k: int = 0,
    moe_ffn: int = 0,
    **attention: Any,
) -> ModelSpec:
    head_dim = attention.pop("head_dim", max(1, hidden // heads))
    spec = AttentionSpec(heads, heads if kv_heads is None else kv_heads, head_dim, **attention)
    if experts:
        kind = LayerSpec(spec, moe=MoeSpec(experts, top_k, moe_ffn))
    else:
        kind = LayerSpec(spec, mlp=MlpSpec(ffn))
    return ModelSpec(name, hidden, vocab, (kind,), (0,) * layers)


def train(batch: int = 64, seq_len: int = 4096, **more: Any) -> TrainSpec:
    return TrainSpec(global_batch_size=batch, seq_len=seq_len, **more)
