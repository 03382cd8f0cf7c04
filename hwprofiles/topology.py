"""What a group of ranks really gets from the network: closed forms, and the graph they stand for.

Ranks are numbered along the nodes: rank r sits on node ``r // gpus_per_node`` and in scale-up
domain ``r // domain_gpus``. A group of `size` ranks with `stride` holds r, r + stride, ...; the
groups of one axis tile all ranks and run at once, so that what one group gets is its share. Sizes
and strides broadcast; networkx is imported only to draw the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwprofiles.errors import ProfileError
from hwprofiles.profile import Cluster

if TYPE_CHECKING:
    import networkx as nx

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PATTERNS = ("ring", "all-to-all")


def units_spanned(unit_ranks: int, size: ArrayLike, stride: ArrayLike) -> Ints:
    """Most units (nodes, domains) of `unit_ranks` ranks that one of the equal groups touches.

    A block of size x stride ranks holds `stride` groups; blocks start at every multiple of
    g = gcd(size * stride, unit_ranks) within a unit, so the worst group starts at offset
    o = unit_ranks - g + min(stride, g) - 1 and touches (o + (size - 1) stride) // unit_ranks + 1
    units, at most `size`. Exact for any size and stride.

    References: derived here.

    >>> units_spanned(8, [8, 16, 6, 2], [1, 1, 1, 8]).tolist()
    [1, 2, 2, 2]
    """
    size, stride = (np.asarray(value, dtype=np.int64) for value in (size, stride))
    g = np.gcd(size * stride, unit_ranks)
    offset = unit_ranks - g + np.minimum(stride, g) - 1
    spanned: Ints = np.minimum(size, (offset + (size - 1) * stride) // unit_ranks + 1)
    return spanned


def group_span(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> tuple[Ints, Ints, Ints]:
    """Members that share a scale-up domain, domains and nodes of a group: (local, domains, nodes).

    Of equal groups the one that spans most counts; where its members are spread unevenly, `local`
    is rounded down.

    >>> from hwprofiles.loader import load_cluster
    >>> [int(n) for n in group_span(load_cluster("dgx-h100"), 16, 4)]
    [2, 8, 8]
    """
    domains = units_spanned(cluster.domain_gpus, size, stride)
    local: Ints = np.maximum(1, np.asarray(size, dtype=np.int64) // domains)
    return local, domains, units_spanned(cluster.gpus_per_node, size, stride)


def scale_up_rate(cluster: Cluster, members: ArrayLike) -> Floats:
    """Achieved rate of a ring of `members` ranks inside one domain [bytes/s per rank].

    min(all links, (members - 1) x what one pair has) x achieved fraction: behind a switch a pair
    has all links, in a mesh a ring over few members leaves links to the others unused.

    >>> from hwprofiles.loader import load_cluster
    >>> (scale_up_rate(load_cluster("leonardo"), [2, 4]) / 1e9).round(1).tolist()
    [76.7, 230.0]
    """
    peers = np.maximum(np.asarray(members, dtype=np.float64) - 1, 1)
    link = cluster.scale_up
    rate: Floats = np.minimum(link.bytes_per_s, peers * cluster.pair_bytes_per_s)
    return rate * link.achieved_fraction


def _crossed(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> list[tuple[Ints, Floats]]:
    """(members below, capacity leaving per GPU below) of the domain and every level above it.

    The capacity per GPU is infinite where no group leaves the unit.
    """
    size = np.asarray(size, dtype=np.int64)
    nic_share = cluster.node_scale_out_bytes_per_s / cluster.gpus_per_node
    oversubscription = 1.0
    found: list[tuple[Ints, Floats]] = []
    units = [(cluster.domain_gpus, 1.0)]
    for level in cluster.levels:
        ranks = level.nodes * cluster.gpus_per_node
        if ranks > cluster.domain_gpus:
            units.append((ranks, level.oversubscription))
        else:  # a level inside the domain: its traffic takes the scale-up links
            units[0] = (cluster.domain_gpus, max(units[0][1], level.oversubscription))
    for ranks, taper in units:
        oversubscription *= taper
        spanned = units_spanned(ranks, size, stride)
        members: Ints = np.maximum(1, size // spanned)
        found.append((members, np.where(spanned > 1, nic_share / oversubscription, np.inf)))
    return found


def group_bandwidth(
    cluster: Cluster,
    size: ArrayLike,
    stride: ArrayLike,
    *,
    pattern: str = "ring",
    concurrent: bool = True,
) -> Floats:
    """Bandwidth per rank of a group when all equal groups run at once [bytes/s], a bus bandwidth.

    ring: min(s, w m_0, w m_1 / q_1, ...), with s = scale-up rate, w = NIC rate of a node / its
    GPUs, m_0 = members that share a domain, m_i = members below network level i and q_i = product
    of the oversubscriptions up to it. A ring enters and leaves a unit once, so that the unit's
    GPUs / m_i rings share its uplink.
    all-to-all: min over the same levels of w / q_i / f_i, with f_i = (n - m_i) / (n - 1) the share
    of the bytes that leaves the unit; within the domain s.
    A lone group (not `concurrent`) has at least one whole NIC to itself.
    Assumes traffic spread evenly over the links of a level; a group of one gets infinity.

    References: derived here; the NIC share as NCCL's rings over nodes show it.

    >>> from hwprofiles.loader import load_cluster
    >>> cluster = load_cluster("dgx-h100")
    >>> (group_bandwidth(cluster, [8, 16, 16], [1, 1, 8]) / 1e9).tolist()
    [367.02, 367.02, 48.0]
    """
    if pattern not in PATTERNS:
        raise ProfileError(
            f"pattern {pattern!r} is none of {', '.join(PATTERNS)}",
            values={"pattern": pattern},
            legal={"pattern": list(PATTERNS)},
        )
    size = np.asarray(size, dtype=np.int64)
    local, _, _ = group_span(cluster, size, stride)
    rate = np.where(local > 1, scale_up_rate(cluster, local), np.inf)
    out = cluster.scale_out
    one_nic = out.bytes_per_s * out.achieved_fraction
    for members, per_gpu in _crossed(cluster, size, stride):
        if pattern == "ring":
            share = per_gpu * members
        else:
            share = per_gpu * np.maximum(size - 1, 1) / np.maximum(size - members, 1)
        if not concurrent:
            share = np.maximum(share, np.where(np.isfinite(per_gpu), one_nic, np.inf))
        rate = np.minimum(rate, share)
    return np.where(size > 1, rate, np.inf)


def ring_hop_s(cluster: Cluster, size: ArrayLike, stride: ArrayLike) -> Floats:
    """Mean latency of one hop of the ring through a group [s].

    ((size - d) a_in + d (a_out + h)) / size; d = domains (0 when the group stays in one), a_in and
    a_out = latency per hop of the links, h = extra latency of the highest level that it crosses.

    References: NcclTuner (latency per hop and link kind).

    >>> from hwprofiles.loader import load_cluster
    >>> float(ring_hop_s(load_cluster("dgx-h100"), 16, 8)) * 1e6
    14.0
    """
    size = np.asarray(size, dtype=np.int64)
    domains = units_spanned(cluster.domain_gpus, size, stride)
    across = np.where(domains > 1, domains, 0)
    extra = np.zeros(np.broadcast(size, domains).shape)
    for level in cluster.levels:
        beyond = units_spanned(level.nodes * cluster.gpus_per_node, size, stride) > 1
        extra = np.where(beyond, level.hop_latency_s, extra)
    inside = (size - across) * cluster.scale_up.latency_s
    hops: Floats = (inside + across * (cluster.scale_out.latency_s + extra)) / size
    return hops


def draw(cluster: Cluster, num_nodes: int) -> nx.DiGraph[Any]:
    """The cluster as a graph: GPU, switch, NIC, one vertex per unit of a level, and the core.

    Vertices are tuples: ``("gpu", node, index)``, ``("switch", domain)``, ``("nic", node, index)``,
    ``(level name, unit)``, ``("core",)``. Edges carry `capacity` in bytes/s achieved, one direction
    each. Where a pair has less than all links there is no switch, and GPUs join in a mesh.
    """
    import networkx as nx

    if num_nodes < 1 or (cluster.max_nodes is not None and num_nodes > cluster.max_nodes):
        raise ProfileError(
            f"cluster {cluster.name!r} has 1 to {cluster.max_nodes or 'any number of'} nodes, "
            f"not {num_nodes}",
            values={"nodes": num_nodes},
            legal={"nodes": [1, cluster.max_nodes] if cluster.max_nodes else [1]},
        )
    graph: nx.DiGraph[Any] = nx.DiGraph()

    def join(one: Any, other: Any, capacity: float) -> None:
        graph.add_edge(one, other, capacity=capacity)
        graph.add_edge(other, one, capacity=capacity)

    up, gpus = cluster.scale_up, cluster.gpus_per_node
    mesh = cluster.pair_bytes_per_s < up.bytes_per_s * 0.999
    by_domain: dict[int, list[Any]] = {}
    whole_nics = max(1, int(cluster.nics_per_node))
    nic_rate = cluster.node_scale_out_bytes_per_s / whole_nics
    levels = [v for v in cluster.levels if v.nodes * gpus > cluster.domain_gpus]
    inner = [v.oversubscription for v in cluster.levels if v.nodes * gpus <= cluster.domain_gpus]
    nic_rate /= max([1.0, *inner])
    for node in range(num_nodes):
        above = (levels[0].name, node // levels[0].nodes) if levels else ("core",)
        for index in range(whole_nics):
            join(("nic", node, index), above, nic_rate)
        for index in range(gpus):
            gpu = ("gpu", node, index)
            by_domain.setdefault((node * gpus + index) // cluster.domain_gpus, []).append(gpu)
            mine = [n for n in range(whole_nics) if n * gpus // whole_nics == index]
            for nic in mine or [index * whole_nics // gpus]:
                join(gpu, ("nic", node, nic), nic_rate)
    for domain, members in by_domain.items():
        for position, gpu in enumerate(members):
            if mesh:
                for other in members[position + 1 :]:
                    join(gpu, other, cluster.pair_bytes_per_s * up.achieved_fraction)
            else:
                join(gpu, ("switch", domain), up.bytes_per_s * up.achieved_fraction)
    node_rate = cluster.node_scale_out_bytes_per_s / max([1.0, *inner])
    taper = 1.0
    for position, level in enumerate(levels):
        taper *= level.oversubscription
        for unit in range(-(-num_nodes // level.nodes)):
            higher = levels[position + 1] if position + 1 < len(levels) else None
            above = (higher.name, unit * level.nodes // higher.nodes) if higher else ("core",)
            below = min(level.nodes, num_nodes - unit * level.nodes)
            join((level.name, unit), above, below * node_rate / taper)
    return graph
