"""LoRA and QLoRA: low-rank adapters on frozen linears.

References: Hu2021; Dettmers2023.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import Layout
from planner.operations import local_kv_heads
from planner.specs import LayerSpec, LoraSpec, ModelSpec


def adapter_parameters(
    model: ModelSpec, kind: LayerSpec, lora: LoraSpec, layout: Layout
) -> tuple[Any, Any]:
    """Adapter parameters of one layer on one rank: (dense, expert).

    A linear of in x out gets r (in + out) parameters. Column-parallel linears split `out` over tp,
    row-parallel ones `in`; the other factor is replicated.

    >>> from planner.specs import AttentionSpec, MlpSpec
    >>> kind = LayerSpec(AttentionSpec(8, 8, 64), mlp=MlpSpec(2048))
    >>> model = ModelSpec("m", 512, 1000, (kind,), (0,))
    >>> dense, expert = adapter_parameters(model, kind, LoraSpec(8), Layout())
    >>> int(dense), int(expert)
    (94208, 0)
    """
    h, r, tp = model.hidden_size, lora.rank, np.asarray(layout.tp)
    spec = kind.attention
    dense: Any = 0.0
    expert: Any = 0.0
    q = spec.num_attention_heads * spec.head_dim / tp
    kv = local_kv_heads(spec.num_key_value_heads, tp) * (spec.head_dim + spec.v_dim)
    out = spec.num_attention_heads * spec.v_dim / tp
    if "qkv" in lora.targets:
        dense = dense + r * (h + q) + r * (2 * h + kv)
    if "out" in lora.targets:
        dense = dense + r * (out + h)
    if "mlp" in lora.targets:
        if kind.mlp is not None:
            up = 2 if kind.mlp.gated else 1
            width = kind.mlp.intermediate_size / tp
            dense = dense + up * r * (h + width) + r * (width + h)
        if kind.moe is not None:
            up = 2 if kind.moe.gated else 1
            width = kind.moe.intermediate_size / np.asarray(layout.etp)
            local = kind.moe.num_experts / np.asarray(layout.ep)
            expert = expert + local * (up + 1) * r * (h + width)
            if kind.moe.shared_intermediate_size:
                width = kind.moe.shared_intermediate_size / tp
                dense = dense + (up + 1) * r * (h + width)
    return dense, expert
