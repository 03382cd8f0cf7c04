"""Mixture-of-experts decoders: Mixtral, Qwen, DeepSeek, GLM, gpt-oss, OLMoE, Grok, Llama-4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.config_fields import MAX_LAYERS, Fields
from planner.families.parts import (
    Parts,
    activation,
    decoder_layers,
    num_layers,
    read_gqa,
    read_moe,
    windows,
)
from planner.specs import AttentionSpec, MlpSpec, MoeSpec


def _parts(
    fields: Fields,
    attention: AttentionSpec,
    blocks: list[MlpSpec | MoeSpec],
    *,
    window: int | None = None,
    sliding: list[bool] | None = None,
    norms: int = 2,
    tie: bool = False,
) -> Parts:
    layers = len(blocks)
    return Parts(
        fields.width("hidden_size"),
        fields.count("vocab_size", low=1),
        decoder_layers(
            attention,
            windows(fields, layers, window, sliding or [window is not None] * layers),
            blocks,
            norms=norms,
        ),
        tie=tie,
    )


def read_mixtral(fields: Fields) -> Parts:
    layers = num_layers(fields)
    moe = read_moe(
        fields,
        experts=["num_local_experts"],
        top_k=["num_experts_per_tok"],
        width="intermediate_size",
    )
    window = fields.width("sliding_window") if fields.has("sliding_window") else None
    attention = read_gqa(fields, fields.width("hidden_size"), kv_needed=True)
    return _parts(fields, attention, [moe] * layers, window=window)


def read_grok(fields: Fields) -> Parts:
    """Grok-1: four norms a layer, tied embeddings."""
    moe = read_moe(
        fields,
        experts=["num_experts", "num_local_experts"],
        top_k=["num_experts_per_tok"],
        width="intermediate_size",
    )
    attention = read_gqa(fields, fields.width("hidden_size"))
    return _parts(fields, attention, [moe] * num_layers(fields), norms=4, tie=True)


def read_olmoe(fields: Fields) -> Parts:
    moe = read_moe(
        fields, experts=["num_experts"], top_k=["num_experts_per_tok"], width="intermediate_size"
    )
    bias = fields.flag("attention_bias", default=False)
    attention = read_gqa(
        fields, fields.width("hidden_size"), qkv_bias=bias, out_bias=bias, qk_norm="full"
    )
    return _parts(fields, attention, [moe] * num_layers(fields))


def read_gpt_oss(fields: Fields) -> Parts:
    """gpt-oss: sinks, biases on attention, router and experts, every other layer slides."""
    layers = num_layers(fields)
    moe = read_moe(
        fields,
        experts=["num_local_experts"],
        top_k=["num_experts_per_tok", "experts_per_token"],
        width="intermediate_size",
        router_bias=True,
        expert_bias=True,
        clamped=True,
    )
    bias = fields.flag("attention_bias", default=True)
    attention = read_gqa(
        fields,
        fields.width("hidden_size"),
        head_dim=64,
        kv_needed=True,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    window = fields.width("sliding_window", default=128)
    sliding = [i % 2 == 0 for i in range(layers)]
    return _parts(fields, attention, [moe] * layers, window=window, sliding=sliding)


def sparse_blocks(fields: Fields, layers: int, moe: MoeSpec) -> list[MlpSpec | MoeSpec]:
    """Qwen's rule: every decoder_sparse_step-th layer is sparse, but those in mlp_only_layers."""
    step = fields.integer("decoder_sparse_step", default=1, high=MAX_LAYERS)
    dense = set(fields.items("mlp_only_layers", int) or [])
    outside = [i for i in dense if not 0 <= i < layers]
    if outside:
        raise fields.refuse("mlp_only_layers", f"layer indices from 0 to {layers - 1}")
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    if all(sparse):
        return [moe] * layers
    mlp = MlpSpec(fields.width("intermediate_size"), activation=activation(fields))
    return [moe if is_sparse else mlp for is_sparse in sparse]


