"""Measured attention rates -> tables over head size and length, forward and backward.

Few sources time both directions, so one is often derived; every table says how. All rates count
causal FLOPs (half of 4 b h s^2 d forward, 2.5 times that backward) and, under keys that end in
`:full`, the uncut ones. Lengths run from 128 to 131072 in powers of two: beyond the measured range
a rate is held, below it the law 1/rate = a + b/s of the two shortest measured lengths goes on.
Rates are those of a full device; `occupancy` says how much few blocks lose, and both meet again in
`planner.roofline`.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np

from hwprofiles.fit_gemm import MACHINES, MEASURED
from hwprofiles.profile import Array

SEQ_LENS = tuple(2**i for i in range(7, 18))
# Forward slowdown at 192 and 256 relative to 128 is read where measured (H100), else taken from it.
HEAD_DIMS = (64, 128, 256)
# Shah2024 (FlashAttention-3), section 4: backward 1.5 to 1.75 times that of FlashAttention-2.
FA3_OVER_FA2_BACKWARD = 1.625
# Dao2023 (FlashAttention-2), abstract: about twice FlashAttention.
FA1_OVER_FA2 = 0.5
# Bytes per score of unfused attention: products, softmax and dropout read and write 16-bit scores
# 6.5 times forward and 9.5 times backward; time follows bytes.
UNFUSED_BACKWARD_OVER_FORWARD = 2.5 * 13.0 / 19.0

Points = dict[int, float]
Rates = dict[tuple[int, int], float]  # (head_dim, seq_len) -> FLOP/s


def read_rates(
    source_id: str,
    kernel: str,
    attention_pass: str,
    causal: bool,
    full_device: float = 0.0,
    **equal: str,
) -> Rates:
    """Rates of one benchmark by (head_dim, seq_len), best row where there are several.

    Each is raised to what a full device would reach, times 1 + `full_device` / blocks, with
    `full_device` = c S of `occupancy`. Rows without batch and heads are of figures that all hold
    16384 tokens of 2048 elements.
    """
    rates: Rates = {}
    with (MEASURED / "attention.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            same = (row["source_id"], row["kernel"], row["attention_pass"], row["causal"]) == (
                source_id,
                kernel,
                attention_pass,
                str(causal),
            )
            if same and all(row[name] == value for name, value in equal.items()):
                key = int(row["head_dim"]), int(row["seq_len"])
                tokens = 16384 if not row["batch"] else int(row["batch"]) * key[1]
                heads = int(row["n_heads"]) if row["n_heads"] else 2048 // key[0]
                rate = float(row["tflop_per_s"]) * 1e12
                rate *= 1.0 + full_device / (tokens * heads / 128)
                rates[key] = max(rates.get(key, 0.0), rate)
    return rates


def extend(points: Points) -> Array:
    """Rates at SEQ_LENS from those measured at some lengths."""
    known = sorted(points)
    inverse = {s: 1.0 / points[s] for s in known}
    s1, s2 = known[0], known[1]
    slope = max(0.0, (inverse[s1] - inverse[s2]) / (1.0 / s1 - 1.0 / s2))
    offset = inverse[s1] - slope / s1
    rates = []
    for s in SEQ_LENS:
        if s < known[0]:
            rates.append(1.0 / (offset + slope / s))
        else:
            rates.append(float(np.interp(np.log(s), np.log(known), [points[x] for x in known])))
    return np.array(rates)


def table(rates: Rates) -> dict[int, Array]:
    """Extended rates by head size."""
    heads = sorted({d for d, _ in rates})
    return {d: extend({s: r for (e, s), r in rates.items() if e == d}) for d in heads}


def split(both: Array, backward_over_forward: Array) -> tuple[Array, Array]:
    """Forward and backward rates from the rate of both: 3.5/R = 1/Rf + 2.5/Rb."""
    forward = both * (1.0 + 2.5 / backward_over_forward) / 3.5
    return forward, forward * backward_over_forward


def backward_of(both: Array, forward: Array) -> Array:
    """Backward rate from those of both passes and of forward: Rb = 2.5 / (3.5/R - 1/Rf)."""
    return 2.5 / (3.5 / both - 1.0 / forward)


def fit_attention() -> dict[str, Any]:
    """The document of calibrations/attention.json."""
    curves: list[dict[str, Any]] = []
    slow = occupancy()
    on = {"a100": 108.0, "h100": 132.0, "gb200": 152.0, "b200": 148.0}
    arch_of = {"a100": "ampere", "h100": "hopper", "gb200": "blackwell", "b200": "blackwell"}
    fwd = {d: sms * slow[arch_of[d]]["fwd"] for d, sms in on.items()}
    bwd = {d: sms * slow[arch_of[d]]["bwd"] for d, sms in on.items()}
    # Of both passes, 2/7 of the FLOPs are forward.
    fwd_bwd = {d: (fwd[d] * 2 + bwd[d] * 5) / 7 for d in on}

    def add(
        device: str,
        arch: str,
        kernel: str,
        forward: dict[int, Array],
        backward: dict[int, Array],
        source: str,
        kind: str,
        note: str,
    ) -> None:
        curves.append(
            {
                "device": device,
                "arch": arch,
                "kernel": kernel,
                "kind": kind,
                "source": source,
                "note": note,
                "head_dims": sorted(forward),
                "forward_tflop_per_s": [forward[d].round(1).tolist() for d in sorted(forward)],
                "backward_tflop_per_s": [backward[d].round(1).tolist() for d in sorted(forward)],
            }
        )

    tera = 1e-12
    for suffix, causal in (("", True), (":full", False)):
        # H100, FlashAttention-2: forward and both passes measured at 64 and 128.
        fa2 = table(read_rates("fa3_h100", "flash_attn_2", "fwd", causal, fwd["h100"]))
        both = table(read_rates("fa2_h100", "flash_attn_2", "fwd_bwd", causal, fwd_bwd["h100"]))
        fa2_back = {d: backward_of(both[d], fa2[d]) for d in both}
        ratio = {d: fa2_back[d] / fa2[d] for d in fa2_back}
        ratio[256] = ratio[128]
        fa2_back[256] = fa2[256] * ratio[256]
        add(
            "h100-sxm",
            "hopper",
            "flash_attn_2" + suffix,
            {d: r * tera for d, r in fa2.items()},
            {d: r * tera for d, r in fa2_back.items()},
            "fa3_h100",
            "measured",
            "backward from forward and forward+backward (fa2_h100); at 256 by the ratio at 128",
        )
        fa3_back = {}
        for kernel in ("flash_attn_3", "cudnn"):
            fa3 = table(read_rates("fa3_h100", kernel, "fwd", causal, fwd["h100"]))
            if kernel == "flash_attn_3":
                fa3_back = {
                    d: np.minimum(FA3_OVER_FA2_BACKWARD * fa2_back[d], 0.9 * fa3[d]) for d in fa3
                }
            add(
                "h100-sxm",
                "hopper",
                kernel + suffix,
                {d: r * tera for d, r in fa3.items()},
                {d: np.minimum(fa3_back[d], 0.9 * fa3[d]) * tera for d in fa3},
                "fa3_h100",
                "measured",
                "forward measured; backward derived: 1.5 to 1.75 times FlashAttention-2 as its "
                "authors state, middle taken, at most 0.9 of forward",
            )
        # A100, FlashAttention-2: both passes measured, split by the ratio seen on H100.
        a100 = table(read_rates("fa2_a100", "flash_attn_2", "fwd_bwd", causal, fwd_bwd["a100"]))
        a100[256] = a100[128] * fa2[256] / fa2[128]
        parts = {d: split(a100[d], ratio[d]) for d in a100}
        add(
            "a100-sxm-80gb",
            "ampere",
            "flash_attn_2" + suffix,
            {d: p[0] * tera for d, p in parts.items()},
            {d: p[1] * tera for d, p in parts.items()},
            "fa2_a100",
            "measured",
            "forward+backward measured, split by backward/forward of H100; 256 by H100's 256/128",
        )
        for device, arch, forward, backward, source in (
            ("a100-sxm-80gb", "ampere", *_columns(parts), "fa2_a100"),
            ("h100-sxm", "hopper", fa2, fa2_back, "fa3_h100"),
        ):
            add(
                device,
                arch,
                "flash_attn_1" + suffix,
                {d: FA1_OVER_FA2 * r * tera for d, r in forward.items()},
                {d: FA1_OVER_FA2 * r * tera for d, r in backward.items()},
                source,
                "derived",
                "half of flash_attn_2, as the authors of FlashAttention-2 state",
            )
        # Blackwell, FlashAttention-4.
        fa4 = table(read_rates("fa4_sm100_2605", "flash_attn_4", "fwd", causal, fwd["gb200"]))
        if causal:
            # Causal 128 ends at 4096: go on as the uncut rate times the share that 64 shows.
            full = table(read_rates("fa4_sm100_2605", "flash_attn_4", "fwd", False, fwd["gb200"]))
            at = SEQ_LENS.index(4096)
            share = np.minimum(fa4[64] / full[64], 1.0)
            rest = full[128] * np.minimum(share * fa4[128][at] / full[128][at] / share[at], 1.0)
            fa4[128][at + 1 :] = rest[at + 1 :]
        best = read_rates("fa4_b200", "flash_attn_4 cute 2CTA", "bwd", causal, bwd["b200"])
        over = read_rates("fa4_b200", "flash_attn_4 cute", "fwd", causal, fwd["b200"])
        back_over = next(iter(best.values())) / next(iter(over.values()))
        first = {d: r * tera for d, r in fa4.items()}
        note = "forward measured on GB200; backward by backward/forward of fa4_b200 at one length"
        for device in ("b200-sxm", "gb200"):
            add(
                device,
                "blackwell",
                "flash_attn_4" + suffix,
                first,
                {d: r * back_over for d, r in first.items()},
                "fa4_sm100_2605",
                "measured" if device == "gb200" else "derived",
                note,
            )
            earlier = next(iter(over.values())) / float(
                fa4[128][SEQ_LENS.index(next(iter(over))[1])]
            )
            add(
                device,
                "blackwell",
                "cudnn" + suffix,
                {d: r * earlier for d, r in first.items()},
                {d: r * earlier * back_over for d, r in first.items()},
                "fa4_b200",
                "derived",
                "no cuDNN rates found: the shape of flash_attn_4 at the level of its first release",
            )
            sms = (148 if device == "b200-sxm" else 152) / 132
            add(
                device,
                "blackwell",
                "flash_attn_2" + suffix,
                {d: r * sms * tera for d, r in fa2.items()},
                {d: r * sms * tera for d, r in fa2_back.items()},
                "fa3_h100",
                "derived",
                "flash_attn_2 of H100 by number of SMs; it does not use Blackwell's tensor memory",
            )
    # The inference kernels and the unfused form only exist causal here.
    _add_inference_kernels(add, ratio, fwd)
    _add_unfused(add)
    return {"seq_lens": list(SEQ_LENS), "occupancy": slow, "curve": curves}


def _columns(parts: dict[int, tuple[Array, Array]]) -> tuple[dict[int, Array], dict[int, Array]]:
    return {d: p[0] for d, p in parts.items()}, {d: p[1] for d, p in parts.items()}


def _add_inference_kernels(add: Any, ratio: dict[int, Array], full: dict[str, float]) -> None:
    """Prefill kernels of aic_*: forward, causal, batch 4 and 32 heads, cache write included."""
    tera = 1e-12
    for device, arch, source, kernel, name in (
        ("b200-sxm", "blackwell", "aic_b200_sxm", "trtllm", "trtllm"),
        ("gb200", "blackwell", "aic_gb200", "trtllm", "trtllm"),
        ("l40s", "ada", "aic_l40s", "vllm_flash_attn", "flash_attn_2"),
    ):
        blocks = full.get(device.removesuffix("-sxm"), 0.0)
        forward = table(read_rates(source, kernel, "fwd", True, blocks, batch="4", n_heads="32"))
        if 64 not in forward:
            forward[64] = forward[128] * 0.9  # what FlashAttention-2 on H100 loses at 64
        add(
            device,
            arch,
            name,
            {d: r * tera for d, r in forward.items()},
            {d: r * np.minimum(ratio[d], 0.9) * tera for d, r in forward.items()},
            source,
            "measured",
            "prefill kernel with cache write; backward by backward/forward of flash_attn_2 on H100",
        )


def _add_unfused(add: Any) -> None:
    """PyTorch's own products and softmax, forward+backward measured."""
    for device, arch, source in (
        ("a100-sxm-80gb", "ampere", "fa2_a100"),
        ("h100-sxm", "hopper", "fa2_h100"),
    ):
        both = table(read_rates(source, "pytorch_standard", "fwd_bwd", True))
        forward = {
            d: r * (1 + 2.5 / UNFUSED_BACKWARD_OVER_FORWARD) / 3.5 * 1e-12 for d, r in both.items()
        }
        if 64 not in forward:
            forward[64] = forward[128] * 0.56  # A100: 18 of 32 TFLOP/s at the same bytes per score
        add(
            device,
            arch,
            "unfused",
            forward,
            {d: r * UNFUSED_BACKWARD_OVER_FORWARD for d, r in forward.items()},
            source,
            "measured",
            "forward+backward measured, split 13 to 19 by bytes of the scores",
        )
    # Bound by the bytes of the scores, so other devices follow H100 by achieved memory bandwidth.
    for name in ("b200-sxm", "gb200", "l40s"):
        scale = MACHINES[name].memory_bytes_per_s / MACHINES["h100-sxm"].memory_bytes_per_s
        add(
            name,
            MACHINES[name].arch,
            "unfused",
            {d: r * scale for d, r in forward.items()},
            {d: r * scale * UNFUSED_BACKWARD_OVER_FORWARD for d, r in forward.items()},
            "fa2_h100",
            "derived",
            "unfused of H100 by achieved memory bandwidth",
        )


