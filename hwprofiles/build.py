"""Facts -> Device, Link and Cluster, and the digest that names a cluster's content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from hwprofiles.errors import ProfileError
from hwprofiles.facts import PRECISIONS
from hwprofiles.profile import (
    AttentionCurve,
    Cluster,
    CollectiveCurve,
    Device,
    Fact,
    GemmCurve,
    Link,
    NetworkLevel,
)


def build_device(
    name: str,
    vendor: str,
    arch: str,
    facts: Mapping[str, Fact],
    gemm: Mapping[str, GemmCurve],
    attention: Mapping[str, AttentionCurve],
) -> Device:
    """A device from its facts; a device computes in at least one precision."""
    peaks = {p: facts[f"peak_{p}"].value for p in PRECISIONS if f"peak_{p}" in facts}
    if not peaks:
        raise ProfileError(
            f"device {name!r} has no peak rate; give at least one of "
            f"{', '.join('peak_' + p for p in PRECISIONS)}",
            values={"device": name},
            legal={"facts": [f"peak_{p}" for p in PRECISIONS]},
        )
    _not_above(facts, "achieved_memory_bandwidth", "memory_bandwidth", f"device {name!r}")
    price = None
    if "price_low" in facts or "price_high" in facts:
        low = facts.get("price_low", facts.get("price_high"))
        high = facts.get("price_high", low)
        assert low is not None
        assert high is not None
        _not_above(facts, "price_low", "price_high", f"device {name!r}")
        price = (low.value, high.value)
    return Device(
        name=name,
        vendor=vendor,
        arch=arch,
        memory_bytes=facts["memory"].value,
        memory_bytes_per_s=facts["memory_bandwidth"].value,
        achieved_memory_bytes_per_s=facts["achieved_memory_bandwidth"].value,
        peak_flops_per_s=peaks,
        num_sms=int(facts["num_sms"].value),
        l2_bytes=facts["l2"].value,
        tdp_w=facts["tdp"].value,
        kernel_floor_s=facts["kernel_floor"].value,
        host_launch_s=facts["host_launch"].value,
        host_link_bytes_per_s=facts["host_link_bandwidth"].value,
        price_usd_per_hour=price,
        gemm=gemm,
        attention=attention,
        facts=dict(facts),
    )


def _not_above(facts: Mapping[str, Fact], small: str, large: str, where: str) -> None:
    if small in facts and large in facts and facts[small].value > facts[large].value * (1 + 1e-9):
        raise ProfileError(
            f"{where}: {small} ({facts[small].written:g} {facts[small].unit}) is above {large} "
            f"({facts[large].written:g} {facts[large].unit})",
            values={small: facts[small].value, large: facts[large].value},
        )


def build_link(name: str, facts: Mapping[str, Fact]) -> Link:
    """A link from its facts."""
    return Link(
        name=name,
        bytes_per_s=facts["bandwidth"].value,
        achieved_fraction=facts["achieved_fraction"].value,
        latency_s=facts["latency"].value,
        base_latency_s=facts["base_latency"].value,
        facts=dict(facts),
    )


def build_cluster(
    name: str,
    device: Device,
    scale_up: Link,
    scale_out: Link,
    facts: Mapping[str, Fact],
    level_names: tuple[str, ...],
    *,
    transports: tuple[str, ...],
    description: str,
    curves: Mapping[str, CollectiveCurve],
) -> Cluster:
    """A cluster from its parts; facts of level L are named ``level.L.nodes`` and so on."""
    gpus, domain = (int(facts[key].value) for key in ("gpus_per_node", "domain_gpus"))
    if domain % gpus and gpus % domain:
        raise ProfileError(
            f"cluster {name!r}: domain_gpus={domain} must be a multiple or a divisor of "
            f"gpus_per_node={gpus}",
            values={"domain_gpus": domain, "gpus_per_node": gpus},
            legal={"domain_gpus": [gpus, 2 * gpus, 4 * gpus]},
        )
    levels = tuple(
        NetworkLevel(
            level,
            int(facts[f"level.{level}.nodes"].value),
            facts[f"level.{level}.oversubscription"].value,
            facts[f"level.{level}.hop_latency"].value,
        )
        for level in level_names
    )
    for below, above in pairwise(levels):
        if above.nodes % below.nodes or above.nodes == below.nodes:
            raise ProfileError(
                f"cluster {name!r}: level {above.name!r} joins {above.nodes} nodes and must hold "
                f"several whole units of level {below.name!r} ({below.nodes} nodes)",
                values={above.name: above.nodes, below.name: below.nodes},
                legal={"nodes": [below.nodes * factor for factor in (2, 4, 8)]},
            )
    cluster = Cluster(
        name=name,
        device=device,
        gpus_per_node=gpus,
        domain_gpus=domain,
        scale_up=scale_up,
        scale_out=scale_out,
        nics_per_node=facts["nics_per_node"].value,
        pair_bytes_per_s=facts["pair_bandwidth"].value,
        in_switch_reduction=bool(facts["in_switch_reduction"].value),
        levels=levels,
        host_memory_bytes=facts["host_memory"].value,
        gpus_per_host_link=(
            facts["gpus_per_host_link"].value if "gpus_per_host_link" in facts else 1.0
        ),
        host_memory_bytes_per_s=(
            facts["host_memory_bandwidth"].value if "host_memory_bandwidth" in facts else 0.0
        ),
        nvme_bytes=facts["nvme"].value,
        nvme_read_bytes_per_s=facts["nvme_read_bandwidth"].value,
        nvme_write_bytes_per_s=facts["nvme_write_bandwidth"].value,
        node_overhead_w=facts["node_overhead"].value,
        max_nodes=int(facts["max_nodes"].value) if "max_nodes" in facts else None,
        curves=curves,
        transports=transports,
        facts=dict(facts),
        description=description,
    )
    return replace(cluster, digest=digest_of(cluster))


def _canonical(thing: Any) -> Any:
    """Plain data, the same for the same content, for the digest."""
    if isinstance(thing, Fact):  # how a number was written does not change what it is
        return [thing.value, thing.kind, thing.source]
    if is_dataclass(thing):
        return {
            field.name: _canonical(getattr(thing, field.name))
            for field in fields(thing)
            if field.name not in ("digest", "description", "note")  # words about it
        }
    if isinstance(thing, np.ndarray):
        return [list(thing.shape), hashlib.sha256(thing.tobytes()).hexdigest()]
    if isinstance(thing, Mapping):
        return {str(key): _canonical(value) for key, value in thing.items()}
    if isinstance(thing, tuple | list):
        return [_canonical(value) for value in thing]
    return thing


def digest_of(cluster: Cluster) -> str:
    """First 16 hex digits of the SHA-256 of device, links, cluster and curves, notes left out."""
    content = json.dumps(_canonical(cluster), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
