"""Errors, ranks and regret of predictions against measurements. Statistics only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors in percent: `median`, `mean`, `p90` of absolute ones, `bias` the signed median."""

    n: int
    median: float
    mean: float
    p90: float
    bias: float
    low: float
    high: float


def errors(signed: Sequence[float]) -> Errors | None:
    """Summary of signed errors in percent; None of nothing.

    >>> errors([-1.0, 2.0, 4.0]).median, errors([-1.0, 2.0, 4.0]).bias
    (2.0, 2.0)
    """
    if not signed:
        return None
    values = np.asarray(signed, dtype=np.float64)
    size = np.abs(values)
    return Errors(
        len(signed),
        float(np.median(size)),
        float(np.mean(size)),
        float(np.quantile(size, 0.9)),
        float(np.median(values)),
        float(values.min()),
        float(values.max()),
    )


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs.

    >>> ranks([10.0, 30.0, 10.0]).tolist()
    [0.5, 2.0, 0.5]
    """
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    upto = np.cumsum(counts)
    mean: np.ndarray = ((upto - counts) + (upto - 1)) / 2.0
    return mean[inverse]


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Rank correlation, as Pearson's of ranks; None where either side is all equal.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0])
    1.0
    """
    a, b = ranks(predicted), ranks(measured)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return round(float(a @ b) / size, 12) if size > 0 else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the layout predicted best is than the one measured best [percent].

    >>> regret([1.0, 2.0], [12.5, 10.0])
    25.0
    """
    chosen = measured[int(np.argmin(predicted))]
    return 100.0 * (chosen / min(measured) - 1.0) if min(measured) > 0 else 0.0
