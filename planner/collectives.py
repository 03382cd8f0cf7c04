"""Collective and group -> seconds, on the measured curves of a domain and the links above it.

`num_bytes` counts as nccl-tests does: all_reduce buffer per rank; all_gather gathered total;
reduce_scatter input total; all_to_all send buffer per rank; send_recv bytes sent. A group is
`size` ranks that lie `stride` ranks apart; all arguments but the operation broadcast.

Inside a scale-up domain the measured curve decides where there is one, else latency and bandwidth
of the Link. Across domains the forms of NCCL are costed and the fastest is taken: a ring through
all ranks, a tree over nodes, a tree over nodes whose node part is reduced in the switch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hwprofiles.profile import Array, Cluster, CollectiveCurve
from hwprofiles.topology import group_span, units_spanned
from planner.errors import InputError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
# NCCL drives a domain's network through at most this many GPUs' ports per collective: 144 and 1440
# GPUs of NVL72 racks both show 8 x 48 GB/s (coreweave rows), and no node has more than 8.
MAX_RAILS = 8
# A reduction in the node and one over the network overlap except for the first chunks; what does
# not overlap is the shorter part of this many bytes (h20_2node: 8 to 64 MiB).
FILL_BYTES = 32 * 2.0**20
# Cost of one more peer of a flat all-to-all: what 16 MiB over 16 nodes takes beyond the rate that
# 16 GiB reaches, over its 120 remote peers (simai_alltoall_table).
PEER_S = 1.4e-6
# Assumed: NCCL's own model gives trees at most 0.92 of the ring's rate, and the two-node rate
# without switch reduction does not beat the ring (a100_hdr_2node), so long messages take the ring.
TREE_RATE = 0.85
# The LL protocol that NCCL takes for short messages: base and hop of a ring over the network,
# and a flag word beside every word of data (nccl-tuner).
LL_BASE_S, LL_HOP_S, LL_BYTES = 6.6e-6, 2.7e-6, 2.0


@dataclass(frozen=True, slots=True)
class Group:
    """Where the ranks of a group lie and what they can use."""

    size: Array
    local: Array  # members in one domain
    domains: Array
    in_rate: Array  # bytes/s of a ring inside the domain, infinite if alone there
    out_rate: Array  # bytes/s of all members of a domain into the network
    rank_out_rate: Array  # bytes/s of one member into the network, when all send
    hop_s: Array  # latency of one network hop
    spread: Array  # share of an all-to-all that leaves the slowest level, over its rate [s/byte]


def _array(value: ArrayLike) -> Array:
    return np.asarray(value, dtype=np.float64)


def place(cluster: Cluster, size: ArrayLike, stride: ArrayLike, concurrent: bool = True) -> Group:
    """Members per domain, domains, and the rates that the group can use.

    Where the ranks lie is `hwprofiles.topology.group_span`. With `concurrent` all equal groups of
    the cluster run at once, so a member has its GPU's share of the node's ports; alone, the group
    starts at the first rank of a domain and a member may use a whole port. A level with
    oversubscription o (product up to it) above m members limits a ring that leaves it to m
    shares / o, because one edge in m crosses it, and an all-to-all to its share that leaves / o.
    """
    ranks = np.asarray(size, dtype=np.int64)
    step = np.asarray(stride, dtype=np.int64)
    if concurrent:
        members, across, _ = group_span(cluster, ranks, step)
    else:  # one group, from the first rank of a domain on
        across = np.minimum(ranks, (ranks - 1) * step // cluster.domain_gpus + 1)
        members = np.maximum(1, ranks // across)
    n, local, domains = _array(ranks), _array(members), _array(across)
    node_rate = cluster.node_scale_out_bytes_per_s
    share = node_rate / cluster.gpus_per_node
    rails = np.minimum(local, MAX_RAILS)
    domain_rate = node_rate * cluster.domain_gpus / cluster.gpus_per_node
    if concurrent:
        out = rails * share
        rank_out = np.full_like(out, share)
    else:
        port = cluster.scale_out.bytes_per_s * cluster.scale_out.achieved_fraction
        out = np.minimum(rails * max(share, port), domain_rate)
        rank_out = np.minimum(max(share, port), out)
    spread = (n - local) / n / rank_out
    hop = np.full_like(out, cluster.scale_out.latency_s)
    taper = 1.0
    for level in cluster.levels:
        below = level.nodes * cluster.gpus_per_node
        if below <= cluster.domain_gpus:
            continue
        taper *= level.oversubscription
        spanned = units_spanned(below, ranks, step)
        crossed = spanned > 1
        inside = np.maximum(1.0, np.floor(n / spanned))
        out = np.minimum(out, np.where(crossed, inside * share / taper, np.inf))
        leaving = (n - inside) / n * taper / share
        spread = np.where(crossed, np.maximum(spread, leaving), spread)
        hop = hop + np.where(crossed, level.hop_latency_s, 0.0)
    in_rate = _ring_rate(cluster, local)
    return Group(n, local, domains, in_rate, out, rank_out, hop, spread)


def _ring_rate(cluster: Cluster, local: Array) -> Array:
    """Bytes/s of a ring through `local` GPUs of a domain, as long messages show it."""
    curve = cluster.curves.get("all_gather")
    rate = np.full_like(local, cluster.scale_up.bytes_per_s * cluster.scale_up.achieved_fraction)
    if curve is not None:
        sizes = np.asarray(curve.group_sizes, dtype=np.float64)
        long = (curve.num_bytes[-1] - curve.num_bytes[-2]) / (
            curve.seconds[:, -1] - curve.seconds[:, -2]
        )
        bus = long * (sizes - 1.0) / sizes
        rate = np.interp(np.log2(np.maximum(local, 2.0)), np.log2(sizes), bus)
    ring: Array = np.where(local > 1.0, rate, np.inf)
    return ring


def curve_s(curve: CollectiveCurve, num_bytes: ArrayLike, size: ArrayLike) -> Array:
    """Time of a measured collective [s], between its sizes and messages.

    Logarithm of time linear in logarithms of bytes and of group size; linear in bytes beyond the
    longest message; the shortest time below the first. One rank takes no time.
    """
    q, n = np.broadcast_arrays(_array(num_bytes), _array(size))
    step = np.log2(curve.num_bytes[1] / curve.num_bytes[0])
    last = len(curve.num_bytes) - 1
    top = curve.num_bytes[-1]
    x = np.clip(np.log2(np.maximum(q, 1.0) / curve.num_bytes[0]) / step, 0.0, float(last))
    i = np.minimum(x.astype(np.int64), last - 1)
    share = x - i
    sizes = np.asarray(curve.group_sizes, dtype=np.float64)
    logs = np.log2(sizes)
    y = np.clip(np.log2(np.maximum(n, 1.0)), logs[0], logs[-1])
    a = np.clip(np.searchsorted(logs, y, side="right") - 1, 0, max(0, len(logs) - 2))
    b = np.minimum(a + 1, len(logs) - 1)
    part = np.where(b > a, (y - logs[a]) / np.where(b > a, logs[b] - logs[a], 1.0), 0.0)
    table = np.log(curve.seconds)

    def at(row: NDIndex) -> Array:
        inside = np.exp(table[row, i] * (1.0 - share) + table[row, i + 1] * share)
        slope = (curve.seconds[row, last] - curve.seconds[row, last - 1]) / (
            top - curve.num_bytes[-2]
        )
        beyond: Array = inside + slope * np.maximum(q - top, 0.0)
        return beyond

    low, high = at(a), at(b)
    seconds: Array = np.where(n > 1.0, low ** (1.0 - part) * high**part, 0.0)
    return seconds


NDIndex = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def _inside(cluster: Cluster, op: str, q: Array, local: Array) -> Array:
    """Time inside one scale-up domain [s]: the curve, else latency and bandwidth of the link.

    Ring of l: base + h (l - 1) a + h (l - 1)/l q/B with h = 2 for all_reduce, else 1. All-to-all:
    the same bytes, but no faster than one peer's part over what two GPUs can use between them.
    """
    curve = cluster.curves.get(op)
    if curve is not None:
        return curve_s(curve, q, local)
    link = cluster.scale_up
    rate = link.bytes_per_s * link.achieved_fraction
    pair = min(cluster.pair_bytes_per_s * link.achieved_fraction, rate)
    if op == "send_recv":
        seconds = link.base_latency_s + link.latency_s + q / pair
    elif op == "all_to_all":
        moved = np.maximum((local - 1.0) / local * q / rate, q / local / pair)
        seconds = link.base_latency_s + link.latency_s + moved
    else:
        passes = 2.0 if op == "all_reduce" else 1.0
        seconds = link.base_latency_s + passes * (
            (local - 1.0) * link.latency_s + (local - 1.0) / local * q / rate
        )
    inside: Array = np.where(local > 1.0, seconds, 0.0)
    return inside


def _ring(cluster: Cluster, q: Array, g: Group, passes: float) -> Array:
    """Ring over all ranks: base + h ((n-d) a_up + (d-1) a_out + (n-1)/n q / min(B_up, B_out)).

    The faster of two protocols: that of long messages, and LL of less latency and twice the bytes.
    """
    link = cluster.scale_out
    inside = (g.size - g.domains) * cluster.scale_up.latency_s
    moved = (g.size - 1.0) / g.size * q / np.minimum(g.in_rate, g.out_rate)
    short_hop = g.hop_s - max(0.0, link.latency_s - LL_HOP_S)
    long = link.base_latency_s + passes * (inside + (g.domains - 1.0) * g.hop_s + moved)
    short = min(link.base_latency_s, LL_BASE_S) + passes * (
        inside + (g.domains - 1.0) * short_hop + LL_BYTES * moved
    )
    seconds: Array = np.minimum(long, short)
    return seconds


def _tree(cluster: Cluster, q: Array, g: Group) -> Array:
    """Tree over nodes, chain in a node: 2 ((l-1) a_up + ceil(log2 d) a_out) + bytes of a ring."""
    depth = np.ceil(np.log2(np.maximum(g.domains, 1.0)))
    hops = (g.local - 1.0) * cluster.scale_up.latency_s + depth * g.hop_s
    rate = TREE_RATE * np.minimum(g.in_rate, g.out_rate)
    moved = (g.size - 1.0) / g.size * q / rate
    seconds: Array = cluster.scale_out.base_latency_s + 2.0 * (hops + moved)
    return seconds


def _switch_tree(cluster: Cluster, q: Array, g: Group) -> Array:
    """Reduction in the switch, tree over domains: latency + longer part + what fills the pipe.

    Over the network go 2 (d-1)/d q of every domain, over its rails.
    """
    depth = np.ceil(np.log2(np.maximum(g.domains, 1.0)))
    inside = _inside(cluster, "all_reduce", q, g.local)
    outside = 2.0 * (g.domains - 1.0) / g.domains * q / g.out_rate
    first = np.minimum(1.0, FILL_BYTES / np.maximum(q, 1.0))
    fill = np.minimum(inside, outside) * first
    latency = cluster.scale_out.base_latency_s + 2.0 * depth * g.hop_s
    seconds: Array = latency + np.maximum(inside, outside) + fill
    usable = (g.local >= 4.0) | (g.local == cluster.domain_gpus)
    return np.where(usable, seconds, np.inf)


def _all_to_all(cluster: Cluster, q: Array, g: Group, hierarchical: bool) -> Array:
    """All-to-all across domains: the longer of network and domain part, and a cost per peer.

    Flat: (n-l)/n q leave through the rank's share of the ports, l/n q stay, n-l remote peers.
    Hierarchical (one message per domain, forwarded there): the same bytes leave, all q cross the
    domain once more, d-1 remote peers.
    """
    outside = q * g.spread
    stay = q if hierarchical else q * g.local / g.size
    inside = _inside(cluster, "all_to_all", stay, g.local)
    peers = (g.domains - 1.0) if hierarchical else (g.size - g.local)
    latency = cluster.scale_out.base_latency_s + g.hop_s + peers * PEER_S
    seconds: Array = latency + np.maximum(outside, inside)
    return seconds


def _forms(
    cluster: Cluster, op: str, q: Array, g: Group, hierarchical: bool
) -> list[tuple[str, Array]]:
    """Every form of an operation that the cluster can run across domains."""
    if op == "all_reduce":
        forms = [("ring", _ring(cluster, q, g, 2.0)), ("tree", _tree(cluster, q, g))]
        if cluster.in_switch_reduction:
            forms.append(("switch_tree", _switch_tree(cluster, q, g)))
        return forms
    if op in ("all_gather", "reduce_scatter"):
        return [("ring", _ring(cluster, q, g, 1.0))]
    if op == "all_to_all":
        name = "hierarchical" if hierarchical else "pairwise"
        return [(name, _all_to_all(cluster, q, g, hierarchical))]
    link = cluster.scale_out
    return [("direct", link.base_latency_s + g.hop_s + q / g.rank_out_rate)]


def _checked(op: str) -> None:
    if op not in OPS:
        raise InputError(
            f"unknown collective {op!r}; known: {', '.join(OPS)}",
            values={"op": op},
            legal={"op": list(OPS)},
        )


def collective_s(
    cluster: Cluster,
    op: str,
    num_bytes: ArrayLike,
    size: ArrayLike,
    stride: ArrayLike = 1,
    *,
    concurrent: bool = True,
    hierarchical: bool = False,
) -> Array:
    """Time of one collective in a group of `size` ranks, `stride` apart [s].

    Inside a domain: `_inside`. Across: the fastest of the forms above. A group of one, and no
    bytes, take no time. Assumes ranks numbered domain by domain, equal groups and no overlap with
    compute; `concurrent`: all equal groups of the cluster run the same collective at once.

    References: Thakur2005 (ring and tree); NcclTests (what bytes count).

    >>> from hwprofiles.textbook import textbook_cluster
    >>> c = textbook_cluster()  # 4 GPUs of 100 GB/s a node, 50 GB/s a node out
    >>> round(float(collective_s(c, "all_reduce", 1e9, 4)), 6)  # 6 us + 1.5 GB / 100 GB/s
    0.015006
    >>> round(float(collective_s(c, "all_gather", 1e9, 8)), 6)  # 6 + 10 us + 7/8 GB / 50 GB/s
    0.017516
    >>> round(float(collective_s(c, "all_gather", 1e9, 2, 4)), 6)  # a quarter of the port
    0.04001
    """
    _checked(op)
    q, n, s = np.broadcast_arrays(_array(num_bytes), _array(size), _array(stride))
    g = place(cluster, n, s, concurrent)
    seconds = _inside(cluster, op, q, g.local)
    if np.any(g.domains > 1.0):
        across = _forms(cluster, op, q, g, hierarchical)
        best = across[0][1]
        for _, other in across[1:]:
            best = np.minimum(best, other)
        seconds = np.where(g.domains > 1.0, best, seconds)
    result: Array = np.where((n > 1.0) & (q > 0.0), seconds, 0.0)
    return result


def collective_algorithm(
    cluster: Cluster,
    op: str,
    num_bytes: float,
    size: int,
    stride: int = 1,
    *,
    concurrent: bool = True,
    hierarchical: bool = False,
) -> str:
    """Name of the form that `collective_s` takes: measured, link, ring, tree, switch_tree, ...

    >>> from hwprofiles.textbook import textbook_cluster
    >>> collective_algorithm(textbook_cluster(), "all_reduce", 1e9, 4)
    'link'
    >>> collective_algorithm(textbook_cluster(), "all_reduce", 1e3, 64)
    'tree'
    """
    _checked(op)
    g = place(cluster, size, stride, concurrent)
    if float(g.domains) <= 1.0:
        return "measured" if op in cluster.curves else "link"
    forms = _forms(cluster, op, _array(num_bytes), g, hierarchical)
    return min(forms, key=lambda form: float(form[1]))[0]


def bus_bandwidth_factor(op: str, size: ArrayLike) -> Array:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it.

    2 (n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for a send.

    >>> float(bus_bandwidth_factor("all_reduce", 8))
    1.75
    """
    _checked(op)
    n = np.maximum(_array(size), 1.0)
    if op == "send_recv":
        return np.ones_like(n)
    factor: Array = (2.0 if op == "all_reduce" else 1.0) * (n - 1.0) / n
    return factor
