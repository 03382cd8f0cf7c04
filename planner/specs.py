"""What is trained, and how: ModelSpec and TrainSpec.

Field names are those of Hugging Face configs. A model is a list of layers, each of one *kind*; few
kinds make up any model (dense and MoE, local and global attention), and costs are per kind.
"""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp4")
ATTENTION_KINDS = ("gqa", "mla", "gated-delta-net", "mamba2", "none")  # gqa covers MHA and MQA
OPTIMIZERS = ("adamw", "adam", "adamw-bf16", "adamw-8bit", "sgd", "muon", "lion", "adafactor")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer kind.

    `kind` is one of `ATTENTION_KINDS`. Widths are per head. For MLA `head_dim` is the query-key
    width (nope + rope) and `v_head_dim` the value width. `window` is the sliding or chunked window
    in tokens (None: full). `qk_norm`: ``none``, ``head`` (one weight of head_dim each for q and k)
    or ``full`` (weights over all heads).

    The linear kinds use the same fields, by the duality of state-space models and attention:
    ``gated-delta-net`` has `num_key_value_heads` key heads of `head_dim` and `num_attention_heads`
    value heads of `v_head_dim`; ``mamba2`` has `num_key_value_heads` groups of state width
    `head_dim` and `num_attention_heads` heads of `v_head_dim`. ``none`` (a block without mixer) has
    head_dim 0.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    kind: str = "gqa"
    v_head_dim: int = 0  # 0: head_dim
    q_lora_rank: int = 0  # MLA; 0: query is projected directly
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str = "none"
    sinks: bool = False  # one learned logit per head (gpt-oss)
    gate: bool = False  # output gate as wide as the query (Qwen3-Next)
    window: int | None = None
    chunked: bool = False  # windows are fixed chunks (Llama-4) and do not slide
    causal: bool = True
    conv_kernel: int = 0  # linear kinds: width of the causal convolution
    index_n_heads: int = 0  # DeepSeek sparse attention: heads of the indexer (0: dense)
    index_head_dim: int = 0
    index_topk: int = 0  # keys that each query attends to

    @property
    def v_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Dense feed-forward: gated (three matrices) or plain (two)."""

    intermediate_size: int
    gated: bool = True
    bias: bool = False
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts: `num_experts` routed, `num_experts_per_tok` chosen, plus shared width.

    `shared_intermediate_size` is the total width of the shared experts (0: none).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    gated: bool = True
    shared_intermediate_size: int = 0
    shared_gate: bool = False  # a sigmoid gate per token on the shared expert (Qwen2-MoE)
    router_bias: bool = False  # a trained bias vector, one value an expert
    expert_bias: bool = False
    clamped: bool = False  # inputs of the activation are clamped (gpt-oss)
    aux_free_bias: bool = False  # DeepSeek-V3 correction bias: a buffer, not a counted parameter
    latent_size: int = 0  # width at which routed experts work (Nemotron-3; 0: hidden_size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One kind of layer.

    `norms` is the number of norms of width hidden_size in the layer (2 usual; Gemma-2 4; parallel
    blocks 1). `parallel` runs attention and MLP from the same input (GPT-NeoX, Falcon, Phi-2).
    """

    attention: AttentionSpec
    mlp: MlpSpec | None = None
    moe: MoeSpec | None = None
    norms: int = 2
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """An encoder in front of the decoder (ViT), on the first pipeline stage.

    `tokens` is the number of patch tokens per image; `other_params` counts patch embedding,
    positions, norms outside of layers and the projector into the decoder.
    """

    hidden_size: int
    num_hidden_layers: int
    layer: LayerSpec
    tokens: int
    other_params: int
    norm_bias: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder (or encoder) transformer.

    `kinds` are the distinct layers, `layer_kinds[i]` is the index into `kinds` of layer i. `norm`
    is ``rmsnorm`` or ``layernorm`` (weights only or weights and bias: `norm_bias`;
    ``nonparametric`` has none). `positions`: ``rotary``, ``learned``, ``alibi``, ``none``.
    `mtp_layers`: extra multi-token-prediction layers, left out of parameter counts and costs unless
    trained. `extra_params` holds what no other field counts (embedding norms, relative biases),
    with `extra_params_note` saying what it is.
    """

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[LayerSpec, ...]
    layer_kinds: tuple[int, ...]
    norm: str = "rmsnorm"
    norm_bias: bool = False
    positions: str = "rotary"
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False
    final_norm: bool = True
    lm_head: bool = True
    lm_head_bias: bool = False
    dropout: bool = False
    mtp_layers: int = 0
    tower: TowerSpec | None = None
    extra_params: int = 0
    extra_params_note: str = ""
    source: str = ""

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def is_moe(self) -> bool:
        return any(kind.moe is not None for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank adapters on the linears named; `quantized` keeps frozen weights in 4 bits."""

    rank: int
    targets: tuple[str, ...] = ("qkv", "out", "mlp")
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """How the model is trained.

    `flash_attention`: None takes the runtime's kernel (by name in its file), False the unfused one.
    `router_imbalance` is the tokens of the fullest expert rank over the mean (1: balanced).
    """

    global_batch_size: int
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    runtime: str = "megatron-core"
    attention_kernel: str | None = None
    lora: LoraSpec | None = None
    router_imbalance: float = 1.0
    dropout: bool | None = None  # None: as the model says
    memory_margin_fraction: float = 0.0
