"""Calibrations -> curves of a device or a cluster.

A device that was measured gets its own curves. Another one of a known architecture gets those of
the nearest measured device, scaled by peak and by the best rate seen of both where there is one;
it says so (`kind` derived). An unknown architecture gets none, and whoever asks for a rate is
refused: nothing is ever guessed from nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hwprofiles.profile import AttentionCurve, CollectiveCurve, GemmCurve

CALIBRATIONS = Path(__file__).parent / "calibrations"
TILE_SHAPES = ((256, 128), (128, 128), (128, 64), (64, 64))

# Architecture -> measured device whose shape of curve stands for it.
_GEMM_REFERENCE = {
    "volta": "a100-sxm-80gb",
    "turing": "a100-sxm-80gb",
    "ampere": "a100-sxm-80gb",
    "ada": "l40s",
    "hopper": "h100-sxm",
    "blackwell": "b200-sxm",
    "cdna2": "mi355x",
    "cdna3": "mi355x",
    "cdna4": "mi355x",
}
_ATTENTION_REFERENCE = {
    "ampere": "a100-sxm-80gb",
    "ada": "l40s",
    "hopper": "h100-sxm",
    "blackwell": "b200-sxm",
}
# FlashAttention-3, length 2048, causal, head size 128: H20 over H100 of the same figures.
_H20_ATTENTION = {"flash_attn_2": 66 / 298, "flash_attn_3": 108 / 521, "cudnn": 108 / 484}
# Ada's peaks count fp32 accumulation at half rate on the consumer part, so rates follow SMs there.
_SM_RATIO = {"rtx-4090": 128 / 142}
CONSUMER_CEILING = 0.9  # of peak, for a part whose ceiling was not measured
# Board power of Hopper parts that hold less than an SXM board [W]; where not listed, that of SXM.
_HOPPER_W = {
    "h100-pcie": 350.0,
    "h100-nvl": 400.0,
    "h100-sxm-96gb-500w": 500.0,
    "h20": 500.0,
}
_SXM_W, _SXM_SMS, _SXM_PEAK = 700.0, 132, 989e12
# FlashAttention-3 reaches this on H20 (fa3_h20), so its GEMM ceiling is no lower.
_H20_FLOPS_PER_S = 129e12
# cuBLAS runs the same old kernel on all of these. The rate is that of an H200, by SMs; an RTX 4090
# of higher clock reaches 107 to 116 TFLOP/s (pytorch/pytorch#181718) where this gives 94.
_UNALIGNED_ARCHS = ("ampere", "ada", "hopper", "blackwell")
# Precisions whose curve is read from another one: same tensor-core rate, or nothing better known.
_SHAPE_OF = {"fp16": "bf16", "tf32": "bf16", "fp32": "bf16"}
_FAMILY = {"nvlink3": "a100", "nvlink4": "h100", "nvlink5": "b200", "xgmi": "mi355x"}
_FAMILY_OF_DEVICE = {"b300-sxm": "b300", "gb200": "gb200", "gb300": "gb200"}
_MEASURED_DEVICE = {
    "a100": "a100-sxm-80gb",
    "h100": "h100-sxm",
    "b200": "b200-sxm",
    "b300": "b300-sxm",
    "gb200": "gb200",
    "mi355x": "mi355x",
}


@cache
def _document(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CALIBRATIONS / name).read_text())
    return document


def _gemm_reference(device_name: str, arch: str) -> str | None:
    measured = {c["device"] for c in _document("gemm.json")["curve"]}
    if device_name in measured:
        return device_name
    if device_name.startswith("gb") and arch == "blackwell":
        return "gb200"
    return _GEMM_REFERENCE.get(arch)


def _unaligned_flops_per_s(precision: str, num_sms: int, arch: str) -> float:
    """Rate of unaligned 16-bit products by the number of SMs; 0 where no such kernel is known."""
    if precision not in ("bf16", "fp16") or arch not in _UNALIGNED_ARCHS:
        return 0.0
    return num_sms * float(_document("gemm.json")["unaligned"]["flops_per_s_per_sm"])


def load_gemm_curves(
    device_name: str, peak_flops_per_s: Mapping[str, float], num_sms: int, arch: str
) -> dict[str, GemmCurve]:
    """GEMM curves of a device by precision; empty if nothing is known of its architecture.

    `peak_flops_per_s` maps precision (bf16, fp16, tf32, fp32, fp8, fp4) to dense peaks. A device
    with fp8 also gets `fp8_block`. Rates scale with the peak; where the best rate of both devices
    is known (a search over shapes), the ceiling scales with that instead.

    >>> load_gemm_curves("h100-sxm", {"bf16": 989e12}, 132, "hopper")["bf16"].kind
    'measured'
    >>> load_gemm_curves("h100-pcie", {"bf16": 756e12}, 114, "hopper")["bf16"].kind
    'derived'
    >>> load_gemm_curves("abacus", {"bf16": 1e3}, 1, "wood")
    {}
    """
    reference = _gemm_reference(device_name, arch)
    if reference is None:
        return {}
    document = _document("gemm.json")
    shapes = {c["precision"]: c for c in document["curve"] if c["device"] == reference}
    best = {(b["device"], b["precision"]): b["flops_per_s"] for b in document["best"]}
    wanted = {p: v for p, v in peak_flops_per_s.items() if v > 0}
    if "fp8" in wanted:
        wanted.setdefault("fp8_block", wanted["fp8"])
    curves: dict[str, GemmCurve] = {}
    for precision, peak in wanted.items():
        shape_name = _SHAPE_OF.get(precision, precision)
        note_shape = "" if precision in ("fp16", shape_name) else f", shape of {shape_name}"
        if shape_name not in shapes:
            shape_name, note_shape = "bf16", ", shape of bf16"
        shape = shapes[shape_name]
        scale = peak / float(shape["peak_flops_per_s"])
        cap_scale = scale
        pair = best.get((device_name, shape_name)), best.get((reference, shape_name))
        if device_name != reference and pair[0] and precision in (shape_name, "fp16"):
            # Without a best rate of the reference, that of the device is the ceiling itself.
            cap_scale = pair[0] / (pair[1] or float(shape["cap_flops_per_s"]))
        cap = float(shape["cap_flops_per_s"]) * cap_scale
        sustained = float(shape["sustained_fraction"])
        if shape_name in ("fp8", "fp8_block", "fp4"):
            # The same power limit: denser arithmetic keeps no more of its clock than bf16 does.
            sustained = min(sustained, float(shapes["bf16"]["sustained_fraction"]))
        if device_name in _SM_RATIO:
            scale = cap_scale = _SM_RATIO[device_name]
            cap = min(float(shape["cap_flops_per_s"]) * scale, CONSUMER_CEILING * peak)
        if device_name == "h20":
            cap = max(cap, _H20_FLOPS_PER_S * peak / peak_flops_per_s["bf16"])
        if arch == "hopper" and device_name in _HOPPER_W:
            sustained = _hopper_sustained(sustained, device_name, num_sms, peak_flops_per_s)
        measured = device_name == reference and not note_shape
        curves[precision] = GemmCurve(
            tile_flops_per_s=max(float(shape["tile_flops_per_s"]) * max(scale, cap_scale), cap),
            prologue_k=float(shape["prologue_k"]),
            launch_s=float(shape["launch_s"]),
            tiles=tuple(
                (x, y, float(e))
                for (x, y), e in zip(TILE_SHAPES, shape["tile_efficiency"], strict=True)
            ),
            cap_flops_per_s=cap,
            num_sms=num_sms,
            kind="measured" if measured else "derived",
            source=str(shape["source"]),
            residual_median=float(shape["residual_median"]),
            residual_p90=float(shape["residual_p90"]),
            note="" if measured else f"from {reference} by ratio of peaks{note_shape}",
            sustained_fraction=sustained,
            unaligned_flops_per_s=_unaligned_flops_per_s(precision, num_sms, arch),
        )
    return curves


def _hopper_sustained(
    sxm: float, device_name: str, num_sms: int, peaks: Mapping[str, float]
) -> float:
    """Share of the short-run rate that a Hopper board of other power keeps.

    f = min(1, f_sxm (P/P_sxm S_sxm/S)^(1/3) / c);  power per SM goes with the cube of the clock,
    c = peak clock over that of SXM. The cube is assumed (P ~ f V^2, V ~ f).
    """
    clock = peaks.get("bf16", _SXM_PEAK) / _SXM_PEAK * _SXM_SMS / num_sms
    power = _HOPPER_W[device_name] / _SXM_W * _SXM_SMS / num_sms
    return float(min(1.0, sxm * power ** (1.0 / 3.0) / clock))


def backward_gemm_factor() -> float:
    """Time of a backward GEMM over a forward one of the same shape.

    Geometric mean of the input-gradient layout (NN) and of the weight-gradient layout (NT, added
    to fp32), from the layouts of `simumax_B200-SXM`.

    >>> 1.0 < backward_gemm_factor() < 1.1
    True
    """
    return float(_document("gemm.json")["layout"]["backward"])


def assumed_gemm_curve(peak_flops_per_s: float, num_sms: int) -> GemmCurve:
    """A curve for a processor that nobody measured: seven tenths of its peak, no waves to fill.

    >>> assumed_gemm_curve(1e12, 2).kind
    'assumed'
    """
    return GemmCurve(
        tile_flops_per_s=0.7 * peak_flops_per_s,
        prologue_k=0.0,
        launch_s=5e-6,
        tiles=((64, 64, 1.0),),
        cap_flops_per_s=0.7 * peak_flops_per_s,
        num_sms=num_sms,
        kind="assumed",
        source="assumed",
        note="0.7 of peak, until calibrated",
    )


def assumed_attention_curve(kernel: str, peak_flops_per_s: float) -> AttentionCurve:
    """An attention table for a processor that nobody measured: three tenths of its peak.

    >>> assumed_attention_curve("math", 1e12).kind
    'assumed'
    """
    rate = np.full((1, 2), 0.3 * peak_flops_per_s)
    note = "0.3 of peak, until calibrated"
    return AttentionCurve(kernel, (64,), (128, 131072), rate, rate, "assumed", "assumed", note)


def _attention_scale(device_name: str, kernel: str, peak: float, base: float) -> float:
    if device_name in _SM_RATIO:
        return _SM_RATIO[device_name]
    if device_name == "h20":
        return _H20_ATTENTION.get(kernel.removesuffix(":full"), _H20_ATTENTION["flash_attn_2"])
    return peak / base


def load_attention_curves(
    device_name: str, arch: str, peak_flops_per_s: Mapping[str, float]
) -> dict[str, AttentionCurve]:
    """Attention tables of a device by kernel; empty if its architecture was never measured.

    A key ending in `:full` holds the uncut (not causal) rates. Other devices of an architecture
    scale by the 16-bit peak. For AMD parts no rates were found: FlashAttention-2 of H100 is taken
    by the ratio of the best GEMM rates, and `kind` is assumed.

    >>> sorted(load_attention_curves("a100-sxm-80gb", "ampere", {"bf16": 312e12}))[-1]
    'unfused'
    """
    peak = peak_flops_per_s.get("bf16") or peak_flops_per_s.get("fp16") or 0.0
    if peak <= 0.0:
        return {}
    document = _document("attention.json")
    own = {c["device"] for c in document["curve"]}
    gemm = _document("gemm.json")
    best = {(b["device"], b["precision"]): b["flops_per_s"] for b in gemm["best"]}
    only: tuple[str, ...] | None = None
    if device_name in own:
        reference = device_name
    elif device_name.startswith("gb") and arch == "blackwell":
        reference = "gb200"
    elif arch == "volta":  # the flash kernels need Ampere
        reference, only = "a100-sxm-80gb", ("unfused",)
    elif arch in _ATTENTION_REFERENCE:
        reference = _ATTENTION_REFERENCE[arch]
    elif arch in ("cdna2", "cdna3", "cdna4"):
        reference, only = "h100-sxm", ("flash_attn_2", "flash_attn_2:full", "unfused")
    else:
        return {}
    base = next(
        c["peak_flops_per_s"]
        for c in gemm["curve"]
        if (c["device"], c["precision"]) == (reference, "bf16")
    )
    seq_lens = tuple(document["seq_lens"])
    curves: dict[str, AttentionCurve] = {}
    for entry in document["curve"]:
        kernel = str(entry["kernel"])
        if entry["device"] != reference or (only is not None and kernel not in only):
            continue
        scale, kind, note = 1.0, str(entry["kind"]), str(entry["note"])
        if arch.startswith("cdna"):
            rate = best.get((device_name, "bf16"), 0.51 * peak)
            scale = rate / best[reference, "bf16"]
            kind, note = "assumed", "no rates found; H100 by the ratio of best GEMM rates"
        elif device_name != reference:
            scale = _attention_scale(device_name, kernel, peak, base)
            kind = "derived"
            note = f"from {reference} by ratio of 16-bit peaks"
            if device_name in _SM_RATIO:
                note = f"from {reference} by number of SMs"
            if device_name == "h20":
                note = "from h100-sxm by the ratio of both at length 2048 (fa3_h20)"
        curves[kernel] = AttentionCurve(
            kernel=kernel,
            head_dims=tuple(entry["head_dims"]),
            seq_lens=seq_lens,
            forward_flops_per_s=np.array(entry["forward_tflop_per_s"]) * (1e12 * scale),
            backward_flops_per_s=np.array(entry["backward_tflop_per_s"]) * (1e12 * scale),
            kind=kind,
            source=str(entry["source"]),
            note=note,
        )
    return curves


def attention_occupancy(arch: str) -> tuple[float, float]:
    """Slowdown constants (forward, backward) of few attention blocks, t ~ 1 + c S / u.

    Architectures that were not measured use Ampere's.

    >>> attention_occupancy("blackwell")[0] > attention_occupancy("hopper")[0]
    True
    """
    table = _document("attention.json")["occupancy"]
    entry = table.get(arch, table["ampere"])
    return float(entry["fwd"]), float(entry["bwd"])


def load_collective_curves(
    cluster_name: str, device_name: str, scale_up_name: str, domain_gpus: int
) -> dict[str, CollectiveCurve]:
    """Collective curves of a scale-up domain by operation; empty where nothing was measured.

    Only switched domains of the measured sizes (8 GPUs, or an NVL72 rack) have curves; meshes,
    PCIe hosts and reduced links use latency and bandwidth of their Link.

    >>> load_collective_curves("dgx-h100", "h100-sxm", "nvlink4", 8)["all_reduce"].group_sizes
    (2, 4, 8)
    >>> load_collective_curves("l40s", "l40s", "pcie4", 8)
    {}
    """
    family = _FAMILY_OF_DEVICE.get(device_name) or _FAMILY.get(scale_up_name.split("-")[0])
    amd = device_name.startswith("mi")
    if amd and device_name in ("mi300x", "mi325x", "mi355x"):
        family = "mi355x"
    if family is None or scale_up_name.endswith("reduced") or (amd and family != "mi355x"):
        return {}
    if not amd and not scale_up_name.startswith("nvlink"):
        return {}
    if family == "gb200":
        if domain_gpus < 4:
            return {}
    elif domain_gpus != 8:
        return {}
    document = _document(f"collectives/{family}.json")
    measured = _MEASURED_DEVICE[family]
    # One xGMI link: 64 GB/s on MI300X and MI325X, 76.5 GB/s on MI355X.
    slow = 76.5 / 64.0 if device_name in ("mi300x", "mi325x") else 1.0
    first = int(document["first_log2_bytes"])
    curves: dict[str, CollectiveCurve] = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        entry = document[op]
        seconds = np.array(entry["microseconds"]) * 1e-6
        floor = seconds[:, :1]
        curves[op] = CollectiveCurve(
            op=op,
            group_sizes=tuple(entry["group_sizes"]),
            num_bytes=tuple(2.0 ** (first + i) for i in range(seconds.shape[1])),
            seconds=floor + (seconds - floor) * slow,
            kind="measured" if device_name == measured else "derived",
            source=str(document["source"]),
            note="" if device_name == measured else f"{cluster_name}: curves of {measured}",
        )
    return curves
