"""A published run as the cost model sees it: row -> setting, layout, stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from hwprofiles.loader import load_cluster
from hwprofiles.override import override
from hwprofiles.profile import Cluster
from planner.errors import ShardwiseError
from planner.estimate import even_counts, stage_layouts
from planner.layout import OFFLOADS, RECOMPUTE, SCHEDULES, Layout, StageLayout
from planner.problem import UNFUSED, attention_kernel
from planner.runtime import Runtime
from planner.setting import Setting
from planner.specs import ModelSpec, TrainSpec
from reports.published_models import model_of
from reports.published_rules import SourceRule, recipe_of, rule_of, runtime_of, seen_by_allocator
from reports.published_table import MissingField, NotPredictable, PublishedRow

OPTIMIZERS = {"decoupled_adamw": "adamw", "adamw": "adamw", "cpu adamw": "adamw"}
# NIC rate per node as the table states it [bytes/s]; the links of the shipped clusters agree.
LINK_RATE = re.compile(r"(\d+) Gb/s per (node|GPU)")
MODULES = {
    "core_attn": "core_attention",
    "mla_up_proj": "mla_up_projection",
    "moe_act": "moe_activation",
    "layernorm": "norm",
    "mlp": "mlp",
    "moe": "moe",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A row made ready: what to estimate, and which ranks' memory was measured.

    `timed` is False where the batch is not stated, so that only memory can be compared.
    """

    row: PublishedRow
    setting: Setting
    layout: Layout
    stages: tuple[StageLayout, ...]
    ranks: str
    memory: str
    timed: bool = True


def case_of(
    row: PublishedRow,
    vpp_elsewhere: Mapping[tuple[str, int, int], int],
    rule: SourceRule | None = None,
    model: ModelSpec | None = None,
) -> Case:
    """Make a row ready; `rule` and `model`, where given, stand in for those of its source.

    Raises
    ------
    MissingField, NotPredictable
        With the reason that goes into the column `skipped_reason`.
    """
    rule = rule or rule_of(row.source)
    if row.source == "megatron_ci" and row.says("id", "fine_grained_offloading"):
        raise NotPredictable(
            "it offloads the activations of some modules, which no policy here does"
        )
    try:
        return _case(row, rule, vpp_elsewhere, model)
    except ShardwiseError as error:
        raise NotPredictable(str(error)) from error


def _case(
    row: PublishedRow,
    rule: SourceRule,
    vpp_elsewhere: Mapping[tuple[str, int, int], int],
    model: ModelSpec | None,
) -> Case:
    model = model or model_of(row, rule)
    cluster = cluster_of(row, rule)
    runtime = row_runtime(row, rule)
    vpp = vpp_of(row, vpp_elsewhere)
    layout, batch, timed = layout_of(row, vpp)
    train = TrainSpec(
        global_batch_size=batch,
        seq_len=row.needed("seq_len", "2048"),
        precision=precision_of(row),
        optimizer=optimizer_of(row),
        runtime=runtime.name,
    )
    flash = row.flag("flash_attention")
    plain = flash is False or row.says("notes", "unfused attention backend")
    plain = plain or any(f"_{test}_H100" in row.text("id") for test in rule.unfused)
    kernel = UNFUSED if plain else attention_kernel(cluster, runtime, None)
    setting = Setting(
        model,
        train,
        cluster,
        seen_by_allocator(runtime, rule.memory),
        layout.num_gpus,
        kernel=kernel,
    )
    return Case(
        row, setting, layout, stages_of(row, layout, setting), rule.ranks, rule.memory, timed
    )


@lru_cache
def cluster_named(name: str, changes: tuple[tuple[str, float], ...]) -> Cluster:
    return override(load_cluster(name), dict(changes)) if changes else load_cluster(name)


def cluster_of(row: PublishedRow, rule: SourceRule) -> Cluster:
    """The shipped cluster of the row's GPU, with the NIC rate that the row states."""
    gpu = row.text("gpu")
    if gpu not in rule.clusters:
        raise NotPredictable(
            f"gpu {gpu!r} of {row.source} is not one whose memory and links are stated"
        )
    changes: dict[str, float] = dict(rule.changes)
    stated = LINK_RATE.search(row.text("inter_link"))
    base = cluster_named(rule.clusters[gpu], ())
    if stated is not None:
        bits = (
            float(stated.group(1)) * 1e9 * (base.gpus_per_node if stated.group(2) == "GPU" else 1)
        )
        changes["cluster.nics_per_node"] = bits / 8 / base.scale_out.bytes_per_s
    if changes.get("cluster.nics_per_node") == base.nics_per_node:
        del changes["cluster.nics_per_node"]
    return cluster_named(rule.clusters[gpu], tuple(sorted(changes.items())))


