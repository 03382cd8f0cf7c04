"""What the host costs: kernels that are launched one by one, and waits that empty their queue.

Counts of launches are facts of the runtime, seconds per launch one of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.flops import unfused_softmax
from planner.layout import Layout
from planner.setting import Setting
from planner.specs import LayerSpec, MoeSpec

PHASES = ("forward", "backward")


def paced_s(segments: Sequence[tuple[Any, Any]], each: float) -> Any:
    """Seconds from an empty launch queue until the device has done all segments.

    Segments are (launches n, device seconds g) in order. The host launches without pause, so
    h_i = h_(i-1) + n_i each; the device starts a segment after its first launch and cannot end
    before its last: d_i = max(max(d_(i-1), h_(i-1) + each) + g_i, h_i). Kernels of a segment are
    taken as equally long.

    >>> float(paced_s([(10, 5.0), (2, 40.0)], 1.0))  # ten launches before the long kernels
    51.0
    >>> float(paced_s([(2, 40.0), (10, 5.0)], 1.0))  # launched while the long kernels run
    46.0
    """
    host: Any = 0.0
    device: Any = 0.0
    for launches, seconds in segments:
        started = host + each * np.minimum(launches, 1.0)
        host = host + each * launches
        device = np.maximum(np.maximum(device, started) + seconds, host)
    return device


def expert_launches(moe: MoeSpec, layout: Layout, setting: Setting, phase: str) -> Any:
    """Launches of the experts of one rank: products, casts and biases are launched by expert."""
    launches = setting.runtime.launches
    each = launches[f"expert_{phase}"]
    if setting.train.precision in ("fp8", "fp4"):
        each = each + launches[f"expert_fp8_{phase}"]
    if moe.expert_bias:
        each = each + launches[f"expert_bias_{phase}"]
    return each * moe.num_experts / np.asarray(layout.ep)


def linear_modules(kind: LayerSpec) -> int:
    """Linear modules of a layer: grouped experts are one for each of their two products.

    >>> from planner.specs import AttentionSpec, MlpSpec
    >>> linear_modules(LayerSpec(AttentionSpec(8, 8, 64), MlpSpec(256)))
    4
    """
    attention = 2
    if kind.attention.kind == "mla":
        attention = 5 if kind.attention.q_lora_rank else 4
    shared = 2 if kind.moe is not None and kind.moe.shared_intermediate_size else 0
    return attention + 2 * (kind.mlp is not None or kind.moe is not None) + shared


def layer_launches(kind: LayerSpec, layout: Layout, setting: Setting, phase: str) -> Any:
    """Kernels that a layer launches in one phase."""
    launches = setting.runtime.launches
    tp = np.asarray(layout.tp)
    count: Any = launches["moe_" + phase if kind.moe is not None else "dense_" + phase]
    count = count + np.where(tp > 1, 1.0, 0.0) * launches[f"tp_{phase}"]
    if not setting.flash:
        heads = kind.attention.num_attention_heads / tp
        slow = unfused_softmax(layout.micro_batch, heads) * 1.0
        count = count + slow * launches[f"softmax_{phase}"]
    count = count + linear_modules(kind) * launches["linear_module"]
    if kind.attention.kind == "mla":
        count = count + launches[f"mla_{phase}"]
    if kind.moe is not None:
        count = count + expert_launches(kind.moe, layout, setting, phase)
    return count


def drained_wait_s(
    moe: MoeSpec, launches: Any, total: Any, experts: Any, exchange: Any, layout: Layout,
    setting: Setting,
) -> Any:  # fmt: skip
    """Seconds that the device idles in forward because the host waited for it once.

    The host waits for the split sizes just before dispatch. From then on, until it waits in the
    next layer, the device runs dispatch, the experts, and combine with the next layer's attention
    and router, each no sooner than launched. `total`, `experts`, `exchange` are device seconds of
    the layer, of its experts' work and of its all-to-alls.
    """
    each = setting.cluster.device.host_launch_s
    own = expert_launches(moe, layout, setting, "forward")
    first = setting.runtime.launches["dispatch"]
    segments = (
        (first, exchange / 2),
        (own, experts),
        (launches - own - first, total - experts - exchange / 2),
    )
    return np.maximum(0.0, paced_s(segments, each) - total)
