"""The machine at hand as a cluster."""

from pathlib import Path

import pytest

from hwprofiles import local
from hwprofiles.errors import ProfileError
from hwprofiles.loader import load_cluster


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_nvidia_gpus", lambda: None)


def test_processes_share_the_machine() -> None:
    one, four = load_cluster("local:1"), load_cluster("local:4")
    assert four.gpus_per_node == 4
    assert four.device.memory_bytes == pytest.approx(one.device.memory_bytes / 4)
    assert four.device.peak_flops_per_s["fp32"] <= one.device.peak_flops_per_s["fp32"]
    assert load_cluster("local:4").digest == four.digest
    rates = [f for n, f in four.device.facts.items() if n.startswith("peak")]
    assert {fact.kind for fact in rates} == {"assumed"}
    assert four.device.gemm["bf16"].kind == "assumed"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux")
def test_memory_is_what_the_system_says() -> None:
    words = Path("/proc/meminfo").read_text().split()
    cluster = load_cluster("local")
    assert cluster.host_memory_bytes == float(words[words.index("MemTotal:") + 1]) * 1024
    assert cluster.max_nodes == 1


def test_gpus_by_their_marketing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.parse_gpus("NVIDIA H200\n") == ("h200-sxm", 1)
    assert local.parse_gpus("NVIDIA H20\n" * 8) == ("h20", 8)
    assert local.parse_gpus("NVIDIA A100-SXM4-80GB\n") == ("a100-sxm-80gb", 1)
    with pytest.raises(ProfileError, match="Quadro"):
        local.parse_gpus("Quadro 1\n")
    with pytest.raises(ProfileError, match="2 kinds"):
        local.parse_gpus("NVIDIA H20\nNVIDIA H200\n")
    monkeypatch.setattr(local, "_nvidia_gpus", lambda: ("h200-sxm", 2))
    cluster = load_cluster("local")
    assert (cluster.gpus_per_node, cluster.device.name, cluster.max_nodes) == (2, "h200-sxm", 1)
    assert cluster.facts["gpus_per_node"].kind == "measured"


def test_every_gpu_name_has_a_device_and_links() -> None:
    for device in local.GPU_NAMES.values():
        assert load_cluster(local.GPU_CLUSTERS[device]).device.name == device
