"""What the judgements of reported layouts share: the reports, a model of each, and the verdict.

`cases_invalid.csv` holds the 36 reports, each with its source. Every row has a judgement of its own
(`judgements_degrees`, `judgements_batch_and_experts`), on a model of the row's dimensions.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import LayoutError
from planner.legality import (
    check,
    parse_layout,
)
from planner.runtime import Runtime, load_runtime
from planner.specs import ModelSpec
from tests import samples_legality as sample

Row = dict[str, str]
ROWS = {
    row["id"]: row
    for row in csv.DictReader(
        (Path(__file__).parent / "cases_invalid.csv").read_text(encoding="utf-8").splitlines()
    )
}
JUDGEMENTS: dict[str, Callable[[Row], None]] = {}
MEGATRON = load_runtime("megatron-core")


def judges(case: str) -> Callable[[Callable[[Row], None]], Callable[[Row], None]]:
    def note(function: Callable[[Row], None]) -> Callable[[Row], None]:
        assert case not in JUDGEMENTS
        JUDGEMENTS[case] = function
        return function

    return note


def model_of(row: Row) -> ModelSpec:
    """A model of the row's dimensions; what the row does not state is as in a 7B model."""

    def number(key: str, otherwise: int) -> int:
        return int(row[key]) if row[key] else otherwise

    return sample.model(
        row["model"],
        layers=number("n_layers", 32),
        hidden=number("hidden", 4096),
        ffn=number("ffn", 14336),
        heads=number("heads", 32),
        kv_heads=number("kv_heads", number("heads", 32)),
        vocab=number("vocab", 32000),
        experts=number("experts", 0),
        top_k=number("top_k", 0),
        moe_ffn=number("moe_ffn", 1024),
        head_dim=128,
    )


def judge(
    model: ModelSpec,
    layout: str,
    *,
    gpus: int | None = None,
    batch: int = 64,
    seq_len: int = 4096,
    runtime: Runtime = MEGATRON,
    cluster=None,
    stages: tuple[int, ...] | None = None,
    **train,
) -> list[str]:
    return check(
        parse_layout(layout, gpus),
        model,
        sample.train(batch, seq_len, **train),
        cluster or sample.cluster(),
        gpus,
        runtime,
        stages,
    )


def refused(*args, **kwargs) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        judge(*args, **kwargs)
    return caught.value
