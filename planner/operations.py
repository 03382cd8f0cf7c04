"""Operation: what one rank does for a micro-batch, as shapes and bytes, before anyone times it.

`planner.flops` lists the operations of a layer, `planner.layer` times them with `planner.roofline`,
`planner.parallel.recompute` says what is kept. All sizes broadcast over a table of layouts.

Symbols: b micro-batch, s sequence, t tp, c cp, T = b s / c tokens of this rank, h hidden width, f
MLP width, a heads, d head width. Activations are two bytes an element, four in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.layout import Layout
from planner.runtime import Runtime
from planner.specs import ModelSpec, TrainSpec

QUANTIZED = ("fp8", "fp4")


@dataclass(frozen=True, slots=True)
class Gemm:
    """C[m, n] = A[m, k] B[k, n], `groups` times in a launch; `precision` '' is that of training."""

    m: Any
    n: Any
    k: Any
    groups: Any = 1
    precision: str = ""

    @property
    def flops(self) -> Any:
        """Multiply-adds times two.

        >>> Gemm(m=4, n=8, k=16).flops
        1024
        """
        return 2 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention kernel: softmax(Q K^T) V for `batch` sequences and `heads` local heads."""

    batch: Any
    heads: Any
    kv_heads: Any
    seq_q: Any
    seq_kv: Any
    head_dim: int
    v_head_dim: int
    causal: bool
    window: int | None

    @property
    def flops(self) -> Any:
        """Forward FLOPs, 2 b a s_q s_kv (d + d_v), halved where causal, cut by the window.

        >>> float(AttentionCall(1, 1, 1, 8, 8, 4, 4, False, None).flops)
        1024.0
        """
        pairs = attended_pairs(self.seq_q, self.seq_kv, self.causal, self.window)
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.v_head_dim)


def attended_pairs(seq_q: Any, seq_kv: Any, causal: bool, window: int | None) -> Any:
    """Query-key pairs that a query attends to, per head and sequence.

    Full s_q s_kv; causal half of it; a window w < s leaves w (s - w / 2) of the causal triangle,
    and 2 w s without causality. Under context parallelism s_q = s / c of balanced rows, so the
    share is the same. Edge terms of order s are left out, as published FLOP counts do.

    >>> float(attended_pairs(1024, 1024, True, None))
    524288.0
    >>> float(attended_pairs(1024, 1024, True, 512))
    393216.0
    """
    full = np.multiply(seq_q, seq_kv) * (0.5 if causal else 1.0)
    if window is None:
        return full
    w = np.minimum(window, seq_kv)
    share = w * (seq_kv - w / 2) if causal else np.minimum(2 * w, seq_kv) * seq_kv
    return np.minimum(full, share * np.divide(seq_q, seq_kv))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank and micro-batch.

    Attributes
    ----------
    part
        Breakdown category: attention_gemm, attention_core, mlp_gemm, expert_gemm, router, head,
        memory_bound.
    forward_bytes, backward_bytes
        HBM traffic of memory-bound work that belongs to it.
    kept_bytes
        Saved from forward to backward.
    modules
        Names under which a selective recompute policy may drop and redo it.
    """

    name: str
    part: str
    gemm: Gemm | None = None
    attention: AttentionCall | None = None
    forward_bytes: Any = 0.0
    backward_bytes: Any = 0.0
    kept_bytes: Any = 0.0
    modules: tuple[str, ...] = ()
    frozen: bool = False  # no weight gradient (LoRA base)

    @property
    def flops(self) -> Any:
        """Forward FLOPs of matrix products and attention."""
        total: Any = 0.0
        if self.gemm is not None:
            total = total + self.gemm.flops
        if self.attention is not None:
            total = total + self.attention.flops
        return total


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank sees of a micro-batch.

    `casts_weights`: fp8 weights are cast anew in every pass, not once a step.
    `tokens` T = b s / c; `token_rows` T / t under sequence parallelism, else T; `element_bytes` of
    an activation, `input_bytes` of a saved GEMM input (1 where GEMMs run in fp8).
    """

    tokens: Any
    token_rows: Any
    micro_batch: Any
    seq_len: int
    tp: Any
    cp: Any
    ep: Any
    etp: Any
    element_bytes: float
    input_bytes: float
    dropout: bool
    flash: bool
    imbalance: float
    quantized: bool
    casts_weights: bool
    passes: Mapping[str, float]
    kept_extra: Mapping[str, float]


