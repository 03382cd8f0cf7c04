"""How many layouts a second the cost model prices on one core: ``make bench``.

Streams a whole legal space, whatever a search would skip: rows are built, costed and bounded in
chunks. ``cold`` starts with nothing computed; ``warm`` repeats it, with every distinct layer and
sharding known.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 50_000  # rows at a time
LEAST_RATE = 1e6  # layouts a second
# The same model and cluster as the cases of `plans.py`.
SPACES: dict[str, dict[str, Any]] = {
    "llama-3.1-405b, 16384 GPUs": {
        "model": "llama-3.1-405b",
        "cluster": "dgx-h100",
        "gpus": 16384,
        "global_batch_size": 2048,
        "seq_len": 8192,
    },
    "gpt-3-175b, 1024 GPUs": {
        "model": "gpt-3-175b",
        "cluster": "dgx-a100-80gb",
        "gpus": 1024,
        "global_batch_size": 1536,
        "seq_len": 2048,
    },
}


@dataclass(frozen=True)
class Streamed:
    """Layouts that were priced, those whose memory floor fits, and the time it took."""

    layouts: int
    fitting: int
    least_s: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.layouts / self.seconds


def stream(provider: Any, table: Any, order: Any) -> Streamed:
    """Build, cost and bound every legal layout, a chunk of cells at a time."""
    from planner.search.bounds import row_bound
    from planner.search.candidates import expand, rows

    begin = time.perf_counter()
    provider.cell_costs(table.cells)
    ends = np.cumsum(table.counts)
    layouts = fitting = first = 0
    least_s = np.inf
    while first < table.num_cells:
        done = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        cell, local = expand(table, np.arange(first, last))
        built = rows(table, cell, local)
        costs = provider.stage_costs(built, cell)
        pp = np.asarray(built.pp)
        flight = np.minimum(provider.in_flight(built, 0), provider.in_flight(built, pp - 1))
        bound = row_bound(costs, order, pp, np.asarray(built.vpp), flight)
        fits = bound.floor_bytes <= costs.capacity_bytes
        layouts, fitting, first = layouts + cell.size, fitting + int(fits.sum()), last
        if fits.any():
            least_s = min(least_s, float(bound.time_s[fits].min()))
    return Streamed(layouts, fitting, least_s, time.perf_counter() - begin)


def bench(name: str, request: dict[str, Any]) -> bool:
    """Print both rates of one space; whether the cold one is fast enough."""
    from planner.problem import make_setting
    from planner.provider import ModelProvider
    from planner.search.candidates import candidates
    from planner.search.orders import layer_order

    arguments = dict(request)
    provider = ModelProvider(make_setting(arguments.pop("model"), **arguments))
    begin = time.perf_counter()
    table = candidates(provider)
    listed_s = time.perf_counter() - begin
    order = layer_order(provider.layer_kinds, provider.num_kinds)
    cold, warm = stream(provider, table, order), stream(provider, table, order)
    assert cold.layouts == warm.layouts == table.num_legal + table.refused
    assert cold.least_s == warm.least_s
    good = cold.rate >= LEAST_RATE
    print(
        f"{name:<28} {table.enumerated:>12,} enumerated  {cold.layouts:>11,} legal in "
        f"{listed_s:.2f} s  cold {cold.rate:>11,.0f}/s  warm {warm.rate:>11,.0f}/s"
        f"{'' if good else '  slow'}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, as the rate says
    sys.path.insert(0, str(ROOT))
    results = [bench(name, request) for name, request in SPACES.items()]
    sys.exit(0 if all(results) else 1)
