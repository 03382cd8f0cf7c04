"""Sums of the cost model for large tables of layouts, each distinct case computed once.

A search asks for millions of rows that share few distinct layers and few distinct shardings. `Memo`
keeps what was computed by the integer columns that it depends on; the formulas stay those of
`planner.layer` and `planner.costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs import Traffic, state_costs
from planner.edges import edge_costs
from planner.layer import LayerCosts, layer_costs
from planner.layout import Layout
from planner.memory import rank_parameters
from planner.results import Array
from planner.setting import Setting

Index = NDArray[np.int64]
LAYER_COLUMNS = ("tp", "cp", "cp_kind", "micro_batch", "ep", "etp")
STATE_COLUMNS = ("tp", "cp", "ep", "etp", "pp", "zero", "shard", "offload")  # dp follows
CAPPED = ("cp",)  # sharding spans cp x dp; cp alone only adds a communicator


class Memo:
    """Arrays by distinct rows of integer columns.

    Parameters
    ----------
    columns
        Fields of `Layout` that `compute` depends on.
    radix
        One more than the largest value of each column.
    compute
        A table of distinct layouts to arrays whose leading axis is that table's.
    capped
        Columns of which only "one" or "more" matters.
    """

    def __init__(
        self,
        columns: Sequence[str],
        radix: Sequence[int],
        compute: Callable[[Layout], tuple[Array, ...]],
        capped: Sequence[str] = (),
    ) -> None:
        self.columns, self.radix, self.compute = columns, radix, compute
        self.capped = capped
        self.keys: Index = np.zeros(0, dtype=np.int64)
        self.order: Index = np.zeros(0, dtype=np.int64)
        self.values: tuple[Array, ...] = ()

    def key(self, table: Layout) -> Index:
        """Columns as one integer."""
        total: Any = np.int64(0)
        for name, radix in zip(self.columns, self.radix, strict=True):
            column = np.asarray(getattr(table, name), dtype=np.int64)
            total = total * radix + (np.minimum(column, 2) if name in self.capped else column)
        return np.atleast_1d(total)

    def rows(self, table: Layout) -> Index:
        """Where the values of each row of `table` lie in `values`; computes what is missing."""
        key = self.key(table)
        at = np.searchsorted(self.keys, key)
        if self.keys.size:
            known = self.keys[np.minimum(at, self.keys.size - 1)] == key
        else:
            known = np.zeros(key.shape, dtype=bool)
        if not known.all():
            missing = np.flatnonzero(~known)
            _, first = np.unique(key[missing], return_index=True)
            self._add(table.take(missing[first]), key[missing[first]])
            at = np.searchsorted(self.keys, key)
        return self.order[at]

    def _add(self, table: Layout, key: Index) -> None:
        new = self.compute(table)
        start = self.values[0].shape[0] if self.values else 0
        self.values = (
            tuple(np.concatenate(pair) for pair in zip(self.values, new, strict=True))
            if self.values
            else new
        )
        keys = np.concatenate([self.keys, key])
        order = np.concatenate([self.order, start + np.arange(key.size)])
        sort = np.argsort(keys, kind="stable")
        self.keys, self.order = keys[sort], order[sort]


@dataclass(frozen=True, slots=True)
class LayerSums:
    """Per micro-batch: layers (R, K) and by policy (R, K, P); embedding and head (R,).

    Bytes are as the allocator reserves them.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    extra_s: Array
    kept_bytes: Array
    working_bytes: Array
    first_s: Array
    head_s: Array
    first_kept_bytes: Array
    head_kept_bytes: Array
    away_bytes: Array  # (R, K) what offload sends to host memory


