"""Model FLOPs of one token: what the mathematics of the model needs, whatever runs it.

Multiplications and additions count one each. Recomputation, padding and softmax do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.parameters import expert_parameters, layer_parameters
from planner.specs import AttentionSpec, LayerSpec, ModelSpec

NOT_IN_GEMMS = (
    "query_bias", "key_value_bias", "output_bias", "down_bias", "qk_norm", "sinks", "norms",
    "mlp_up_bias", "mlp_down_bias", "decay", "gated_norm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs per token by part; the backward pass needs twice those of the forward pass."""

    forward: dict[str, float]

    @property
    def forward_flops(self) -> float:
        return sum(self.forward.values())

    @property
    def total_flops(self) -> float:
        """Forward and backward."""
        return 3.0 * self.forward_flops


def mean_attended_keys(
    seq_len: int, window: int | None = None, *, causal: bool = True, chunked: bool = False
) -> float:
    """Keys that a query attends to, averaged over the sequence [tokens].

    Causal: the i-th query sees min(i, w) keys, i = 1 ... s. Chunked: causal inside chunks of w.
    Not causal: s keys, or at most w.

    >>> mean_attended_keys(4)  # (1 + 2 + 3 + 4) / 4
    2.5
    >>> mean_attended_keys(4, 2)  # (1 + 2 + 2 + 2) / 4
    1.75
    >>> mean_attended_keys(4, 2, chunked=True)  # (1 + 2 + 1 + 2) / 4
    1.5
    """
    width = seq_len if window is None else min(window, seq_len)
    if not causal:
        return float(width)
    ramp = width * (width + 1) / 2
    if chunked:
        whole, rest = divmod(seq_len, width)
        return (whole * ramp + rest * (rest + 1) / 2) / seq_len
    return (ramp + (seq_len - width) * width) / seq_len


def score_flops(spec: AttentionSpec, seq_len: int, *, causal: bool = True) -> float:
    """Forward FLOPs per token of one layer's sequence mixing, without its projections.

    Attention: 2 a (d_qk + d_v) k, with a = heads and k = mean attended keys. Sparse attention:
    k of at most `index_topk`, and the indexer's 2 a_i d_i over all keys. Linear kinds, in their
    recurrent form: 6 a d_k d_v for the delta rule (read, correct, query), 4 a d_k d_v for Mamba-2
    (update, query). The chunked kernels that train them do somewhat more.
    """
    heads, key, value = spec.num_attention_heads, spec.head_dim, spec.v_dim
    if spec.kind == "none":
        return 0.0
    if spec.kind == "gated-delta-net":
        return 6.0 * heads * key * value
    if spec.kind == "mamba2":
        return 4.0 * heads * key * value
    causal = causal and spec.causal
    window = spec.window
    flops = 0.0
    if spec.index_n_heads:
        keys = mean_attended_keys(seq_len, causal=causal)
        flops += 2.0 * spec.index_n_heads * spec.index_head_dim * keys
        window = spec.index_topk
    keys = mean_attended_keys(seq_len, window, causal=causal, chunked=spec.chunked)
    return flops + 2.0 * heads * (key + value) * keys


def layer_forward_flops(
    model: ModelSpec, kind: int | LayerSpec, seq_len: int, *, causal: bool = True
) -> dict[str, float]:
    """Forward FLOPs per token of one layer, by part: projections, scores, mlp, router, experts."""
    layer = model.kinds[kind] if isinstance(kind, int) else kind
    parts = {
        name: part.count
        for name, part in layer_parameters(model, layer).parts.items()
        if name not in NOT_IN_GEMMS
    }
    flops = {"attention_scores": score_flops(layer.attention, seq_len, causal=causal)}
    if layer.moe is not None:
        moe = layer.moe
        one = expert_parameters(moe, model.hidden_size)
        if moe.expert_bias:
            up = 2 if moe.gated else 1
            one -= up * moe.intermediate_size + (moe.latent_size or model.hidden_size)
        del parts["experts"], parts["router"]
        flops["router"] = 2.0 * moe.num_experts * model.hidden_size
        flops["experts"] = 2.0 * moe.num_experts_per_tok * one
        shared = ("latent", "shared_expert", "shared_gate")
        flops["shared_expert"] = 2.0 * sum(parts.pop(name, 0) for name in shared)
    if layer.mlp is not None:
        flops["mlp"] = 2.0 * parts.pop("mlp")
    flops["attention_projections"] = 2.0 * (sum(parts.values()) - _norms_inside(layer.attention))
    return flops


def _norms_inside(spec: AttentionSpec) -> int:
    """Norm weights and the like that parts of latent attention and Mamba count with matrices."""
    if spec.kind == "mla":
        return spec.q_lora_rank + spec.kv_lora_rank + 2 * spec.index_head_dim
    if spec.kind == "mamba2" and spec.qkv_bias:
        inner = spec.num_attention_heads * spec.v_dim
        return inner + 2 * spec.num_key_value_heads * spec.head_dim
    return 0


def model_flops_per_token(model: ModelSpec, seq_len: int, causal: bool = True) -> ModelFlops:
    """Model FLOPs of one token of a sequence of `seq_len` tokens [FLOP], by part.

    F = sum over layers of 2 x (parameters of matrices a token passes) + scores, plus 2 h V for the
    logits. `causal=False` counts every query against every key, as PaLM's convention does. The
    vision tower is left out: its work is per image, not per token.

    References: Narayanan2021, Korthikanti2022.

    One layer, h = 8, two heads of 4, plain MLP of 32, V = 10, s = 4: projections
    2 x 4 x 64 = 512, scores 2 x 2 x 8 x 2.5 = 80, MLP 2 x 2 x 8 x 32 = 1024, logits 160.

    >>> from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
    >>> layer = LayerSpec(AttentionSpec(2, 2, 4), MlpSpec(32, gated=False))
    >>> flops = model_flops_per_token(ModelSpec("tiny", 8, 10, (layer,), (0,)), 4)
    >>> flops.forward_flops, flops.total_flops
    (1776.0, 5328.0)
    """
    totals: dict[str, float] = {}
    for kind in range(len(model.kinds)):
        layers = model.layer_kinds.count(kind)
        for part, flops in layer_forward_flops(model, kind, seq_len, causal=causal).items():
            totals[part] = totals.get(part, 0.0) + layers * flops
    if model.lm_head:
        totals["logits"] = 2.0 * model.hidden_size * model.vocab_size
    return ModelFlops(totals)