def qwen_moe(fields: Fields) -> MoeSpec:
    """Qwen's experts, with a gated shared expert where its width is not 0."""
    shared = fields.width("shared_expert_intermediate_size", default=0, low=0)
    return read_moe(
        fields,
        experts=["num_experts", "num_local_experts"],
        top_k=["num_experts_per_tok"],
        width="moe_intermediate_size",
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )


def read_qwen_moe(fields: Fields, *, qwen3: bool) -> Parts:
    layers = num_layers(fields)
    if fields.flag("use_sliding_window", default=False):
        raise fields.fail("use_sliding_window=true is not supported for this family of models.")
    bias = fields.flag("attention_bias", default=False)
    attention = read_gqa(
        fields,
        fields.width("hidden_size"),
        kv_needed=True,
        qkv_bias=bias if qwen3 else fields.flag("qkv_bias", default=True),
        out_bias=bias if qwen3 else False,
        qk_norm="head" if qwen3 else "none",
    )
    return _parts(fields, attention, sparse_blocks(fields, layers, qwen_moe(fields)))


def _query_rank(fields: Fields) -> int:
    """null projects the query directly; a config without the key means its class's rank, 1536."""
    if "q_lora_rank" in fields.table and not fields.has("q_lora_rank"):
        return 0
    return fields.width("q_lora_rank", default=1536, low=0)


def read_mla(fields: Fields, *, sparse_attention: bool = False) -> AttentionSpec:
    """Multi-head latent attention, with the indexer of DeepSeek sparse attention where asked."""
    heads = fields.width("num_attention_heads")
    nope = fields.width("qk_nope_head_dim")
    rope = fields.width("qk_rope_head_dim")
    bias = fields.flag("attention_bias", default=False)
    attention = AttentionSpec(
        heads,
        heads,
        nope + rope,
        kind="mla",
        v_head_dim=fields.width("v_head_dim"),
        q_lora_rank=_query_rank(fields),
        kv_lora_rank=fields.width("kv_lora_rank"),
        qk_rope_head_dim=rope,
        qkv_bias=bias,
        out_bias=bias,
    )
    if not sparse_attention:
        return attention
    if not attention.q_lora_rank:
        raise fields.fail("q_lora_rank is missing, the sparse-attention indexer reads that latent.")
    return replace(
        attention,
        index_n_heads=fields.width("index_n_heads"),
        index_head_dim=fields.width("index_head_dim"),
        index_topk=fields.width("index_topk"),
    )


def deepseek_blocks(fields: Fields, layers: int) -> list[MlpSpec | MoeSpec]:
    """DeepSeek's rule: first_k_dense_replace dense layers, then every moe_layer_freq-th sparse."""
    first = fields.integer("first_k_dense_replace", default=0, low=0, high=MAX_LAYERS)
    if first > layers:
        raise fields.fail(
            f"first_k_dense_replace={first} is more than num_hidden_layers={layers}.",
            first_k_dense_replace=first,
            num_hidden_layers=layers,
        )
    every = fields.integer("moe_layer_freq", default=1, high=MAX_LAYERS)
    width = fields.width("moe_intermediate_size")
    moe = read_moe(
        fields,
        experts=["n_routed_experts"],
        top_k=["num_experts_per_tok"],
        width="moe_intermediate_size",
        shared_intermediate_size=width
        * fields.integer("n_shared_experts", default=0, low=0, high=1024),
        aux_free_bias=fields.word("topk_method") == "noaux_tc",
    )
    mlp = None
    blocks: list[MlpSpec | MoeSpec] = []
    for i in range(layers):
        if i >= first and i % every == 0:
            blocks.append(moe)
        else:
            mlp = mlp or MlpSpec(fields.width("intermediate_size"), activation=activation(fields))
            blocks.append(mlp)
    return blocks


def read_deepseek(fields: Fields, *, mla: bool = True, sparse_attention: bool = False) -> Parts:
    if mla:
        attention = read_mla(fields, sparse_attention=sparse_attention)
    else:
        bias = fields.flag("attention_bias", default=False)
        hidden = fields.width("hidden_size")
        attention = read_gqa(fields, hidden, qkv_bias=bias, out_bias=bias)
    parts = _parts(fields, attention, deepseek_blocks(fields, num_layers(fields)))
    return _with_mtp(parts, fields)


