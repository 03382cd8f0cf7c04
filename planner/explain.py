"""Why a layout loses, and what to watch, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwprofiles.profile import Cluster
from planner.forms import layout_document
from planner.layout import Layout
from planner.results import Estimate
from planner.words import gib, percent, seconds

WORDS = {
    "attention_gemm": "attention projections",
    "attention_core": "attention itself",
    "mlp_gemm": "MLP matrix products",
    "expert_gemm": "expert matrix products",
    "memory_bound": "memory-bound passes",
    "head": "embedding, logits and loss",
    "recompute": "recompute",
    "activation_offload": "activation offload",
    "tensor_parallel": "tensor-parallel communication",
    "context_parallel": "context-parallel communication",
    "expert_parallel": "expert all-to-all",
    "fsdp": "parameter gathers and gradient scatters of sharding",
    "gradient_copies": "copies of parameters and gradients",
    "launch": "waiting for kernel launches",
    "pipeline_sends": "pipeline sends",
    "pipeline_bubble": "pipeline bubble",
    "gradient_reduction": "gradient reduction",
    "parameter_gather": "parameter gather after the optimizer",
    "optimizer": "optimizer step",
    "gradient_norm": "gradient norm",
    "tied_embedding": "tied embedding reduction",
}
# Terms whose words are many, not one.
PLURAL = (
    "attention_gemm",
    "mlp_gemm",
    "expert_gemm",
    "memory_bound",
    "head",
    "fsdp",
    "pipeline_sends",
)
NEAR_LIMIT = 0.95


@dataclass(frozen=True, slots=True)
class Contrast:
    """How another layout differs: the addend that grows most, and the text of it."""

    term: str
    text: str


def contrast(best: Estimate, other: Estimate) -> Contrast:
    """The largest term of the difference between two estimates, in words."""
    names = {*best.breakdown_s, *other.breakdown_s}
    more = {n: other.breakdown_s.get(n, 0.0) - best.breakdown_s.get(n, 0.0) for n in sorted(names)}
    term = max(more, key=lambda name: more[name])
    if more[term] <= 0:
        return Contrast("none", "no term is larger: the same time within rounding")
    takes = "take" if term in PLURAL else "takes"
    text = f"{WORDS.get(term, term)} {takes} {seconds(more[term])} more"
    if term in ("recompute", "activation_offload"):
        peak = max(best.memory_bytes, key=lambda items: sum(items.values()))
        largest = max(peak, key=lambda name: peak[name])
        text += f": memory is short beside {gib(peak[largest])} of {largest}"
    gain = min(more, key=lambda name: more[name])
    if -more[gain] > 0.25 * more[term]:
        text += f", {WORDS.get(gain, gain)} {seconds(-more[gain])} less"
    return Contrast(term, text)


def why_not_row(
    degree: str,
    value: int,
    direction: str,
    best: Estimate,
    layout: Layout | None,
    other: Estimate | None,
    reason: str = "",
) -> dict[str, Any]:
    """One line of "why not"."""
    row: dict[str, Any] = {"degree": degree, "value": value, "direction": direction}
    if layout is None or other is None:
        return row | {
            "layout": None,
            "step_time_s": None,
            "slower_fraction": None,
            "term": "none",
            "text": reason,
        }
    found = contrast(best, other)
    slower = other.step_time_s / best.step_time_s - 1.0
    return row | {
        "layout": layout_document(layout),
        "step_time_s": other.step_time_s,
        "slower_fraction": slower,
        "term": found.term,
        "text": found.text,
    }


def memory_warnings(estimate: Estimate, cluster: Cluster) -> list[str]:
    """Near the limit of a memory, or beyond one whose size is not known."""
    found = []
    share = estimate.peak_memory_bytes / estimate.capacity_bytes
    if NEAR_LIMIT < share <= 1:
        found.append(
            f"The fullest stage takes {percent(share)} of memory; fragmentation or a longer batch "
            f"may exceed it ({gib(estimate.capacity_bytes - estimate.peak_memory_bytes)} are left)."
        )
    host = estimate.host_bytes_per_node
    if host > 0 and cluster.host_memory_bytes <= 0:
        found.append(
            f"Offload takes {gib(host)} of host memory a node; how much a node of {cluster.name} "
            "has is not known."
        )
    elif NEAR_LIMIT * cluster.host_memory_bytes < host <= cluster.host_memory_bytes:
        found.append(
            f"Offload takes {percent(host / cluster.host_memory_bytes)} of host memory "
            f"({gib(cluster.host_memory_bytes - host)} a node are left)."
        )
    return found


def unverified_facts(facts: Mapping[str, Any], curves: Sequence[tuple[str, str]]) -> list[str]:
    """Name what the prediction rests on that nobody measured."""
    assumed = sorted({name for name, fact in facts.items() if fact.kind == "assumed"})
    derived = sorted({what for what, kind in curves if kind in ("derived", "assumed")})
    found = []
    if assumed:
        shown = ", ".join(assumed[:6]) + (" and others" if len(assumed) > 6 else "")
        found.append(f"Assumed, not measured: {shown}.")
    if derived:
        found.append(
            f"Derived from a similar device, not measured on this one: {', '.join(derived)}."
        )
    return found
