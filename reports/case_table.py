"""The table of reported cases: what people saw fit, run out of memory, or take so many seconds.

`validation/cases.csv` holds the reports, `validation/cases.toml` how each was run. A case becomes a
row of the kind that published runs are (`reports.published_table`), so that both take one way.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from reports.published_rules import SourceRule, rule_of
from reports.published_table import COLUMNS, VALIDATION_DIR, NotPredictable, PublishedRow

CASES_TABLE = VALIDATION_DIR / "cases.csv"
GATED = {"llama": ("1", "0"), "nemo": ("1", "0")}  # gated_mlp and tied_embeddings by style
RENAMED = {
    "model": "model_name",
    "ffn": "ffn_hidden",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "experts": "n_experts",
    "moe_ffn": "moe_ffn_hidden",
    "zero": "zero_stage",
    "note": "notes",
}
GPUS = {
    "A100-80GB": "A100-SXM-80GB",
    "A100/A800-80GB": "A100-SXM-80GB",
    "A100-40GB": "A100-SXM-40GB",
    "H100-80GB": "H100-SXM-80GB",
    "H100-96GB": "H100-SXM-96GB-HBM2e-500W",
    "H100-96GB-HBM2e-500W": "H100-SXM-96GB-HBM2e-500W",
    "H200-141GB": "H200-SXM-141GB",
}
# Modules that a report says are recomputed, in the words of the table of published runs.
RECOMPUTED = {
    "selective core_attn": "core_attn",
    "norm+act": "layernorm+moe_act",
    "selective moe+layernorm": "moe+layernorm",
}
PRECISION = re.compile(r"fp8|fp4|bf16|fp16|fp32")


@dataclass(frozen=True, slots=True)
class CaseRule:
    """What the page or the code behind a case says beyond its columns.

    `like` is a source of rules.toml, `set` replaces columns of the row, `skip` says why a case is
    not judged, `cause` why prediction and report differ, where that is understood.
    """

    like: str = ""
    clusters: Mapping[str, str] = field(default_factory=dict)
    set: Mapping[str, str] = field(default_factory=dict)
    skip: str = ""
    cause: str = ""
    runtime: str = ""
    gb_bytes: float = 2.0**30  # what the report calls a GB
    measure: str = "peak"  # peak | activations | host
    bound: bool = False  # the value is what is enough, not what was used
    counts: tuple[int, ...] = ()  # layers per pipeline rank
    schedule: str = ""
    cp_kind: str = ""
    shard: int = 0
    tokens: float = 0.0  # trained, where hours are reported
    dense_layers: int = 0  # of a shortened mixture of experts
    domain_gpus: int = 0  # GPUs of a scale-up domain that a job is given, where not all
    flash: bool = True
    sequence_parallel_stated: bool = False  # on where the recompute says +sp, off elsewhere


@dataclass(frozen=True, slots=True)
class ReportedCase:
    """One report: its fields as written, and its rule."""

    fields: Mapping[str, str]
    rule: CaseRule

    @property
    def id(self) -> str:
        return self.fields["id"]

    @property
    def value(self) -> float | None:
        text = self.fields["expected_value"]
        return float(text) if text else None


@lru_cache
def case_rules() -> Mapping[str, Any]:
    with open(VALIDATION_DIR / "cases.toml", "rb") as file:
        return tomllib.load(file)


@lru_cache
def read_cases() -> tuple[ReportedCase, ...]:
    """The cases that ship, in their order."""
    with open(CASES_TABLE, encoding="utf-8", newline="") as file:
        return tuple(ReportedCase(record, rule_for(record)) for record in csv.DictReader(file))


def rule_for(record: Mapping[str, str]) -> CaseRule:
    """Rule of a case: that of the longest beginning of its source, and what its own id adds."""
    sources: Mapping[str, Any] = case_rules()["sources"]
    names = [name for name in sources if record["source"].startswith(name)]
    base = dict(sources[max(names, key=len)]) if names else {}
    own = case_rules()["rows"].get(record["id"], {})
    both = {**base.get("set", {}), **own.get("set", {})}
    merged = {**base, **own, "set": both}
    if "counts" in merged:
        merged["counts"] = tuple(merged["counts"])
    return CaseRule(**merged)


def source_rule(case: ReportedCase) -> SourceRule:
    """Rule of a published source, with clusters and runtime of the case."""
    if not case.rule.like:
        raise NotPredictable("nothing says which runtime ran it")
    base = rule_of(case.rule.like)
    changes: dict[str, Any] = {
        "clusters": {**base.clusters, **case.rule.clusters},
        "runtime": case.rule.runtime or base.runtime,
    }
    if case.rule.domain_gpus:
        changes["changes"] = {**base.changes, "cluster.domain_gpus": float(case.rule.domain_gpus)}
    known = {name: getattr(base, name) for name in SourceRule.__slots__}
    return SourceRule(**{**known, **changes})


def published_row(case: ReportedCase, lenient: Mapping[str, str]) -> PublishedRow:
    """The case as a row of the table of published runs; `lenient` fills what it leaves empty."""
    record, rule = case.fields, case.rule
    row = dict.fromkeys(COLUMNS, "")
    for name, value in record.items():
        column = RENAMED.get(name, name)
        if column in row:
            row[column] = value
    style = rule_of(rule.like).model if rule.like else ""
    row["gated_mlp"], row["tied_embeddings"] = GATED.get(style, ("0", "1"))
    row["gpu"] = GPUS.get(record["gpu"], record["gpu"])
    found = PRECISION.search(record["precision"].replace("nvfp4", "fp4"))
    row["precision"] = found.group() if found else ""
    row["recompute"], modules = recompute_of(record["recompute"])
    if modules:
        row["notes"] = f"selective modules: {modules}; {row['notes']}"
    row["flash_attention"] = "1" if rule.flash else "0"
    if rule.sequence_parallel_stated:
        row["sequence_parallel"] = "1" if record["recompute"].endswith("+sp") else "0"
    row["sharding_note"] = record["variant"]
    row["source_key"], row["quality"] = rule.like, "A"
    row |= rule.set
    row |= {name: value for name, value in lenient.items() if not row[name]}
    return PublishedRow(row)


def recompute_of(words: str) -> tuple[str, str]:
    """Policy and modules of what a report says is recomputed.

    >>> recompute_of("norm+act"), recompute_of("full uniform"), recompute_of("as in recipe")
    (('selective', 'layernorm+moe_act'), ('full', ''), ('', ''))
    """
    if words in RECOMPUTED:
        return "selective", RECOMPUTED[words]
    for policy in ("none", "selective", "full"):
        if words.startswith(policy):
            return policy, ""
    return ("" if words in ("", "as in recipe") else words), ""
