"""A reported case as the cost model sees it: model, setting, layout and stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.errors import ShardwiseError
from planner.estimate import stage_layouts
from planner.layout import CP_KINDS, OFFLOADS, SCHEDULES
from planner.specs import LoraSpec, ModelSpec
from reports.case_table import ReportedCase, case_rules, published_row, source_rule
from reports.published_models import preset
from reports.published_rows import Case, case_of
from reports.published_table import MissingField, NotPredictable, PublishedRow

# What takes least memory: where even that does not fit, nothing left open matters.
LENIENT = {
    "seq_len": "128",
    "micro_batch": "1",
    "recompute": "full",
    "zero_stage": "3",
    "vpp": "1",
    "cp": "1",
    "pp": "1",
    "tp": "1",
}
ALL_LINEAR = ("qkv", "out", "mlp")
STATES_OFFLOADED = {"optimizer cpu": "optimizer-cpu", "optimizer cpu 100%": "optimizer-cpu"}


def ready(case: ReportedCase, lenient: bool = False) -> Case:
    """A case made ready; `lenient` fills what it leaves open with what takes least memory.

    Raises
    ------
    MissingField, NotPredictable
        Why it cannot be judged.
    """
    rule = case.rule
    if rule.skip:
        raise NotPredictable(rule.skip)
    row = published_row(case, LENIENT if lenient else {"cp": "1", "pp": "1", "tp": "1"})
    if not lenient:
        require(case, row)
    found = case_of(row, {}, source_rule(case), model_of_case(case, row))
    layout, setting = found.layout, found.setting
    changes: dict[str, int] = {}
    if rule.schedule:
        changes["schedule"] = SCHEDULES.index(rule.schedule)
    if rule.cp_kind:
        changes["cp_kind"] = CP_KINDS.index(rule.cp_kind)
    if rule.shard:
        changes["shard"] = rule.shard
    changes["offload"] = OFFLOADS.index(offload_of(case))
    layout = replace(layout, **changes)
    train = replace(setting.train, lora=lora_of(case))
    if "moments kept in bf16" in case.fields["note"]:
        train = replace(train, optimizer="adamw-bf16")
    setting = replace(setting, train=train)
    stages = found.stages
    if rule.counts:
        stages = stage_layouts(layout, setting, rule.counts, layout.recompute)
    elif rule.schedule:
        counts = [sum(stage.layers) for stage in stages]
        stages = stage_layouts(layout, setting, counts, layout.recompute)
    ranks = "first" if "first stage" in case.fields["expected"] else found.ranks
    return replace(found, setting=setting, layout=layout, stages=stages, ranks=ranks)


def require(case: ReportedCase, row: PublishedRow) -> None:
    """Refuse what a run of published rows may leave empty, and a single figure may not."""
    if not row.text("recompute") and case.fields["recompute"] != "as in recipe":
        raise MissingField("recompute", "none")
    batch = row.count("global_batch")
    if batch is None and (case.fields["kind"] == "throughput" or (row.count("pp") or 1) > 1):
        raise MissingField("global_batch", "micro_batch x dp")
    if row.count("ep") and not row.count("n_experts"):
        raise MissingField("n_experts", "1")


def offload_of(case: ReportedCase) -> str:
    """Code of what is kept off the device, or the reason that no policy is like it."""
    words = case.fields["offload"]
    if words in ("", "none"):
        return "none"
    if words not in STATES_OFFLOADED:
        raise NotPredictable(f"offload {words!r} is not one that the model has")
    return STATES_OFFLOADED[words]


def lora_of(case: ReportedCase) -> LoraSpec | None:
    """Adapters on all linears, except where the case's source adapts fewer."""
    rank = case.fields["lora_rank"]
    if not rank:
        return None
    if not rank.isdigit():
        raise MissingField("lora_rank", "16")
    targets = ("qkv",) if case.fields["source"].startswith("Lightning-AI/litgpt") else ALL_LINEAR
    return LoraSpec(int(rank), targets, quantized=case.fields["precision"].startswith("nf4"))


def model_of_case(case: ReportedCase, row: PublishedRow) -> ModelSpec | None:
    """The published config that a case names, cut or changed to its dimensions; None: by them."""
    names: Mapping[str, str] = case_rules()["models"]
    name = case.fields["model"].split(" (")[0]
    if name not in names:
        if row.count("n_experts") is not None:
            raise NotPredictable(f"no config of {name} ships, and the table has not all of it")
        return None
    try:
        model = preset(names[name])
    except ShardwiseError as error:
        raise NotPredictable(str(error)) from error
    return resized(model, row, case.rule.dense_layers)


def resized(model: ModelSpec, row: PublishedRow, dense_layers: int) -> ModelSpec:
    """The model with the layers, widths, heads and vocabulary of the row.

    A shortened model keeps its first layers, or `dense_layers` dense ones before the mixtures.
    """
    count = row.count("n_layers") or model.num_hidden_layers
    layers = model.layer_kinds
    if count > len(layers):
        raise NotPredictable(f"n_layers is {count}, but the published config has {len(layers)}")
    if count < len(layers):
        last = layers[-1]
        layers = layers[:count]
        if dense_layers:
            layers = (layers[0],) * dense_layers + (last,) * (count - dense_layers)
    kinds = []
    for kind in model.kinds:
        mlp = kind.mlp
        ffn = row.count("ffn_hidden")
        if mlp is not None and ffn is not None:
            mlp = replace(mlp, intermediate_size=ffn)
        heads = row.count("n_heads")
        if heads is not None and heads != kind.attention.num_attention_heads:
            raise NotPredictable(
                f"n_heads is {heads}, but the published config has "
                f"{kind.attention.num_attention_heads}"
            )
        kinds.append(replace(kind, mlp=mlp))
    hidden = row.count("hidden")
    if hidden is not None and hidden != model.hidden_size:
        raise NotPredictable(
            f"hidden is {hidden}, but the published config has {model.hidden_size}"
        )
    vocab = row.count("vocab") or model.vocab_size
    return replace(model, kinds=tuple(kinds), layer_kinds=layers, vocab_size=vocab)
