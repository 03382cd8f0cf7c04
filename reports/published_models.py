"""The model of a published run: a preset where the row names one, else from its dimensions."""

from __future__ import annotations

from functools import lru_cache

from planner.presets_index import load_model
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from reports.published_rules import SourceRule
from reports.published_table import VALIDATION_DIR, MissingField, NotPredictable, PublishedRow

# A mixture of experts has more dimensions than the table has columns: such rows name a model whose
# published config ships with the planner. The row's own dimensions must agree with it.
PRESETS = {
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Qwen3_235B_a22B (tokendrop)": "qwen3-235b-a22b",
    "DeepSeekV3 (dropless)": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "llama4-maverick": "llama-4-maverick",
}
# Models with dimensions beyond the columns; reports/validation/models has them with their source:
# by name, and for the tests of Megatron-LM by a part of the id, which is that of the test.
CI = ("megatron_ci",)
FILES = {
    "Moonlight-16B-A3B": "moonlight-16b-a3b",
    "ep4_etp1_memory_speed": "mcore-test-mla-moe-1-15",
    "ep4_etp1_mtp_resume_torch_dist_fp8": "mcore-test-mla-moe-1-15",
    "ep4_etp1_selective_recompute_experimental": "mcore-test-mla-moe-3-13",
    "te_tp2_pp2_mla_H100": "mcore-test-mla",
    "deepseek_proxy_fsdp": "mcore-test-mla-moe-1-1",
}
BLOOM_VOCAB = (
    250_880  # --pad-vocab-size-to in tr11-176B-ml.slurm; the table gives the rounded 250000
)


def model_of(row: PublishedRow, rule: SourceRule) -> ModelSpec:
    """Model of a row, in the style of its source: megatron-gpt, bloom, mpt, nemo or llama."""
    name = row.text("model_name")
    for part, file in FILES.items():
        if part in (name, row.text("id")) or (part in row.text("id") and row.source in CI):
            model = described(file)
            check_dimensions(row, model)
            return model
    if row.says("notes", "multi-latent attention"):
        raise NotPredictable("the ranks of its multi-latent attention are in no column and no file")
    if name in PRESETS:
        model = preset(PRESETS[name])
        check_dimensions(row, model)
        return model
    for field in ("n_layers", "hidden", "ffn_hidden"):
        if row.count(field) is None:
            raise MissingField(field, f"that of another publication of {name or 'the model'}")
    if row.flag("gated_mlp") is None:
        raise MissingField("gated_mlp", "1")
    return from_columns(row, rule)


@lru_cache
def described(name: str) -> ModelSpec:
    return load_model(VALIDATION_DIR / "models" / f"{name}.toml")


@lru_cache
def preset(name: str) -> ModelSpec:
    return load_model(name)


def check_dimensions(row: PublishedRow, model: ModelSpec) -> None:
    """Refuse a preset that is not the model of the row."""
    heads = model.kinds[0].attention.num_attention_heads
    own = {"n_layers": model.num_hidden_layers, "hidden": model.hidden_size, "n_heads": heads}
    for field, value in own.items():
        written = row.count(field)
        if written is not None and written != value:
            raise NotPredictable(f"{field} is {written}, but the published config has {value}")


def from_columns(row: PublishedRow, rule: SourceRule) -> ModelSpec:
    """A decoder from the dimensions of the row, all of its layers alike.

    Gated: RMS norm, rotary positions, no bias (Llama). Plain: layer norm and biases; learned
    positions, except rotary in Nemotron and ALiBi in BLOOM; dropout as Megatron-LM defaults.
    """
    gated = bool(row.flag("gated_mlp"))
    hidden, layers = row.needed("hidden", "none"), row.needed("n_layers", "none")
    heads = rule.heads.get(str(hidden)) if row.count("n_heads") is None else None
    heads = heads or row.needed("n_heads", "hidden / 128")
    if hidden % heads:
        raise NotPredictable(f"n_heads={heads} does not divide hidden={hidden}")
    vocab = row.count("vocab") or rule.vocab or row.needed("vocab", "50257, GPT-2's tokenizer")
    style = rule.model
    bias = not gated and not row.says("model_name", "nemotron")
    attention = AttentionSpec(
        heads,
        row.count("n_kv_heads") or heads,
        hidden // heads,
        qkv_bias=bias,
        out_bias=bias,
    )
    width, experts = row.needed("ffn_hidden", "4 hidden"), row.count("n_experts")
    mlp, moe = None, None
    if experts:
        own = row.needed("moe_ffn_hidden", "ffn_hidden")
        shared = own * (row.count("n_shared_experts") or 0)
        top_k = row.needed("top_k", "2")
        moe = MoeSpec(experts, top_k, own, gated=gated, shared_intermediate_size=shared)
    else:
        mlp = MlpSpec(width, gated=gated, bias=bias, activation="silu" if gated else "gelu")
    if row.flag("tied_embeddings") is None:
        raise MissingField("tied_embeddings", "0")
    learned = bias and style != "bloom"
    positions = "learned" if learned else "alibi" if style == "bloom" else "rotary"
    return ModelSpec(
        name=row.text("model_name"),
        hidden_size=hidden,
        vocab_size=BLOOM_VOCAB if style == "bloom" else vocab,
        kinds=(LayerSpec(attention, mlp, moe),),
        layer_kinds=(0,) * layers,
        norm="rmsnorm" if gated else "layernorm",
        norm_bias=not gated,
        positions=positions,
        max_position_embeddings=row.needed("seq_len", "2048") if learned else 0,
        tie_word_embeddings=bool(row.flag("tied_embeddings")),
        dropout=style in ("megatron-gpt", "bloom"),
        extra_params=2 * hidden if style == "bloom" else 0,
        extra_params_note="layer norm of the embedding" if style == "bloom" else "",
        source=row.source,
    )
