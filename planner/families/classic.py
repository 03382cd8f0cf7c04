"""Decoders of the GPT-3 generation and plain encoders: layer norm, plain MLP, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.config_fields import Fields
from planner.families.parts import (
    Parts,
    activation,
    check_heads,
    decoder_layers,
    head_dim_of,
    num_layers,
)
from planner.specs import AttentionSpec, LayerSpec, MlpSpec


def has_dropout(fields: Fields, *keys: str, default: bool = False) -> bool:
    """Whether any of the dropout rates is above 0; `default` where none is given."""
    given = False
    for key in keys:
        if fields.has(key):
            value = fields.raw(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise fields.refuse(key, "a rate from 0 to 1")
            if not 0 <= value < 1:
                raise fields.refuse(key, "a rate from 0 to 1")
            given = True
            if value > 0:
                return True
    return default and not given


def _parts(
    hidden: int,
    vocab: int,
    layers: int,
    attention: AttentionSpec,
    mlp: MlpSpec,
    *,
    norms: int = 2,
    parallel: bool = False,
    tie: bool = True,
    **more: Any,
) -> Parts:
    return Parts(
        hidden,
        vocab,
        decoder_layers(attention, [None] * layers, [mlp] * layers, norms=norms, parallel=parallel),
        tie=tie,
        more={"norm": "layernorm", "norm_bias": True, **more},
    )


def _heads(fields: Fields, hidden: int, heads: int, kv_heads: int, *, bias: bool) -> AttentionSpec:
    check_heads(fields, hidden, heads, kv_heads)
    head_dim = head_dim_of(fields, hidden, heads)
    return AttentionSpec(heads, kv_heads, head_dim, qkv_bias=bias, out_bias=bias)


def read_gpt2(fields: Fields, *, multi_query: bool = False) -> Parts:
    hidden = fields.width("n_embd", "hidden_size")
    heads = fields.width("n_head", "num_attention_heads")
    if multi_query:
        multi_query = fields.flag("multi_query", default=True)
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields, "n_layer", "num_hidden_layers"),
        _heads(fields, hidden, heads, 1 if multi_query else heads, bias=True),
        MlpSpec(
            fields.width("n_inner", default=4 * hidden),
            gated=False,
            bias=True,
            activation=activation(fields, "gelu_new"),
        ),
        positions="learned",
        max_position_embeddings=fields.count("n_positions", "n_ctx", low=1),
        dropout=has_dropout(fields, "attn_pdrop", "embd_pdrop", "resid_pdrop", default=True),
    )


def read_opt(fields: Fields) -> Parts:
    hidden = fields.width("hidden_size")
    heads = fields.width("num_attention_heads")
    projected = fields.width("word_embed_proj_dim", default=hidden)
    if projected != hidden:
        raise fields.fail(
            f"word_embed_proj_dim={projected} differs from hidden_size={hidden}; embeddings that "
            "are projected to the hidden size are not supported.",
            word_embed_proj_dim=projected,
            hidden_size=hidden,
        )
    if not fields.flag("do_layer_norm_before", default=True):
        raise fields.fail("do_layer_norm_before=false (norms after each block) is not supported.")
    bias = fields.flag("enable_bias", default=True)
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields),
        _heads(fields, hidden, heads, heads, bias=bias),
        MlpSpec(fields.width("ffn_dim"), gated=False, bias=bias, activation="relu"),
        positions="learned",
        max_position_embeddings=fields.count("max_position_embeddings", low=1),
        dropout=has_dropout(fields, "dropout", "attention_dropout", default=True),
        extra_params=2 * hidden,
        extra_params_note="two rows before the first learned position",
    )


def read_bloom(fields: Fields) -> Parts:
    hidden = fields.width("hidden_size", "n_embed")
    heads = fields.width("n_head", "num_attention_heads")
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields, "n_layer", "num_hidden_layers"),
        _heads(fields, hidden, heads, heads, bias=True),
        MlpSpec(4 * hidden, gated=False, bias=True, activation="gelu"),
        positions="alibi",
        dropout=has_dropout(fields, "hidden_dropout", "attention_dropout"),
        extra_params=2 * hidden,
        extra_params_note="layer norm after the embedding",
    )


def read_gpt_neox(fields: Fields) -> Parts:
    hidden = fields.width("hidden_size")
    heads = fields.width("num_attention_heads")
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields),
        _heads(fields, hidden, heads, heads, bias=fields.flag("attention_bias", default=True)),
        MlpSpec(
            fields.width("intermediate_size"),
            gated=False,
            bias=True,
            activation=activation(fields, "gelu"),
        ),
        parallel=fields.flag("use_parallel_residual", default=True),
        tie=False,
        dropout=has_dropout(fields, "attention_dropout", "hidden_dropout"),
    )


def read_falcon(fields: Fields) -> Parts:
    """Falcon: one or two norms before parallel blocks, one or several key-value heads."""
    hidden = fields.width("hidden_size")
    heads = fields.width("num_attention_heads", "n_head")
    new = fields.flag("new_decoder_architecture", default=False)
    parallel = new or fields.flag("parallel_attn", default=True)
    if new:
        kv_heads = fields.width("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    norms = fields.integer("num_ln_in_parallel_attn", default=2 if new else 1, high=2)
    bias = fields.flag("bias", default=False)
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields, "num_hidden_layers", "n_layer"),
        _heads(fields, hidden, heads, kv_heads, bias=bias),
        MlpSpec(
            fields.width("ffn_hidden_size", default=4 * hidden),
            gated=False,
            bias=bias,
            activation="gelu",
        ),
        parallel=parallel,
        norms=norms if parallel else 2,
        positions="alibi" if fields.flag("alibi", default=False) else "rotary",
    )


def read_mpt(fields: Fields) -> Parts:
    hidden = fields.width("d_model")
    heads = fields.width("n_heads")
    attention = fields.sub("attn_config") or Fields({}, fields.where)
    alibi = attention.flag("alibi", default=True)
    bias = not fields.flag("no_bias", default=True)
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields, "n_layers"),
        _heads(fields, hidden, heads, heads, bias=bias),
        MlpSpec(
            fields.integer("expansion_ratio", default=4, high=64) * hidden,
            gated=False,
            bias=bias,
            activation="gelu",
        ),
        norm_bias=bias,
        positions="alibi" if alibi else "learned",
        max_position_embeddings=fields.count("max_seq_len", low=1),
    )


def read_phi(fields: Fields) -> Parts:
    """Phi-1 and Phi-2, in either spelling of their config."""
    hidden = fields.width("hidden_size", "n_embd")
    heads = fields.width("num_attention_heads", "n_head")
    kv_heads = fields.width("num_key_value_heads", "n_head_kv", default=heads)
    if fields.flag("qk_layernorm", default=False):
        raise fields.fail("qk_layernorm=true is not supported for Phi.")
    return _parts(
        hidden,
        fields.count("vocab_size", low=1),
        num_layers(fields, "num_hidden_layers", "n_layer"),
        _heads(fields, hidden, heads, kv_heads, bias=True),
        MlpSpec(
            fields.width("intermediate_size", "n_inner", default=4 * hidden),
            gated=False,
            bias=True,
            activation=activation(fields, "gelu_new"),
        ),
        norms=1,
        parallel=True,
        tie=False,
        lm_head_bias=True,
        max_position_embeddings=fields.count("max_position_embeddings", "n_positions", default=0),
    )


def vit_layer(
    hidden: int, heads: int, width: int, head_dim: int, *, qkv_bias: bool = True
) -> LayerSpec:
    """A layer of a vision transformer: full attention, plain MLP, biases, two layer norms."""
    return LayerSpec(
        AttentionSpec(heads, heads, head_dim, qkv_bias=qkv_bias, out_bias=True, causal=False),
        mlp=MlpSpec(width, gated=False, bias=True, activation="gelu"),
    )


def read_vit(fields: Fields) -> Parts:
    """A ViT classifier: patches and a class token in, labels out; there is no vocabulary."""
    hidden = fields.width("hidden_size")
    heads = fields.width("num_attention_heads")
    patch = fields.width("patch_size")
    image = fields.width("image_size")
    if patch > image:
        raise fields.refuse("patch_size", f"at most image_size={image}")
    patches = (image // patch) ** 2
    labels = len(fields.raw("id2label")) if isinstance(fields.raw("id2label"), dict) else 2
    labels = fields.integer("num_labels", default=labels, high=1 << 20)
    pixels = fields.width("num_channels", default=3) * patch * patch
    layer = vit_layer(
        hidden,
        heads,
        fields.width("intermediate_size"),
        head_dim_of(fields, hidden, heads),
        qkv_bias=fields.flag("qkv_bias", default=True),
    )
    return Parts(
        hidden,
        0,
        (layer,) * num_layers(fields),
        more={
            "norm": "layernorm",
            "norm_bias": True,
            "positions": "learned",
            "max_position_embeddings": patches + 1,
            "lm_head": False,
            "dropout": has_dropout(fields, "hidden_dropout_prob", "attention_probs_dropout_prob"),
            "extra_params": pixels * hidden + hidden + hidden + (hidden + 1) * labels,
            "extra_params_note": f"patches, class token, head of {labels} labels",
        },
    )


READERS: dict[str, Callable[[Fields], Parts]] = {
    "gpt2": read_gpt2,
    "gpt_bigcode": lambda fields: read_gpt2(fields, multi_query=True),
    "opt": read_opt,
    "bloom": read_bloom,
    "gpt_neox": read_gpt_neox,
    "falcon": read_falcon,
    "mpt": read_mpt,
    "phi": read_phi,
    "phi-msft": read_phi,
    "vit": read_vit,
}
