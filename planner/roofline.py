"""Operation and device -> seconds: GEMM, attention, memory-bound passes, host copies.

Every argument that counts something may be an array; arguments broadcast and the answer is an
array. Rates come from the device's curves. What a device lacks is refused, never assumed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hwprofiles.curves import attention_occupancy, backward_gemm_factor
from hwprofiles.profile import Array, AttentionCurve, Device, GemmCurve
from hwprofiles.tile_model import operand_bytes, wave_s
from planner.errors import ProfileError

# Rows of queries that one attention block holds, as the occupancy constants count them.
BLOCK_ROWS = 128
UNFUSED = "unfused"


def _array(value: ArrayLike) -> Array:
    return np.asarray(value, dtype=np.float64)


def gemm_curve(device: Device, precision: str) -> GemmCurve:
    """The GEMM curve of a precision, or a ProfileError that names those there are."""
    curve = device.gemm.get(precision)
    if curve is None:
        raise ProfileError(
            f"device {device.name!r} has no GEMM rate for precision {precision!r}; "
            f"it has {', '.join(sorted(device.gemm)) or 'none'}",
            values={"device": device.name, "precision": precision},
            legal={"precision": sorted(device.gemm)},
        )
    return curve


def attention_curve(device: Device, kernel: str) -> AttentionCurve:
    """The rate table of an attention kernel, or a ProfileError that names those there are."""
    curve = device.attention.get(kernel)
    if curve is None:
        kernels = sorted(k for k in device.attention if not k.endswith(":full"))
        raise ProfileError(
            f"device {device.name!r} has no rates for attention kernel {kernel!r}; "
            f"it has {', '.join(kernels) or 'none'}",
            values={"device": device.name, "kernel": kernel},
            legal={"kernel": kernels},
        )
    return curve


def gemm_s(
    device: Device,
    precision: str,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    batch: ArrayLike = 1,
    backward: bool = False,
    sustained: bool = True,
    aligned: ArrayLike = True,
) -> Array:
    """Time of C[m,n] = A[m,k] B[k,n] [s].

    t = t0 + max(w / f, 2 g m n k / (cap f), q / B);  w = time of the waves of output tiles
    (`hwprofiles.tile_model.wave_s`), g = batch, q = bytes read and written once, B = achieved
    memory bandwidth, t0, cap and f from the device's curve. f is the share of the rate that long
    runs keep at the power limit; `sustained=False` leaves it out, as short benchmarks do.

    `batch` > 1 is one grouped or batched launch: tiles of all products share the waves. With
    `backward` the caller gives the permuted shape and the layout factor of the two backward
    products is applied. Where `aligned` is false, rows of an operand or of the result are no
    multiple of 16 bytes, and w / f is 2 g m n k / u at least, u = rate of such products. An empty
    product takes no time.

    References: Derived here; constants in hwprofiles/calibrations/gemm.json.

    >>> from hwprofiles.textbook import textbook_device
    >>> float(gemm_s(textbook_device(), "bf16", 1024, 1024, 1000))  # 2.097e9 / 1e12, no launch time
    0.002097152
    """
    curve = gemm_curve(device, precision)
    m_, n_, k_, g = _array(m), _array(n), _array(k), _array(batch)
    work = 2.0 * g * m_ * n_ * k_
    waves = wave_s(
        m_,
        n_,
        k_,
        batch=g,
        num_sms=curve.num_sms,
        tile_flops_per_s=curve.tile_flops_per_s,
        prologue_k=curve.prologue_k,
        tiles=curve.tiles,
    )
    compute = np.maximum(waves, work / curve.cap_flops_per_s)
    if sustained:
        compute = compute / curve.sustained_fraction
    if backward:
        compute = compute * backward_gemm_factor()
    if curve.unaligned_flops_per_s:
        slow = np.where(aligned, 0.0, work / curve.unaligned_flops_per_s)
        compute = np.maximum(compute, slow)
    moved = operand_bytes(m_, n_, k_, precision, g) / device.achieved_memory_bytes_per_s
    seconds: Array = np.where(work > 0.0, curve.launch_s + np.maximum(compute, moved), 0.0)
    return seconds


def grouped_gemm_s(
    device: Device,
    precision: str,
    tokens_per_expert: ArrayLike,
    num_local_experts: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    backward: bool = False,
    sustained: bool = True,
) -> Array:
    """Time of one grouped GEMM, a product of `tokens_per_expert` rows for every local expert [s].

    The GEMM of `gemm_s` with g = num_local_experts products in one launch. Assumes equal groups:
    give the largest group where the load is uneven and the slowest decides. `sustained` as there.

    >>> from hwprofiles.textbook import textbook_device
    >>> one = gemm_s(textbook_device(), "bf16", 4096, 1024, 1000)
    >>> bool(grouped_gemm_s(textbook_device(), "bf16", 1024, 4, 1024, 1000) == one)
    True
    """
    return gemm_s(
        device,
        precision,
        tokens_per_expert,
        n,
        k,
        batch=num_local_experts,
        backward=backward,
        sustained=sustained,
    )


def attention_pairs(
    seq_q: ArrayLike, seq_kv: ArrayLike, causal: bool, window: ArrayLike = 0
) -> Array:
    """Query-key pairs of one head that the mask leaves, as FLOP conventions count them.

    Causal: s_q s_kv - s_q^2 / 2 (s^2 / 2 when square, queries at the end otherwise). With a window
    of w keys: s_q w - w^2 / 2 causal, and at most 2 w keys a query when not. window = 0: none.

    >>> float(attention_pairs(8, 8, True)), float(attention_pairs(8, 8, False))
    (32.0, 64.0)
    >>> float(attention_pairs(8, 8, True, 2))
    14.0
    """
    q, kv, w = _array(seq_q), _array(seq_kv), _array(window)
    limited = (w > 0) & (w < kv)
    if not causal:
        full: Array = q * np.where(limited, np.minimum(kv, 2.0 * w), kv)
        return full
    short = np.minimum(q, kv)
    whole = q * kv - short * short / 2.0
    # Only queries closer than w to the first key see fewer than w keys.
    near = np.maximum(0.0, w - np.maximum(kv - q, 0.0))
    pairs: Array = np.where(limited, np.minimum(whole, q * w - near * near / 2.0), whole)
    return pairs


def _rate(curve: AttentionCurve, backward: bool, seq_len: Array, head_dim: Array) -> Array:
    """Interpolated rate: linear in log2 of the length and in head size, full device."""
    table = curve.backward_flops_per_s if backward else curve.forward_flops_per_s
    lengths = np.log2(np.asarray(curve.seq_lens, dtype=np.float64))
    x = np.log2(np.maximum(seq_len, 1.0))
    # Below the first length a block is still a block: rate falls with length.
    below = np.exp2(np.minimum(0.0, x - lengths[0]))
    x = np.clip(x, lengths[0], lengths[-1])
    i = np.clip(np.searchsorted(lengths, x, side="right") - 1, 0, max(0, len(lengths) - 2))
    j = np.minimum(i + 1, len(lengths) - 1)
    share = np.where(j > i, (x - lengths[i]) / np.where(j > i, lengths[j] - lengths[i], 1.0), 0.0)
    dims = np.asarray(curve.head_dims, dtype=np.float64)
    d = np.clip(head_dim, dims[0], dims[-1])
    a = np.clip(np.searchsorted(dims, d, side="right") - 1, 0, max(0, len(dims) - 2))
    b = np.minimum(a + 1, len(dims) - 1)
    part = np.where(b > a, (d - dims[a]) / np.where(b > a, dims[b] - dims[a], 1.0), 0.0)
    low = table[a, i] * (1.0 - share) + table[a, j] * share
    high = table[b, i] * (1.0 - share) + table[b, j] * share
    # Heads narrower than the smallest tile still fill it.
    narrow = np.minimum(1.0, head_dim / dims[0])
    rate: Array = (low * (1.0 - part) + high * part) * below * narrow
    return rate


def attention_s(
    device: Device,
    kernel: str,
    batch: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    seq_q: ArrayLike,
    seq_kv: ArrayLike,
    head_dim: ArrayLike,
    v_head_dim: ArrayLike | None = None,
    causal: bool = True,
    window: ArrayLike = 0,
    backward: bool = False,
) -> Array:
    """Time of the attention core (products and softmax, no projections) of one pass [s].

    t = max(floor, F (1 + c S / u) / R(length, d), q / B);  F = 2 b h P (d + d_v) forward and 2.5
    times that backward, P = pairs under the mask (`attention_pairs`), R = measured rate of the
    kernel on a full device, u = b h ceil(s_q / 128) blocks on S SMs, c = occupancy constant of the
    architecture, q = bytes of query, key, value and result. The length at which R is read is that
    of a square problem with as many pairs a query.

    `unfused` computes all pairs whatever the mask, so its time does not depend on it; head sizes
    that are no multiple of 8 cannot use tensor cores there and run at half the fp32 peak (assumed).

    References: Dao2023 and Shah2024 (FLOP convention and rates); calibrations/attention.json.

    >>> from hwprofiles.textbook import textbook_device
    >>> t = attention_s(textbook_device(), "flash_attn_2", 1, 1024, 1024, 1024, 1024, 64)
    >>> round(float(t), 3)  # 4 h s^2 d / 2 = 1.37e11 at 1 TFLOP/s; 8192 blocks on 32 SMs: 0.4 %
    0.138
    """
    curve = attention_curve(device, kernel)
    b, h, h_kv, d = _array(batch), _array(heads), _array(kv_heads), _array(head_dim)
    q, kv = _array(seq_q), _array(seq_kv)
    d_v = d if v_head_dim is None else _array(v_head_dim)
    pairs = attention_pairs(q, kv, causal, window)
    safe_q = np.maximum(q, 1.0)
    if kernel == UNFUSED:
        pairs = q * kv / 2.0  # its rates count the causal half and it computes both
        length = kv
    elif causal:
        length = 2.0 * pairs / safe_q
    else:
        full = device.attention.get(kernel + ":full")
        length = pairs / safe_q * (1.0 if full is not None else 2.0)
        curve = full or curve
    work = 2.0 * b * h * pairs * (d + d_v) * (2.5 if backward else 1.0)
    rate = _rate(curve, backward, length, d)
    if kernel == UNFUSED:
        scalar = device.peak_flops_per_s.get("fp32")
        if scalar:
            rate = np.where(d % 8 != 0, np.minimum(rate, scalar / 4.0), rate)
        slow: Array = np.ones_like(rate)
    else:
        c = attention_occupancy(device.arch)[1 if backward else 0]
        blocks = np.maximum(b * h * np.ceil(safe_q / BLOCK_ROWS), 1.0)
        slow = 1.0 + c * device.num_sms / blocks
    moved = 2.0 * b * (d + d_v) * (h * q + h_kv * kv) * (2.0 if backward else 1.0)
    busy = np.maximum(
        work * slow / np.maximum(rate, 1.0), moved / device.achieved_memory_bytes_per_s
    )
    seconds: Array = np.where(work > 0.0, np.maximum(busy, device.kernel_floor_s), 0.0)
    return seconds


def memory_bound_s(device: Device, num_bytes: ArrayLike) -> Array:
    """Time of a pass that is bound by device memory, `num_bytes` read and written in all [s].

    t = max(floor, t0 + q / B);  q = num_bytes, B = achieved bandwidth of a long device copy,
    floor = shortest kernel, t0 = start-up of a kernel before memory is busy, taken from the launch
    term of the device's GEMM fit. No bytes take no time. Data that is still in L2 may be faster;
    in a training step the next layer has displaced it.

    >>> from hwprofiles.textbook import textbook_device
    >>> float(memory_bound_s(textbook_device(), 1e9)), float(memory_bound_s(textbook_device(), 1.0))
    (0.01, 1e-06)
    """
    q = _array(num_bytes)
    curve = device.gemm.get("bf16") or device.gemm.get("fp32")
    start = curve.launch_s if curve is not None and curve.kind != "assumed" else 0.0
    busy = np.maximum(device.kernel_floor_s, start + q / device.achieved_memory_bytes_per_s)
    seconds: Array = np.where(q > 0.0, busy, 0.0)
    return seconds


def host_copy_s(device: Device, num_bytes: ArrayLike) -> Array:
    """Time to move bytes between device and host memory, one direction [s].

    t = floor + q / L;  q = num_bytes, L = host link rate per GPU and direction.

    >>> from hwprofiles.textbook import textbook_device
    >>> float(host_copy_s(textbook_device(), 1e9)) - 0.1 < 1.1e-6
    True
    """
    q = _array(num_bytes)
    seconds: Array = np.where(
        q > 0.0, device.kernel_floor_s + q / device.host_link_bytes_per_s, 0.0
    )
    return seconds