def read_glm4_moe(fields: Fields) -> Parts:
    """GLM-4.5: biases on query, key and value only, head norms by use_qk_norm."""
    attention = read_gqa(
        fields,
        fields.width("hidden_size"),
        head_dim=128,
        kv_needed=True,
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
    )
    blocks = [
        replace(block, aux_free_bias=True) if isinstance(block, MoeSpec) else block
        for block in deepseek_blocks(fields, num_layers(fields))
    ]
    return _with_mtp(_parts(fields, attention, blocks), fields)


def _with_mtp(parts: Parts, fields: Fields) -> Parts:
    mtp = fields.integer("num_nextn_predict_layers", default=0, low=0, high=64)
    return replace(parts, more={**parts.more, "mtp_layers": mtp})


def read_llama4(fields: Fields) -> Parts:
    """Llama-4: every interleave_moe_layer_step-th layer sparse, three of four in fixed chunks."""
    layers = num_layers(fields)
    bias = fields.flag("attention_bias", default=False)
    attention = read_gqa(
        fields,
        fields.width("hidden_size"),
        head_dim=128,
        kv_needed=True,
        qkv_bias=bias,
        out_bias=bias,
    )
    step = fields.integer("interleave_moe_layer_step", default=1, high=MAX_LAYERS)
    width = fields.width("intermediate_size")
    moe = read_moe(
        fields,
        experts=["num_local_experts"],
        top_k=["num_experts_per_tok"],
        width="intermediate_size",
        shared_intermediate_size=width,
    )
    sparse = fields.items("moe_layers", int) or list(range(step - 1, layers, step))
    if any(not 0 <= i < layers for i in sparse):
        raise fields.refuse("moe_layers", f"layer indices from 0 to {layers - 1}")
    mlp = None
    blocks: list[MlpSpec | MoeSpec] = [moe] * layers
    for i in set(range(layers)) - set(sparse):
        mlp = mlp or MlpSpec(fields.width("intermediate_size_mlp"))
        blocks[i] = mlp
    every = fields.integer("no_rope_layer_interval", default=4, high=MAX_LAYERS)
    chunked = [(i + 1) % every != 0 for i in range(layers)]
    no_rope = fields.items("no_rope_layers", int)
    if no_rope:  # 1: rotary and chunked, 0: full attention
        if len(no_rope) != layers:
            fields.items("no_rope_layers", int, layers)
        chunked = [bool(flag) for flag in no_rope]
    chunk = 8192
    if "attention_chunk_size" in fields.table:
        if fields.has("attention_chunk_size"):
            chunk = fields.width("attention_chunk_size")
        else:
            chunked = [False] * layers
    attention = replace(attention, chunked=any(chunked))
    return _parts(fields, attention, blocks, window=chunk, sliding=chunked)


READERS: dict[str, Callable[[Fields], Parts]] = {
    "mixtral": read_mixtral,
    "grok-1": read_grok,
    "olmoe": read_olmoe,
    "gpt_oss": read_gpt_oss,
    "qwen2_moe": lambda fields: read_qwen_moe(fields, qwen3=False),
    "qwen3_moe": lambda fields: read_qwen_moe(fields, qwen3=True),
    "qwen3_vl_moe_text": lambda fields: read_qwen_moe(fields, qwen3=True),
    "deepseek": lambda fields: read_deepseek(fields, mla=False),
    "deepseek_v2": read_deepseek,
    "deepseek_v3": read_deepseek,
    "kimi_k2": read_deepseek,
    "deepseek_v32": lambda fields: read_deepseek(fields, sparse_attention=True),
    "glm_moe_dsa": lambda fields: read_deepseek(fields, sparse_attention=True),
    "glm4_moe": read_glm4_moe,
    "llama4_text": read_llama4,
}
