"""``shardwise models``: the models there are, or one of them counted."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from planner.errors import InputError
from planner.model_flops import ModelFlops, model_flops_per_token
from planner.parameters import (
    active_parameters,
    embedding_parameters,
    final_norm_parameters,
    head_parameters,
    layer_parameters,
    layers_parameters,
    total_parameters,
    tower_parameters,
)
from planner.presets_index import available_models, load_model
from planner.specs import AttentionSpec, LayerSpec, ModelSpec

DEFAULT_SEQ_LEN = 4096
MAX_SEQ_LEN = 1 << 30


def models_document(name: str | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """What ``shardwise models [NAME] --json`` prints: every preset, or one model in detail.

    `seq_len` is that of the FLOPs; without one, 4096 or the positions that the model has learned.
    """
    if seq_len is not None and not 1 <= seq_len <= MAX_SEQ_LEN:
        raise InputError(
            f"seq_len={seq_len} must be from 1 to {MAX_SEQ_LEN}.",
            values={"seq_len": seq_len},
            legal={"seq_len": [1, MAX_SEQ_LEN]},
        )
    if name is None:
        models = [load_model(preset) for preset in available_models()]
        return {"models": [_summary(model) for model in models]}
    return _detail(load_model(name), seq_len)


def _summary(model: ModelSpec) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": {"total": total_parameters(model), "active": active_parameters(model)},
        "layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "moe": model.is_moe,
        "source": model.source,
    }


def _detail(model: ModelSpec, seq_len: int | None) -> dict[str, Any]:
    if seq_len is None:
        seq_len = DEFAULT_SEQ_LEN
        if model.positions == "learned":
            seq_len = min(seq_len, model.max_position_embeddings)
    flops = model_flops_per_token(model, seq_len)
    return {
        "name": model.name,
        "parameters": {
            "total": total_parameters(model),
            "active": active_parameters(model),
            "embedding": int(embedding_parameters(model)),
            "layers": layers_parameters(model),
            "final_norm": final_norm_parameters(model),
            "head": int(head_parameters(model)),
            "tower": tower_parameters(model),
        },
        "layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "norm": model.norm,
        "positions": model.positions,
        "tie_word_embeddings": model.tie_word_embeddings,
        "mtp_layers_left_out": model.mtp_layers,
        "extra_params": model.extra_params,
        "extra_params_note": model.extra_params_note,
        "layer_kinds": [_kind(model, index) for index in range(len(model.kinds))],
        "tower": None if model.tower is None else _tower(model),
        "flops_per_token": _flops(flops, seq_len),
        "source": model.source,
    }


def _kind(model: ModelSpec, index: int) -> dict[str, Any]:
    layer = model.kinds[index]
    counts = layer_parameters(model, index)
    return {
        "layers": model.layer_kinds.count(index),
        "attention": _set_fields(layer.attention),
        "mlp": None if layer.mlp is None else _set_fields(layer.mlp),
        "moe": None if layer.moe is None else _set_fields(layer.moe),
        "words": _layer_words(layer),
        "norms": layer.norms,
        "parallel": layer.parallel,
        "parameters": {
            "total": counts.total,
            "dense_tp": counts.dense_tp,
            "dense_kv": counts.dense_kv,
            "dense_replicated": counts.dense_replicated,
            "expert": counts.expert,
            "parts": {name: part.count for name, part in counts.parts.items()},
        },
    }


def _set_fields(spec: Any) -> dict[str, Any]:
    """The fields of a spec that say something: those that are not zero, false or none."""
    values = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return {name: value for name, value in values.items() if value not in (0, None, "none")}


def _tower(model: ModelSpec) -> dict[str, Any]:
    tower = model.tower
    if tower is None:
        return {}
    return {
        "hidden_size": tower.hidden_size,
        "layers": tower.num_hidden_layers,
        "num_attention_heads": tower.layer.attention.num_attention_heads,
        "tokens": tower.tokens,
        "parameters": tower_parameters(model),
    }


def _flops(flops: ModelFlops, seq_len: int) -> dict[str, Any]:
    return {
        "seq_len": seq_len,
        "convention": "model FLOPs, causal attention counted exactly, logits included",
        "forward": flops.forward_flops,
        "forward_backward": flops.total_flops,
        "forward_by_part": flops.forward,
    }


def _amount(count: float) -> str:
    """A count for people: 3 significant digits and a unit."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:  # rounds to 1.00 at least
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _attention_words(spec: AttentionSpec) -> str:
    if spec.kind == "none":
        return "no attention"
    heads = f"{spec.num_attention_heads} heads of {spec.head_dim}"
    if spec.kind == "mla":
        words = f"latent attention, {heads}, kv rank {spec.kv_lora_rank}"
    elif spec.kind != "gqa":
        words = f"{spec.kind}, {spec.num_attention_heads} heads of {spec.v_dim}"
    elif spec.num_key_value_heads == spec.num_attention_heads:
        words = heads
    else:
        words = f"{heads}, {spec.num_key_value_heads} key-value heads"
    if spec.index_topk:
        words += f", sparse to {spec.index_topk} keys"
    if spec.window:
        words += f", {'chunks' if spec.chunked else 'window'} of {spec.window}"
    return words


