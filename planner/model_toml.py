"""Our own TOML form of a model, for models that have no Hugging Face config.

The keys are the field names of `planner.specs`; layers are written as groups of equal ones. Unknown
keys are refused. Plain checks rather than a validation library, so that a preset loads in about a
millisecond.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from planner.config_fields import MAX_COUNT, MAX_LAYERS, MAX_WIDTH, Fields, near
from planner.errors import ModelError
from planner.hf_config import read_text, sort_kinds
from planner.specs import (
    ATTENTION_KINDS,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    TowerSpec,
)

LEGAL_WORDS = {
    "kind": ATTENTION_KINDS,
    "qk_norm": ("none", "head", "full"),
    "norm": ("rmsnorm", "layernorm", "nonparametric"),
    "positions": ("rotary", "learned", "alibi", "none"),
}
MAY_BE_ZERO = {
    "v_head_dim", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "conv_kernel",
    "index_n_heads", "index_head_dim", "index_topk", "shared_intermediate_size", "latent_size",
    "norms", "mtp_layers", "extra_params", "max_position_embeddings", "other_params", "vocab_size",
}  # fmt: skip
TOP_KEYS = {"layers", "repeat", "tower"}


def _read_field(fields: Fields, spec: dataclasses.Field[Any], kind: str) -> Any:
    """One field, by the type its dataclass declares."""
    key = spec.name
    if spec.default is dataclasses.MISSING and not fields.has(key):
        raise fields.missing(key)
    if not fields.has(key):
        return spec.default
    if kind == "bool":
        return fields.flag(key, default=False)
    if kind == "str":
        return fields.word(key, legal=LEGAL_WORDS.get(key))
    high = MAX_COUNT if key in ("vocab_size", "max_position_embeddings") else MAX_WIDTH
    if key in ("extra_params", "other_params"):
        high = 1 << 40
    return fields.integer(key, low=0 if key in MAY_BE_ZERO else 1, high=high)


def _read_spec(fields: Fields, cls: type[Any], skip: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    """A flat dataclass from a table: every key must be one of its fields."""
    values = {
        spec.name: _read_field(fields, spec, str(spec.type))
        for spec in dataclasses.fields(cls)
        if spec.name not in skip
    }
    _refuse_unknown(fields, set(values) | (TOP_KEYS if skip else set()))
    return cls(**values) if not skip else values


def _refuse_unknown(fields: Fields, known: set[str]) -> None:
    unknown = sorted(set(fields.table) - known)
    if unknown:
        close = near(unknown[0], known)
        hint = f", near: {', '.join(close)}" if close else ""
        error = fields.fail(f"unknown key {unknown[0][:60]!r}{hint}.", key=unknown[0])
        error.legal = close or sorted(known)
        raise error


def _attention(fields: Fields) -> AttentionSpec:
    spec: AttentionSpec = _read_spec(fields, AttentionSpec)
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if heads % kv_heads:
        raise fields.fail(
            f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}.",
            num_key_value_heads=kv_heads,
            num_attention_heads=heads,
        )
    if spec.kind == "mla" and not (spec.kv_lora_rank and 0 < spec.qk_rope_head_dim < spec.head_dim):
        raise fields.fail(
            "kind='mla' needs kv_lora_rank above 0 and qk_rope_head_dim between 0 and head_dim.",
            kv_lora_rank=spec.kv_lora_rank,
            qk_rope_head_dim=spec.qk_rope_head_dim,
            head_dim=spec.head_dim,
        )
    return spec


def _moe(fields: Fields) -> MoeSpec:
    spec: MoeSpec = _read_spec(fields, MoeSpec)
    if spec.num_experts_per_tok > spec.num_experts:
        raise fields.fail(
            f"num_experts_per_tok={spec.num_experts_per_tok} is more than "
            f"num_experts={spec.num_experts}.",
            num_experts_per_tok=spec.num_experts_per_tok,
            num_experts=spec.num_experts,
        )
    return spec


def _layer(fields: Fields, extra: set[str]) -> LayerSpec:
    attention = fields.sub("attention")
    if attention is None:
        raise fields.missing("attention")
    mlp, moe = fields.sub("mlp"), fields.sub("moe")
    if mlp is not None and moe is not None:
        raise fields.fail("a layer has either mlp or moe, this one has both.")
    layer = LayerSpec(
        _attention(attention),
        mlp=None if mlp is None else _read_spec(mlp, MlpSpec),
        moe=None if moe is None else _moe(moe),
        norms=fields.integer("norms", default=2, low=0, high=8),
        parallel=fields.flag("parallel", default=False),
    )
    _refuse_unknown(fields, {"attention", "mlp", "moe", "norms", "parallel"} | extra)
    return layer


def _layers(top: Fields) -> tuple[LayerSpec, ...]:
    groups = top.items("layers", dict)
    if not groups:
        raise top.missing("layers")
    one_round: list[LayerSpec] = []
    for i, table in enumerate(groups):
        group = Fields(table, f"{top.where}: layers[{i}]")
        count = group.integer("count", default=1, high=MAX_LAYERS)
        one_round += [_layer(group, {"count"})] * count
        if len(one_round) > MAX_LAYERS:
            raise group.refuse("count", f"small enough for {MAX_LAYERS} layers in all")
    repeat = top.integer("repeat", default=1, high=max(1, MAX_LAYERS // len(one_round)))
    return tuple(one_round * repeat)


def _tower(fields: Fields) -> TowerSpec:
    layer = fields.sub("layer")
    if layer is None:
        raise fields.missing("layer")
    known = {"hidden_size", "num_hidden_layers", "layer", "tokens", "other_params", "norm_bias"}
    _refuse_unknown(fields, known)
    return TowerSpec(
        fields.width("hidden_size"),
        fields.integer("num_hidden_layers", high=MAX_LAYERS),
        _layer(layer, set()),
        tokens=fields.count("tokens", low=1),
        other_params=fields.integer("other_params", low=0, high=1 << 40),
        norm_bias=fields.flag("norm_bias", default=True),
    )


def model_from_table(table: dict[str, Any], name: str) -> ModelSpec:
    """The model that a table in our TOML form describes."""
    top = Fields(table, name)
    derived = {"kinds", "layer_kinds", "tower"}
    values = _read_spec(Fields({"name": name, **table}, name), ModelSpec, skip=derived)
    kinds, layer_kinds = sort_kinds(_layers(top))
    tower = top.sub("tower")
    return ModelSpec(
        kinds=kinds,
        layer_kinds=layer_kinds,
        tower=None if tower is None else _tower(tower),
        **values,
    )


def model_from_toml(path: str | Path) -> ModelSpec:
    """The model in a TOML file of our own form.

    Raises
    ------
    ModelError
        Not TOML, an unknown or missing key, a value that is wrong or contradicts another.
    """
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path, "TOML"))
    except RecursionError:
        raise ModelError(f"{path}: nested too deep for a model file.") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid TOML ({error}).", values={"path": str(path)}) from None
    return model_from_table(table, path.stem)
