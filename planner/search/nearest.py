"""What misses its memories least, relative to what they hold, when nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.layout import Layout
from planner.results import Array, StageCosts
from planner.search.bounds import host_share, min_bottleneck, row_bound
from planner.search.candidates import Candidates, expand, rows
from planner.search.columns import Stages, least, stages
from planner.search.orders import LayerOrder, patterns
from planner.search.positions import PositionColumns, Positions, positions
from planner.search.provider import CostProvider

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
_CHUNK = 50_000
_BATCH = 64
TIE = 1e-9  # relative: rows closer than this miss capacity alike
BISECTIONS = 48


@dataclass(frozen=True, slots=True)
class Nearest:
    """The layout whose fullest rank needs least of its fullest memory, relative to what that holds,
    each kind under its leanest single policy.

    `memory` is the one that is short: ``device``, ``state`` (where offloaded state goes) or
    ``activations`` (where they are sent). `needed_bytes` is what that rank needs of it,
    `missing_bytes` how much more than its capacity; `terms_bytes` are the named addends of that
    rank and `main_term` the largest.
    """

    layout: Layout
    needed_bytes: float
    missing_bytes: float
    stage: int
    terms_bytes: Mapping[str, float]
    main_term: str
    memory: str = "device"
    capacity_bytes: float = 0.0


def nearest_row(provider: CostProvider, table: Candidates, order: LayerOrder) -> Nearest | None:
    """The legal layout that misses capacity least; None where no layout is legal.

    Best-first: cells, then rows, by the least share of a memory that they take; the least share of
    the fullest rank over all splits by bisection, until the next floor is no lower.
    """
    if table.num_cells == 0:
        return None
    costs, in_flight = provider.cell_costs(table.cells)
    pp = np.asarray(table.cells.pp)
    floor = row_bound(costs, order, pp, np.ones_like(pp), in_flight).floor_bytes
    floor = floor / costs.capacity_bytes
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
        costs = provider.stage_costs(layouts, cell)
        own = row_bound(costs, order, own_pp, np.asarray(layouts.vpp), low).floor_bytes
        own = np.maximum(own / costs.capacity_bytes, host_share(costs, order, own_pp))
        ranked = np.flatnonzero(_has_split(provider, layouts, order))
        ranked = ranked[np.argsort(own[ranked], kind="stable")]
        for start in range(0, ranked.size, _BATCH):
            part = ranked[start : start + _BATCH]
            if best is not None and own[part[0]] >= best[0]:
                break
            some, held = layouts.take(part), costs.take(part)
            if best is not None:
                tight = _stage_floor(provider, some, held, order) < best[0] * (1 - TIE)
                keep = np.flatnonzero(tight)
                part, some, held = part[keep], some.take(keep), held.take(keep)
            for i in range(part.size):
                found = _columns(
                    provider, some.take(np.array([i])), held.take(np.array([i])), order
                )
                needed = min((f.value for f in found), default=np.inf)
                if needed < (np.inf if best is None else best[0]):
                    best = (needed, int(cell[part[i]]), int(local[part[i]]))
    if best is None:
        return None
    return _explain(provider, table, order, *best)


Terms = dict[str, Array]  # named bytes of columns


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of one split problem: share of the fullest memory, and per memory its terms."""

    value: float  # the least share of the fullest rank, over all splits
    share: Array
    terms: Mapping[str, Terms]
    capacity: Mapping[str, float]


def _columns(
    provider: CostProvider, layout: Layout, costs: StageCosts, order: LayerOrder
) -> list[_Columns]:
    """Per split pattern and leanest policy of one layout (a table of one row), its columns."""
    pp, vpp = int(layout.pp[0]), int(layout.vpp[0])
    head = provider.head_stage(layout)
    in_flight = np.broadcast_to(
        np.asarray(provider.in_flight(layout, np.arange(pp)[None, :]), dtype=float), (1, pp)
    )
    staged = stages(costs, in_flight, head)
    result = []
    for lean in _leanest(costs, in_flight):
        capacity = {"device": costs.capacity_bytes}
        if costs.host is not None:
            capacity["state"] = float(costs.host.state_capacity[0])
            capacity["activations"] = float(costs.host.act_capacity[0])

        def terms(counts: Array, lean: Index = lean) -> dict[str, Terms]:
            return _terms(staged, lean, counts)

        result += [
            _Columns(value, share, named, capacity)
            for value, share, named in _split_columns(
                terms, capacity, order, pp, vpp, bool(head[0] == 0 and pp > 1)
            )
        ]
    return result


