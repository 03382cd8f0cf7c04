"""Operations of the feed-forward half of a layer: dense MLP, and mixture of experts.

Symbols as in `planner.flops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.operations import Operation, Shard, linear
from planner.specs import ModelSpec, MoeSpec


def mlp_operations(
    prefix: str,
    part: str,
    hidden: int,
    width: Any,
    rows: Any,
    x: Shard,
    *,
    gated: bool,
    bias: bool,
    groups: Any = 1,
    kept_input: Any = 0.0,
    frozen: bool = False,
    moe: bool = False,
) -> list[Operation]:
    """A feed-forward network of local width `width` over `rows` rows (each group).

    Kept per row: first product's output (2 or 4 f), the activation's output (2 f, one byte in fp8).
    """
    e = x.element_bytes
    fan = 2 * width if gated else width
    kind = "gated" if gated else "plain"
    act = ("moe_activation", "moe") if moe else ("activation", "mlp")
    whole = ("moe",) if moe else ("mlp",)
    size = groups * rows * width
    return [
        linear(
            f"{prefix}_fc1",
            part,
            rows,
            fan,
            hidden,
            x,
            kept=kept_input + e * groups * rows * fan,
            modules=whole,
            bias=bias,
            groups=groups,
            frozen=frozen,
        ),
        Operation(
            f"{prefix}_activation",
            "memory_bound",
            forward_bytes=x.passes[f"{kind}_forward"] * e / 2 * size,
            backward_bytes=x.passes[f"{kind}_backward"] * e / 2 * size,
            kept_bytes=(x.input_bytes + (x.kept_extra["gated"] if gated else 0.0)) * size,
            modules=act,
        ),
        linear(
            f"{prefix}_fc2",
            part,
            rows,
            hidden,
            width,
            x,
            modules=whole,
            bias=bias,
            groups=groups,
            frozen=frozen,
        ),
    ]


def routed_rows(moe: MoeSpec, x: Shard) -> tuple[Any, Any]:
    """Rows that this rank's experts process, and its number of local experts.

    rows = (T / t) k etp imbalance: every rank of the ep x etp group feeds T / t tokens k times,
    spread over ep; etp ranks see the same rows. With fewer rows than experts an expert still costs
    a tile.

    References: Shazeer2017; parallel folding in Megatron-Core.
    """
    rows = x.tokens / np.asarray(x.tp) * moe.num_experts_per_tok * np.asarray(x.etp) * x.imbalance
    return rows, moe.num_experts / np.asarray(x.ep)


def row_operations(moe: MoeSpec, inside: int, rows: Any, local: Any, x: Shard) -> list[Operation]:
    """Passes over the rows of this rank's experts, beside products and activation.

    Order by local expert (not with a single one), padding of groups for fp8, the bias of the second
    product weighed by probabilities, clamps of the activation's input with what they keep.
    """
    scale = x.element_bytes / 2
    fan = (2 if moe.gated else 1) * moe.intermediate_size / np.asarray(x.etp)
    several = np.where(np.asarray(local) > 1, 1.0, 0.0)
    passes = (
        ("expert_sort", inside * several, 0.0, ("moe",)),
        ("expert_padding", inside * float(x.quantized), 0.0, ("moe",)),
        ("expert_bias", inside * float(moe.expert_bias), 0.0, ("moe",)),
        ("clamp", fan / 2 * float(moe.clamped), x.element_bytes, ("moe_activation", "moe")),
    )
    return [
        Operation(
            name,
            "memory_bound",
            forward_bytes=x.passes[f"{name}_forward"] * scale * rows * width,
            backward_bytes=x.passes[f"{name}_backward"] * scale * rows * width,
            kept_bytes=2 * kept * rows * width if x.passes[f"{name}_forward"] else 0.0 * rows,
            modules=modules,
        )
        for name, width, kept, modules in passes
    ]


def moe_operations(model: ModelSpec, moe: MoeSpec, x: Shard, frozen: bool) -> list[Operation]:
    """Router, permutation, grouped expert products, un-permutation, shared experts.

    Kept: router probabilities (fp32 logits and probabilities, 8 bytes an expert), the rows after
    dispatch (2 h each) and what the expert MLP keeps.
    """
    h, e, scale = model.hidden_size, x.element_bytes, x.element_bytes / 2
    inside = moe.latent_size or h
    fed = x.tokens / np.asarray(x.tp)
    rows, local = routed_rows(moe, x)
    sent = fed * moe.num_experts_per_tok
    ops = [
        linear(
            "router",
            "router",
            fed,
            moe.num_experts,
            h,
            x,
            precision="router",
            kept=8.0 * moe.num_experts * fed,
            modules=("moe",),
        ),
        Operation(
            "route",
            "memory_bound",
            forward_bytes=x.passes["router_forward"] * fed * moe.num_experts,
            backward_bytes=x.passes["router_backward"] * fed * moe.num_experts,
            modules=("moe",),
        ),
        Operation(
            "permute",
            "memory_bound",
            forward_bytes=x.passes["permute_forward"] * scale * (sent + rows) / 2 * inside,
            backward_bytes=x.passes["permute_backward"] * scale * (sent + rows) / 2 * inside,
            modules=("moe",),
        ),
    ]
    ops += [op for op in row_operations(moe, inside, rows, local, x) if np.any(op.forward_bytes)]
    if moe.latent_size:
        ops.append(
            linear(
                "latent",
                "mlp_gemm",
                fed,
                2 * moe.latent_size,
                h,
                x,
                frozen=frozen,
                kept=e * moe.latent_size * fed,
                modules=("moe",),
            )
        )
    ops += mlp_operations(
        "expert",
        "expert_gemm",
        inside,
        moe.intermediate_size / np.asarray(x.etp),
        rows / local,
        x,
        gated=moe.gated,
        bias=moe.expert_bias,
        groups=local,
        kept_input=x.input_bytes * rows * inside,
        frozen=frozen,
        moe=True,
    )
    if moe.shared_intermediate_size:
        ops += mlp_operations(
            "shared",
            "mlp_gemm",
            h,
            moe.shared_intermediate_size / np.asarray(x.tp),
            x.tokens,
            x,
            gated=moe.gated,
            bias=False,
            frozen=frozen,
        )
    return ops
