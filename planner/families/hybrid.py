"""Hybrids: linear attention and state-space layers among attention, and pruned layers."""

from __future__ import annotations

from collections.abc import Callable

from planner.config_fields import MAX_LAYERS, Fields
from planner.families.moe import qwen_moe, sparse_blocks
from planner.families.parts import (
    Parts,
    activation,
    check_heads,
    head_dim_of,
    num_layers,
    read_gqa,
    read_moe,
)
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec


def _gated_delta_net(fields: Fields) -> AttentionSpec:
    keys = fields.width("linear_num_key_heads")
    values = fields.width("linear_num_value_heads")
    if values % keys:
        raise fields.fail(
            f"linear_num_key_heads={keys} does not divide linear_num_value_heads={values}.",
            linear_num_key_heads=keys,
            linear_num_value_heads=values,
        )
    return AttentionSpec(
        values,
        keys,
        fields.width("linear_key_head_dim"),
        kind="gated-delta-net",
        v_head_dim=fields.width("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", high=1024),
    )


def read_qwen_hybrid(fields: Fields) -> Parts:
    """Qwen3-Next and Qwen3.5: gated delta nets, every full_attention_interval-th layer full."""
    hidden = fields.width("hidden_size")
    layers = num_layers(fields)
    bias = fields.flag("attention_bias", default=False)
    full = read_gqa(
        fields,
        hidden,
        head_dim=256,
        kv_needed=True,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        gate=fields.flag("attn_output_gate", default=True),
    )
    types = fields.items("layer_types", str, layers)
    if types is None:
        every = fields.integer("full_attention_interval", default=4, high=MAX_LAYERS)
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    mixers = {"full_attention": full, "linear_attention": _gated_delta_net(fields)}
    unknown = sorted(set(types) - set(mixers))
    if unknown:
        raise fields.fail(
            f"layer_types has {unknown[0][:40]!r}, known here are {', '.join(mixers)}.",
            layer_types=unknown[0],
        )
    blocks: list[MlpSpec | MoeSpec]
    if fields.has("num_experts"):
        blocks = sparse_blocks(fields, layers, qwen_moe(fields))
    else:
        blocks = [MlpSpec(fields.width("intermediate_size"))] * layers
    return Parts(
        hidden,
        fields.count("vocab_size", low=1),
        tuple(
            LayerSpec(
                mixers[kind],
                mlp=block if isinstance(block, MlpSpec) else None,
                moe=block if isinstance(block, MoeSpec) else None,
            )
            for kind, block in zip(types, blocks, strict=True)
        ),
        more={"mtp_layers": fields.integer("mtp_num_hidden_layers", default=0, low=0, high=64)},
    )


def _no_attention(heads: int) -> AttentionSpec:
    """A block without mixer: no width, and heads that divide like those of its neighbours."""
    return AttentionSpec(heads, heads, 0, kind="none")


def read_nemotron_h(fields: Fields) -> Parts:
    """Nemotron-H and Nemotron-3: every block is a Mamba-2, an attention or a feed-forward."""
    hidden = fields.width("hidden_size")
    pattern = fields.items("layers_block_type", str)
    if pattern is None and fields.has("hybrid_override_pattern"):
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        pattern = [names.get(sign, sign) for sign in fields.word("hybrid_override_pattern")]
    if not pattern:
        raise fields.missing("layers_block_type", "hybrid_override_pattern")
    if fields.has("num_hidden_layers") and num_layers(fields) != len(pattern):
        raise fields.fail(
            f"num_hidden_layers={num_layers(fields)}, but the block pattern has {len(pattern)}.",
            num_hidden_layers=num_layers(fields),
        )
    unknown = sorted(set(pattern) - {"mamba", "attention", "mlp", "moe"})
    if unknown:
        raise fields.fail(
            f"the block pattern has {unknown[0][:40]!r}, known are mamba, attention, mlp and moe.",
            layers_block_type=unknown[0],
        )
    bias = fields.flag("attention_bias", default=False)
    attention = read_gqa(fields, hidden, head_dim=128, kv_needed=True, qkv_bias=bias, out_bias=bias)
    blocks: dict[str, LayerSpec] = {"attention": LayerSpec(attention, norms=1)}
    idle = _no_attention(attention.num_attention_heads)
    if "mamba" in pattern:
        blocks["mamba"] = LayerSpec(_mamba2(fields), norms=1)
    if "mlp" in pattern:
        mlp = MlpSpec(
            fields.width("intermediate_size"),
            gated=False,
            bias=fields.flag("mlp_bias", default=False),
            activation=activation(fields, "relu2"),
        )
        blocks["mlp"] = LayerSpec(idle, mlp=mlp, norms=1)
    if "moe" in pattern:
        shared = fields.width("moe_shared_expert_intermediate_size", default=0, low=0)
        shared *= min(1, fields.integer("n_shared_experts", default=1, low=0, high=1024))
        moe = read_moe(
            fields,
            experts=["n_routed_experts"],
            top_k=["num_experts_per_tok"],
            width="moe_intermediate_size",
            gated=False,
            shared_intermediate_size=shared,
            aux_free_bias=True,
            latent_size=fields.width("moe_latent_size", default=0, low=0),
        )
        blocks["moe"] = LayerSpec(idle, moe=moe, norms=1)
    return Parts(
        hidden,
        fields.count("vocab_size", low=1),
        tuple(blocks[name] for name in pattern),
        more={
            "mtp_layers": fields.integer("num_nextn_predict_layers", default=0, low=0, high=64),
            "positions": "none",
        },
    )