def _layer_words(layer: LayerSpec) -> list[str]:
    words = [_attention_words(layer.attention)]
    if layer.mlp is not None:
        kind = "gated MLP" if layer.mlp.gated else "MLP"
        words.append(f"{kind} of {layer.mlp.intermediate_size}")
    if layer.moe is not None:
        moe = layer.moe
        chosen = f"{moe.num_experts_per_tok} of {moe.num_experts}"
        shared = f", {moe.shared_intermediate_size} shared" if moe.shared_intermediate_size else ""
        words.append(f"{chosen} experts of {moe.intermediate_size}{shared}")
    return words


def print_models(document: dict[str, Any]) -> None:
    """Print a `models_document` for people, in at most 80 columns where names allow."""
    for line in model_lines(document):
        print(line)


def model_lines(document: dict[str, Any]) -> list[str]:
    """The lines that `print_models` prints."""
    if "models" in document:
        rows = document["models"]
        width = max(len(row["name"]) for row in rows)
        head = f"{'model':<{width}}  {'params':>7}  {'active':>7}  {'layers':>6}  {'hidden':>6}"
        lines = [head]
        for row in rows:
            counts = row["parameters"]
            active = _amount(counts["active"]) if row["moe"] else ""
            lines.append(
                f"{row['name']:<{width}}  {_amount(counts['total']):>7}  {active:>7}  "
                f"{row['layers']:>6}  {row['hidden_size']:>6}"
            )
        return lines
    return _detail_lines(document)


def _detail_lines(document: dict[str, Any]) -> list[str]:
    counts = document["parameters"]
    lines = [
        document["name"],
        f"  parameters  {counts['total']:>18,}",
    ]
    if counts["active"] != counts["total"]:
        lines.append(f"  active      {counts['active']:>18,}")
    names = ("embedding", "layers", "final_norm", "head", "tower")
    lines += [f"    {part:<10}{counts[part]:>18,}" for part in names if counts[part]]
    tied = ", tied with the head" if document["tie_word_embeddings"] else ""
    lines += [
        f"  hidden {document['hidden_size']}, vocabulary {document['vocab_size']}{tied}",
        f"  norm {document['norm']}, positions {document['positions']}",
        f"  {document['layers']} layers",
    ]
    for kind in document["layer_kinds"]:
        attention, *rest = kind["words"]
        lines.append(f"    {kind['layers']:>3} x {attention}")
        lines += [f"          {words}" for words in rest]
        lines.append(f"          {kind['parameters']['total']:,} parameters each")
    if document["tower"]:
        tower = document["tower"]
        lines.append(
            f"  tower: {tower['layers']} layers, hidden {tower['hidden_size']}, "
            f"{tower['tokens']} tokens an image"
        )
    if document["mtp_layers_left_out"]:
        left_out = document["mtp_layers_left_out"]
        lines.append(f"  left out: {left_out} multi-token-prediction layer(s)")
    if document["extra_params"]:
        lines.append(f"  with the embedding: {document['extra_params_note']}")
    flops = document["flops_per_token"]
    lines += [
        f"  model FLOPs per token at sequence length {flops['seq_len']}",
        (
            f"    forward {flops['forward'] / 1e9:.4g} G, both ways "
            f"{flops['forward_backward'] / 1e9:.4g} G; forward by part:"
        ),
    ]
    for part, value in flops["forward_by_part"].items():
        if value:
            lines.append(f"    {part:<22}{value / 1e9:>12.4f} G")
    if document["source"]:
        lines.append(f"  source: {document['source']}")
    return lines


def models(
    model: Annotated[
        str | None, typer.Argument(help="preset, config.json or folder, or TOML file")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="sequence length of the FLOPs")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """List the models, or count the parameters and FLOPs of one."""
    document = models_document(model, seq_len)
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        print_models(document)
