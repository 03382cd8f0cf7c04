"""Tiny models with the parts that real ones differ in."""

from __future__ import annotations

from typing import Any

from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

LATENT = AttentionSpec(
    4, 4, 24, kind="mla", v_head_dim=16, q_lora_rank=16, kv_lora_rank=32, qk_rope_head_dim=8
)


def dense_model(layers: int = 4, **changes: Any) -> ModelSpec:
    """A small Llama: grouped-query attention, a vocabulary that 4 ranks cut unevenly."""
    kind = LayerSpec(AttentionSpec(8, 4, 8), mlp=MlpSpec(96))
    fields = {"name": "tiny", "hidden_size": 64, "vocab_size": 101} | changes
    return ModelSpec(kinds=(kind,), layer_kinds=(0,) * layers, **fields)


def moe_model(layers: int = 2, shared: int = 0) -> ModelSpec:
    """A dense layer, then mixtures of 4 experts, 2 chosen, balanced by an auxiliary loss."""
    attention = AttentionSpec(4, 4, 8)
    moe = MoeSpec(4, 2, 32, shared_intermediate_size=shared)
    kinds = (LayerSpec(attention, mlp=MlpSpec(64)), LayerSpec(attention, moe=moe))
    return ModelSpec("tiny-moe", 32, 64, kinds, (0,) + (1,) * (layers - 1))


def of_layers(name: str, *kinds: LayerSpec, **changes: Any) -> ModelSpec:
    """A model of two layers or one of each kind."""
    order = tuple(range(len(kinds))) if len(kinds) > 1 else (0, 0)
    return ModelSpec(name, 64, 96, kinds, order, **changes)


def biased(**changes: Any) -> LayerSpec:
    """A layer of GPT-2: biases everywhere, a plain MLP."""
    attention = AttentionSpec(4, 4, 16, qkv_bias=True, out_bias=True)
    return LayerSpec(
        attention, mlp=MlpSpec(128, gated=False, bias=True, activation="gelu"), **changes
    )


def windowed(window: int | None) -> LayerSpec:
    """A layer of Gemma-2: four norms, a window in every second layer."""
    mlp = MlpSpec(128, activation="gelu_pytorch_tanh")
    return LayerSpec(AttentionSpec(4, 2, 16, window=window), mlp=mlp, norms=4)


GPT2 = of_layers(
    "tiny-gpt2",
    biased(),
    norm="layernorm",
    norm_bias=True,
    positions="learned",
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
NEOX = of_layers("tiny-neox", biased(parallel=True), norm="layernorm", norm_bias=True)
QWEN3 = of_layers(
    "tiny-qwen3",
    LayerSpec(AttentionSpec(4, 2, 16, qk_norm="head"), mlp=MlpSpec(128)),
    tie_word_embeddings=True,
)
GEMMA2 = of_layers("tiny-gemma2", windowed(8), windowed(None))
DEEPSEEK2 = of_layers("tiny-deepseek2", LayerSpec(LATENT, mlp=MlpSpec(96)))
DEEPSEEK3 = of_layers(
    "tiny-deepseek3",
    LayerSpec(LATENT, mlp=MlpSpec(96)),
    LayerSpec(LATENT, moe=MoeSpec(8, 2, 32, shared_intermediate_size=32, aux_free_bias=True)),
)
QWEN2_MOE = of_layers(
    "tiny-qwen2-moe",
    LayerSpec(
        AttentionSpec(4, 2, 16),
        moe=MoeSpec(8, 2, 32, shared_intermediate_size=32, shared_gate=True),
    ),
)
