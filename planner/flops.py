"""Operations of a layer: shapes of its matrix products, bytes moved, bytes kept for backward.

Symbols: b micro-batch, s sequence, t tp, c cp, T = b s / c tokens of this rank, h hidden width, f
MLP width, a heads, d head width. Activations are two bytes an element, four in fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.feed_forward import mlp_operations, moe_operations
from planner.linear_attention import indexer_operations, mixer_operations
from planner.operations import (
    AttentionCall,
    Operation,
    Shard,
    linear,
    local_kv_heads,
    norm,
    residual,
)
from planner.specs import AttentionSpec, LayerSpec, ModelSpec


def attention_operations(
    model: ModelSpec, spec: AttentionSpec, x: Shard, cp_kind: Any, frozen: bool
) -> list[Operation]:
    """Operations from the normalised input to the output projection.

    Kept bytes per token: q, k, v after the rotation; the attention output (the projection's input,
    kept again in one byte under fp8); softmax statistics, or the scores where attention is unfused
    (2 scores, 2 probabilities, 1 mask: 5 a s bytes per token).

    References: Korthikanti2022 section 4.1; Dao2023.
    """
    if spec.kind not in ("gqa", "mla"):
        return mixer_operations(model, spec, x, frozen)
    h, tokens, e = model.hidden_size, x.tokens, x.element_bytes
    heads = spec.num_attention_heads / np.asarray(x.tp)
    kv = local_kv_heads(spec.num_key_value_heads, x.tp) if spec.kind == "gqa" else heads
    d, dv = spec.head_dim, spec.v_dim
    q_width, k_width, v_width = heads * d, kv * d, kv * dv
    ops: list[Operation] = []
    up = ("mla_up_projection",)
    if spec.kind == "mla":
        latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        if spec.q_lora_rank:
            ops.append(
                linear(
                    "q_down",
                    "attention_gemm",
                    x.token_rows,
                    spec.q_lora_rank,
                    h,
                    x,
                    kept=2 * e * spec.q_lora_rank * x.token_rows,
                    frozen=frozen,
                )
            )
            ops.append(norm("q_latent_norm", spec.q_lora_rank, x.token_rows, x, keeps_output=False))
            ops.append(
                linear(
                    "q_up",
                    "attention_gemm",
                    tokens,
                    q_width,
                    spec.q_lora_rank,
                    x,
                    kept=e * q_width * tokens,
                    modules=up,
                    frozen=frozen,
                )
            )
        else:
            ops.append(
                linear(
                    "q",
                    "attention_gemm",
                    tokens,
                    q_width,
                    h,
                    x,
                    kept=e * q_width * tokens,
                    frozen=frozen,
                )
            )
        ops.append(
            linear(
                "kv_down",
                "attention_gemm",
                x.token_rows,
                latent,
                h,
                x,
                kept=2 * e * latent * x.token_rows,
                frozen=frozen,
            )
        )
        ops.append(norm("kv_latent_norm", spec.kv_lora_rank, x.token_rows, x, keeps_output=False))
        nope = d - spec.qk_rope_head_dim
        ops.append(
            linear(
                "kv_up",
                "attention_gemm",
                tokens,
                heads * (nope + dv),
                spec.kv_lora_rank,
                x,
                kept=e * (k_width + v_width) * tokens,
                modules=up,
                frozen=frozen,
            )
        )
    else:
        width = q_width + k_width + v_width + (q_width if spec.gate else 0)
        ops.append(
            linear(
                "qkv",
                "attention_gemm",
                tokens,
                width,
                h,
                x,
                kept=e * width * tokens,
                bias=spec.qkv_bias,
                frozen=frozen,
            )
        )
    if spec.qk_norm != "none":
        ops.append(norm("qk_norm", 1, (q_width + k_width) * tokens, x, keeps_output=False))
    if x.passes["layout_backward"] and spec.kind == "gqa":
        moved = x.passes["layout_backward"] * e / 2 * (q_width + k_width + v_width) * tokens
        ops.append(Operation("layout", "memory_bound", backward_bytes=moved))
    if model.positions == "rotary":
        rotated = q_width + k_width
        if spec.kind == "mla":
            rotated = (
                heads + 1
            ) * spec.qk_rope_head_dim + k_width  # rotate, then lay out k per head
        ops.append(
            Operation(
                "rotary",
                "memory_bound",
                forward_bytes=x.passes["rotary_forward"] * e / 2 * rotated * tokens,
                backward_bytes=x.passes["rotary_backward"] * e / 2 * rotated * tokens,
                kept_bytes=x.kept_extra["rotary"] * rotated * tokens,
                modules=("norm",),
            )
        )
    if spec.index_n_heads:
        ops += indexer_operations(model, spec, x, frozen)
    ops.append(core_attention(spec, x, heads, kv, cp_kind))
    out_in = heads * dv
    kept_out = (e + (1.0 if x.quantized else 0.0)) * out_in * tokens
    ops.append(
        linear(
            "out",
            "attention_gemm",
            tokens,
            h,
            out_in,
            x,
            kept=kept_out,
            bias=spec.out_bias,
            frozen=frozen,
        )
    )
    return ops


def unfused_softmax(micro_batch: Any, heads: Any) -> Any:
    """Whether Megatron's fused causal softmax refuses: it wants (b a / t) % 4 == 0.

    Otherwise scale, mask, casts and softmax run one by one: more passes and more launches.

    >>> bool(unfused_softmax(1, 2)), bool(unfused_softmax(2, 2))
    (True, False)
    """
    return np.asarray(micro_batch * heads) % 4 != 0


def core_attention(spec: AttentionSpec, x: Shard, heads: Any, kv: Any, cp_kind: Any) -> Operation:
    """The attention kernel on this rank's share of the sequence.

    Ring and all-gather context parallelism keep s / c query rows against all s keys, load-balanced;
    Ulysses trades that for a / c heads over the whole sequence. FLOPs are equal.
    """
    ulysses = np.asarray(cp_kind) == 2
    cp = np.asarray(x.cp)
    rows = np.where(ulysses, x.seq_len, x.seq_len / cp)
    local = np.where(ulysses, heads / cp, heads)
    call = AttentionCall(
        x.micro_batch,
        local,
        np.minimum(kv, local),
        rows,
        x.seq_len,
        spec.head_dim,
        spec.v_dim,
        spec.causal,
        spec.index_topk or spec.window,
    )
    stats = 4.0 * heads * x.tokens
    if x.flash:
        return Operation(
            "core_attention",
            "attention_core",
            attention=call,
            kept_bytes=stats,
            modules=("core_attention",),
        )
    scores = x.micro_batch * local * rows * x.seq_len
    scale = x.element_bytes / 2
    slow = unfused_softmax(x.micro_batch, heads)
    forward = x.passes["scores_forward"] + slow * x.passes["scores_unfused_softmax_forward"]
    backward = x.passes["scores_backward"] + slow * x.passes["scores_unfused_softmax_backward"]
    kept = (2 + 2 + 1 if x.dropout else 2) * scale
    return Operation(
        "core_attention",
        "attention_core",
        attention=call,
        forward_bytes=forward * scale * scores,
        backward_bytes=backward * scale * scores,
        kept_bytes=kept * scores,
        modules=("core_attention",),
    )


def layer_operations(
    model: ModelSpec, kind: LayerSpec, x: Shard, *, cp_kind: Any = 0, frozen: bool = False
) -> list[Operation]:
    """All operations of one layer, in order of the forward pass.

    The residual stream is kept at the layer's input (``block_input``) and before the second norm.
    """
    h = model.hidden_size
    ops = [Operation("block_input", "memory_bound", kept_bytes=x.element_bytes * h * x.token_rows)]
    ops.append(norm("input_norm", h, x.token_rows, x))
    ops += attention_operations(model, kind.attention, x, cp_kind, frozen)
    two_streams = not kind.parallel
    if two_streams:
        ops.append(residual("attention_residual", h, x, kept=True))
        ops.append(norm("post_attention_norm", h, x.token_rows, x))
    for extra in range(max(0, kind.norms - (2 if two_streams else 1))):
        ops.append(norm(f"extra_norm_{extra}", h, x.token_rows, x))
    if kind.mlp is not None:
        width = kind.mlp.intermediate_size / np.asarray(x.tp)
        ops += mlp_operations(
            "mlp",
            "mlp_gemm",
            h,
            width,
            x.tokens,
            x,
            gated=kind.mlp.gated,
            bias=kind.mlp.bias,
            frozen=frozen,
        )
    if kind.moe is not None:
        ops += moe_operations(model, kind.moe, x, frozen)
    ops.append(residual("mlp_residual", h, x, kept=False))
    if x.kept_extra["gathered"]:
        blocks = 1 if kind.parallel else 2
        # In place of each rank's part, which the norm does not need.
        kept = x.kept_extra["gathered"] * blocks * h * x.tokens * (1.0 - 1.0 / np.asarray(x.tp))
        ops.append(Operation("gathered_inputs", "memory_bound", kept_bytes=kept))
    return ops


def head_operations(model: ModelSpec, x: Shard, padded_vocab: Any) -> list[Operation]:
    """Final norm, logits and loss on the last stage; logits stay in bf16 under fp8."""
    if not model.lm_head:
        return [norm("final_norm", model.hidden_size, x.token_rows, x)]
    vocab = padded_vocab / np.asarray(x.tp)
    return [
        norm("final_norm", model.hidden_size, x.token_rows, x),
        linear("logits", "head", x.tokens, vocab, model.hidden_size, x, precision="head"),
        Operation(
            "loss",
            "head",
            forward_bytes=x.passes["loss"] / 2 * x.tokens * vocab,
            backward_bytes=x.passes["loss"] / 2 * x.tokens * vocab,
        ),
    ]


def embedding_operations(model: ModelSpec, x: Shard) -> list[Operation]:
    """Token (and learned position) lookup: read a row, write a row; backward adds into a row."""
    size = model.hidden_size * x.tokens * x.element_bytes
    rows = 2 if model.positions == "learned" else 1
    kept = (x.element_bytes + 1.0) * model.hidden_size * x.token_rows if x.dropout else 0.0
    return [
        Operation(
            "embedding",
            "head",
            forward_bytes=(1 + rows) * size,
            backward_bytes=(1 + 2 * rows) * size,
            kept_bytes=kept,
        )
    ]