@dataclass(frozen=True, slots=True)
class StateSums:
    """Per layer of each kind (R, K); then embedding and head, `fixed` and `constant` (R,)."""

    up_s: Array
    again_s: Array
    down_s: Array
    copy_s: Array
    slow_s: Array
    reduce_s: Array
    gather_s: Array
    optimizer_s: Array
    static_bytes: Array
    fixed_bytes: Array
    constant_s: Array
    away_bytes: Array  # as blocks

    def traffic(self, blocks: Any) -> Traffic:
        """Traffic of some blocks: layer kinds, then -2 the embedding, -1 the head."""
        return Traffic(
            self.up_s[:, blocks],
            self.again_s[:, blocks],
            self.down_s[:, blocks],
            self.copy_s[:, blocks],
            self.slow_s[:, blocks],
            self.reduce_s[:, blocks],
            self.gather_s[:, blocks],
        )


def wide(value: Any, size: int) -> Array:
    """A column of `size` numbers from one or many."""
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (size,))


def stacked(values: Sequence[Any], size: int) -> Array:
    """Columns side by side, (size, len(values))."""
    return np.stack([wide(value, size) for value in values], axis=1)


class Tables:
    """Memos of one setting."""

    def __init__(
        self, setting: Setting, policies: tuple[int, ...], values: Mapping[str, Sequence[int]]
    ) -> None:
        self.setting, self.policies = setting, policies

        def radix(name: str) -> int:
            return 1 + (setting.num_gpus if name == "shard" else max(values[name]))

        self.layers = Memo(LAYER_COLUMNS, [radix(n) for n in LAYER_COLUMNS], self.layer_arrays)
        self.states = Memo(
            STATE_COLUMNS, [radix(n) for n in STATE_COLUMNS], self.state_arrays, CAPPED
        )

    def layer_arrays(self, table: Layout) -> tuple[Array, ...]:
        """Arrays of `LayerSums` for distinct rows."""
        size = len(np.atleast_1d(table.tp))
        model = self.setting.model
        stretch = 1.0 + self.setting.runtime.allocator_fraction
        layers = [layer_costs(kind, table, self.setting) for kind in model.kinds]
        vocab = rank_parameters(table, self.setting).vocab
        first, head = edge_costs(table, self.setting, vocab)

        def by_policy(name: str) -> Array:
            columns = [stacked([getattr(x, name)[p] for p in self.policies], size) for x in layers]
            return np.stack(columns, axis=1)

        def both(x: LayerCosts) -> Any:
            return x.forward_total_s + x.backward_total_s

        return (
            stacked([x.forward_total_s for x in layers], size),
            stacked([x.backward_total_s for x in layers], size),
            stacked([x.weight_s for x in layers], size),
            by_policy("recompute_s"),
            stretch * by_policy("kept_bytes"),
            stretch * by_policy("working_bytes"),
            wide(both(first), size),
            wide(both(head), size),
            stretch * wide(first.kept_bytes[0], size),
            stretch * wide(head.kept_bytes[0], size),
            stacked([x.kept_bytes[0] for x in layers], size),
        )

    def state_arrays(self, table: Layout) -> tuple[Array, ...]:
        """Arrays of `StateSums` for distinct rows."""
        size = len(np.atleast_1d(table.tp))
        state = state_costs(table, self.setting)
        memory = state.memory
        blocks = [*memory.layer, memory.first, memory.head]
        return (
            *(
                stacked([getattr(t, name) for t in state.traffic], size)
                for name in (
                    "up_s",
                    "again_s",
                    "down_s",
                    "copy_s",
                    "slow_s",
                    "reduce_s",
                    "gather_s",
                )
            ),
            stacked(state.optimizer_s, size),
            stacked([sum(items.values()) for items in blocks], size),
            wide(sum(memory.fixed.values()), size),
            wide(sum(state.constant_s.values()), size),
            stacked(memory.away, size),
        )

    def layer_sums(self, table: Layout) -> LayerSums:
        index = self.layers.rows(table)
        return LayerSums(*[value[index] for value in self.layers.values])

    def state_sums(self, table: Layout) -> StateSums:
        index = self.states.rows(table)
        return StateSums(*[value[index] for value in self.states.values])
