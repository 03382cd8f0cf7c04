"""Recompute: a layer, or its attention kernel alone, runs again in backward.

``full`` keeps a layer's input, ``selective`` all but what the attention kernel saves, ``none`` all.
Ring attention takes the kernel's place and never keeps scores, so ``selective`` adds nothing to it.

References: Chen2016; Korthikanti2022 section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.errors import LayoutError

POLICIES = ("none", "selective", "full")


def apply(model: nn.Module, policies: Mapping[int, str]) -> None:
    """Wrap each layer by the policy of its global index; names of parameters stay.

    Raises
    ------
    LayoutError
        A policy that does not run here.
    """
    for index, layer in model.layers.items():
        policy = policies[int(index)]
        if policy not in POLICIES:
            raise LayoutError(
                f"recompute={policy} of layer {index} is not run here; legal: "
                f"{', '.join(POLICIES)}",
                values={"recompute": policy, "layer": int(index)},
                legal={"recompute": list(POLICIES)},
            )
        if policy == "full":
            layer.forward = partial(again, layer.forward)
        elif policy == "selective":
            layer.attention.core = partial(again, layer.attention.core)


def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run now, keep the arguments alone, and run again in backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
