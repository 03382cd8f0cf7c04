"""Seconds of one operation: its shapes and bytes put on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.operations import AttentionCall, Operation
from planner.roofline import attention_s, gemm_curve, gemm_s, memory_bound_s
from planner.setting import Setting

WIDTH_MULTIPLE = 8  # elements of 2 bytes in the 16 that one load of a fast product takes
UNFUSED_RATE = 0.6  # of the sustained GEMM rate, in products of short k


def unfused_products_s(call: AttentionCall, setting: Setting) -> Any:
    """The two batched products of unfused attention, forward [s]; their bytes are counted apart.

    t = 2 b a s_q s_kv (d + d_v) / r over the whole score matrix, causal or not, with r = 0.6 of the
    sustained GEMM rate for products of short k (assumed). A head width that is no multiple of 8
    leaves tensor cores idle: half the fp32 peak then (assumed).

    References: Korthikanti2022; NVIDIA tensor-core alignment guide.
    """
    device = setting.cluster.device
    aligned = call.head_dim % 8 == 0 and call.v_head_dim % 8 == 0
    rate = UNFUSED_RATE * gemm_curve(device, setting.gemm_precision("")).cap_flops_per_s
    if not aligned:
        rate = min(rate, 0.5 * device.peak_flops_per_s.get("fp32", rate))
    flops = 2.0 * call.batch * call.heads * np.multiply(call.seq_q, call.seq_kv)
    return flops * (call.head_dim + call.v_head_dim) / rate


def operation_s(op: Operation, setting: Setting) -> tuple[Any, Any, Any]:
    """Seconds of an operation: forward, backward for its input, backward for its weight.

    C[m, n] = A[m, k] B[k, n]; input gradient [m, k] over n, weight gradient [k, n] over m. Rows of
    all four matrices are n or k long: a width that is no multiple of 8 leaves all three products
    without 16-byte loads, unless the runtime pads them.
    """
    device = setting.cluster.device
    forward: Any = 0.0
    backward: Any = 0.0
    weight: Any = 0.0
    if np.any(np.asarray(op.forward_bytes) > 0):
        forward = forward + memory_bound_s(device, op.forward_bytes)
    if np.any(np.asarray(op.backward_bytes) > 0):
        backward = backward + memory_bound_s(device, op.backward_bytes)
    if op.gemm is not None:
        g = op.gemm
        precision = setting.gemm_precision(g.precision)
        whole = (np.mod(g.n, WIDTH_MULTIPLE) == 0) & (np.mod(g.k, WIDTH_MULTIPLE) == 0)
        how: dict[str, Any] = {"batch": g.groups, "aligned": setting.runtime.pads_products | whole}
        forward = forward + gemm_s(device, precision, g.m, g.n, g.k, **how)
        backward = backward + gemm_s(device, precision, g.m, g.k, g.n, **how, backward=True)
        if not op.frozen:
            weight = gemm_s(device, precision, g.k, g.n, g.m, **how, backward=True)
    if op.attention is not None and not setting.flash:
        products = unfused_products_s(op.attention, setting)
        forward, backward = forward + products, backward + 2 * products
    elif op.attention is not None:
        a = op.attention
        args = (
            device,
            setting.kernel,
            a.batch,
            a.heads,
            a.kv_heads,
            a.seq_q,
            a.seq_kv,
            a.head_dim,
            a.v_head_dim,
            a.causal,
            a.window or 0,
        )
        forward = forward + attention_s(*args, backward=False)
        backward = backward + attention_s(*args, backward=True)
    return forward, backward, weight
