"""Offload: where FSDP keeps its shards between uses."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from planner.errors import LayoutError
from planner.layout import OFFLOADS
from planner.plan import Plan

RUN = ("none", "params-cpu")


def apply(plan: Plan, device_type: str) -> OffloadPolicy:
    """The policy for FSDP: parameters, gradients and optimizer state in host memory, or not.

    Pinned memory is a device's business, so CPU runs do without.

    Raises
    ------
    LayoutError
        An offload that does not run here, or without sharded parameters.
    """
    name = OFFLOADS[plan.layout.offload]
    if name not in RUN or (name != "none" and plan.layout.zero != 3):
        raise LayoutError(
            f"offload={name} with zero={plan.layout.zero} is not run here; legal: none, or "
            "params-cpu with zero=3",
            values={"offload": name, "zero": plan.layout.zero},
            legal={"offload": list(RUN), "zero": [3]},
        )
    return OffloadPolicy() if name == "none" else CPUOffloadPolicy(pin_memory=device_type == "cuda")
