"""What misses the capacity least when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.layout import Layout
from planner.results import Array
from planner.search.bounds import min_bottleneck, row_bound
from planner.search.candidates import Candidates, expand, rows
from planner.search.columns import stages
from planner.search.orders import LayerOrder, patterns
from planner.search.positions import PositionColumns, Positions, positions
from planner.search.provider import CostProvider

Index = NDArray[np.int64]
_CHUNK = 50_000
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Nearest:
    """The layout whose fullest rank needs least memory, each kind under its leanest single policy.

    `needed_bytes` is what that rank needs, `missing_bytes` how much more than its capacity;
    `terms_bytes` are the named addends of that rank and `main_term` the largest.
    """

    layout: Layout
    needed_bytes: float
    missing_bytes: float
    stage: int
    terms_bytes: Mapping[str, float]
    main_term: str


def nearest_row(provider: CostProvider, table: Candidates, order: LayerOrder) -> Nearest | None:
    """The legal layout that misses the capacity least; None where no layout is legal.

    Best-first: cells, then rows, by their memory floors; the least bytes of the fullest rank over
    all splits by bisection, until the next floor is no lower.
    """
    if table.num_cells == 0:
        return None
    costs, in_flight = provider.cell_costs(table.cells)
    pp = np.asarray(table.cells.pp)
    floor = row_bound(costs, order, pp, np.ones_like(pp), in_flight).floor_bytes
    cells = np.argsort(floor, kind="stable")
    best: tuple[float, int, int] | None = None
    at = 0
    counts = table.counts[cells]
    while at < cells.size and (best is None or floor[cells[at]] < best[0]):
        end = at + max(1, int(np.searchsorted(np.cumsum(counts[at:]), _CHUNK)))
        cell, local = expand(table, cells[at:end])
        at = end
        layouts = rows(table, cell, local)
        own_pp = np.asarray(layouts.pp)
        low = np.minimum(provider.in_flight(layouts, 0), provider.in_flight(layouts, own_pp - 1))
        own = row_bound(
            provider.stage_costs(layouts, cell), order, own_pp, np.asarray(layouts.vpp), low
        ).floor_bytes
        ranked = np.argsort(own, kind="stable")
        for start in range(0, ranked.size, _BATCH):
            part = ranked[start : start + _BATCH]
            if best is not None and own[part[0]] >= best[0]:
                break
            needed = _needed(provider, table, cell[part], local[part], order)
            i = int(needed.argmin())
            if np.isfinite(needed[i]) and (best is None or needed[i] < best[0]):
                best = (float(needed[i]), int(cell[part[i]]), int(local[part[i]]))
    if best is None:
        return None
    return _explain(provider, table, order, *best)


def _stage_bytes(
    provider: CostProvider, table: Candidates, cell: int, local: int, order: LayerOrder
) -> list[tuple[float, Array, dict[str, Array]]]:
    """Per split pattern of one layout: the least bytes of its fullest rank, and the columns."""
    at = np.array([cell]), np.array([local])
    layout = rows(table, *at)
    costs = provider.stage_costs(layout, at[0])
    pp, vpp = int(layout.pp[0]), int(layout.vpp[0])
    head = provider.head_stage(layout)
    in_flight = np.broadcast_to(
        np.asarray(provider.in_flight(layout, np.arange(pp)[None, :]), dtype=float), (1, pp)
    )
    staged = stages(costs, in_flight, head)
    allowed = np.isfinite(costs.layer_s[0])
    total = in_flight[0].mean() * costs.layer_act_bytes[0] + costs.working_bytes[0]
    lean = np.where(allowed, total, np.inf).argmin(axis=1)  # (K,)
    kinds = np.arange(lean.size)
    act = costs.layer_act_bytes[0, kinds, lean]
    work = costs.working_bytes[0, kinds, lean]
    static = costs.layer_static_bytes[0]
    base_terms = {
        "fixed": np.broadcast_to(costs.fixed_bytes[0], (pp,)),
        "embedding": staged.first[0] * costs.first_bytes[0],
        "head": staged.head[0] * costs.head_bytes[0],
        "embedding activations": staged.first[0] * in_flight[0] * costs.first_act_bytes[0],
    }

    def terms(counts: Array) -> dict[str, Array]:
        shape = counts.shape[:-1]
        spread = [1] * (len(shape) - 1)
        return {
            **{n: np.broadcast_to(v.reshape(pp, *spread), shape) for n, v in base_terms.items()},
            "weights, gradients and optimizer of layers": counts @ static,
            "activations of layers": (counts @ act) * in_flight[0].reshape(pp, *spread),
            "working memory": np.where(counts > 0, work, 0.0).max(axis=-1),
        }

    result = []
    if order.form == "any" and vpp == 1:
        found: Positions = positions(order)
        length = order.num_layers
        if length < pp:
            return []
        sizes = np.arange(length - pp + 2)
        start = np.arange(length + 1)[:, None]
        inside = (start + sizes <= length) & (sizes > 0)
        counts = found.prefix[np.minimum(start + sizes, length)] - found.prefix[start]
        vectors, index = np.unique(counts[inside], axis=0, return_inverse=True)
        vector = np.full(inside.shape, -1, dtype=np.int64)
        vector[inside] = index.reshape(-1)
        wide = np.broadcast_to(vectors, (pp, *vectors.shape)).astype(float)
        addends = terms(wide)
        bytes_ = np.sum(list(addends.values()), axis=0)
        value = PositionColumns(bytes_[None], bytes_[None], vectors, vector).min_bottleneck()
        result.append((float(value[0]), bytes_, addends))
        return result
    for pattern in patterns(order, pp, vpp, bool(head[0] == 0 and pp > 1)):
        width = int((pattern.hi - pattern.lo).max(initial=0)) + 1
        counts = np.repeat(pattern.base[:, None, :], width, axis=1).astype(float)
        counts[:, :, pattern.free] += pattern.lo[:, None] + np.arange(width)
        addends = terms(counts)
        bytes_ = np.sum(list(addends.values()), axis=0)
        bytes_ = np.where(np.arange(width) > (pattern.hi - pattern.lo)[:, None], np.inf, bytes_)
        value = min_bottleneck(bytes_[None], pattern.lo[None], np.array([pattern.total]))
        result.append((float(value[0]), bytes_, addends))
    return result


def _needed(
    provider: CostProvider, table: Candidates, cell: Index, local: Index, order: LayerOrder
) -> Array:
    values = []
    for c, i in zip(cell.tolist(), local.tolist(), strict=True):
        found = _stage_bytes(provider, table, c, i, order)
        values.append(min((f[0] for f in found), default=np.inf))
    return np.array(values)


def _explain(
    provider: CostProvider,
    table: Candidates,
    order: LayerOrder,
    needed: float,
    cell: int,
    local: int,
) -> Nearest:
    found = _stage_bytes(provider, table, cell, local, order)
    value, bytes_, addends = min(found, key=lambda f: f[0])
    at = np.unravel_index(int(np.abs(bytes_ - value).argmin()), bytes_.shape)
    terms = {name: float(column[at]) for name, column in addends.items() if column[at] > 0}
    layout = rows(table, np.array([cell]), np.array([local]))
    capacity = provider.stage_costs(layout, np.array([cell])).capacity_bytes
    return Nearest(
        layout=layout.take(0),
        needed_bytes=needed,
        missing_bytes=needed - capacity,
        stage=int(at[0]),
        terms_bytes=terms,
        main_term=max(terms, key=lambda name: terms[name]),
    )