def _leanest(costs: StageCosts, in_flight: Array) -> list[Index]:
    """The policy of least device memory by kind; and the least of those that send nothing away."""
    allowed = np.isfinite(costs.layer_s[0])
    total = in_flight[0].mean() * costs.layer_act_bytes[0] + costs.working_bytes[0]
    lean = np.where(allowed, total, np.inf).argmin(axis=1)  # (K,)
    if costs.host is None or costs.host.act_policy < 0:
        return [lean]
    stays = allowed.copy()
    stays[:, costs.host.act_policy] = False
    if not stays.any(axis=1).all():
        return [lean]
    return [lean, np.where(stays, total, np.inf).argmin(axis=1)]


def _terms(staged: Stages, lean: Index, counts: Array) -> dict[str, Terms]:
    """Named bytes of columns with `counts` (S, ..., K) layers, by memory."""
    costs = staged.costs
    pp = staged.in_flight.shape[1]
    kinds = np.arange(lean.size)
    act = costs.layer_act_bytes[0, kinds, lean]
    work = costs.working_bytes[0, kinds, lean]
    shape = counts.shape[:-1]
    column = (pp, *[1] * (len(shape) - 1))
    first, head = staged.first[0].reshape(column), staged.head[0].reshape(column)
    in_flight = staged.in_flight[0].reshape(column)

    def whole(items: dict[str, Any]) -> Terms:
        return {name: np.broadcast_to(value, shape) for name, value in items.items()}

    found = {
        "device": whole(
            {
                "fixed": costs.fixed_bytes[0],
                "embedding": first * costs.first_bytes[0],
                "head": head * costs.head_bytes[0],
                "embedding activations": first * in_flight * costs.first_act_bytes[0],
                "weights, gradients and optimizer of layers": counts @ costs.layer_static_bytes[0],
                "activations of layers": (counts @ act) * in_flight,
                "working memory": np.where(counts > 0, work, 0.0).max(axis=-1),
            }
        )
    }
    host = costs.host
    if host is not None:
        state = {
            "offloaded state of layers": counts @ host.layer[0],
            "offloaded state of the embedding": first * host.first[0],
            "offloaded state of the head": head * host.head[0],
        }
        sent = np.where(lean == host.act_policy, host.act[0], 0.0)
        shared = {name: host.shared[0] * value for name, value in state.items()}
        found["state"] = whole(state)
        found["activations"] = whole(
            {**shared, "offloaded activations": (counts @ sent) * in_flight}
        )
    return found


def _shares(terms: Mapping[str, Terms], capacity: Mapping[str, float]) -> Array:
    """Share of the memory that each column fills most."""
    shares = [
        np.sum(list(items.values()), axis=0) / max(capacity[memory], 1e-300)
        for memory, items in terms.items()
    ]
    fullest: Array = np.max(shares, axis=0)
    return fullest


def _split_columns(
    terms: Callable[[Array], dict[str, Terms]],
    capacity: Mapping[str, float],
    order: LayerOrder,
    pp: int,
    vpp: int,
    v_shape: bool,
) -> list[tuple[float, Array, dict[str, Terms]]]:
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
        named = terms(wide)
        share = _shares(named, capacity)
        value = PositionColumns(share[None], share[None], vectors, vector).min_bottleneck()
        result.append((float(value[0]), share, named))
        return result
    for pattern in patterns(order, pp, vpp, v_shape):
        width = int((pattern.hi - pattern.lo).max(initial=0)) + 1
        counts = np.repeat(pattern.base[:, None, :], width, axis=1).astype(float)
        counts[:, :, pattern.free] += pattern.lo[:, None] + np.arange(width)
        named = terms(counts)
        share = _shares(named, capacity)
        share = np.where(np.arange(width) > (pattern.hi - pattern.lo)[:, None], np.inf, share)
        value = min_bottleneck(share[None], pattern.lo[None], np.array([pattern.total]))
        result.append((float(value[0]), share, named))
    return result