def row_runtime(row: PublishedRow, rule: SourceRule) -> Runtime:
    """The runtime of the source, or the variant that the row's own fields ask for."""
    name, note, source = rule.runtime, row.text("sharding_note").lower(), row.source
    if source == "llmfoundry" and "default" in note:
        name = "composer-fsdp1-default"
    elif source == "bloom" and row.text("precision") == "fp16":
        name = "megatron-deepspeed-fp16"
    elif source == "torchtitan" and row.says("gpu", "h200"):
        name = "torchtitan-2025"
    elif source == "torchtitan" and "eager" in note:
        name = "torchtitan-eager"
    elif source == "torchtitan" and "async tp" in note:
        name = "torchtitan-async-tp"
    elif source in ("papers", "megatron_lm_readme") and row.says("gpu", "h100"):
        name = "megatron-core"
    elif source in ("korthikanti", "megatron_ci") and row.flag("sequence_parallel") is False:
        name = f"{name}-no-sp"
    recipe = recipe_of(row)
    if recipe is not None and recipe.runtime:
        name = recipe.runtime
    runtime = runtime_of(name)
    if rule.blocking_launch_factor:
        runtime = replace(runtime, blocking_launch_factor=rule.blocking_launch_factor)
    words: tuple[str, ...] = ()
    found = re.search(r"(?:selective|recompute) modules:? (\S+);", row.text("notes"))
    if found and row.text("recompute") == "selective":
        words = tuple(found.group(1).split("+"))
    elif recipe is not None and row.text("recompute") in ("", "selective"):
        words = recipe.modules
    if words:
        runtime = replace(runtime, selective_modules=tuple(MODULES[word] for word in words))
    return runtime


def optimizer_of(row: PublishedRow) -> str:
    recipe = recipe_of(row)
    if recipe is not None and recipe.optimizer:
        return recipe.optimizer
    return OPTIMIZERS.get(row.text("optimizer").lower(), "adam")


def precision_of(row: PublishedRow) -> str:
    if not row.text("precision"):
        raise MissingField("precision", "bf16 or fp8")
    return row.text("precision")


def vpp_of(row: PublishedRow, elsewhere: Mapping[tuple[str, int, int], int]) -> int:
    """Model chunks; not stated: 1 without pipeline, else as in other releases of the same run."""
    vpp = row.count("vpp")
    if vpp is not None:
        return vpp
    pp = row.count("pp") or 1
    if pp == 1:
        return 1
    if row.source == "torchtitan" and row.says("sharding_note", "interleaved"):
        return 2  # stages per rank of that schedule in torchtitan's defaults of the time
    key = (row.text("model_name"), row.count("tp") or 1, pp)
    if key in elsewhere:
        return elsewhere[key]
    raise MissingField("vpp", "1")


def layout_of(row: PublishedRow, vpp: int) -> tuple[Layout, int, bool]:
    """Layout and batch; whether the batch is stated."""
    tp, pp, cp = (row.needed(name, "1") for name in ("tp", "pp", "cp"))
    if row.count("n_gpus") is None and row.count("dp") is None:
        raise MissingField("n_gpus", "the smallest number that the layout allows")
    dp = row.count("dp") or row.needed("n_gpus", "none") // (tp * pp * cp)
    zero = row.count("zero_stage")
    if zero is None:
        raise MissingField("zero_stage", "1")
    recipe = recipe_of(row)
    micro = row.count("micro_batch")
    if recipe is not None and recipe.micro_batch:
        micro = recipe.micro_batch
    batch = row.count("global_batch")
    if micro is None and row.source == "torchtitan" and pp > 1 and batch:
        # torchtitan's default at the time: as many micro-batches as there are stages.
        micro = max(1, batch // (dp * pp * vpp))
    if micro is None:
        raise MissingField("micro_batch", "1")
    # Tests of numerics in deterministic mode say of themselves that their times mean nothing.
    timed = batch is not None and not row.says("notes", "use for memory only")
    if batch is None:
        batch = micro * dp
    if batch % (micro * dp):
        raise NotPredictable(
            f"global_batch={batch} is not a multiple of micro_batch x dp = {micro} x {dp}"
        )
    policy = row.text("recompute") or (recipe.recompute if recipe else "") or "none"
    if policy not in RECOMPUTE:
        raise NotPredictable(f"recompute is {policy!r}, and must be one of {', '.join(RECOMPUTE)}")
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        ep=row.count("ep") or 1,
        etp=row.count("etp") or 1,
        zero=zero,
        shard=dp * cp if zero else 1,
        micro_batch=micro,
        recompute=RECOMPUTE.index(policy),
        schedule=SCHEDULES.index("interleaved" if vpp > 1 else "1f1b"),
        offload=OFFLOADS.index("optimizer-cpu") if row.says("offload", "optimizer") else 0,
    )
    return layout, batch, timed