def occupancy() -> dict[str, dict[str, float]]:
    """How much slower few blocks are: t ~ 1 + c S / u, u = batch heads ceil(s / 128) blocks.

    Forward: `aic_*` rows of equal length (512 to 4096, head size 128) that differ in batch and
    heads; backward: simumax rows of length 4096 that differ in heads (a ratio, so that table's
    FLOP convention drops out; Hopper takes Ampere's). L40S shows none. c is the median over pairs
    of the row with most blocks and another.
    """
    found: dict[str, dict[str, float]] = {}
    for arch, source, num_sms in (
        ("ampere", "aic_a100_sxm", 108),
        ("hopper", "aic_h100_sxm", 132),
        ("blackwell", "aic_b200_sxm", 148),
        ("ada", "aic_l40s", 142),
    ):
        slopes = [
            c for s in (512, 1024, 2048, 4096) for c in _slopes(source, "fwd", str(s), num_sms)
        ]
        found[arch] = {"fwd": round(max(0.0, float(np.median(slopes))), 2), "bwd": 0.0}
    for arch, source, num_sms in (
        ("ampere", "simumax_A100-PCIe-80", 108),
        ("blackwell", "simumax_B200-SXM", 148),
    ):
        found[arch]["bwd"] = round(float(np.median(_slopes(source, "bwd", "4096", num_sms))), 2)
    found["hopper"]["bwd"] = found["ampere"]["bwd"]
    return found


def _slopes(source: str, attention_pass: str, seq_len: str, num_sms: int) -> list[float]:
    points: dict[float, list[float]] = {}  # S / u -> seconds per FLOP
    with (MEASURED / "attention.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["source_id"], row["attention_pass"]) != (source, attention_pass):
                continue
            if (row["head_dim"], row["seq_len"]) == ("128", seq_len):
                blocks = int(row["batch"]) * int(row["n_heads"]) * int(seq_len) / 128
                points.setdefault(num_sms / blocks, []).append(1.0 / float(row["tflop_per_s"]))
    time = {x: float(np.median(v)) for x, v in points.items()}
    full = min(time)
    return [
        (time[x] / time[full] - 1.0) / (x - full * time[x] / time[full]) for x in time if x > full
    ]
