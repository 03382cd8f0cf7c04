"""How each source was run: `reports/validation/rules.toml`, and variants of runtimes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hwprofiles.profile import Fact
from planner.runtime import Runtime, load_runtime
from reports.published_table import VALIDATION_DIR, NotPredictable, PublishedRow


@dataclass(frozen=True, slots=True)
class SourceRule:
    """What the page or the code of a source says beyond the columns of its rows."""

    runtime: str
    model: str
    clusters: Mapping[str, str]
    memory: str = "device"  # device | reserved | allocated
    ranks: str = "all"  # all | first | last | ends
    blocking_launch_factor: float = 0.0  # CUDA_LAUNCH_BLOCKING=1 in the run script
    unfused: tuple[str, ...] = ()  # parts of ids whose runs attend without a fused kernel
    vocab: int = 0  # of the tokenizer that the source names, where its rows leave it out
    composed: str = ""  # why its times are a composition, and so count in no pooled error
    changes: Mapping[str, float] = field(default_factory=dict)  # facts of the cluster
    heads: Mapping[str, int] = field(
        default_factory=dict
    )  # by hidden width, where a table is silent


@lru_cache
def rules() -> Mapping[str, Any]:
    with open(VALIDATION_DIR / "rules.toml", "rb") as file:
        return tomllib.load(file)


def rule_of(source: str) -> SourceRule:
    """The rule of a source, or the reason that its rows cannot be predicted."""
    known: Mapping[str, Any] = rules()["sources"]
    if source not in known:
        raise NotPredictable(f"source_key {source[:40]!r} has no rule that names its runtime")
    return SourceRule(**known[source])


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a source's recipe says of a model beyond the columns of its rows."""

    source: str
    model: str
    read: str
    id: str = ""
    runtime: str = ""
    recompute: str = ""
    modules: tuple[str, ...] = ()
    optimizer: str = ""
    micro_batch: int = 0


@lru_cache
def recipes() -> tuple[Recipe, ...]:
    """Recipes in the order of the file; a later one is more special."""
    entries: list[dict[str, Any]] = rules()["recipes"]
    return tuple(
        Recipe(**{**entry, "modules": tuple(entry.get("modules", ()))}) for entry in entries
    )


def recipe_of(row: PublishedRow) -> Recipe | None:
    """The most special recipe of a row's source and model, if one is known."""
    found = None
    for recipe in recipes():
        if (
            recipe.source == row.source
            and row.text("model_name").startswith(recipe.model)
            and recipe.id in row.text("id")
        ):
            found = recipe
    return found


def composed_sources() -> dict[str, str]:
    """Sources whose times were put together from parts rather than measured, and how that shows."""
    sources: Mapping[str, Any] = rules()["sources"]
    return {name: rule["composed"] for name, rule in sources.items() if rule.get("composed")}


@lru_cache
def runtime_of(name: str) -> Runtime:
    """A runtime file, or a variant: a file with some facts replaced."""
    variant = rules()["variants"].get(name)
    if variant is None:
        return load_runtime(name)
    base = runtime_of(variant["base"])  # a variant of a variant, too
    changes: dict[str, Any] = {"name": name}
    facts, tables = (
        dict(base.facts),
        {t: dict(getattr(base, t)) for t in ("pass_bytes", "launches", "kept_extra")},
    )
    for key, entry in variant.get("facts", {}).items():
        value = float(entry["value"])
        facts[key] = Fact(
            value, value, entry["unit"], entry["kind"], entry["source"], note=entry.get("note", "")
        )
        table, _, item = key.partition(".")
        if item:
            tables[table][item] = value
        else:
            changes[key] = value
    changes |= {key: entry["value"] for key, entry in variant.get("flags", {}).items()}
    changes |= tables
    return replace(base, facts=facts, **changes)


def seen_by_allocator(runtime: Runtime, basis: str) -> Runtime:
    """The runtime as an allocator's counter sees its memory: no context, no communicator buffers.

    `allocated` leaves out what the allocator reserves beyond it, too. Times do not change.
    """
    if basis == "device":
        return runtime
    changes: dict[str, Any] = {
        "context_bytes": 0.0,
        "comm_bytes_per_group": 0.0,
        "comm_base_bytes": 0.0,
    }
    if basis == "allocated":
        changes["allocator_fraction"] = 0.0
    return replace(runtime, **changes)