def shard_of(
    layout: Layout, model: ModelSpec, train: TrainSpec, runtime: Runtime, *, flash: bool
) -> Shard:
    """The share of a micro-batch that one rank of `layout` works on."""
    tokens = layout.micro_batch * train.seq_len / np.asarray(layout.cp)
    split = np.asarray(layout.tp) if runtime.sequence_parallel else np.ones_like(layout.tp)
    element = 4.0 if train.precision == "fp32" else 2.0
    return Shard(
        tokens=tokens,
        token_rows=tokens / split,
        micro_batch=layout.micro_batch,
        seq_len=train.seq_len,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        element_bytes=element,
        input_bytes=1.0 if train.precision in QUANTIZED else element,
        dropout=model.dropout if train.dropout is None else train.dropout,
        flash=flash,
        imbalance=train.router_imbalance,
        quantized=train.precision in QUANTIZED,
        casts_weights=runtime.weight_shard_is_master,
        passes=runtime.pass_bytes,
        kept_extra=runtime.kept_extra,
    )


def linear(
    name: str,
    part: str,
    m: Any,
    n: Any,
    k: Any,
    x: Shard,
    *,
    kept: Any = 0.0,
    modules: tuple[str, ...] = (),
    bias: bool = False,
    groups: Any = 1,
    precision: str = "",
    frozen: bool = False,
) -> Operation:
    """A linear layer: its product, the casts around it in fp8, the bias gradient's extra read."""
    quantized = x.quantized and not precision
    scale = x.element_bytes / 2
    forward = x.passes["fp8_cast_forward"] * groups * m * k if quantized else 0.0
    backward = x.passes["fp8_cast_backward"] * groups * m * n if quantized else 0.0
    if quantized and x.casts_weights:
        forward = forward + x.passes["fp8_weight_cast"] * groups * n * k
    if bias:
        backward = backward + x.passes["bias_backward"] * scale * groups * m * n
    return Operation(
        name,
        part,
        gemm=Gemm(m, n, k, groups, precision),
        forward_bytes=forward,
        backward_bytes=backward,
        kept_bytes=kept,
        modules=modules,
        frozen=frozen,
    )


def norm(name: str, width: Any, rows: Any, x: Shard, *, keeps_output: bool = True) -> Operation:
    """A norm: one fused pass each way; its output, the next product's input, may be kept."""
    scale = x.element_bytes / 2
    return Operation(
        name,
        "memory_bound",
        forward_bytes=x.passes["norm_forward"] * scale * width * rows,
        backward_bytes=x.passes["norm_backward"] * scale * width * rows,
        kept_bytes=(x.input_bytes + x.kept_extra["norm"]) * width * rows if keeps_output else 0.0,
        modules=("norm",),
    )


def residual(name: str, hidden_size: int, x: Shard, *, kept: bool) -> Operation:
    """Residual addition with dropout where the model has it; keeps the stream, and the mask."""
    scale = x.element_bytes / 2
    extra = x.dropout
    forward = x.passes["residual_forward"] + (x.passes["dropout_forward"] if extra else 0.0)
    backward = x.passes["residual_backward"] + (x.passes["dropout_backward"] if extra else 0.0)
    size = hidden_size * x.token_rows
    return Operation(
        name,
        "memory_bound",
        forward_bytes=forward * scale * size,
        backward_bytes=backward * scale * size,
        kept_bytes=(x.element_bytes if kept else 0.0) * size + (1.0 if extra else 0.0) * size,
    )


def local_kv_heads(kv_heads: int, tp: Any) -> Any:
    """Key-value heads on one rank: split while they last, then one each (replicated)."""
    return np.maximum(kv_heads / np.asarray(tp), 1.0)
