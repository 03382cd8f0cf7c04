"""What the model shall reach, and whether it does: groups of rows with a median and a p90."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from reports.predictions import Prediction
from reports.published_table import VALIDATION_DIR
from reports.statistics import errors


@lru_cache
def targets() -> Mapping[str, Any]:
    with open(VALIDATION_DIR / "targets.toml", "rb") as file:
        return tomllib.load(file)


def in_group(p: Prediction, group: Mapping[str, Any]) -> bool:
    """Whether a row counts in a group."""
    if "without" in group:
        return p.row.source not in group["without"]
    if group.get("moe") and p.row.count("n_experts") is not None:
        return True
    quality = group.get("quality")
    return p.row.source in group["sources"] and quality in (None, p.row.text("quality"))


def time_targets(judged: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Of each group: n, median, p90 and bias in percent, what they shall be, and whether they are.

    `judged` are predictions of rows of quality A and B.
    """
    rows = []
    for group in targets()["groups"]:
        signed = [p.time_error for p in judged if p.time_error is not None and in_group(p, group)]
        one = errors(signed)
        if one is None:
            continue
        met = one.median <= group["median"] and one.p90 <= group.get("p90", float("inf"))
        met = met and abs(one.bias) <= group.get("bias", float("inf"))
        rows.append(
            {
                "name": group["name"],
                "n": one.n,
                "median": one.median,
                "p90": one.p90,
                "bias": one.bias,
                "target_median": group["median"],
                "target_p90": group.get("p90"),
                "target_bias": group.get("bias"),
                "met": met,
            }
        )
    return rows


def memory_target(judged: Sequence[Prediction]) -> dict[str, Any]:
    """The same of peak memory over all rows, with how many lie too far below the measured."""
    wanted = targets()["memory"]
    signed = [p.memory_error for p in judged if p.memory_error is not None]
    one = errors(signed)
    if one is None:
        return {}
    low = sum(error < -wanted["too_low"] for error in signed)
    return {
        "n": one.n,
        "median": one.median,
        "p90": one.p90,
        "bias": one.bias,
        "too_low": low,
        "lowest": one.low,
        "target_median": wanted["median"],
        "target_p90": wanted["p90"],
        "target_too_low": wanted["too_low"],
        "met": one.median <= wanted["median"] and one.p90 <= wanted["p90"] and low == 0,
    }
