"""Offload: optimizer state, parameters or activations in host memory or on NVMe.

Codes of `planner.layout.OFFLOADS`. The optimizer then steps on the host: gradients go down, updated
weights come up, and the host reads and writes the state at its memory's rate; on NVMe the state is
read and written in addition.

References: Ren2021 (ZeRO-Offload); Rajbhandari2021 (ZeRO-Infinity).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import OFFLOADS

OPTIMIZER = tuple(i for i, name in enumerate(OFFLOADS) if name != "none")
PARAMS = tuple(i for i, name in enumerate(OFFLOADS) if name.startswith("params"))
NVME = tuple(i for i, name in enumerate(OFFLOADS) if name.endswith("nvme"))


def is_one_of(codes: Any, wanted: tuple[int, ...]) -> Any:
    """Mask of layouts whose offload code is among `wanted`."""
    codes = np.asarray(codes)
    mask = np.zeros(codes.shape, dtype=bool)
    for code in wanted:
        mask = mask | (codes == code)
    return mask


def step_s(
    owned_params: Any,
    state_bytes: float,
    grad_bytes: float,
    weight_bytes: float,
    link_bytes_per_s: float,
    host_bytes_per_s: float,
    nvme_read_bytes_per_s: float,
    nvme_write_bytes_per_s: float,
    on_nvme: Any,
) -> Any:
    """Time of an optimizer step on the host [s] for `owned_params` parameters of one rank.

    t = P g / link + P (2 state + 4) / host + P w / link (+ P state / read + P state / write on
    NVMe). All rates are this rank's share. Nothing overlaps, as in ZeRO-Offload without delayed
    update.

    >>> float(step_s(1e9, 12.0, 2.0, 2.0, 25e9, 28e9, 1e9, 1e9, False))
    1.16
    """
    transfer = owned_params * (grad_bytes + weight_bytes) / link_bytes_per_s
    host = owned_params * (2 * state_bytes + 4.0) / host_bytes_per_s
    if not np.any(on_nvme):
        return transfer + host
    if nvme_read_bytes_per_s <= 0 or nvme_write_bytes_per_s <= 0:
        nvme: Any = np.inf
    else:
        nvme = owned_params * state_bytes * (1 / nvme_read_bytes_per_s + 1 / nvme_write_bytes_per_s)
    return transfer + host + np.where(on_nvme, nvme, 0.0)


def activation_exposed_s(kept_bytes: Any, compute_s: Any, link_bytes_per_s: float) -> Any:
    """Time of a layer's activation transfer that its own compute does not hide [s].

    >>> float(activation_exposed_s(5e9, 0.1, 25e9))
    0.1
    """
    return np.maximum(0.0, kept_bytes / link_bytes_per_s - compute_s)
