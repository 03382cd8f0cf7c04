"""Every layout of a space, as columns: coarse cells, option tables, and their ragged product.

No loop runs over layouts. Legality of the fine options is asked once per distinct key (see
`planner.search.provider`), so that the number of legal layouts is known without building them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import LayoutError
from planner.layout import OFFLOADS, SCHEDULES, Layout
from planner.search.provider import (
    ALL_AXES,
    CELL_AXES,
    PIPE_AXES,
    STATE_AXES,
    CostProvider,
    Space,
)

Index = NDArray[np.int64]
_DEFAULT = Layout()
_INTERLEAVED = SCHEDULES.index("interleaved")
_DUALPIPE = SCHEDULES.index("dualpipe")
_ONE_F_ONE_B = SCHEDULES.index("1f1b")
_NOT_OFFLOADED = OFFLOADS.index("none")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The legal space in factored form.

    `cells` is the table of coarse cells. `state` and `pipe` hold option columns by field name;
    the options of cell i are rows ``state_start[i] + 0 .. state_count[i]-1`` (and alike for pipe).
    Row j of cell i, ``0 <= j < state_count[i] * pipe_count[i]``, is state option ``j //
    pipe_count`` with pipeline option ``j % pipe_count``. `enumerated` counts the product before
    legality; `refused` the rows whose pipeline option is legal in the cell, but not with the row's
    ZeRO stage: who builds rows asks about them once more.
    """

    cells: Layout
    state: Mapping[str, Index]
    pipe: Mapping[str, Index]
    state_start: Index
    state_count: Index
    pipe_start: Index
    pipe_count: Index
    enumerated: int
    refused: int = 0

    @property
    def num_cells(self) -> int:
        return int(self.state_count.size)

    @property
    def counts(self) -> Index:
        """Rows of every cell, in closed form; all legal but those that `refused` counts."""
        return self.state_count * self.pipe_count

    @property
    def num_legal(self) -> int:
        return int(self.counts.sum()) - self.refused


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def restrict(space: Space, fixed: Mapping[str, Any]) -> Space:
    """The space with some fields fixed to one value (or to a tuple of values).

    Raises
    ------
    LayoutError
        A name that is no axis of the search, or a value outside of the space.
    """
    values = dict(space.values)
    for name, wanted in fixed.items():
        if name not in ALL_AXES:
            raise LayoutError(
                f"{name} cannot be fixed; fields of a layout that can are {', '.join(ALL_AXES)}",
                values={"field": name},
                legal=list(ALL_AXES),
            )
        chosen = tuple(int(v) for v in (wanted if isinstance(wanted, tuple | list) else (wanted,)))
        allowed = values.get(name)
        if allowed is None and name not in ("dp", "shard"):
            allowed = (int(getattr(_DEFAULT, name)),)
        if allowed is not None and not set(chosen) & set(allowed):
            raise LayoutError(
                f"{name}={chosen[0]} is not possible here; allowed are "
                f"{', '.join(map(str, allowed))}",
                values={name: chosen[0]},
                legal={name: list(allowed)},
            )
        values[name] = chosen if allowed is None else tuple(v for v in chosen if v in allowed)
    return Space(space.num_gpus, space.global_batch_size, values)


def candidates(provider: CostProvider, space: Space | None = None) -> Candidates:
    """The legal layouts of `space` (the provider's whole space if None)."""
    space = provider.space() if space is None else space
    cells = _coarse_cells(space)
    pipe_options = _pipe_options(space)
    enumerated = _enumerated(cells, space, pipe_options)
    cells = cells.take(np.flatnonzero(provider.legal_cells(cells)))
    state, state_start, state_count = _state_table(provider, space, cells, pipe_options)
    keep = np.flatnonzero(state_count)
    cells = cells.take(keep)
    state_start, state_count = state_start[keep], state_count[keep]
    pipe, pipe_start, pipe_count, refused = _pipe_table(
        provider, cells, state, (state_start, state_count), pipe_options
    )
    keep = np.flatnonzero(pipe_count)
    return Candidates(
        cells=cells.take(keep),
        state=state,
        pipe=pipe,
        state_start=state_start[keep],
        state_count=state_count[keep],
        pipe_start=pipe_start[keep],
        pipe_count=pipe_count[keep],
        enumerated=enumerated,
        refused=refused,
    )


