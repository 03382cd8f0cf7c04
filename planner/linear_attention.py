"""Operations of layers that mix the sequence without softmax attention: gated delta net, Mamba-2.

Both train in chunks of `CHUNK` tokens: dense products inside a chunk, a state of d_k x d_v per head
carried between chunks. The chunk products are priced as grouped products of that shape; no measured
curve of these kernels is shipped, so layers of these kinds are rougher than attention.

References: Dao2024 (Mamba-2), Yang2024 (gated delta net).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.operations import (
    AttentionCall,
    Gemm,
    Operation,
    Shard,
    linear,
    local_kv_heads,
    norm,
)
from planner.specs import AttentionSpec, ModelSpec

CHUNK = 64  # tokens, the size that both published kernels use by default
PRODUCTS = {
    "gated-delta-net": 6,
    "mamba2": 4,
}  # d_k x d_v or chunk-wide products per chunk and head


def mixer_operations(
    model: ModelSpec, spec: AttentionSpec, x: Shard, frozen: bool
) -> list[Operation]:
    """Projections, short convolution, chunked scan, gated norm, output projection."""
    if spec.kind == "none":
        return []
    h, e, tp = model.hidden_size, x.element_bytes, np.asarray(x.tp)
    values = spec.num_attention_heads * spec.v_dim / tp
    heads = spec.num_attention_heads / tp
    groups = local_kv_heads(spec.num_key_value_heads, tp) * spec.head_dim
    per_head = 2 if spec.kind == "gated-delta-net" else 1
    width = 2 * groups + 2 * values + per_head * heads
    mixed = 2 * groups + values
    scale = e / 2
    return [
        linear(
            "mixer_in",
            "attention_gemm",
            x.tokens,
            width,
            h,
            x,
            kept=e * width * x.tokens,
            frozen=frozen,
        ),
        Operation(
            "convolution",
            "memory_bound",
            forward_bytes=4 * scale * mixed * x.tokens,
            backward_bytes=8 * scale * mixed * x.tokens,
            kept_bytes=e * mixed * x.tokens,
            modules=("norm",),
        ),
        scan(spec, x, heads),
        norm("gated_norm", values, x.tokens, x, keeps_output=False),
        linear(
            "out",
            "attention_gemm",
            x.tokens,
            h,
            values,
            x,
            kept=e * values * x.tokens,
            frozen=frozen,
        ),
    ]


def scan(spec: AttentionSpec, x: Shard, heads: Any) -> Operation:
    """The chunked scan: `PRODUCTS` products of (chunk, d_k, d_v) per chunk and head.

    It has no weights, so backward is twice forward on the inputs alone.
    """
    count = PRODUCTS[spec.kind] * heads * x.tokens / CHUNK
    states = heads * x.tokens / CHUNK * spec.head_dim * spec.v_dim
    moved = x.element_bytes * heads * x.tokens * (2 * spec.head_dim + 2 * spec.v_dim) + 4.0 * states
    return Operation(
        "core_attention",
        "attention_core",
        gemm=Gemm(CHUNK, spec.v_dim, spec.head_dim, count),
        forward_bytes=moved,
        backward_bytes=2 * moved,
        kept_bytes=4.0 * states,
        modules=("core_attention",),
    )


def indexer_operations(
    model: ModelSpec, spec: AttentionSpec, x: Shard, frozen: bool
) -> list[Operation]:
    """Indexer of sparse attention: projections, and scores of every query against every key.

    References: DeepSeek-V3.2 (lightning indexer); replicated over tensor parallel ranks.
    """
    if not spec.index_n_heads:
        return []
    width = spec.index_n_heads * spec.index_head_dim
    source = spec.q_lora_rank or model.hidden_size
    call = AttentionCall(
        x.micro_batch,
        spec.index_n_heads,
        1,
        x.seq_len / np.asarray(x.cp),
        x.seq_len,
        spec.index_head_dim,
        spec.index_head_dim,
        spec.causal,
        None,
    )
    return [
        linear(
            "index_query",
            "attention_gemm",
            x.tokens,
            width,
            source,
            x,
            frozen=frozen,
            kept=x.element_bytes * width * x.tokens,
        ),
        linear(
            "index_key",
            "attention_gemm",
            x.tokens,
            spec.index_head_dim + spec.index_n_heads,
            model.hidden_size,
            x,
            frozen=frozen,
            kept=x.element_bytes * spec.index_head_dim * x.tokens,
        ),
        Operation("index_scores", "attention_core", attention=call),
    ]
