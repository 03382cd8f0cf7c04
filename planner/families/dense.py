"""Dense decoders of today: Llama and its kin, which differ in a few flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.config_fields import MAX_LAYERS, Fields
from planner.families.parts import (
    Parts,
    activation,
    check_heads,
    decoder_layers,
    head_dim_of,
    num_layers,
    read_gqa,
    windows,
)
from planner.specs import AttentionSpec, MlpSpec


@dataclass(frozen=True, slots=True)
class Dense:
    """What sets one family apart; a text names the config key that decides."""

    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    qk_norm: str = "none"
    norms: int = 2
    norm: str = "rmsnorm"
    norm_bias: bool = False
    parallel: bool = False
    gated: bool = True
    tie: bool = False
    window: int | None = None  # of a config that leaves sliding_window out
    switched: bool = False  # sliding only where use_sliding_window says so
    head_dim: int | None = None  # of a config that leaves it out (None: hidden_size over heads)
    kv_needed: bool = False  # num_key_value_heads has no default that depends on the model
    pattern: int = 0  # every n-th layer attends fully, the others slide (0: all alike)


FAMILIES = {
    "llama": Dense(mlp_bias="mlp_bias"),
    "granite": Dense(mlp_bias="mlp_bias"),
    "mistral": Dense(qkv_bias=False, out_bias=False, window=4096, kv_needed=True),
    "phi3": Dense(qkv_bias=False, out_bias=False),
    "qwen2": Dense(qkv_bias=True, out_bias=False, switched=True, kv_needed=True),
    "qwen3": Dense(qk_norm="head", head_dim=128, switched=True, kv_needed=True),
    "gemma": Dense(tie=True, head_dim=256, kv_needed=True),
    "gemma2": Dense(head_dim=256, kv_needed=True, norms=4, tie=True, window=4096, pattern=2),
    "gemma3_text": Dense(
        head_dim=256, kv_needed=True, norms=4, qk_norm="head", tie=True, window=4096, pattern=6
    ),
    "olmo": Dense(norm="nonparametric"),
    "olmo2": Dense(qk_norm="full"),
    "olmo3": Dense(qk_norm="full", window=4096, pattern=4),
    "stablelm": Dense(
        kv_needed=True, qkv_bias="use_qkv_bias", out_bias=False, norm="layernorm", norm_bias=True
    ),
    "cohere": Dense(norms=1, norm="layernorm", parallel=True, tie=True),
    "internlm2": Dense(qkv_bias="bias", out_bias="bias"),
    "minicpm": Dense(tie=True),
    "nemotron": Dense(mlp_bias="mlp_bias", norm="layernorm", norm_bias=True, gated=False),
    "starcoder2": Dense(
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        norm="layernorm",
        norm_bias=True,
        gated=False,
        tie=True,
        kv_needed=True,
    ),
}
TRUE_WHEN_ABSENT = {"bias", "use_bias"}  # keys whose published default is true


def _flag(fields: Fields, rule: str | bool) -> bool:
    if isinstance(rule, bool):
        return rule
    return fields.flag(rule, default=rule in TRUE_WHEN_ABSENT)


def _qk_norm(fields: Fields, family: Dense) -> str:
    """Cohere and StableLM switch a norm over all heads on by a key."""
    if fields.flag("use_qk_norm", "qk_layernorm", default=False) and family.norm == "layernorm":
        return "full"
    return family.qk_norm


def _sliding(fields: Fields, family: Dense, layers: int) -> tuple[int | None, list[bool]]:
    """The window, and which layers use it."""
    window = family.window
    if "sliding_window" in fields.table:
        window = fields.width("sliding_window") if fields.has("sliding_window") else None
    if family.pattern:
        every = fields.integer("sliding_window_pattern", default=family.pattern, high=MAX_LAYERS)
        return window, [(i + 1) % every != 0 for i in range(layers)]
    if family.switched:
        slides = fields.flag("use_sliding_window", default=False)
        first = fields.integer("max_window_layers", default=28, low=0, high=MAX_LAYERS)
        return window, [slides and i >= first for i in range(layers)]
    return window, [window is not None] * layers


def read_dense(fields: Fields, family: Dense) -> Parts:
    """A dense decoder in the key names that Llama made usual."""
    hidden = fields.width("hidden_size")
    layers = num_layers(fields)
    parallel = family.parallel or fields.flag("use_parallel_residual", default=False)
    attention = read_gqa(
        fields,
        hidden,
        head_dim=family.head_dim,
        kv_needed=family.kv_needed,
        qkv_bias=_flag(fields, family.qkv_bias),
        out_bias=_flag(fields, family.out_bias),
        qk_norm=_qk_norm(fields, family),
    )
    mlp = MlpSpec(
        fields.width("intermediate_size"),
        gated=family.gated,
        bias=_flag(fields, family.mlp_bias),
        activation=activation(fields),
    )
    window, sliding = _sliding(fields, family, layers)
    return Parts(
        hidden,
        fields.count("vocab_size", low=1),
        decoder_layers(
            attention,
            windows(fields, layers, window, sliding),
            [mlp] * layers,
            norms=1 if parallel else family.norms,
            parallel=parallel,
        ),
        tie=family.tie,
        more={"norm": family.norm, "norm_bias": family.norm_bias},
    )


def read_chatglm(fields: Fields) -> Parts:
    """ChatGLM-2 and 3 and GLM-4-9B, whose config has key names of its own."""
    hidden = fields.width("hidden_size")
    heads = fields.width("num_attention_heads")
    groups = heads
    if fields.flag("multi_query_attention", default=False):
        groups = fields.width("multi_query_group_num", default=1)
    check_heads(fields, hidden, heads, groups)
    linear_bias = fields.flag("add_bias_linear", default=True)
    attention = AttentionSpec(
        heads,
        groups,
        head_dim_of(fields, hidden, heads, "kv_channels"),
        qkv_bias=linear_bias or fields.flag("add_qkv_bias", default=False),
        out_bias=linear_bias,
    )
    mlp = MlpSpec(fields.width("ffn_hidden_size"), bias=linear_bias)
    layers = num_layers(fields, "num_layers", "num_hidden_layers")
    rms = fields.flag("rmsnorm", default=True)
    return Parts(
        hidden,
        fields.count("padded_vocab_size", "vocab_size", low=1),
        decoder_layers(attention, [None] * layers, [mlp] * layers),
        more={
            "norm": "rmsnorm" if rms else "layernorm",
            "norm_bias": not rms,
            "final_norm": fields.flag("post_layer_norm", default=True),
            "max_position_embeddings": fields.count("seq_length", default=0),
        },
    )


def _reader(family: Dense) -> Callable[[Fields], Parts]:
    return lambda fields: read_dense(fields, family)


READERS: dict[str, Callable[[Fields], Parts]] = {
    **{name: _reader(family) for name, family in FAMILIES.items()},
    "chatglm": read_chatglm,
}