def rows(table: Candidates, cell: Index, local: Index) -> Layout:
    """Full layouts: row `local` of each `cell`."""
    state_option, pipe_option = np.divmod(local, table.pipe_count[cell])
    state_option += table.state_start[cell]
    pipe_option += table.pipe_start[cell]
    columns = {name: np.asarray(getattr(table.cells, name))[cell] for name in (*CELL_AXES, "dp")}
    columns |= {name: column[state_option] for name, column in table.state.items()}
    columns |= {name: column[pipe_option] for name, column in table.pipe.items()}
    return Layout(**columns)


def expand(table: Candidates, cells: Index) -> tuple[Index, Index]:
    """Cell and local index of every legal row of `cells`, in order."""
    counts = table.counts[cells]
    cell = np.repeat(cells, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return cell, np.arange(cell.size, dtype=np.int64) - first


def _values(space: Space, name: str) -> tuple[int, ...]:
    found = space.values.get(name)
    return (int(getattr(_DEFAULT, name)),) if found is None else tuple(sorted(set(found)))


def _coarse_cells(space: Space) -> Layout:
    """All coarse cells whose degrees divide the GPUs and the batch, pp slowest."""
    gpus, batch = space.num_gpus, space.global_batch_size
    axes = [
        np.array(
            [v for v in _values(space, n) if n == "cp_kind" or gpus % v == 0 or n == "micro_batch"]
        )
        for n in CELL_AXES
    ]
    grid = np.meshgrid(*axes, indexing="ij")
    column = {n: g.reshape(-1).astype(np.int64) for n, g in zip(CELL_AXES, grid, strict=True)}
    inner = column["tp"] * column["cp"] * column["pp"]
    keep = gpus % inner == 0
    dp = gpus // inner
    keep &= batch % (np.maximum(dp, 1) * column["micro_batch"]) == 0
    keep &= (dp * column["tp"] * column["cp"]) % (column["ep"] * column["etp"]) == 0
    # Without context parallelism its kind means nothing: keep one.
    keep &= (column["cp"] > 1) | (column["cp_kind"] == axes[3].min(initial=0))
    if "dp" in space.values:
        keep &= np.isin(dp, space.values["dp"])
    index = np.flatnonzero(keep)
    column["dp"] = dp
    return Layout(**{n: c[index] for n, c in column.items()})


def _state_options(space: Space, ranks: int) -> list[tuple[int, int, int]]:
    """(zero, shard, offload) for a given ``dp * cp``.

    Sharding over one rank is no sharding, but what is offloaded differs by ZeRO stage even there.
    """
    zeros = _values(space, "zero")
    shards = space.values.get("shard")
    found = []
    for zero in zeros:
        offloads = _values(space, "offload")
        if zero > 0 and ranks == 1 and 0 in zeros:
            offloads = tuple(o for o in offloads if o != _NOT_OFFLOADED)
        if zero == 0 or ranks == 1:
            legal_shards: tuple[int, ...] = (1,) if shards is None or 1 in shards else ()
        else:
            legal_shards = tuple(
                s for s in divisors(ranks) if s > 1 and (shards is None or s in shards)
            )
        found += [(zero, s, o) for s in legal_shards for o in offloads]
    return found


def _pipe_options(space: Space) -> list[tuple[int, int]]:
    """(schedule, vpp) that mean something; legality for a given pp is the provider's."""
    found = []
    for schedule in _values(space, "schedule"):
        for vpp in space.values.get("vpp", (1,)):
            if schedule == _INTERLEAVED:
                good = vpp > 1
            else:
                good = vpp == (2 if schedule == _DUALPIPE else 1)
            if good:
                found.append((schedule, vpp))
    # 1f1b first: it is the representative when other options are asked about.
    return sorted(found, key=lambda o: (o[0] != _ONE_F_ONE_B, o))


def _options_for(options: list[tuple[int, int]], pp: int) -> list[tuple[int, int]]:
    """On one rank all schedules are the same: keep the first that is not interleaved."""
    if pp > 1:
        return options
    return [o for o in options if o[1] == 1][:1]


def _enumerated(cells: Layout, space: Space, pipe_options: list[tuple[int, int]]) -> int:
    ranks, times = np.unique(np.asarray(cells.dp * cells.cp), return_counts=True)
    state = sum(
        int(t) * len(_state_options(space, int(r))) for r, t in zip(ranks, times, strict=True)
    )
    return state * len(pipe_options)


def _group(cells: Layout, names: tuple[str, ...]) -> tuple[Index, Index]:
    """First cell of each distinct key, and the group of every cell."""
    key = np.zeros(np.size(cells.dp), dtype=np.int64)
    for name in names:
        column = np.asarray(getattr(cells, name))
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), group.reshape(-1).astype(np.int64)


