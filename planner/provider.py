"""The cost model as the search sees it (`planner.search.provider.CostProvider`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.collectives import collective_s
from planner.costs import RowCosts, constant_addends, num_microbatches, optimizer_s, row_costs
from planner.layer import LayerCosts, Setting, edge_costs, layer_costs, unique_rows
from planner.layout import OFFLOADS, RECOMPUTE, SCHEDULES, Layout
from planner.legality import RULES, Situation, legal_mask
from planner.memory import MemoryItems, memory_items, rank_parameters
from planner.parallel import data_parallel, pipeline_parallel
from planner.results import Array, StageCosts
from planner.schedules import bubble_beta, in_flight
from planner.search.provider import PIPE_KEY, STATE_KEY, Space
from planner.space import allowed_values

CELL_RULES = (
    "degrees",
    "training",
    "limits",
    "heads",
    "kv_heads",
    "widths",
    "world",
    "experts",
    "expert_grid",
    "context",
    "ulysses",
    "sequence",
    "layers",
    "batch",
)
STATE_COLUMNS = (
    "tp",
    "cp",
    "cp_kind",
    "micro_batch",
    "ep",
    "etp",
    "pp",
    "zero",
    "shard",
    "offload",
)


def total(items: Mapping[str, Any]) -> Any:
    """Sum of named addends."""
    return sum(items.values())


class ModelProvider:
    """Costs of a model on a cluster, by rows of layouts.

    Parameters
    ----------
    setting
        Model, recipe, cluster, runtime and number of GPUs.
    fixed
        Values that the user fixed, by field of `Layout`.
    max_degree
        Largest degree by field.
    """

    def __init__(
        self,
        setting: Setting,
        fixed: Mapping[str, int] | None = None,
        max_degree: Mapping[str, int] | None = None,
    ) -> None:
        self.setting = setting
        self.fixed = dict(fixed or {})
        self.max_degree = dict(max_degree or {})
        self.policy_codes = tuple(
            code
            for code, name in enumerate(RECOMPUTE)
            if name in setting.runtime.recompute and self.fixed.get("recompute", code) == code
        )
        self._space: Space | None = None

    @property
    def num_kinds(self) -> int:
        return len(self.setting.model.kinds)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        return self.setting.model.layer_kinds

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(RECOMPUTE[code] for code in self.policy_codes)

    @property
    def state_key(self) -> tuple[str, ...]:
        return STATE_KEY

    @property
    def pipe_key(self) -> tuple[str, ...]:
        return PIPE_KEY

    def space(self) -> Space:
        """Allowed values of every axis for this model, cluster, batch and runtime."""
        if self._space is None:
            s = self.setting
            values = allowed_values(
                s.model,
                s.train,
                s.cluster,
                s.runtime,
                s.num_gpus,
                fixed=self.fixed,
                max_degree=self.max_degree,
            )
            self._space = Space(s.num_gpus, s.train.global_batch_size, values)
        return self._space

    def legal_cells(self, cells: Layout) -> NDArray[np.bool_]:
        """Cells that obey every rule which the coarse axes and dp decide alone."""
        s = self.setting
        situation = Situation(s.model, s.train, s.cluster, s.runtime, s.num_gpus)
        mask = np.ones(np.shape(np.atleast_1d(cells.pp)), dtype=bool)
        for rule in RULES:
            if rule.name in CELL_RULES:
                mask &= np.asarray(rule.allowed(cells, situation), dtype=bool)
        return mask

    def legal(self, rows: Layout) -> NDArray[np.bool_]:
        s = self.setting
        return legal_mask(rows, s.model, s.train, s.cluster, s.runtime)

    def in_flight(self, rows: Layout, stage: Any) -> Array:
        """Micro-batches in flight on rank `stage`."""
        m = num_microbatches(rows, self.setting)
        columns = [
            np.asarray(rows.schedule),
            np.asarray(rows.pp),
            np.asarray(rows.vpp),
            np.asarray(m),
        ]
        if np.ndim(stage) == 2:
            columns = [np.atleast_1d(column)[:, None] for column in columns]
        return in_flight(*columns, stage)

    def head_stage(self, rows: Layout) -> NDArray[np.int64]:
        result: NDArray[np.int64] = pipeline_parallel.head_stage(rows.schedule, rows.pp)
        return result

    def layer_arrays(
        self, layers: list[LayerCosts], fsdp: list[list[Any]] | None, size: int
    ) -> tuple[Array, Array, Array]:
        """(layer_s, layer_act_bytes, working_bytes) of shape (U, K, P)."""
        stretch = 1.0 + self.setting.runtime.allocator_fraction
        shape = (size, len(layers), len(self.policy_codes))
        seconds, kept, working = np.empty(shape), np.empty(shape), np.empty(shape)
        for k, costs in enumerate(layers):
            base = costs.forward_total_s + costs.backward_total_s
            for j, p in enumerate(self.policy_codes):
                extra = costs.recompute_s[p] + (0.0 if fsdp is None else fsdp[k][p])
                seconds[:, k, j] = base + extra
                kept[:, k, j] = stretch * costs.kept_bytes[p]
                working[:, k, j] = stretch * costs.working_bytes[p]
        return seconds, kept, working

    def edges(
        self, layout: Layout, vocab: Any, head: LayerCosts, first: LayerCosts
    ) -> tuple[Any, Any]:
        """Bytes in flight on the first rank; bytes of logits and final norm on the head's."""
        s = self.setting
        stretch = 1.0 + s.runtime.allocator_fraction
        tokens = np.asarray(layout.micro_batch) * s.train.seq_len / np.asarray(layout.cp)
        logits = tokens * vocab / np.asarray(layout.tp) * s.runtime.logit_bytes_peak
        if not s.model.lm_head:
            logits = 0.0 * logits
        scale = s.element_bytes / 2
        return stretch * first.kept_bytes[0], stretch * (head.kept_bytes[0] + scale * logits)

    def stage_costs(self, rows: Layout, cell: NDArray[np.int64] | None = None) -> StageCosts:
        """Costs of full rows; what schedule and vpp do not touch is computed once."""
        del cell  # distinct rows are found by value
        index, inverse = unique_rows(*[getattr(rows, name) for name in STATE_COLUMNS])
        distinct = self.table(rows).take(index)
        costs = row_costs(distinct, self.setting)
        return self.assemble(self.table(rows), distinct, costs, inverse)

    def table(self, rows: Layout) -> Layout:
        """`rows` with every field an array of one length."""
        names = Layout.__dataclass_fields__
        arrays = np.broadcast_arrays(*[np.atleast_1d(getattr(rows, name)) for name in names])
        return Layout(**dict(zip(names, arrays, strict=True)))

    def assemble(
        self, rows: Layout, distinct: Layout, costs: RowCosts, inverse: NDArray[np.int64]
    ) -> StageCosts:
        """Sum the addends of distinct rows, spread them over all rows, add what schedules change."""
        size = len(np.atleast_1d(distinct.tp))
        seconds, kept, working = self.layer_arrays(costs.layers, costs.fsdp_s, size)
        first_act, head_act = self.edges(distinct, costs.params.vocab, costs.head, costs.first)
        main = max(range(self.num_kinds), key=self.layer_kinds.count)
        layer = costs.layers[main]
        weight = np.broadcast_to(layer.weight_s, (size,))
        forward = np.broadcast_to(layer.forward_total_s, (size,))
        rest = np.broadcast_to(layer.backward_total_s, (size,)) - weight

        def spread(value: Any) -> Array:
            return np.broadcast_to(np.asarray(value, dtype=np.float64), (size,))[inverse]

        m = num_microbatches(rows, self.setting)
        beta = bubble_beta(
            rows.schedule,
            rows.vpp,
            forward[inverse],
            rest[inverse],
            weight[inverse],
            pp=rows.pp,
            num_microbatches=m,
        )
        p2p, fill = self.send_s(distinct)
        hidden = np.isin(np.asarray(rows.schedule), self.overlapping)
        per_stage = np.where(hidden, 0.0, 2 * np.asarray(rows.vpp) * p2p[inverse])
        memory = costs.memory
        return StageCosts(
            num_microbatches=np.asarray(m, dtype=np.float64),
            beta=beta,
            layer_s=seconds[inverse],
            layer_step_s=np.stack([spread(total(items)) for items in costs.step_s], axis=1),
            layer_static_bytes=np.stack([spread(total(items)) for items in memory.layer], axis=1),
            layer_act_bytes=kept[inverse],
            working_bytes=working[inverse],
            stage_s=per_stage,
            first_s=spread(
                costs.first.forward_total_s + costs.first.backward_total_s + costs.fsdp_first_s
            ),
            head_s=spread(
                costs.head.forward_total_s + costs.head.backward_total_s + costs.fsdp_head_s
            ),
            first_step_s=spread(total(costs.first_step_s)),
            head_step_s=spread(total(costs.head_step_s)),
            fixed_bytes=spread(total(memory.fixed)),
            first_bytes=spread(total(memory.first)),
            head_bytes=spread(total(memory.head) + head_act),
            first_act_bytes=spread(first_act),
            constant_s=spread(total(costs.constant_s)) + np.where(hidden, fill[inverse], 0.0),
            capacity_bytes=self.capacity_bytes,
        )

    @property
    def capacity_bytes(self) -> float:
        """Bytes that a rank may use: what the driver reports, less the margin asked for."""
        s = self.setting
        return s.cluster.device.memory_bytes * (1.0 - s.train.memory_margin_fraction)

    @property
    def overlapping(self) -> tuple[int, ...]:
        """Codes of the schedules whose sends hide behind compute."""
        if self.setting.overlap == "all":
            return tuple(range(len(SCHEDULES)))
        if self.setting.overlap == "none":
            return ()
        return tuple(SCHEDULES.index(name) for name in self.setting.runtime.overlap_p2p)

    def send_s(self, layout: Layout) -> tuple[Array, Array]:
        """Seconds of one send to the next stage; and of the sends that fill and drain the pipeline."""
        s = self.setting
        pp = np.atleast_1d(layout.pp)
        tokens = np.asarray(layout.micro_batch) * s.train.seq_len / np.asarray(layout.cp)
        size = pipeline_parallel.send_bytes(
            s.model, tokens, layout.tp, s.element_bytes, s.runtime.sequence_parallel
        )
        stride = np.maximum(1, s.num_gpus // pp)
        one = np.where(pp > 1, collective_s(s.cluster, "send_recv", size, pp, stride), 0.0)
        return one, (0.0 if s.overlap == "all" else 2.0) * (pp - 1) * one

    def cell_costs(self, cells: Layout) -> tuple[StageCosts, Array]:
        """A floor under every term over all sharding, offload and schedule options of each cell."""
        cells, s = self.table(cells), self.setting
        values = self.space().values
        index, inverse = unique_rows(*[getattr(cells, n) for n in STATE_COLUMNS[:6]])
        small = cells.take(index)
        layers = [layer_costs(kind, small, s).gathered(inverse) for kind in s.model.kinds]
        size = len(inverse)
        params = rank_parameters(cells, s)
        first, head = (
            one.gathered(inverse) for one in edge_costs(small, s, np.asarray(params.vocab)[index])
        )
        seconds, kept, working = self.layer_arrays(layers, None, size)
        memory = self.least_memory(cells, params, values)
        first_act, head_act = self.edges(cells, params.vocab, head, first)
        zeros = np.zeros(size)

        def wide(value: Any) -> Array:
            return np.broadcast_to(np.asarray(value, dtype=np.float64), (size,))

        step = self.least_step(cells, params, values)
        m = num_microbatches(cells, s)
        main = max(range(self.num_kinds), key=self.layer_kinds.count)
        weight = wide(layers[main].weight_s)
        forward, rest = (
            wide(layers[main].forward_total_s),
            wide(layers[main].backward_total_s) - weight,
        )
        beta = np.ones(size)
        for schedule in values["schedule"]:
            for vpp in values["vpp"]:
                beta = np.minimum(
                    beta,
                    bubble_beta(
                        schedule, vpp, forward, rest, weight, pp=cells.pp, num_microbatches=m
                    ),
                )
        costs = StageCosts(
            num_microbatches=np.asarray(m, dtype=np.float64),
            beta=beta,
            layer_s=seconds,
            layer_step_s=np.stack([wide(value) for value in step[:-2]], axis=1),
            layer_static_bytes=np.stack([wide(value) for value in memory.layer], axis=1),
            layer_act_bytes=kept,
            working_bytes=working,
            stage_s=zeros,
            first_s=wide(first.forward_total_s + first.backward_total_s),
            head_s=wide(head.forward_total_s + head.backward_total_s),
            first_step_s=wide(step[-2]),
            head_step_s=wide(step[-1]),
            fixed_bytes=wide(memory.fixed["sum"]),
            first_bytes=wide(memory.first["sum"]),
            head_bytes=wide(memory.head["sum"] + head_act),
            first_act_bytes=wide(first_act),
            constant_s=wide(total(constant_addends(cells, params, s))),
            capacity_bytes=self.capacity_bytes,
        )
        return costs, np.ones(size)

    def variants(self, cells: Layout, values: Mapping[str, tuple[int, ...]]) -> list[Layout]:
        """Cells under each ZeRO stage, fully sharded, without offload and with the furthest one."""
        whole = np.asarray(cells.dp) * cells.cp
        offloads = sorted({min(values["offload"]), max(values["offload"])})
        return [
            cells.with_(zero=zero, shard=whole if zero else 1, offload=code)
            for zero in values["zero"]
            for code in offloads
        ]

    def least_memory(
        self, cells: Layout, params: Any, values: Mapping[str, tuple[int, ...]]
    ) -> Any:
        """Least static bytes of every term over the variants; each term on its own."""
        best: MemoryItems | None = None
        for variant in self.variants(cells, values):
            items = memory_items(variant, params, self.setting)
            sums = MemoryItems(
                [total(x) for x in items.layer],
                {"sum": total(items.fixed)},
                {"sum": total(items.first)},
                {"sum": total(items.head)},
            )
            if best is None:
                best = sums
                continue
            best = MemoryItems(
                [np.minimum(a, b) for a, b in zip(best.layer, sums.layer, strict=True)],
                *[
                    {"sum": np.minimum(a["sum"], b["sum"])}
                    for a, b in (
                        (best.fixed, sums.fixed),
                        (best.first, sums.first),
                        (best.head, sums.head),
                    )
                ],
            )
        return best

    def least_step(
        self, cells: Layout, params: Any, values: Mapping[str, tuple[int, ...]]
    ) -> list[Any]:
        """Least optimizer seconds: per layer of each kind, then embedding and head."""
        s = self.setting
        blocks = [
            (d, t, e, u)
            for d, t, e, u in zip(
                params.dense,
                params.trained_dense,
                params.expert,
                params.trained_expert,
                strict=True,
            )
        ]
        blocks += [
            (params.first, params.trained_first, 0.0, 0.0),
            (params.head, params.trained_head, 0.0, 0.0),
        ]
        best: list[Any] = [np.inf] * len(blocks)
        for variant in self.variants(cells, values):
            dense = data_parallel.dense_groups(variant)
            expert = data_parallel.expert_groups(variant)
            for i, (d, t, e, u) in enumerate(blocks):
                seconds = optimizer_s(d, t, variant, dense, s)
                if np.any(np.asarray(e) > 0):
                    seconds = seconds + optimizer_s(e, u, variant, expert, s)
                best[i] = np.minimum(best[i], seconds)
        return best


def offload_names(codes: tuple[int, ...]) -> list[str]:
    """Names of offload codes, for messages."""
    return [OFFLOADS[code] for code in codes]
