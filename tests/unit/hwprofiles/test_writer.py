"""A written cluster reads back as the same; curves of one's own are checked."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hwprofiles.errors import ProfileError
from hwprofiles.loader import available_clusters, load_cluster
from hwprofiles.override import override
from hwprofiles.writer import cluster_to_toml, save_cluster


@pytest.mark.parametrize("name", [n for n in available_clusters() if n != "local"])
def test_round_trip_keeps_the_digest(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    save_cluster(cluster, tmp_path / "mine.toml")
    assert load_cluster(tmp_path / "mine.toml").digest == cluster.digest
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_a_changed_curve_is_what_is_read(tmp_path: Path) -> None:
    cluster = override(load_cluster("dgx-h100"), {"device.peak_bf16": "0.5x"})
    measured = replace(cluster.device.gemm["bf16"], launch_s=7e-6, kind="measured", source="here")
    cluster = replace(
        cluster, device=replace(cluster.device, gemm={**cluster.device.gemm, "bf16": measured})
    )
    save_cluster(cluster, tmp_path / "here.toml")
    assert load_cluster(tmp_path / "here.toml").device.gemm["bf16"] == measured


def test_this_machine_can_be_written(tmp_path: Path) -> None:
    save_cluster(load_cluster("local:2"), tmp_path / "here.toml")
    here = load_cluster(tmp_path / "here.toml")
    assert (here.name, here.gpus_per_node) == ("local-2", 2)
    assert here.device.gemm["bf16"] == load_cluster("local:2").device.gemm["bf16"]


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        (r"launch_s = \S+", "launch_s = -1.0"),
        (r"launch_s = \S+", "launch_s = nan"),
        (r"launch_s = \S+", ""),
        (r"tiles = .+", "tiles = [[1, 2]]"),
        (r"tiles = .+", "tiles = []"),
        (r"head_dims = \[.+\]", "head_dims = [64.5]"),
        (r"seq_lens = \[(\d+), (\d+)", r"seq_lens = [\2, \1"),
        (r"group_sizes = \[.+\]", "group_sizes = [2]"),
        (r"seconds = \[\[\S+,", "seconds = [["),
        (r"\[curves\.\"all_reduce\"\]", "[curves.all_reduced]"),
        (r"\[curves\.\"all_reduce\"\]\n", "[curves.all_reduce]\nspeed = 3\n"),
    ],
)
def test_wrong_curves_are_refused(pattern: str, wrong: str, tmp_path: Path) -> None:
    text, count = re.subn(pattern, wrong, cluster_to_toml(load_cluster("dgx-h100")), count=1)
    assert count == 1
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ProfileError):
        load_cluster(tmp_path / "x.toml")
