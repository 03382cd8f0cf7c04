"""Profiles load, are refused with a sentence when wrong, and keep a digest of their content."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwprofiles import loader
from hwprofiles.build import digest_of
from hwprofiles.errors import ProfileError
from hwprofiles.loader import (
    available_clusters,
    available_devices,
    available_links,
    cluster_from,
    load_cluster,
    load_device,
    load_link,
    parse_toml,
)

SHIPPED = [name for name in available_clusters() if name != "local"]
FACT = '{ value = %s, unit = "%s", kind = "assumed", source = "mine" }'


def device_text(**changed: str) -> str:
    facts = {
        "memory": FACT % (80, "GB"),
        "memory_bandwidth": FACT % (3000, "GB/s"),
        "achieved_memory_bandwidth": FACT % (2500, "GB/s"),
        "peak_bf16": FACT % (900, "TFLOP/s"),
        "num_sms": FACT % (100, "SM"),
        "l2": FACT % (50, "MB"),
        "tdp": FACT % (700, "W"),
        "kernel_floor": FACT % (3, "us"),
        "host_launch": FACT % (10, "us"),
        "host_link_bandwidth": FACT % (60, "GB/s"),
        "vendor": '"nvidia"',
        "arch": '"hopper"',
    } | changed
    return "\n".join(f"{key} = {value}" for key, value in facts.items() if value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_cluster_loads_and_is_plausible(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.pair_bytes_per_s <= cluster.scale_up.bytes_per_s
    assert 0.3 < cluster.scale_up.achieved_fraction <= 1
    assert cluster.device.achieved_memory_bytes_per_s < cluster.device.memory_bytes_per_s
    assert len(cluster.digest) == 16
    assert digest_of(cluster) == cluster.digest


def test_digests_tell_clusters_apart_and_do_not_change_by_loading_again() -> None:
    digests = {name: load_cluster(name).digest for name in SHIPPED}
    assert len(set(digests.values())) == len(digests)
    loader._shipped_cluster.cache_clear()
    assert load_cluster("dgx-h100").digest == digests["dgx-h100"]


def test_devices_links_and_speed() -> None:
    assert {load_device(name).name for name in available_devices()} == set(available_devices())
    assert {load_link(name).name for name in available_links()} == set(available_links())
    times = []
    for name in SHIPPED:
        loader._shipped_cluster.cache_clear()
        start = time.process_time()
        load_cluster(name)
        times.append(time.process_time() - start)
    assert sorted(times)[len(times) // 2] < 0.015


def test_known_numbers() -> None:
    h100 = load_cluster("dgx-h100")
    assert h100.device.memory_bytes == 85520809984
    assert h100.device.peak_flops_per_s["bf16"] == 989e12
    assert h100.node_scale_out_bytes_per_s == pytest.approx(8 * 48e9)
    assert load_cluster("gb200-nvl72").domain_gpus == 72
    meta = load_cluster("meta-24k-roce")
    assert [(level.nodes, level.oversubscription) for level in meta.levels] == [(2, 1), (384, 7)]


def test_a_users_cluster_names_files_and_extends(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mygpu.toml").write_text(device_text())
    inline = device_text(name='"other"')
    (tmp_path / "mine.toml").write_text('extends = "dgx-h100"\ndevice = "parts/mygpu.toml"\n')
    (tmp_path / "inline.toml").write_text(f'extends = "mine.toml"\n[device]\n{inline}\n')
    mine = load_cluster(tmp_path / "mine.toml")
    assert mine.name == "mine"
    assert mine.device.name == "mygpu"
    assert mine.scale_out.name == "ib-ndr"
    assert mine.device.gemm["bf16"].kind != "measured"
    assert load_cluster(str(tmp_path / "inline.toml")).device.name == "other"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"memory": FACT % (80, "GB/s")}, "cannot be given in 'GB/s'"),
        ({"memory": FACT % (80, "gigs")}, "not known"),
        ({"memory": FACT % (-80, "GB")}, "more than zero"),
        ({"memory": FACT % (0, "GB")}, "more than zero"),
        ({"memory": FACT % ("nan", "GB")}, "finite"),
        ({"memory": FACT % ("inf", "GB")}, "finite"),
        ({"memory": FACT % ("9" * 400, "GB")}, "finite"),
        ({"memory": FACT % ('"80"', "GB")}, "number"),
        ({"memory": FACT % ("true", "GB")}, "number"),
        ({"memory": "80"}, "table"),
        ({"memory": '{ value = 80, unit = "GB", kind = "assumed" }'}, "'source'"),
        ({"memory": '{ value = 80, kind = "assumed", source = "mine" }'}, "'unit'"),
        ({"memory": '{ value = 80, unit = "GB", kind = "felt", source = "x" }'}, "felt"),
        ({"memory": '{ value = 80, unit = "GB", kind = "assumed", source = " " }'}, "'source'"),
        ({"memory": ""}, "lacks the fact memory"),
        ({"peak_bf16": ""}, "peak"),
        ({"memroy": FACT % (80, "GB")}, "memory"),
        ({"num_sms": FACT % (10.5, "SM")}, "whole"),
        ({"num_sms": FACT % (1e300, "SM")}, "at most"),
        ({"achieved_memory_bandwidth": FACT % (9000, "GB/s")}, "above memory_bandwidth"),
        ({"name": '"../x"'}, "lower-case"),
        ({"vendor": "3"}, "vendor"),
    ],
)
def test_wrong_device_files_are_refused(
    tmp_path: Path, changed: dict[str, str], sentence: str
) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(device_text(**changed))
    with pytest.raises(ProfileError) as refusal:
        load_device(path)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('extends = "dgx-h100"\nnodes = 3', "unknown key 'nodes'"),
        ('extends = "dgx-h100"\nlevels = 3', "levels"),
        ('extends = "dgx-h100"\ntransports = "ib"', "transports"),
        ('extends = "dgx-h100"\ndevice = 3', "device"),
        ('extends = "dgx-h100"\ndevice = "h100"', "h100-sxm"),
        ('extends = "x.toml"', "ring"),
        ('extends = "dgx-h100"\n[domain_gpus]\nvalue=12\nunit="GPU"\nkind="assumed"\nsource="x"',
         "multiple or a divisor"),
        ("a = [[[", "not TOML"),
        ("device = 'h100-sxm'", "lacks the fact"),
    ],
)  # fmt: skip
def test_wrong_cluster_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=sentence):
        load_cluster(path)


def test_names_that_are_not_known_bring_near_ones() -> None:
    with pytest.raises(ProfileError) as refusal:
        load_cluster("dgx_h10")
    assert "dgx-h100" in refusal.value.legal["cluster"]
    with pytest.raises(ProfileError, match="is a device") as refusal:
        load_cluster("h100-sxm")
    assert {"dgx-h100", "aws-p5", "eos"} <= set(refusal.value.legal["cluster"])
    for name in ("", "no/such.toml", "\0.toml", "local:0", "local:x", "local:9999999999"):
        with pytest.raises(ProfileError):
            load_cluster(name)


def test_nesting_size_and_bytes(tmp_path: Path) -> None:
    for content in (b"a=" + b"[" * 100_000, b"\xff\xfe\0", b"#" * 1_000_001, b"a.b.c." * 9):
        path = tmp_path / "x.toml"
        path.write_bytes(content)
        with pytest.raises(ProfileError):
            load_cluster(path)
    with pytest.raises(ProfileError):
        load_cluster(str(tmp_path) + "/")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
FACT_NAMES = ["memory", "gpus_per_node", "device", "scale_up", "levels", "name", "extends", "nvme"]
keys = st.sampled_from([*FACT_NAMES, "value", "unit", "kind", "source", "nodes"]) | st.text("ab")
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_bytes_only_raise_profile_errors(content: bytes) -> None:
    try:
        table = parse_toml(content, "fuzz")
        cluster_from(table, None)
    except ProfileError as error:
        assert error.message
    else:
        pytest.fail("garbage made a cluster")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, trees, max_size=6), st.sampled_from(["dgx-h100", "mi300x"]))
def test_garbage_over_a_real_cluster_is_refused_or_a_cluster(
    garbage: dict[str, Any], name: str
) -> None:
    try:
        cluster = cluster_from({"name": "x", "extends": name, **garbage}, None)
    except ProfileError as error:
        assert error.message
    else:
        assert cluster.gpus_per_node == 8
