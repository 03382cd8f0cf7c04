"""Time of operations: shapes, monotony, limits, refusals, speed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.curves import load_attention_curves, load_gemm_curves
from hwprofiles.loader import available_clusters, load_cluster, load_device
from hwprofiles.textbook import textbook_device
from planner.errors import ProfileError
from planner.roofline import (
    attention_pairs,
    attention_s,
    gemm_s,
    grouped_gemm_s,
    host_copy_s,
    memory_bound_s,
)

H100 = load_device("h100-sxm")
A100 = load_device("a100-sxm-80gb")
B200 = load_device("b200-sxm")
DEVICES = {d.name: d for d in (H100, A100, B200, load_device("mi300x"), load_device("l40s"))}


def test_wave_quantisation_shows() -> None:
    device = textbook_device()  # 32 SMs, tiles of 256 x 128: 1024 x 1024 is one full wave
    one = float(gemm_s(device, "bf16", 1024, 1024, 8192))
    assert one == pytest.approx(2 * 1024 * 1024 * 8192 / 1e12)
    more = float(gemm_s(device, "bf16", 1025, 1024, 8192))
    assert more > 1.2 * one  # a second wave for one row


def test_arrays_broadcast_and_agree_with_scalars() -> None:
    m = np.array([[128], [4096]])
    n = np.array([1024, 8192, 333])
    table = gemm_s(H100, "bf16", m, n, 4096)
    assert table.shape == (2, 3)
    assert table[1, 2] == float(gemm_s(H100, "bf16", 4096, 333, 4096))
    assert attention_s(A100, "flash_attn_2", 1, n, 8, 2048, 2048, 128).shape == (3,)


@given(
    st.sampled_from(sorted(DEVICES)),
    *(st.integers(1, 40000) for _ in range(3)),
    st.sampled_from(["m", "n", "k"]),
)
def test_bigger_products_are_never_much_faster(
    name: str, m: int, n: int, k: int, grown: str
) -> None:
    device = DEVICES[name]
    shape = {"m": m, "n": n, "k": k}
    before = float(gemm_s(device, "bf16", **shape))
    after = float(gemm_s(device, "bf16", **{**shape, grown: 2 * shape[grown]}))
    assert after >= before
    rate = 2.0 * m * n * k / before
    assert rate <= device.peak_flops_per_s["bf16"]


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 10**12), st.integers(1, 10**12))
def test_more_bytes_are_never_faster(name: str, a: int, b: int) -> None:
    device = DEVICES[name]
    low, high = sorted((a, b))
    for seconds in (memory_bound_s, host_copy_s):
        assert float(seconds(device, low)) <= float(seconds(device, high))
    assert float(memory_bound_s(device, high)) >= high / device.achieved_memory_bytes_per_s


def test_nothing_takes_no_time() -> None:
    assert float(gemm_s(H100, "bf16", 0, 128, 128)) == 0.0
    assert float(memory_bound_s(H100, 0)) == float(host_copy_s(H100, 0)) == 0.0
    assert float(attention_s(H100, "cudnn", 0, 8, 8, 128, 128, 128)) == 0.0


def test_grouped_shares_the_launch_and_the_waves() -> None:
    one_by_one = 64 * float(gemm_s(H100, "bf16", 128, 2048, 7168))
    grouped = float(grouped_gemm_s(H100, "bf16", 128, 64, 2048, 7168))
    assert grouped < 0.8 * one_by_one
    assert grouped > 2 * 64 * 128 * 2048 * 7168 / H100.peak_flops_per_s["bf16"]


def test_sustained_and_backward_only_slow_down() -> None:
    short = float(gemm_s(H100, "bf16", 8192, 8192, 8192, sustained=False))
    long = float(gemm_s(H100, "bf16", 8192, 8192, 8192))
    back = float(gemm_s(H100, "bf16", 8192, 8192, 8192, backward=True))
    assert short < long < back < 1.2 * short
    assert float(gemm_s(A100, "bf16", 8192, 8192, 8192)) == float(
        gemm_s(A100, "bf16", 8192, 8192, 8192, sustained=False)
    )


def test_an_odd_vocabulary_makes_its_head_many_times_slower_unless_padded() -> None:
    odd, even = (float(gemm_s(H100, "bf16", 16384, 50257, 2048, aligned=a)) for a in (False, True))
    assert 5 < odd / even < 9


def test_pairs_equal_a_counted_mask_up_to_half_the_diagonal() -> None:
    for q, kv, window in ((8, 8, 0), (8, 16, 0), (16, 16, 4), (4, 16, 8), (4, 16, 6)):
        rows = np.arange(q)[:, None] + (kv - q)
        columns = np.arange(kv)[None, :]
        mask = columns <= rows
        if window:
            mask &= columns > rows - window
        assert abs(float(attention_pairs(q, kv, True, window)) - mask.sum()) <= q / 2 + window / 2


@pytest.mark.parametrize("device", [H100, A100, B200], ids=lambda d: d.name)
def test_attention_halves_with_the_mask_and_grows_with_length(device: object) -> None:
    assert isinstance(device, type(H100))
    args = (device, "flash_attn_2", 1, 32, 8)
    causal = float(attention_s(*args, 8192, 8192, 128))
    full = float(attention_s(*args, 8192, 8192, 128, causal=False))
    window = float(attention_s(*args, 8192, 8192, 128, window=1024))
    assert 1.6 < full / causal < 2.1
    assert window < 0.5 * causal
    lengths = 2 ** np.arange(7, 18)
    times = attention_s(*args, lengths, lengths, 128)
    assert np.all(np.diff(times) >= 0)
    assert np.all(attention_s(*args, 4096, 4096, np.array([64, 96, 128, 192, 256])) > 0)


def test_few_heads_leave_sms_idle() -> None:
    one = float(attention_s(H100, "flash_attn_3", 1, 2, 2, 2048, 2048, 128))
    many = float(attention_s(H100, "flash_attn_3", 1, 64, 64, 2048, 2048, 128))
    assert many < 0.5 * 32 * one


def test_unfused_takes_the_same_with_any_mask_and_suffers_odd_heads() -> None:
    args = (A100, "unfused", 2, 16, 16, 2048, 2048)
    assert float(attention_s(*args, 128)) == float(attention_s(*args, 128, causal=False))
    assert float(attention_s(*args, 150)) > 2 * float(attention_s(*args, 144))


def test_missing_rates_are_refused_with_what_there_is() -> None:
    with pytest.raises(ProfileError, match="no GEMM rate for precision 'fp8'") as gemm_error:
        gemm_s(A100, "fp8", 1, 1, 1)
    assert "bf16" in gemm_error.value.legal["precision"]
    with pytest.raises(ProfileError, match="flash_attn_3"):
        attention_s(A100, "flash_attn_3", 1, 1, 1, 128, 128, 128)
    bare = replace(A100, gemm={}, attention={})
    with pytest.raises(ProfileError, match="it has none"):
        gemm_s(bare, "bf16", 1, 1, 1)


def test_every_shipped_device_has_curves() -> None:
    for name in available_clusters():
        device = load_cluster(name).device
        assert device.gemm, name
        for curve in device.gemm.values():
            assert curve.kind in ("measured", "derived", "assumed")
            assert curve.kind == "measured" or curve.note


def test_unknown_architecture_gets_nothing() -> None:
    assert load_gemm_curves("new", {"bf16": 1e15}, 100, "zen-garden") == {}
    assert load_attention_curves("new", "zen-garden", {"bf16": 1e15}) == {}
    assert load_attention_curves("h100-sxm", "hopper", {}) == {}


def test_derived_parts_follow_the_evidence() -> None:
    h20 = load_device("h20")
    assert h20.gemm["bf16"].sustained_fraction == 1.0  # far from its power limit
    assert h20.gemm["bf16"].cap_flops_per_s >= 129e12
    pcie = load_device("h100-pcie").gemm["bf16"]
    assert pcie.kind == "derived"
    assert pcie.sustained_fraction < 0.9
    best = load_device("h200-sxm").gemm["fp8"].cap_flops_per_s
    assert best == pytest.approx(1453e12, rel=0.01)  # best shape of a search, measured


def test_a_hundred_thousand_shapes_are_fast() -> None:
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, 16384, 100_000) for _ in range(3))
    best = min(_seconds_of(lambda: gemm_s(H100, "bf16", m, n, k)) for _ in range(3))
    assert best < 0.25  # 0.01 s on an idle core


def _seconds_of(call: object) -> float:
    start = time.perf_counter()
    assert callable(call)
    call()
    return time.perf_counter() - start