def _mamba2(fields: Fields) -> AttentionSpec:
    heads = fields.width("mamba_num_heads")
    groups = fields.width("n_groups", default=8)
    if heads % groups:
        raise fields.fail(
            f"n_groups={groups} does not divide mamba_num_heads={heads}.",
            n_groups=groups,
            mamba_num_heads=heads,
        )
    if fields.flag("use_bias", "mamba_proj_bias", default=False):
        raise fields.fail("biases on the Mamba projections are not supported.")
    return AttentionSpec(
        heads,
        groups,
        fields.width("ssm_state_size"),
        kind="mamba2",
        v_head_dim=fields.width("mamba_head_dim"),
        qkv_bias=fields.flag("use_conv_bias", default=True),
        conv_kernel=fields.integer("conv_kernel", default=4, high=1024),
    )


def read_nemotron_nas(fields: Fields) -> Parts:
    """Llama pruned by architecture search: block_configs says what is left of each layer."""
    hidden = fields.width("hidden_size")
    layers = num_layers(fields)
    heads = fields.width("num_attention_heads")
    head_dim = head_dim_of(fields, hidden, heads)
    configs = fields.items("block_configs", dict, layers)
    if configs is None:
        raise fields.missing("block_configs")
    made = []
    for i, table in enumerate(configs):
        block = Fields(table, f"{fields.where}: block_configs[{i}]")
        made.append(_nas_layer(block, hidden, heads, head_dim))
    return Parts(hidden, fields.count("vocab_size", low=1), tuple(made))


def _nas_layer(block: Fields, hidden: int, heads: int, head_dim: int) -> LayerSpec:
    mixer, ffn = block.sub("attention"), block.sub("ffn")
    if mixer is None or ffn is None:
        raise block.missing("attention", "ffn")
    for part in (mixer, ffn):
        if part.flag("replace_with_linear", default=False):
            raise part.fail("replace_with_linear=true (one linear for a block) is not supported.")
    norms = 0
    attention = _no_attention(heads)
    if not mixer.flag("no_op", default=False):
        group = mixer.width("n_heads_in_group")
        if heads % group:
            raise mixer.refuse("n_heads_in_group", f"a divisor of num_attention_heads={heads}")
        check_heads(mixer, hidden, heads, heads // group)
        window = mixer.width("window_length") if mixer.has("window_length") else None
        attention = AttentionSpec(heads, heads // group, head_dim, window=window)
        norms += 1
    mlp = None
    if not ffn.flag("no_op", default=False):
        width = int(2 * ffn.number("ffn_mult", 1.0) * hidden / 3)
        mlp = MlpSpec(-(-width // 256) * 256)  # the architecture rounds up to 256
        norms += 1
    return LayerSpec(attention, mlp=mlp, norms=norms)


READERS: dict[str, Callable[[Fields], Parts]] = {
    "qwen3_next": read_qwen_hybrid,
    "qwen3_5_moe_text": read_qwen_hybrid,
    "qwen3_5_text": read_qwen_hybrid,
    "nemotron_h": read_nemotron_h,
    "nemotron-nas": read_nemotron_nas,
}