def _with(cells: Layout, index: Index, options: Mapping[str, Index]) -> Layout:
    return cells.take(index).with_(**options)


def _state_table(
    provider: CostProvider, space: Space, cells: Layout, pipe_options: list[tuple[int, int]]
) -> tuple[dict[str, Index], Index, Index]:
    # The smallest micro-batch first: more micro-batches never make a schedule illegal.
    order = np.argsort(np.asarray(cells.micro_batch), kind="stable")
    first, group = _group(cells.take(order), provider.state_key)
    representative = order[first]
    group_of_cell = np.empty_like(group)
    group_of_cell[order] = group
    ranks = np.asarray(cells.dp * cells.cp)[representative]
    by_ranks = {int(r): _state_options(space, int(r)) for r in set(ranks.tolist())}
    sizes = np.array([len(by_ranks[int(r)]) for r in ranks], dtype=np.int64)
    flat = np.array([o for r in ranks for o in by_ranks[int(r)]], dtype=np.int64).reshape(-1, 3)
    owner = np.repeat(np.arange(ranks.size), sizes)
    options = {name: flat[:, i] for i, name in enumerate(STATE_AXES)}
    legal = np.zeros(owner.size, dtype=bool)
    pp = np.asarray(cells.pp)[representative]
    open_groups = np.ones(ranks.size, dtype=bool)
    for schedule, vpp in pipe_options:
        ask = open_groups[owner] & ((pp[owner] > 1) | (vpp == 1))
        index = np.flatnonzero(ask)
        if index.size == 0:
            continue
        table = _with(
            cells, representative[owner[index]], {n: c[index] for n, c in options.items()}
        )
        legal[index] = provider.legal(
            table.with_(schedule=np.full(index.size, schedule), vpp=np.full(index.size, vpp))
        )
        open_groups[owner[legal]] = False
    kept = np.flatnonzero(legal)
    count = np.bincount(owner[kept], minlength=ranks.size).astype(np.int64)
    start = np.cumsum(count) - count
    table_columns = {name: column[kept] for name, column in options.items()}
    return table_columns, start[group_of_cell], count[group_of_cell]


def _pipe_table(
    provider: CostProvider,
    cells: Layout,
    state: Mapping[str, Index],
    state_range: tuple[Index, Index],
    pipe_options: list[tuple[int, int]],
) -> tuple[dict[str, Index], Index, Index, int]:
    """Pipeline options that are legal with some ZeRO stage of a cell, and the rows that are not."""
    state_start, state_count = state_range
    representative, group = _group(cells, provider.pipe_key)
    pp = np.asarray(cells.pp)[representative]
    by_pp = {int(p): _options_for(pipe_options, int(p)) for p in set(pp.tolist())}
    sizes = np.array([len(by_pp[int(p)]) for p in pp], dtype=np.int64)
    flat = np.array([o for p in pp for o in by_pp[int(p)]], dtype=np.int64).reshape(-1, 2)
    owner = np.repeat(np.arange(pp.size), sizes)
    num_layers = len(provider.layer_kinds)
    deep = flat[:, 1] * pp[owner] <= num_layers
    # A schedule that splits the backward may want gradients sharded: ask with every ZeRO stage.
    by_zero = []
    for zero in sorted(set(state["zero"].tolist())):
        of_zero = np.concatenate([[0], np.cumsum(state["zero"] == zero)])
        at = np.searchsorted(of_zero, of_zero[state_start] + 1) - 1  # the first of a cell's own
        options = of_zero[state_start + state_count] - of_zero[state_start]
        legal = deep & (options > 0)[representative[owner]]
        index = np.flatnonzero(legal)
        asked = representative[owner[index]]
        table = _with(cells, asked, {n: c[at[asked]] for n, c in state.items()})
        legal[index] = provider.legal(table.with_(schedule=flat[index, 0], vpp=flat[index, 1]))
        by_zero.append((options, legal))
    kept = np.flatnonzero(np.any([legal for _, legal in by_zero], axis=0))
    count = np.bincount(owner[kept], minlength=pp.size).astype(np.int64)
    refused = sum(
        int((options * (count - np.bincount(owner[legal], minlength=pp.size))[group]).sum())
        for options, legal in by_zero
    )
    start = np.cumsum(count) - count
    columns = {name: flat[kept, i] for i, name in enumerate(PIPE_AXES)}
    return columns, start[group], count[group], refused