def _has_split(provider: CostProvider, layouts: Layout, order: LayerOrder) -> Mask:
    """Which rows have any way to fall on their ranks, whatever the memory."""
    pp, vpp = np.asarray(layouts.pp), np.asarray(layouts.vpp)
    v_shape = (provider.head_stage(layouts) == 0) & (pp > 1)
    shapes, index = np.unique(np.stack([pp, vpp, v_shape], axis=1), axis=0, return_inverse=True)
    found = [
        p <= order.num_layers
        if order.form == "any" and v == 1
        else bool(patterns(order, p, v, bool(turns)))
        for p, v, turns in shapes.tolist()
    ]
    return np.array(found, dtype=bool)[index.reshape(-1)]


def _stage_floor(
    provider: CostProvider, layouts: Layout, costs: StageCosts, order: LayerOrder
) -> Array:
    """Lower bound on the share of device memory of each row's fullest rank, (R,): under a cap every
    rank takes as many layers of the leanest kind as fit, and the least cap that places all of them
    is found by bisection."""
    pp = np.asarray(layouts.pp)
    position = np.arange(int(pp.max()))
    inside = position < pp[:, None]
    in_flight = np.where(inside, provider.in_flight(layouts, position[None, :]), 1.0)
    _, act, working = least(costs)
    kinds = [k for k, number in enumerate(order.counts) if number]
    each = costs.layer_static_bytes[:, None] + in_flight[:, :, None] * act[:, None]
    each = each[:, :, kinds].min(axis=2)
    first = costs.first_bytes[:, None] + in_flight * costs.first_act_bytes[:, None]
    given = costs.fixed_bytes[:, None] + working[:, kinds].min(axis=1)[:, None]
    given = given + np.where(position == 0, first, 0.0)
    head = position == provider.head_stage(layouts)[:, None]
    given = given + np.where(head, costs.head_bytes[:, None], 0.0)
    low = np.where(inside, given, 0.0).max(axis=1)
    high = low + order.num_layers * each.max(axis=1)
    for _ in range(BISECTIONS):
        cap = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            taken = np.floor((cap[:, None] - given) / each)
        enough = np.where(inside, taken, 0.0).sum(axis=1) >= order.num_layers
        low, high = np.where(enough, low, cap), np.where(enough, cap, high)
    share: Array = low / costs.capacity_bytes
    return share


def _explain(
    provider: CostProvider,
    table: Candidates,
    order: LayerOrder,
    needed: float,
    cell: int,
    local: int,
) -> Nearest:
    layout = rows(table, np.array([cell]), np.array([local]))
    costs = provider.stage_costs(layout, np.array([cell]))
    found = min(_columns(provider, layout, costs, order), key=lambda f: f.value)
    at = np.unravel_index(int(np.abs(found.share - needed).argmin()), found.share.shape)
    totals = {
        memory: float(sum(column[at] for column in items.values()))
        for memory, items in found.terms.items()
    }
    memory = max(totals, key=lambda m: totals[m] / max(found.capacity[m], 1e-300))
    terms = {name: float(c[at]) for name, c in found.terms[memory].items() if c[at] > 0}
    return Nearest(
        layout=layout.take(0),
        needed_bytes=totals[memory],
        missing_bytes=totals[memory] - found.capacity[memory],
        stage=int(at[0]),
        terms_bytes=terms,
        main_term=max(terms, key=lambda name: terms[name]),
        memory=memory,
        capacity_bytes=found.capacity[memory],
    )
