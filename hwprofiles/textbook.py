"""A device and a cluster of round numbers, for examples that are checked by hand."""

from __future__ import annotations

import numpy as np

from hwprofiles.profile import AttentionCurve, Cluster, Device, GemmCurve, Link


def textbook_device() -> Device:
    """1 TFLOP/s, 100 GB/s, 32 SMs, no start-up costs but a 1 us kernel floor.

    >>> textbook_device().peak_flops_per_s["bf16"]
    1000000000000.0
    """
    rate = np.full((1, 2), 1e12)
    return Device(
        name="textbook",
        vendor="none",
        arch="textbook",
        memory_bytes=16e9,
        memory_bytes_per_s=100e9,
        achieved_memory_bytes_per_s=100e9,
        peak_flops_per_s={"bf16": 1e12, "fp32": 0.1e12},
        num_sms=32,
        l2_bytes=1e6,
        tdp_w=100.0,
        kernel_floor_s=1e-6,
        host_launch_s=10e-6,
        host_link_bytes_per_s=10e9,
        price_usd_per_hour=None,
        gemm={
            "bf16": GemmCurve(
                tile_flops_per_s=1e12,
                prologue_k=0.0,
                launch_s=0.0,
                tiles=((256, 128, 1.0), (128, 64, 0.5)),
                cap_flops_per_s=1e12,
                num_sms=32,
                kind="assumed",
                source="assumed",
            )
        },
        attention={
            "flash_attn_2": AttentionCurve(
                "flash_attn_2", (64,), (128, 1024), rate, rate, "assumed", "assumed"
            )
        },
    )


def textbook_cluster(nodes: int | None = None) -> Cluster:
    """Nodes of 4 GPUs with 100 GB/s between them and one 50 GB/s port per node.

    >>> textbook_cluster().node_scale_out_bytes_per_s
    50000000000.0
    """
    return Cluster(
        name="textbook",
        device=textbook_device(),
        gpus_per_node=4,
        domain_gpus=4,
        scale_up=Link("bus", 100e9, 1.0, 1e-6, 0.0),
        scale_out=Link("wire", 50e9, 1.0, 10e-6, 0.0),
        nics_per_node=1.0,
        pair_bytes_per_s=100e9,
        in_switch_reduction=False,
        levels=(),
        host_memory_bytes=64e9,
        nvme_bytes=0.0,
        nvme_read_bytes_per_s=1e9,
        nvme_write_bytes_per_s=1e9,
        node_overhead_w=100.0,
        max_nodes=nodes,
    )
