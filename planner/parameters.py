"""Parameters counted to the last bias, by part and by how each part shards.

A part is ``tp`` (split by tensor parallelism), ``kv`` (split by it, but never finer than one
key-value head), ``replicated`` (whole on every tensor-parallel rank: norms, router, latent
projections, biases after a row-parallel matmul) or ``expert`` (split over expert and
expert-tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

SHARDS = ("tp", "kv", "replicated", "expert")


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one part of a layer; `shard` is one of `SHARDS`."""

    count: int
    shard: str


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer kind, by how they shard.

    `dense_tp` is split by tp; `dense_kv` by tp but not beyond `num_key_value_heads`;
    `dense_replicated` is whole on every tp rank; `expert` counts all experts of the layer.
    """

    parts: dict[str, Part]
    num_key_value_heads: int

    def _sum(self, shard: str) -> int:
        return sum(part.count for part in self.parts.values() if part.shard == shard)

    @property
    def dense_tp(self) -> int:
        return self._sum("tp")

    @property
    def dense_kv(self) -> int:
        return self._sum("kv")

    @property
    def dense_replicated(self) -> int:
        return self._sum("replicated")

    @property
    def dense(self) -> int:
        return self.total - self.expert

    @property
    def expert(self) -> int:
        return self._sum("expert")

    @property
    def total(self) -> int:
        return sum(part.count for part in self.parts.values())

    def dense_per_rank(self, tp: Any) -> Any:
        """Parameters outside of the experts on one rank; `tp` is a number or an array.

        n = n_tp / tp + n_kv max(1 / tp, 1 / num_key_value_heads) + n_replicated. Assumes a runtime
        that replicates key-value heads when tp exceeds them.
        """
        degree = np.asarray(tp, dtype=np.float64)
        share = np.maximum(1.0 / degree, 1.0 / max(1, self.num_key_value_heads))
        return self.dense_tp / degree + self.dense_kv * share + self.dense_replicated

    def expert_per_rank(self, ep: Any, etp: Any = 1) -> Any:
        """Expert parameters on one rank: n / (ep etp)."""
        return self.expert / (np.asarray(ep, dtype=np.float64) * np.asarray(etp))


def _gqa_parts(spec: AttentionSpec, hidden: int) -> dict[str, Part]:
    q = spec.num_attention_heads * spec.head_dim
    k = spec.num_key_value_heads * spec.head_dim
    v = spec.num_key_value_heads * spec.v_dim
    out = spec.num_attention_heads * spec.v_dim
    parts = {
        "query": Part(hidden * q * (2 if spec.gate else 1), "tp"),
        "key_value": Part(hidden * (k + v), "kv"),
        "output": Part(out * hidden, "tp"),
    }
    if spec.qkv_bias:
        parts["query_bias"] = Part(q * (2 if spec.gate else 1), "tp")
        parts["key_value_bias"] = Part(k + v, "kv")
    if spec.out_bias:
        parts["output_bias"] = Part(hidden, "replicated")
    if spec.qk_norm == "head":
        parts["qk_norm"] = Part(2 * spec.head_dim, "replicated")
    elif spec.qk_norm == "full":
        parts["qk_norm"] = Part(q + k, "replicated")
    if spec.sinks:
        parts["sinks"] = Part(spec.num_attention_heads, "tp")
    return parts


def _mla_parts(spec: AttentionSpec, hidden: int) -> dict[str, Part]:
    heads, rope = spec.num_attention_heads, spec.qk_rope_head_dim
    nope = spec.head_dim - rope
    parts: dict[str, Part] = {}
    if spec.q_lora_rank:
        parts["query_down"] = Part((hidden + 1) * spec.q_lora_rank, "replicated")  # with its norm
        parts["query"] = Part(spec.q_lora_rank * heads * spec.head_dim, "tp")
    else:
        parts["query"] = Part(hidden * heads * spec.head_dim, "tp")
    parts["key_value_down"] = Part(
        hidden * (spec.kv_lora_rank + rope) + spec.kv_lora_rank, "replicated"
    )
    parts["key_value"] = Part(spec.kv_lora_rank * heads * (nope + spec.v_dim), "tp")
    parts["output"] = Part(heads * spec.v_dim * hidden, "tp")
    if spec.qkv_bias:
        parts["down_bias"] = Part(spec.q_lora_rank + spec.kv_lora_rank + rope, "replicated")
    if spec.out_bias:
        parts["output_bias"] = Part(hidden, "replicated")
    if spec.index_n_heads:
        indexer = spec.index_n_heads * (spec.q_lora_rank * spec.index_head_dim + hidden)
        key = (hidden + 2) * spec.index_head_dim  # one key head, and its layer norm
        parts["indexer"] = Part(indexer + key, "replicated")
    return parts


def _delta_net_parts(spec: AttentionSpec, hidden: int) -> dict[str, Part]:
    keys = spec.num_key_value_heads * spec.head_dim
    values = spec.num_attention_heads * spec.v_dim
    return {
        "qkvz": Part(hidden * 2 * (keys + values), "tp"),
        "beta_decay": Part(hidden * 2 * spec.num_attention_heads, "tp"),
        "convolution": Part((2 * keys + values) * spec.conv_kernel, "tp"),
        "decay": Part(2 * spec.num_attention_heads, "tp"),  # A_log and dt_bias
        "gated_norm": Part(spec.v_dim, "replicated"),
        "output": Part(values * hidden, "tp"),
    }


def _mamba2_parts(spec: AttentionSpec, hidden: int) -> dict[str, Part]:
    inner = spec.num_attention_heads * spec.v_dim
    state = spec.num_key_value_heads * spec.head_dim
    channels = inner + 2 * state
    return {
        "in_projection": Part(hidden * (2 * inner + spec.num_attention_heads), "tp"),
        "state_projection": Part(hidden * 2 * state, "kv"),
        "convolution": Part(channels * (spec.conv_kernel + int(spec.qkv_bias)), "tp"),
        "decay": Part(3 * spec.num_attention_heads, "tp"),  # A_log, D and dt_bias
        "gated_norm": Part(inner, "tp"),
        "output": Part(inner * hidden, "tp"),
    }


ATTENTION_PARTS: dict[str, Callable[[AttentionSpec, int], dict[str, Part]]] = {
    "gqa": _gqa_parts,
    "mla": _mla_parts,
    "gated-delta-net": _delta_net_parts,
    "mamba2": _mamba2_parts,
    "none": lambda spec, hidden: {},
}


def _mlp_parts(mlp: MlpSpec, hidden: int) -> dict[str, Part]:
    width = mlp.intermediate_size
    up = 2 if mlp.gated else 1
    parts = {"mlp": Part((up + 1) * hidden * width, "tp")}
    if mlp.bias:
        parts["mlp_up_bias"] = Part(up * width, "tp")
        parts["mlp_down_bias"] = Part(hidden, "replicated")
    return parts


def expert_parameters(moe: MoeSpec, hidden_size: int) -> int:
    """Parameters of one routed expert: its two or three matrices and their biases."""
    inside = moe.latent_size or hidden_size
    up = 2 if moe.gated else 1
    bias = up * moe.intermediate_size + inside if moe.expert_bias else 0
    return (up + 1) * inside * moe.intermediate_size + bias


def _moe_parts(moe: MoeSpec, hidden: int) -> dict[str, Part]:
    up = 2 if moe.gated else 1
    router = moe.num_experts * (hidden + int(moe.router_bias))
    parts = {
        "router": Part(router, "replicated"),
        "experts": Part(moe.num_experts * expert_parameters(moe, hidden), "expert"),
    }
    if moe.latent_size:
        parts["latent"] = Part(2 * hidden * moe.latent_size, "replicated")
    if moe.shared_intermediate_size:
        parts["shared_expert"] = Part((up + 1) * hidden * moe.shared_intermediate_size, "tp")
    if moe.shared_gate:
        parts["shared_gate"] = Part(hidden, "replicated")
    return parts


def _norm_width(model: ModelSpec) -> int:
    """Parameters of one norm over the residual stream."""
    if model.norm == "nonparametric":
        return 0
    return model.hidden_size * (2 if model.norm_bias else 1)


def parameters_of(layer: LayerSpec, hidden_size: int, norm_params: int) -> LayerParameters:
    """Parameters of one layer of width `hidden_size` whose norms have `norm_params` each."""
    spec = layer.attention
    parts = dict(ATTENTION_PARTS[spec.kind](spec, hidden_size))
    if layer.mlp is not None:
        parts |= _mlp_parts(layer.mlp, hidden_size)
    if layer.moe is not None:
        parts |= _moe_parts(layer.moe, hidden_size)
    parts["norms"] = Part(layer.norms * norm_params, "replicated")
    return LayerParameters(parts, spec.num_key_value_heads)


def layer_parameters(model: ModelSpec, kind: int | LayerSpec) -> LayerParameters:
    """Parameters of one layer of `kind`, an index into ``model.kinds`` or one of them.

    Llama-3-8B: query and output 4096 x 4096 each, key and value 4096 x 1024 each, three matrices
    of 4096 x 14336 and two norms: 218,112,000.

    >>> from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
    >>> layer = LayerSpec(AttentionSpec(32, 8, 128), MlpSpec(14336))
    >>> model = ModelSpec("8b", 4096, 128256, (layer,), (0,) * 32)
    >>> layer_parameters(model, 0).total
    218112000
    """
    layer = model.kinds[kind] if isinstance(kind, int) else kind
    return parameters_of(layer, model.hidden_size, _norm_width(model))


def padded_vocab(model: ModelSpec, multiple: int, tp: Any = 1) -> Any:
    """Vocabulary rounded up to a multiple of ``multiple * tp``; `tp` is a number or an array.

    >>> from planner.specs import ModelSpec
    >>> int(padded_vocab(ModelSpec("gpt-2", 1600, 50257, (), ()), 128, 8))
    51200
    """
    block = np.asarray(multiple, dtype=np.int64) * np.asarray(tp, dtype=np.int64)
    return -(-model.vocab_size // block) * block


def embedding_parameters(model: ModelSpec, vocab_size: Any = None) -> Any:
    """Token embedding, learned positions and what goes with them; `vocab_size` may be padded."""
    vocab = model.vocab_size if vocab_size is None else vocab_size
    positions = model.max_position_embeddings if model.positions == "learned" else 0
    return (vocab + positions) * model.hidden_size + model.extra_params


def head_parameters(model: ModelSpec, vocab_size: Any = None) -> Any:
    """The output projection's own parameters: none where it is tied, but for its bias."""
    if not model.lm_head:
        return 0
    vocab = model.vocab_size if vocab_size is None else vocab_size
    matrix = 0 if model.tie_word_embeddings else vocab * model.hidden_size
    return matrix + (vocab if model.lm_head_bias else 0)


