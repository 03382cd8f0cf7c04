"""What-if changes reach the numbers that follow from a fact, and nothing else."""

import pytest

from hwprofiles.errors import ProfileError
from hwprofiles.loader import load_cluster
from hwprofiles.override import override, override_keys


def test_factor_and_amount() -> None:
    cluster = load_cluster("dgx-h100")
    changed = override(cluster, {"link.ib-ndr.bandwidth": "0.5x", "device.memory": "141 GB"})
    assert changed.scale_out.bytes_per_s == cluster.scale_out.bytes_per_s / 2
    assert changed.device.memory_bytes == 141e9
    assert changed.scale_up == cluster.scale_up
    assert changed.digest != cluster.digest
    assert changed.device.facts["memory"].kind == "assumed"
    assert cluster.device.memory_bytes == 85520809984


def test_curves_follow_their_fact() -> None:
    cluster = load_cluster("dgx-h100")
    fast = override(cluster, {"device.peak_bf16": "2x", "scale_up.bandwidth": "2x"})
    assert fast.device.gemm["bf16"].cap_flops_per_s == pytest.approx(
        2 * cluster.device.gemm["bf16"].cap_flops_per_s
    )
    assert fast.device.gemm["fp8"] == cluster.device.gemm["fp8"]
    before, after = cluster.curves["all_reduce"].seconds, fast.curves["all_reduce"].seconds
    assert after[0, 0] == before[0, 0]  # the latency stays
    assert after[-1, -1] == pytest.approx(before[-1, -1] / 2, rel=0.01)
    hbm = override(cluster, {"device.memory_bandwidth": "2x"}).device
    assert hbm.achieved_memory_bytes_per_s == 2 * cluster.device.achieved_memory_bytes_per_s


def test_levels_counts_and_every_key() -> None:
    cluster = load_cluster("meta-24k-roce")
    changed = override(
        cluster, {"cluster.level.pod.oversubscription": "3.5", "cluster.nics_per_node": 4}
    )
    assert changed.levels[1].oversubscription == 3.5
    assert changed.nics_per_node == 4
    same = override(cluster, dict.fromkeys(override_keys(cluster), "1x"))
    assert same.node_scale_out_bytes_per_s == cluster.node_scale_out_bytes_per_s


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device.memory", "141"),
        ("device.memory", "141 GB/s"),
        ("device.memory", "-1x"),
        ("device.memory", "x"),
        ("device.memory", "1e999 GB"),
        ("device.memroy", "2x"),
        ("link.ib-hdr.bandwidth", "2x"),
        ("memory", "2x"),
        ("cluster.gpus_per_node", "7.5"),
        ("cluster.level.scalable-unit.oversubscription", "0.5"),
    ],
)
def test_wrong_changes_are_refused(key: str, value: str) -> None:
    with pytest.raises(ProfileError):
        override(load_cluster("dgx-h100"), {key: value})
