"""What communication costs the compute that runs beside it.

References: Lee2025.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.setting import Setting


def contention_s(kind: str, num_bytes: Any, seconds: Any, size: Any, setting: Setting) -> Any:
    """Seconds that compute is slowed while a collective of `seconds` runs beside it.

    c = s t + (k - s) t_in: t = seconds, s = comm_sms / SMs the share of the device taken for as
    long as it runs, k the contention measured inside a node, t_in = min(t, f bytes (n - 1) / n /
    rate) the time that its bytes alone take at the scale-up rate (f = 2 for all-reduce, n = size).
    Slow networks contend less. Never more than t.
    """
    runtime, cluster = setting.runtime, setting.cluster
    share = min(1.0, runtime.comm_sms / cluster.device.num_sms)
    rate = cluster.scale_up.bytes_per_s * cluster.scale_up.achieved_fraction
    n = np.maximum(1.0, np.asarray(size, dtype=np.float64))
    factor = 2.0 if kind == "all_reduce" else 1.0
    part = np.ones_like(n) if kind == "send_recv" else (n - 1) / n
    inside = np.minimum(seconds, factor * np.asarray(num_bytes) * part / rate)
    return share * np.asarray(seconds) + max(0.0, runtime.overlap_contention - share) * inside
