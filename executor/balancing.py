"""Balancing experts by bias: after every step those with few tokens become easier to choose.

References: DeepSeekV3, auxiliary-loss-free load balancing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from executor.moe import Moe
from executor.weights import global_name
from planner.specs import ModelSpec

PLACE = re.compile(r"layers\.(\d+)\.moe")


class BiasBalancing:
    """The tokens of every expert of the whole model, and the correction biases that follow them.

    The counts of all layers lie in one vector, whatever stage holds them, so that they are summed
    over all ranks together with other numbers of the step.
    """

    def __init__(self, modules: Sequence[nn.Module], model: ModelSpec) -> None:
        kinds = [model.kinds[kind].moe for kind in model.layer_kinds]
        sizes = [moe.num_experts if moe is not None and moe.aux_free_bias else 0 for moe in kinds]
        self.sizes = sizes
        self.layers: dict[int, Moe] = {}
        for module in modules:
            for name, part in module.named_modules():
                found = PLACE.fullmatch(global_name(name))
                if isinstance(part, Moe) and found is not None and sizes[int(found[1])]:
                    self.layers[int(found[1])] = part

    def take_counts(self, device: torch.device) -> Tensor:
        """Tokens that this rank has sent to each expert since it was last asked."""
        parts = [torch.zeros(size, device=device) for size in self.sizes]
        for index, moe in self.layers.items():
            if moe.load is not None:
                parts[index] = moe.load.to(device, torch.float32)
            moe.load = None
        return torch.cat(parts) if parts else torch.zeros(0, device=device)

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """Move each bias by the same step, up for an expert below the mean and down above it."""
        parts = counts.split(self.sizes)
        for index, moe in self.layers.items():
            few = parts[index].mean() - parts[index]
            bias = moe.correction_bias
            bias.add_(few.sign().to(bias), alpha=moe.details.bias_update_speed)
