"""Reads a runtime file: TOML of facts -> `planner.runtime.Runtime`.

Strict: every field is there, no other is, and every number has value, unit, kind and source.
Numbers are written in SI units, so that nothing is converted here.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hwprofiles.errors import ProfileError
from hwprofiles.profile import Fact
from planner.layout import CP_KINDS, OFFLOADS, RECOMPUTE, SCHEDULES
from planner.runtime import RUNTIME_DIR, Runtime
from planner.specs import OPTIMIZERS, PRECISIONS

KINDS = ("datasheet", "derived", "measured", "assumed")
UNITS = (
    "SMs",
    "B",
    "B/param",
    "B/element",
    "B/logit",
    "elements",
    "layers",
    "fraction",
    "s",
    "ranks",
    "kernels",
    "drains",
)
SELECTIVE_MODULES = (
    "core_attention",
    "norm",
    "activation",
    "moe_activation",
    "mlp",
    "moe",
    "mla_up_projection",
    "matmul_half",
)
_WORDS: Mapping[str, tuple[str, ...]] = {
    "schedules": SCHEDULES,
    "recompute": RECOMPUTE,
    "selective_modules": SELECTIVE_MODULES,
    "cp_kinds": CP_KINDS,
    "offloads": OFFLOADS,
    "precisions": PRECISIONS,
    "optimizers": OPTIMIZERS,
    "overlap_p2p": SCHEDULES,
    "microbatches_at_least_pp": SCHEDULES,
}
_STAGES = ("zero_stages", "zero_with_pp", "reduce_every_microbatch", "split_backward_zero")
_FLAGS = (
    "hsdp",
    "sequence_parallel",
    "scattered_sends",
    "kv_replication",
    "expert_tp",
    "uneven_stages",
    "interleaved_multiple",
    "weight_shard_is_master",
    "zero3_pp_keeps_stage",
    "ulysses_kv_replication",
    "ring_window",
    "pads_products",
)
_REDUCE_OPS = ("all_reduce", "reduce_scatter")
_OFFERS = {*_WORDS, *_STAGES, *_FLAGS, "reduce_op"}
_LIMITS = ("max_tp", "max_pp", "max_cp", "max_ep", "vocab_multiple")
_MEMORY = (
    "weight_bytes",
    "grad_bytes",
    "master_bytes",
    "passing_grad_bytes",
    "step_grad_bytes",
    "fp8_weight_copy_bytes",
    "fsdp_forward_units",
    "fsdp_backward_weight_units",
    "fsdp_backward_grad_bytes",
    "bucket_elements",
    "context_bytes",
    "comm_bytes_per_group",
    "comm_base_bytes",
    "reduce_buffer_bytes",
    "cublas_workspace_bytes",
    "allocator_fraction",
    "logit_bytes_kept",
    "logit_bytes_peak",
    "logit_bytes_peak_tp",
)
_TIME = (
    "reduce_bytes",
    "gather_bytes",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_overlap_fraction",
    "fp8_tp_gather_bytes",
    "cp_overlap_fraction",
    "ep_overlap_fraction",
    "overlap_contention",
    "comm_sms",
    "accumulate_bytes",
    "gather_copy_bytes",
    "reduce_copy_bytes",
    "moe_drains",
    "moe_drain_s",
    "route_bytes",
    "shared_expert_overlap",
    "step_bytes_full",
    "step_bytes_owned",
)
PASS_BYTES = (
    "norm_forward",
    "norm_backward",
    "residual_forward",
    "residual_backward",
    "dropout_forward",
    "dropout_backward",
    "bias_backward",
    "gated_forward",
    "gated_backward",
    "plain_forward",
    "plain_backward",
    "rotary_forward",
    "rotary_backward",
    "layout_backward",
    "loss",
    "permute_forward",
    "permute_backward",
    "expert_sort_forward",
    "expert_sort_backward",
    "expert_padding_forward",
    "expert_padding_backward",
    "expert_bias_forward",
    "expert_bias_backward",
    "clamp_forward",
    "clamp_backward",
    "router_forward",
    "router_backward",
    "scores_forward",
    "scores_backward",
    "scores_unfused_softmax_forward",
    "scores_unfused_softmax_backward",
    "fp8_cast_forward",
    "fp8_cast_backward",
    "fp8_weight_cast",
)
NAMED_TABLES = ("pass_bytes", "launches", "kept_extra")
KEPT_EXTRA = ("gated", "norm", "rotary", "gathered")
LAUNCHES = (
    "dense_forward",
    "dense_backward",
    "moe_forward",
    "moe_backward",
    "dispatch",
    "expert_forward",
    "expert_backward",
    "expert_fp8_forward",
    "expert_fp8_backward",
    "expert_bias_forward",
    "expert_bias_backward",
    "linear_module",
    "mla_forward",
    "mla_backward",
    "tp_forward",
    "tp_backward",
    "softmax_forward",
    "softmax_backward",
    "recompute",
    "fsdp_forward",
    "fsdp_backward",
    "optimizer",
)
_FACT_TABLES: Mapping[str, tuple[str, ...]] = {
    "limits": _LIMITS,
    "memory": _MEMORY,
    "time": _TIME,
    "pass_bytes": PASS_BYTES,
    "launches": LAUNCHES,
    "kept_extra": KEPT_EXTRA,
}


def available_runtimes() -> tuple[str, ...]:
    """Names of the runtimes that ship, in alphabetical order."""
    return tuple(sorted(p.stem for p in RUNTIME_DIR.glob("*.toml") if p.stem != "sources"))


@lru_cache
def source_ids() -> frozenset[str]:
    """Give the ids that `planner/runtimes/sources.toml` defines."""
    with open(RUNTIME_DIR / "sources.toml", "rb") as file:
        return frozenset(tomllib.load(file))


def read_runtime(path: Path | str) -> Runtime:
    """Read one runtime file.

    Raises
    ------
    ProfileError
        No such file (with near names), not TOML, an unknown or missing field, a value of the wrong
        type, or a number without unit, kind or a source of sources.toml.
    """
    path = Path(path)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        names = available_runtimes()
        near = difflib.get_close_matches(path.stem, names, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ProfileError(
            f"There is no runtime {path.stem!r}; known: {', '.join(names)}{hint}",
            values={"runtime": path.stem},
            legal={"runtime": near or list(names)},
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ProfileError(
            f"Runtime file {path.name} cannot be read as TOML: {error}.",
            values={"file": path.name},
        ) from None
    return _Reader(path.name).runtime(document)


class _Reader:
    """Checks one document; `file` is what messages call it."""

    def __init__(self, file: str) -> None:
        self.file = file

    def runtime(self, document: Mapping[str, Any]) -> Runtime:
        expected = ("name", "title", "offers", *_FACT_TABLES, "attention_kernels")
        self.keys(document, expected, "the file")
        facts: dict[str, Fact] = {}
        tables: dict[str, dict[str, float]] = {}
        for table, names in _FACT_TABLES.items():
            entries = self.table(document, table)
            self.keys(entries, names, f"[{table}]")
            values: dict[str, float] = {}
            for name in names:
                fact = self.fact(entries[name], f"{table}.{name}")
                values[name] = fact.value
                facts[f"{table}.{name}" if table in NAMED_TABLES else name] = fact
            tables[table] = values
        arguments: dict[str, Any] = {
            "name": self.word(document["name"], "name"),
            "title": self.word(document["title"], "title"),
            **self.offers(self.table(document, "offers")),
            **{name: self.whole(tables["limits"][name], name) for name in _LIMITS},
            **tables["memory"],
            **tables["time"],
            "pass_bytes": tables["pass_bytes"],
            "launches": tables["launches"],
            "kept_extra": tables["kept_extra"],
            "attention_kernels": self.kernels(self.table(document, "attention_kernels")),
            "facts": facts,
        }
        return Runtime(**arguments)

    def refuse(self, what: str, value: object = None, legal: object = ()) -> ProfileError:
        return ProfileError(
            f"Runtime file {self.file}: {what}",
            values={"file": self.file, "value": repr(value)},
            legal=list(legal) if isinstance(legal, tuple | list | set) else [],
        )

    def keys(self, table: Mapping[str, Any], expected: tuple[str, ...], where: str) -> None:
        if unknown := sorted(set(table) - set(expected)):
            near = difflib.get_close_matches(unknown[0], expected, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise self.refuse(f"unknown key {unknown[0]!r} in {where}{hint}", unknown[0], near)
        if missing := [name for name in expected if name not in table]:
            raise self.refuse(f"{where} lacks {', '.join(missing)}.", None, missing)

    def table(self, document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        table = document[name]
        if not isinstance(table, dict):
            raise self.refuse(f"{name} must be a table, but is {table!r}.", table)
        return table

    def word(self, value: object, name: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.refuse(f"{name} must be a text, but is {value!r}.", value)
        return value

    def whole(self, value: float, name: str) -> int:
        if value != int(value) or value < 1:
            raise self.refuse(f"{name} must be a whole number of at least 1, not {value:g}.", value)
        return int(value)

    def origin(self, table: Mapping[str, Any], where: str) -> None:
        kind, source = table.get("kind"), table.get("source")
        if kind not in KINDS:
            raise self.refuse(f"{where} needs a kind of {', '.join(KINDS)}, not {kind!r}.", kind)
        if not isinstance(source, str) or source not in source_ids():
            near = difflib.get_close_matches(str(source), source_ids(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise self.refuse(f"{where} needs a source of sources.toml, not {source!r}{hint}")

    def fact(self, entry: object, where: str) -> Fact:
        if not isinstance(entry, dict):
            raise self.refuse(
                f"{where} must be {{ value, unit, kind, source }}, but is {entry!r}.", entry
            )
        if unknown := sorted(set(entry) - {"value", "unit", "kind", "source", "per", "note"}):
            raise self.refuse(f"unknown key {unknown[0]!r} in {where}.", unknown[0])
        value, unit = entry.get("value"), entry.get("unit")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{where} needs a number as value, not {value!r}.", value)
        if not math.isfinite(value) or value < 0:
            raise self.refuse(f"{where} must be finite and not negative, not {value!r}.", value)
        if unit not in UNITS:
            raise self.refuse(f"{where} needs a unit of {', '.join(UNITS)}, not {unit!r}.", unit)
        if unit == "fraction" and value > 1:
            raise self.refuse(f"{where} is a fraction, so at most 1, not {value!r}.", value)
        self.origin(entry, where)
        return Fact(
            value=float(value),
            written=float(value),
            unit=unit,
            kind=entry["kind"],
            source=entry["source"],
            per=str(entry.get("per", "")),
            note=str(entry.get("note", "")),
        )

    def offers(self, table: Mapping[str, Any]) -> dict[str, Any]:
        self.keys(table, ("kind", "source", *sorted(_OFFERS)), "[offers]")
        self.origin(table, "[offers]")
        offers: dict[str, Any] = {}
        for name, words in _WORDS.items():
            offers[name] = self.choices(table[name], words, name)
        for name in _STAGES:
            offers[name] = self.choices(table[name], (0, 1, 2, 3), name)
        for name in _FLAGS:
            if not isinstance(table[name], bool):
                raise self.refuse(f"{name} must be true or false, not {table[name]!r}.")
            offers[name] = table[name]
        if table["reduce_op"] not in _REDUCE_OPS:
            raise self.refuse(
                f"reduce_op must be {' or '.join(_REDUCE_OPS)}, not {table['reduce_op']!r}."
            )
        offers["reduce_op"] = table["reduce_op"]
        return offers

    def choices(self, value: object, legal: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise self.refuse(f"{name} must be a list, not {value!r}.", value)
        for item in value:
            if isinstance(item, bool) or item not in legal:
                listed = ", ".join(map(str, legal))
                raise self.refuse(f"{name} holds {item!r}; legal: {listed}.", item, legal)
        return tuple(value)

    def kernels(self, table: Mapping[str, Any]) -> dict[str, str]:
        self.origin(table, "[attention_kernels]")
        kernels = {k: self.word(v, k) for k, v in table.items() if k not in ("kind", "source")}
        if "default" not in kernels:
            raise self.refuse("[attention_kernels] lacks 'default'.", None, ("default",))
        return kernels
