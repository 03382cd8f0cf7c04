"""The cost model as the search sees it (`planner.search.provider.CostProvider`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.collectives import collective_s
from planner.costs import (
    Traffic,
    constant_addends,
    num_microbatches,
    optimizer_s,
    step_addends,
    streaming_s,
)
from planner.layer import unique_rows
from planner.layout import RECOMPUTE, SCHEDULES, Layout
from planner.legality import RULES, Situation, legal_mask
from planner.memory import memory_items, rank_parameters
from planner.parallel import data_parallel, offload, pipeline_parallel
from planner.parameters import padded_vocab
from planner.results import Array, HostBytes, StageCosts
from planner.schedules import bubble_beta, in_flight
from planner.search.provider import PIPE_KEY, STATE_KEY, Space
from planner.setting import Setting
from planner.space import allowed_values
from planner.tables import LayerSums, Memo, StateSums, Tables, stacked, wide

OFFLOADED = RECOMPUTE.index("offload")
LEAST_COLUMNS = ("tp", "cp", "ep", "etp", "pp")
TRAFFIC = ("up_s", "again_s", "down_s", "copy_s", "slow_s", "reduce_s", "gather_s")
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
            if name in setting.runtime.recompute
            and self.fixed.get("recompute", code) == code
            and (code != OFFLOADED or setting.cluster.host_memory_bytes_per_s > 0)
        )
        self._space: Space | None = None
        self._tables: Tables | None = None
        self._least: Memo | None = None

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
        columns = [
            np.asarray(rows.schedule),
            np.asarray(rows.pp),
            np.asarray(rows.vpp),
            np.asarray(num_microbatches(rows, self.setting)),
        ]
        if np.ndim(stage) == 2:
            columns = [np.atleast_1d(column)[:, None] for column in columns]
        schedule, pp, vpp, m = columns
        return in_flight(schedule, pp, vpp, m, stage)

    def head_stage(self, rows: Layout) -> NDArray[np.int64]:
        result: NDArray[np.int64] = pipeline_parallel.head_stage(rows.schedule, rows.pp)
        return result

    @property
    def tables(self) -> Tables:
        """Sums by distinct layer and sharding, shared by all calls."""
        if self._tables is None:
            self._tables = Tables(self.setting, self.policy_codes, self.space().values)
        return self._tables

    def stage_costs(self, rows: Layout, cell: NDArray[np.int64] | None = None) -> StageCosts:
        """Costs of full rows."""
        del cell  # distinct cases are found by value
        rows = self.table(rows)
        return self.assemble(rows, self.tables.layer_sums(rows), self.tables.state_sums(rows))

    def table(self, rows: Layout) -> Layout:
        """`rows` with every field an array of one length."""
        names = Layout.__dataclass_fields__
        arrays = np.broadcast_arrays(*[np.atleast_1d(getattr(rows, name)) for name in names])
        return Layout(**dict(zip(names, arrays, strict=True)))

    @property
    def main_kind(self) -> int:
        """The kind that most layers are of: it stands for all in the bubble of a split backward."""
        return max(range(self.num_kinds), key=self.layer_kinds.count)

    def logit_bytes(self, layout: Layout) -> Any:
        """Logits and loss at their peak on the head's rank."""
        s = self.setting
        if not s.model.lm_head:
            return 0.0
        tokens = np.asarray(layout.micro_batch) * s.train.seq_len / np.asarray(layout.cp)
        tp = np.asarray(layout.tp)
        vocab = padded_vocab(s.model, s.runtime.vocab_multiple, tp) / tp
        each = np.where(tp > 1, s.runtime.logit_bytes_peak_tp, s.runtime.logit_bytes_peak)
        return tokens * vocab * each * s.element_bytes / 2

    def assemble(self, rows: Layout, layers: LayerSums, state: StateSums) -> StageCosts:
        """Put layer and sharding sums together and add what schedules change."""
        s, k = self.setting, self.main_kind
        m = num_microbatches(rows, s)
        stretch = 1.0 + s.runtime.allocator_fraction
        kinds = slice(0, self.num_kinds)
        traffic = state.traffic(kinds)
        backward = layers.backward_s[:, :, None] + layers.extra_s
        seconds = layers.forward_s[:, :, None] + backward
        streams = np.flatnonzero((traffic.up_s + traffic.down_s + traffic.copy_s).any(axis=1))
        if streams.size:
            some = Traffic(*[getattr(traffic, f)[streams][:, :, None] for f in TRAFFIC])
            forward = layers.forward_s[streams][:, :, None]
            seconds[streams] += streaming_s(some, forward, backward[streams], s)
        step = step_addends(
            traffic, layers.forward_s, layers.backward_s, state.optimizer_s[:, kinds], s
        )
        edges = [state.traffic(block) for block in (-2, -1)]
        edge_step = [
            step_addends(t, 0.0, 0.0, state.optimizer_s[:, block], s)
            for block, t in zip((-2, -1), edges, strict=True)
        ]
        edge_stream = [streaming_s(t, 0.0, 0.0, s) for t in edges]
        weight = layers.weight_s[:, k]
        beta = bubble_beta(
            rows.schedule,
            rows.vpp,
            layers.forward_s[:, k],
            layers.backward_s[:, k] - weight,
            weight,
            pp=rows.pp,
            num_microbatches=m,
        )
        p2p, fill = self.send_s(rows)
        hidden = np.isin(np.asarray(rows.schedule), self.overlapping)
        static = state.static_bytes
        return StageCosts(
            num_microbatches=np.asarray(m, dtype=np.float64),
            beta=beta,
            layer_s=seconds,
            layer_step_s=total(step),
            layer_static_bytes=static[:, kinds],
            layer_act_bytes=layers.kept_bytes,
            working_bytes=layers.working_bytes,
            stage_s=np.where(hidden, 0.0, 2 * np.asarray(rows.vpp) * p2p),
            first_s=layers.first_s + edge_stream[0],
            head_s=layers.head_s + edge_stream[1],
            first_step_s=total(edge_step[0]),
            head_step_s=total(edge_step[1]),
            fixed_bytes=state.fixed_bytes,
            first_bytes=static[:, -2],
            head_bytes=static[:, -1] + layers.head_kept_bytes + stretch * self.logit_bytes(rows),
            first_act_bytes=layers.first_kept_bytes,
            constant_s=state.constant_s + np.where(hidden, fill, 0.0),
            capacity_bytes=self.capacity_bytes,
            host=self.host_costs(rows, layers, state),
        )

    def host_costs(self, rows: Layout, layers: LayerSums, state: StateSums) -> HostBytes | None:
        """What offload keeps in host memory or on NVMe, and each rank's equal share of either.

        None where nothing is offloaded, so that a search without offload costs nothing.
        """
        s = self.setting
        act = self.policy_codes.index(OFFLOADED) if OFFLOADED in self.policy_codes else -1
        code = np.asarray(rows.offload)
        if act < 0 and not code.any():
            return None
        memory = s.cluster.host_memory_bytes
        host = memory / s.gpus_on_node if memory > 0 else np.inf
        nvme = s.cluster.nvme_bytes / s.gpus_on_node
        on_nvme = offload.is_one_of(code, offload.NVME)
        return HostBytes(
            layer=state.away_bytes[:, : self.num_kinds],
            first=state.away_bytes[:, -2],
            head=state.away_bytes[:, -1],
            act=layers.away_bytes,
            state_capacity=np.where(on_nvme, nvme, host),
            act_capacity=np.full(code.shape, host),
            shared=np.where(on_nvme, 0.0, 1.0),
            act_policy=act,
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
        """Seconds of one send to the next stage, and of those that fill and drain the pipeline."""
        first, inverse = unique_rows(layout.pp, layout.tp, layout.cp, layout.micro_batch)
        one = self.one_send_s(layout.take(first))[inverse]
        pp = np.atleast_1d(layout.pp)
        return one, (0.0 if self.setting.overlap == "all" else 2.0) * (pp - 1) * one

    def one_send_s(self, layout: Layout) -> Array:
        """Seconds of one send for distinct rows."""
        s = self.setting
        pp = np.atleast_1d(layout.pp)
        tokens = np.asarray(layout.micro_batch) * s.train.seq_len / np.asarray(layout.cp)
        size = pipeline_parallel.send_bytes(s.model, tokens, layout.tp, s.element_bytes, s.runtime)
        stride = np.maximum(1, s.num_gpus // pp)
        seconds = collective_s(s.cluster, "send_recv", size, np.where(pp > 1, 2, 1), stride)
        if pipeline_parallel.gathers(s.runtime):
            whole = size * np.asarray(layout.tp)
            seconds = seconds + collective_s(s.cluster, "all_gather", whole, layout.tp, 1)
        return np.where(pp > 1, seconds, 0.0)

    def cell_costs(self, cells: Layout) -> tuple[StageCosts, Array]:
        """A floor under every term over all sharding, offload and schedule options of each cell."""
        cells, s = self.table(cells), self.setting
        values = self.space().values
        layers = self.tables.layer_sums(cells)
        size = len(layers.first_s)
        static, fixed, step, constant = self.least_state(cells)
        k = self.main_kind
        m = num_microbatches(cells, s)
        weight = layers.weight_s[:, k]
        forward, rest = layers.forward_s[:, k], layers.backward_s[:, k] - weight
        beta = np.ones(size)
        for schedule in values["schedule"]:
            # More chunks never leave more of the bubble; other schedules do not read vpp.
            beta = np.minimum(
                beta,
                bubble_beta(
                    schedule,
                    max(values["vpp"]),
                    forward,
                    rest,
                    weight,
                    pp=cells.pp,
                    num_microbatches=m,
                ),
            )
        stretch = 1.0 + s.runtime.allocator_fraction
        kinds = slice(0, self.num_kinds)
        costs = StageCosts(
            num_microbatches=np.asarray(m, dtype=np.float64),
            beta=beta,
            layer_s=(layers.forward_s + layers.backward_s)[:, :, None] + layers.extra_s,
            layer_step_s=step[:, kinds],
            layer_static_bytes=static[:, kinds],
            layer_act_bytes=layers.kept_bytes,
            working_bytes=layers.working_bytes,
            stage_s=np.zeros(size),
            first_s=layers.first_s,
            head_s=layers.head_s,
            first_step_s=step[:, -2],
            head_step_s=step[:, -1],
            fixed_bytes=fixed,
            first_bytes=static[:, -2],
            head_bytes=static[:, -1] + layers.head_kept_bytes + stretch * self.logit_bytes(cells),
            first_act_bytes=layers.first_kept_bytes,
            constant_s=constant,
            capacity_bytes=self.capacity_bytes,
        )
        return costs, np.ones(size)

    def least_state(self, cells: Layout) -> tuple[Array, Array, Array, Array]:
        """Least static and fixed bytes, optimizer and constant seconds over sharding and offload.

        Each term on its own, over ZeRO stages fully sharded, without offload and with the furthest.
        """
        index = self.least.rows(cells)
        static, fixed, step, constant = (value[index] for value in self.least.values)
        return static, fixed, step, constant

    @property
    def least(self) -> Memo:
        """Least sums by the coarse axes that they depend on."""
        if self._least is None:
            values = self.space().values
            radix = [1 + max(values[name]) for name in LEAST_COLUMNS]
            self._least = Memo(LEAST_COLUMNS, radix, self.least_arrays, ("cp",))
        return self._least

    def least_arrays(self, cells: Layout) -> tuple[Array, ...]:
        """`least_state` of distinct cells."""
        values = self.space().values
        whole = np.asarray(cells.dp) * cells.cp
        best: list[Array] = []
        for zero in values["zero"]:
            for code in sorted({min(values["offload"]), max(values["offload"])}):
                sums = self.least_one(
                    cells.with_(
                        zero=np.full_like(whole, zero),
                        shard=whole if zero else np.ones_like(whole),
                        offload=np.full_like(whole, code),
                    )
                )
                best = [np.minimum(a, b) for a, b in zip(best, sums, strict=True)] if best else sums
        return tuple(best)

    def least_one(self, table: Layout) -> list[Array]:
        """Static and fixed bytes, optimizer and constant seconds of one sharding; no traffic."""
        s = self.setting
        size = len(np.atleast_1d(table.tp))
        params = rank_parameters(table, s)
        memory = memory_items(table, params, s)
        dense, expert = data_parallel.dense_groups(table), data_parallel.expert_groups(table)
        step = [
            optimizer_s(p, t, table, dense, s)
            for p, t in (
                *zip(params.dense, params.trained_dense, strict=True),
                (params.first, params.trained_first),
                (params.head, params.trained_head),
            )
        ]
        for i, (held, trained) in enumerate(zip(params.expert, params.trained_expert, strict=True)):
            step[i] = step[i] + optimizer_s(held, trained, table, expert, s)
        blocks = [*memory.layer, memory.first, memory.head]
        return [
            stacked([total(items) for items in blocks], size),
            wide(total(memory.fixed), size),
            stacked(step, size),
            wide(total(constant_addends(table, params, s)), size),
        ]