def final_norm_parameters(model: ModelSpec) -> int:
    return _norm_width(model) if model.final_norm else 0


def tower_parameters(model: ModelSpec) -> int:
    """Vision tower with its embedding and projector; 0 where there is none."""
    tower = model.tower
    if tower is None:
        return 0
    norm = tower.hidden_size * (2 if tower.norm_bias else 1)
    layer = parameters_of(tower.layer, tower.hidden_size, norm).total
    return tower.num_hidden_layers * layer + tower.other_params


def layers_parameters(model: ModelSpec) -> int:
    """All layers of the decoder."""
    totals = [layer_parameters(model, kind).total for kind in range(len(model.kinds))]
    return sum(totals[kind] for kind in model.layer_kinds)


def total_parameters(model: ModelSpec) -> int:
    """All trained parameters, tied ones once, multi-token-prediction layers left out."""
    return int(
        embedding_parameters(model)
        + layers_parameters(model)
        + final_norm_parameters(model)
        + head_parameters(model)
        + tower_parameters(model)
    )


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token passes: all but the routed experts that it is not sent to.

    DeepSeek's convention: shared experts, embedding and output projection are all counted.
    """
    idle = 0
    for kind in model.layer_kinds:
        moe = model.kinds[kind].moe
        if moe is not None:
            unused = moe.num_experts - moe.num_experts_per_tok
            idle += unused * expert_parameters(moe, model.hidden_size)
    return total_parameters(model) - idle
