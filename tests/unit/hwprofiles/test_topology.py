"""The closed forms against brute force over ranks and max-flow on the drawn graph."""

from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.errors import ProfileError
from hwprofiles.loader import load_cluster
from hwprofiles.profile import Cluster, NetworkLevel
from hwprofiles.topology import (
    draw,
    group_bandwidth,
    group_span,
    ring_hop_s,
    scale_up_rate,
    units_spanned,
)


def two_levels(oversubscribed: float = 4.0) -> Cluster:
    """Nodes of 8, racks of 2 nodes, pods of 4: small enough to draw."""
    levels = (NetworkLevel("rack", 2, 2.0, 1e-6), NetworkLevel("pod", 4, oversubscribed, 2e-6))
    return replace(load_cluster("dgx-h100"), levels=levels)


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 12))
def test_units_spanned_is_the_worst_of_all_groups(unit: int, size: int, stride: int) -> None:
    worst = 0
    for block in range(unit):  # after `unit` blocks the offsets repeat
        for offset in range(stride):
            first = block * size * stride + offset
            worst = max(worst, len({(first + i * stride) // unit for i in range(size)}))
    assert int(units_spanned(unit, size, stride)) == worst


def test_group_span_broadcasts() -> None:
    local, domains, nodes = group_span(load_cluster("gb200-nvl72"), [72, 8, 144, 4], [1, 9, 1, 72])
    assert local.tolist() == [72, 8, 72, 1]
    assert domains.tolist() == [1, 1, 2, 4]
    assert nodes.tolist() == [18, 8, 36, 4]


def uplink_flow(graph: Any, cluster: Cluster, ranks_below: int, num_nodes: int) -> float:
    """Max flow out of the first `ranks_below` GPUs over the network alone."""
    gpus = [(node, i) for node in range(num_nodes) for i in range(cluster.gpus_per_node)]
    flow = graph.copy()
    for rank, (node, index) in enumerate(gpus):
        if rank < ranks_below:
            flow.add_edge("source", ("gpu", node, index), capacity=float("inf"))
        else:
            flow.add_edge(("gpu", node, index), "sink", capacity=float("inf"))
    return float(nx.maximum_flow_value(flow, "source", "sink"))


@pytest.mark.parametrize("name", ["two-levels", "dgx-h100", "aws-p4d", "aws-p5", "gb200-nvl72"])
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (16, 1), (4, 8), (8, 4), (2, 32)])
def test_ring_bandwidth_is_the_share_of_the_max_flow(name: str, size: int, stride: int) -> None:
    cluster = two_levels() if name == "two-levels" else load_cluster(name)
    num_nodes = 36 if name == "gb200-nvl72" else 8
    graph = draw(cluster, num_nodes)
    local, _, _ = group_span(cluster, size, stride)
    shares = [float(scale_up_rate(cluster, local))] if local > 1 else []
    units = [cluster.domain_gpus]
    if name == "two-levels":
        units += [level.nodes * cluster.gpus_per_node for level in cluster.levels]
    for ranks in units:
        spanned = int(units_spanned(ranks, size, stride))
        if spanned > 1:
            rings = ranks // (size // spanned)  # each group that lies across enters and leaves once
            shares.append(uplink_flow(graph, cluster, ranks, num_nodes) / rings)
    assert float(group_bandwidth(cluster, size, stride)) == pytest.approx(min(shares), rel=1e-9)


@pytest.mark.parametrize(("name", "members"), [("leonardo", 2), ("leonardo", 4), ("mi300x", 8),
                                               ("mi300x", 3), ("dgx-h100", 4)])  # fmt: skip
def test_scale_up_rate_is_the_max_flow_from_one_member(name: str, members: int) -> None:
    cluster = load_cluster(name)
    graph = draw(cluster, 1)
    inside = graph.subgraph([("switch", 0), *(("gpu", 0, i) for i in range(members))]).copy()
    for i in range(1, members):
        inside.add_edge(("gpu", 0, i), "sink", capacity=float("inf"))
    flow = nx.maximum_flow_value(inside, ("gpu", 0, 0), "sink")
    assert float(scale_up_rate(cluster, members)) == pytest.approx(flow, rel=1e-9)


def test_all_to_all_feels_the_taper_that_a_ring_avoids() -> None:
    flat, tapered = two_levels(1.0), two_levels(2.0)
    ring = [float(group_bandwidth(c, 64, 1)) for c in (flat, tapered)]
    spread = [float(group_bandwidth(c, 64, 1, pattern="all-to-all")) for c in (flat, tapered)]
    assert ring[0] == ring[1]  # 32 members below the pod share one ring's uplink
    nic = flat.node_scale_out_bytes_per_s / 8
    assert spread[0] == pytest.approx(min(nic * 63 / 56, nic / 2 * 63 / 48))
    assert spread[1] == pytest.approx(nic / 4 * 63 / 32)
    with pytest.raises(ProfileError, match="star"):
        group_bandwidth(flat, 8, 1, pattern="star")


def test_limits() -> None:
    cluster = load_cluster("aws-p4d")  # two GPUs share a NIC
    assert np.isinf(group_bandwidth(cluster, 1, 1))
    shared, alone = (
        float(group_bandwidth(cluster, 4, 8, concurrent=concurrent)) for concurrent in (True, False)
    )
    assert alone == pytest.approx(2 * shared)
    assert float(ring_hop_s(cluster, 8, 1)) == pytest.approx(3.4e-6)
    assert float(ring_hop_s(two_levels(), 8, 8)) == pytest.approx(16e-6)
    sizes = np.arange(2, 65)
    rates = group_bandwidth(cluster, sizes, 8)
    assert np.all(np.diff(rates) <= 0)
    with pytest.raises(ProfileError, match="nodes"):
        draw(cluster, 0)
