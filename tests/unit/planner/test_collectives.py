"""Time of collectives: limits, monotony, sharing of ports, forms, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.loader import load_cluster
from hwprofiles.profile import NetworkLevel
from hwprofiles.textbook import textbook_cluster
from planner.collectives import (
    OPS,
    bus_bandwidth_factor,
    collective_algorithm,
    collective_s,
    curve_s,
)
from planner.errors import InputError

NAMES = ("dgx-h100", "dgx-a100-80gb", "gb200-nvl72", "l40s", "mi300x", "leonardo", "aws-p4d")
CLUSTERS = {name: load_cluster(name) for name in NAMES}


def test_curve_is_read_where_it_was_sampled() -> None:
    curve = CLUSTERS["dgx-h100"].curves["all_reduce"]
    for i, size in enumerate(curve.group_sizes):
        got = curve_s(curve, np.array(curve.num_bytes), size)
        assert got == pytest.approx(curve.seconds[i])
    between = float(curve_s(curve, curve.num_bytes[-1] * 1.5, 8))
    assert between > curve.seconds[-1, -1]


@given(
    st.sampled_from(NAMES),
    st.sampled_from(OPS),
    st.integers(1, 2**34),
    st.integers(1, 2**34),
    st.integers(0, 9),
    st.integers(0, 6),
)
def test_more_bytes_are_never_faster(
    name: str, op: str, a: int, b: int, log_size: int, log_stride: int
) -> None:
    low, high = sorted((a, b))
    size, stride = 2**log_size, 2**log_stride
    times = collective_s(CLUSTERS[name], op, np.array([low, high]), size, stride)
    assert 0.0 <= times[0] <= times[1] * (1 + 1e-12)
    assert (size == 1) == (times[1] == 0.0)


@given(st.sampled_from(NAMES), st.sampled_from(OPS), st.integers(0, 8), st.integers(0, 5))
def test_busbw_never_beats_the_wire_without_switch_reduction(
    name: str, op: str, log_size: int, log_stride: int
) -> None:
    cluster = replace(CLUSTERS[name], in_switch_reduction=False, curves={})
    size, stride = 2**log_size, 2**log_stride
    seconds = float(collective_s(cluster, op, 2.0**34, size, stride))
    if size > 1:
        rate = 2.0**34 / seconds * float(bus_bandwidth_factor(op, size))
        wire = max(cluster.scale_up.bytes_per_s, cluster.node_scale_out_bytes_per_s)
        assert rate <= wire * 1.001


def test_one_rank_and_no_bytes_take_no_time() -> None:
    for cluster in CLUSTERS.values():
        for op in OPS:
            assert float(collective_s(cluster, op, 1e6, 1)) == 0.0
            assert float(collective_s(cluster, op, 0.0, 8)) == 0.0


def test_groups_that_cross_together_share_the_ports() -> None:
    cluster = textbook_cluster()  # 4 GPUs and one 50 GB/s port a node
    shared = float(collective_s(cluster, "all_gather", 4e9, 2, 4))
    alone = float(collective_s(cluster, "all_gather", 4e9, 2, 4, concurrent=False))
    assert shared / alone == pytest.approx(4.0, rel=0.01)
    # All four GPUs in one group carry the whole port.
    whole = float(collective_s(cluster, "all_gather", 4e9, 8, 1))
    assert whole == pytest.approx(4e9 * 7 / 8 / 50e9, rel=0.01)


def test_oversubscription_hurts_an_all_to_all_and_not_a_long_ring() -> None:
    flat = textbook_cluster()
    level = NetworkLevel("pod", nodes=8, oversubscription=4.0)
    tapered = replace(flat, levels=(level,))
    for op, factor in (("all_gather", 1.0), ("all_to_all", 3.6)):
        before = float(collective_s(flat, op, 16e9, 128))
        after = float(collective_s(tapered, op, 16e9, 128))
        assert after / before == pytest.approx(factor, rel=0.15)
    # Ranks 8 nodes apart meet the taper with every hop.
    before = float(collective_s(flat, "all_gather", 16e9, 4, 32))
    after = float(collective_s(tapered, "all_gather", 16e9, 4, 32))
    assert after / before == pytest.approx(4.0, rel=0.05)


def test_trees_win_small_reductions_and_rings_or_switches_large_ones() -> None:
    a100, h100 = CLUSTERS["dgx-a100-80gb"], CLUSTERS["dgx-h100"]
    assert collective_algorithm(a100, "all_reduce", 1024, 256) == "tree"
    assert collective_algorithm(a100, "all_reduce", 2**33, 256) == "ring"
    assert collective_algorithm(h100, "all_reduce", 2**33, 256) == "switch_tree"
    assert collective_algorithm(h100, "all_gather", 2**20, 4) == "measured"
    assert collective_algorithm(CLUSTERS["l40s"], "all_gather", 2**20, 4) == "link"


def test_hierarchical_all_to_all_saves_messages() -> None:
    h100 = CLUSTERS["dgx-h100"]
    flat = float(collective_s(h100, "all_to_all", 2**20, 256))
    staged = float(collective_s(h100, "all_to_all", 2**20, 256, hierarchical=True))
    assert staged < 0.6 * flat


def test_all_to_all_across_nodes_is_bound_by_the_ports() -> None:
    h100 = CLUSTERS["dgx-h100"]
    seconds = float(collective_s(h100, "all_to_all", 2**32, 64))
    floor = 2**32 * 56 / 64 / 48e9
    assert floor < seconds < 1.01 * floor


def test_sizes_and_strides_broadcast() -> None:
    sizes, strides = np.array([[1], [8], [64]]), np.array([1, 8])
    table = collective_s(CLUSTERS["dgx-h100"], "all_reduce", 1e8, sizes, strides)
    assert table.shape == (3, 2)
    one = float(collective_s(CLUSTERS["dgx-h100"], "all_reduce", 1e8, 64, 8))
    assert table[2, 1] == one


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(InputError, match="unknown collective 'broadcast'") as error:
        collective_s(CLUSTERS["l40s"], "broadcast", 1e6, 4)
    assert "all_reduce" in error.value.legal["op"]
