"""How Hugging Face names what is here: families, tensors and configs of Llama, Qwen and Mixtral."""

from __future__ import annotations

import re
from typing import Any

from executor.details import Details
from planner.errors import ModelError
from planner.specs import ModelSpec

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
MOE = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*LLAMA_LIKE, *MOE)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

ENDS = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
PARTS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def theirs(name: str, family: str, num_experts: int) -> list[str]:
    """Names under which Hugging Face stores one of our values: one, or one an expert.

    >>> theirs("layers.3.attention.out.weight", "llama", 0)
    ['model.layers.3.self_attn.o_proj.weight']
    >>> theirs("layers.0.moe.experts.up", "mixtral", 2)[1]
    'model.layers.0.block_sparse_moe.experts.1.w3.weight'
    """
    found = LAYER.fullmatch(name)
    if found is None:
        part, _, kind = name.rpartition(".")
        return [f"{ENDS[part]}.{kind}"]
    layer, rest = f"model.layers.{found[1]}", found[2]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    if rest.startswith("moe.experts."):
        matrix = rest.rpartition(".")[2]
        inner = MIXTRAL_EXPERTS[matrix] if family == "mixtral" else f"{matrix}_proj"
        return [f"{layer}.{block}.experts.{e}.{inner}.weight" for e in range(num_experts)]
    if rest.startswith("moe.router."):
        return [f"{layer}.{block}.gate.{rest.rpartition('.')[2]}"]
    part, _, kind = rest.rpartition(".")
    return [f"{layer}.{PARTS[part]}.{kind}"]


def is_stack(name: str) -> bool:
    """Whether a value holds all experts of a layer, which are stored one by one."""
    return ".moe.experts." in name


def experts_of(name: str, model: ModelSpec) -> int:
    """Number of experts of the layer that a value is of; 0 where it has none."""
    found = LAYER.fullmatch(name)
    moe = model.kinds[model.layer_kinds[int(found[1])]].moe if found else None
    return moe.num_experts if moe else 0


# What each family can hold; `shared` counts a shared expert and its gate.
DENSE_FORMS: dict[str, dict[str, Any]] = {
    "llama": {"qk_norm": ["none"], "bias": ["none", "all"], "window": [False]},
    "mistral": {"qk_norm": ["none"], "bias": ["none"], "window": [True]},
    "qwen2": {"qk_norm": ["none"], "bias": ["qkv"], "window": [False]},
    "qwen3": {"qk_norm": ["head"], "bias": ["none", "all"], "window": [False]},
}
MOE_FORMS: dict[str, dict[str, Any]] = {
    "mixtral": {"qk_norm": ["none"], "bias": ["none"], "shared": [{0}], "mixed": [False]},
    "qwen2_moe": {"qk_norm": ["none"], "bias": ["qkv"], "window": [False], "shared": [{2}]},
    "qwen3_moe": {
        "qk_norm": ["head"],
        "bias": ["none", "all"],
        "window": [False],
        "shared": [{0}],
    },
}


def family_of(model: ModelSpec) -> str:
    """The family whose files and config can hold a model.

    Raises
    ------
    ModelError
        None of those known here.
    """
    kinds, attention = model.kinds, model.kinds[0].attention
    moes = [kind.moe for kind in kinds if kind.moe is not None]
    dense = [kind.mlp for kind in kinds if kind.mlp is not None]
    usual = (
        (model.norm, model.positions, model.lm_head_bias) == ("rmsnorm", "rotary", False)
        and len({kind.attention for kind in kinds}) == 1
        and all(kind.norms == 2 and not kind.parallel for kind in kinds)
        and all(mlp.gated and not mlp.bias for mlp in dense)
        and all(moe.gated and not moe.router_bias and not moe.aux_free_bias for moe in moes)
    )
    has = {
        "qk_norm": attention.qk_norm,
        "bias": {(False, False): "none", (True, False): "qkv", (True, True): "all"}.get(
            (attention.qkv_bias, attention.out_bias), "out"
        ),
        "window": attention.window is not None,
        "shared": {(moe.shared_intermediate_size > 0) + moe.shared_gate for moe in moes},
        "mixed": bool(moes and dense),
    }
    if usual and attention.kind == "gqa":
        for family, may in (MOE_FORMS if moes else DENSE_FORMS).items():
            if all(has[name] in values for name, values in may.items()):
                return family
    raise ModelError(
        f"{model.name} is no model that Hugging Face's Llama, Qwen2, Qwen3 or Mixtral can hold; "
        "its checkpoints stay in the run's own form",
        values={"model": model.name},
    )


def config_of(model: ModelSpec, details: Details) -> dict[str, Any]:
    """The config.json of a model that was made here."""
    family = family_of(model)
    attention = model.kinds[0].attention
    dense = next((k.mlp for k in model.kinds if k.mlp is not None), None)
    moe = next((k.moe for k in model.kinds if k.moe is not None), None)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": dense.activation if dense else "silu",
        "max_position_embeddings": model.max_position_embeddings or 4096,
        "rms_norm_eps": details.norm_eps,
        "rope_theta": details.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": details.initializer_range,
        "sliding_window": attention.window,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if details.rope_scaling is not None:
        scaling = details.rope_scaling
        config["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                config["rope_scaling"][key] = getattr(scaling, key)
    if dense is not None:
        config["intermediate_size"] = dense.intermediate_size
    if family in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = attention.qkv_bias
    if moe is not None:
        config |= moe_config(model, family, details)
    return config


def moe_config(model: ModelSpec, family: str, details: Details) -> dict[str, Any]:
    """The keys of a config that speak of experts."""
    moe = next(k.moe for k in model.kinds if k.moe is not None)
    shared: dict[str, Any] = {
        "num_experts_per_tok": moe.num_experts_per_tok,
        "router_aux_loss_coef": details.aux_loss_coefficient,
    }
    if family == "mixtral":
        sizes = {"num_local_experts": moe.num_experts, "intermediate_size": moe.intermediate_size}
        return shared | sizes
    dense = [i for i, k in enumerate(model.layer_kinds) if model.kinds[k].moe is None]
    shared |= {
        "num_experts": moe.num_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": details.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    if family == "qwen2_moe":
        shared["shared_expert_intermediate_size"] = moe.shared_intermediate_size
    return shared
