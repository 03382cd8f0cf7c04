"""The error for a job without a layout: illegal, or too large; and how many GPUs it would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import DoesNotFit, LayoutError, ShardwiseError
from planner.forms import layout_document
from planner.layout_text import format_layout
from planner.legality import check_fixed
from planner.memory import may_hold
from planner.parallel.offload import NVME
from planner.provider import ModelProvider
from planner.search.found import Found
from planner.search.nearest import Nearest
from planner.search.search import LeastGpus, least_gpus
from planner.setting import Setting
from planner.words import gib

MOST_GPUS = 65_536
PLACES = {"host": "host memory", "nvme": "NVMe"}


def nothing_fits(
    found: Found, setting: Setting, fixed: Mapping[str, int], bounded: Mapping[str, int]
) -> ShardwiseError:
    """The error for a job that has no layout: illegal, or too large for its memory."""
    if found.counts.legal == 0:
        # Says which rule no layout obeys, where one rule alone is to blame.
        check_fixed(
            fixed, setting.model, setting.train, setting.cluster, setting.num_gpus, setting.runtime
        )
        held = ", ".join(f"{k}={v}" for k, v in fixed.items())
        return LayoutError(
            f"no legal layout of {setting.model.name} on {setting.num_gpus} GPUs of "
            f"{setting.cluster.name} with global batch {setting.train.global_batch_size} under the "
            f"{setting.runtime.name} runtime{' with ' + held if held else ''}",
            values={"gpus": setting.num_gpus, **fixed},
        )
    near = found.nearest
    least = least_gpus_of(setting, fixed, bounded)
    most = most_gpus(setting)
    enough = (
        f"the least number of GPUs of {setting.cluster.name} on which it fits is {least.num_gpus}"
        if least.num_gpus and least.proven
        else f"it fits on {least.num_gpus} GPUs of {setting.cluster.name}, the least of the "
        f"{least.tried} numbers tried"
        if least.num_gpus
        else f"{setting.cluster.name} has no more GPUs than that"
        if setting.num_gpus >= most
        else f"no number of GPUs of {setting.cluster.name} up to {most:,} is enough"
        if least.proven
        else f"of {setting.cluster.name} none of the {least.tried} numbers of GPUs tried, up to "
        f"{most:,}, is enough"
    )
    values: dict[str, Any] = {
        "gpus": setting.num_gpus,
        "capacity_bytes": provider_capacity(setting),
    }
    detail = ""
    if near is not None:
        place = place_of(near)
        # Host memory and NVMe belong to the node, and the fullest stage may lie on all its GPUs.
        scale = 1 if place == "device" else setting.gpus_on_node
        of = "" if place == "device" else f" of {PLACES[place]} a node"
        values |= {
            "layout": layout_document(near.layout),
            "memory": place,
            "capacity_bytes": scale * near.capacity_bytes,
            "missing_bytes": scale * near.missing_bytes,
            "needed_bytes": scale * near.needed_bytes,
            "largest_term": near.main_term,
            "terms_bytes": {name: scale * size for name, size in near.terms_bytes.items()},
        }
        detail = (
            f"; the nearest is {format_layout(near.layout)}, whose stage {near.stage} misses "
            f"{gib(scale * near.missing_bytes)} of {gib(scale * near.capacity_bytes)}{of}, its "
            f"largest term being {near.main_term} with "
            f"{gib(scale * near.terms_bytes[near.main_term])}"
        )
    return DoesNotFit(
        f"{setting.model.name} does not fit on {setting.num_gpus} GPUs of {setting.cluster.name} "
        f"under the {setting.runtime.name} runtime{detail}; {enough}",
        values=values,
        legal={"gpus": [least.num_gpus] if least.num_gpus else []},
    )


def place_of(near: Nearest) -> str:
    """Which memory is short: device, host or nvme."""
    if near.memory == "state" and int(near.layout.offload) in NVME:
        return "nvme"
    return "device" if near.memory == "device" else "host"


def provider_capacity(setting: Setting) -> float:
    return ModelProvider(setting).capacity_bytes


def least_gpus_of(
    setting: Setting, fixed: Mapping[str, int], bounded: Mapping[str, int]
) -> LeastGpus:
    """The least number of GPUs on which some layout fits, found by searching."""

    def provider(num_gpus: int) -> ModelProvider | None:
        one = ModelProvider(replace(setting, num_gpus=num_gpus), fixed, bounded)
        values = one.space().values
        return one if may_hold(one.setting, values["zero"], values["offload"]) else None

    return least_gpus(provider, step=setting.cluster.gpus_per_node, most=most_gpus(setting))


def most_gpus(setting: Setting) -> int:
    """How many GPUs of this cluster can be asked for: all it has, or as many as are tried."""
    cluster = setting.cluster
    if cluster.max_nodes is None:
        return MOST_GPUS
    return min(MOST_GPUS, cluster.max_nodes * cluster.gpus_per_node)