def stages_of(row: PublishedRow, layout: Layout, setting: Setting) -> tuple[StageLayout, ...]:
    """Layers per rank and their policies, where the row says more than an even split."""
    layers = setting.model.num_hidden_layers
    counts = even_counts(layers, layout.pp)
    if setting.runtime.name == "nanotron":
        counts = counts_by_cost(setting.model, layout.pp)
    if row.says("notes", "partition type:transformer|embedding") and layout.pp > 1:
        counts = even_counts(layers + 2, layout.pp)
        counts[0] -= 1
        counts[-1] -= 1
    policy = layout.recompute
    stages = stage_layouts(layout, setting, counts, policy)
    share = full_share(row)
    if share is None:
        return stages
    full = RECOMPUTE.index("full")
    return tuple(partly(stage, share, full) for stage in stages)


def counts_by_cost(model: ModelSpec, pp: int) -> list[int]:
    """Layers per rank as nanotron splits them: by products, the head's V h beside the layers'.

    A rank takes blocks until their cost, summed from the first, exceeds its share; then the next.

    >>> from planner.specs import AttentionSpec, LayerSpec, MlpSpec
    >>> kind = LayerSpec(AttentionSpec(32, 32, 64), MlpSpec(4096))
    >>> counts_by_cost(ModelSpec("m", 2048, 50257, (kind,), (0,) * 24), 4)
    [7, 7, 6, 4]
    """
    kind = model.kinds[0]
    width = kind.mlp.intermediate_size if kind.mlp is not None else 0
    attention = kind.attention
    layer = 4 * attention.num_attention_heads * attention.head_dim + 3 * width
    whole = model.num_hidden_layers * layer + model.vocab_size
    counts, rank = [0] * pp, 0
    for index in range(model.num_hidden_layers):
        counts[rank] += 1
        if (index + 1) * layer * pp > whole * (rank + 1) and rank < pp - 1:
            rank += 1
    return counts


def full_share(row: PublishedRow) -> float | None:
    """Share of layers under full recompute where a row's ``selective`` means whole layers."""
    if row.text("recompute") != "selective":
        return None
    if row.says("notes", "selective layer"):
        return 0.5  # every second layer, the option's default
    if row.source == "fms_fsdp":
        mfu, hfu = row.number("mfu_pct"), row.number("hfu_pct")
        if not mfu or not hfu:
            raise MissingField("hfu_pct", "one layer in two recomputed")
        return min(1.0, max(0.0, 3.0 * (hfu / mfu - 1.0)))
    return None


def partly(stage: StageLayout, share: float, full: int) -> StageLayout:
    """The stage with a share of its layers under full recompute and the rest under none.

    >>> partly(StageLayout((4,), ((0, 4, 0, 0),)), 0.5, 2).policies
    ((2, 0, 2, 0),)
    """
    policies = []
    for count in stage.layers:
        again = round(share * count)
        policies.append(
            tuple(
                again if p == full else count - again if p == 0 else 0
                for p in range(len(RECOMPUTE))
            )
        )
    return StageLayout(stage.layers, tuple(policies))


def vpp_by_run(rows: tuple[PublishedRow, ...]) -> dict[tuple[str, int, int], int]:
    """Interleaving by (model, tp, pp) where all rows that state it agree."""
    found: dict[tuple[str, int, int], set[int]] = {}
    for row in rows:
        vpp, tp, pp = row.count("vpp"), row.count("tp"), row.count("pp")
        if vpp and tp and pp:
            found.setdefault((row.text("model_name"), tp, pp), set()).add(vpp)
    return {key: next(iter(values)) for key, values in found.items() if len(values) == 1}
