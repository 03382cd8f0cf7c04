"""A small cost model with the shape of the real one, for the search to work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from planner.layout import RECOMPUTE, SCHEDULES, Layout
from planner.results import HostBytes, StageCosts
from planner.search.provider import PIPE_KEY, STATE_KEY, Space

TIME = np.array([1.0, 1.13, 1.31, 1.07])  # by policy: none, selective, full, offload
KEPT = np.array([1.0, 0.55, 0.12, 0.3])
WORK = np.array([0.0, 0.2, 0.9, 0.4])


@dataclass
class ToyCosts:
    """Analytic costs of made-up layers; `capacity` from ample to hopeless."""

    layer_kinds: tuple[int, ...] = (0,) * 8
    num_gpus: int = 8
    batch: int = 8
    capacity: float = 40.0
    policies: tuple[str, ...] = RECOMPUTE
    offered: tuple[str, ...] = RECOMPUTE  # the others cost infinite time
    seconds: tuple[float, ...] = (1.0, 2.3, 1.6)
    weights: tuple[float, ...] = (1.0, 3.1, 1.4)
    acts: tuple[float, ...] = (1.0, 1.4, 0.7)
    working: float = 1.0
    host: float | None = None  # room of a rank outside of the device, None: nothing is offloaded
    values: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state_key: tuple[str, ...] = STATE_KEY
    pipe_key: tuple[str, ...] = PIPE_KEY

    @property
    def num_kinds(self) -> int:
        return max(self.layer_kinds) + 1

    def space(self) -> Space:
        values: dict[str, tuple[int, ...]] = {
            "pp": tuple(p for p in range(1, len(self.layer_kinds) + 1)),
            "tp": (1, 2, 4, 8),
            "cp": (1, 2),
            "ep": (1, 2, 4) if self.num_kinds > 1 else (1,),
            "micro_batch": (1, 2, 4),
            "zero": (0, 1, 3),
            "schedule": tuple(range(len(SCHEDULES))),
            "vpp": (1, 2, 3),
            "offload": (0, 1),
        }
        return Space(self.num_gpus, self.batch, {**values, **self.values})

    def legal_cells(self, cells: Layout) -> Any:
        return np.asarray(cells.tp) * np.asarray(cells.cp) <= 8

    def legal(self, rows: Layout) -> Any:
        m = self.batch // (rows.dp * rows.micro_batch)
        dualpipe = rows.schedule == SCHEDULES.index("dualpipe")
        interleaved = rows.schedule == SCHEDULES.index("interleaved")
        good = ~dualpipe | (m >= 2 * rows.pp)
        good &= ~interleaved | (m % rows.pp == 0)
        good &= (rows.zero != 3) | (rows.pp <= 4)
        good &= (rows.offload == 0) | (rows.zero > 0)
        split = rows.schedule == SCHEDULES.index("zero-bubble")
        good &= ~split | (rows.pp == 1) | (rows.zero == 1) | (rows.dp * rows.cp == 1)
        return good & (rows.pp * rows.vpp <= len(self.layer_kinds)) & self.legal_cells(rows)

    def stage_costs(self, rows: Layout, cell: Any = None) -> StageCosts:
        sharded = np.where(rows.zero > 0, rows.shard, 1)
        zero3 = rows.zero == 3
        offload = rows.offload == 1
        beta = np.ones(np.shape(rows.dp))
        beta = np.where(rows.vpp > 1, 1.0 / rows.vpp, beta)
        beta = np.where(rows.schedule == SCHEDULES.index("zero-bubble"), 0.3, beta)
        return self._costs(
            rows,
            beta=beta,
            static=np.where(zero3, 3.0 / sharded, 2.0) + np.where(offload, 0.0, 4.0 / sharded),
            gather=np.where(zero3, 0.11 + 0.001 * sharded, 0.0),
            step=np.where(offload, 1.0, 0.2) / sharded + np.where(rows.dp * rows.cp > 1, 0.5, 0.0),
            p2p=np.where(rows.pp > 1, 0.02 * rows.vpp, 0.0),
            host=self._host(rows, np.where(offload, 4.0 / sharded, 0.0)),
        )

    def _host(self, rows: Layout, state: Any) -> HostBytes | None:
        """State goes where activations go, except under zero=3: then to a place of its own."""
        if self.host is None:
            return None
        kinds, ones = self.num_kinds, np.ones(np.shape(rows.dp))
        weights = np.array(self.weights[:kinds]) / rows.tp[:, None]
        tokens = rows.micro_batch / (rows.tp * rows.cp)
        return HostBytes(
            layer=weights * state[:, None],
            first=0.3 * state / rows.tp,
            head=0.4 * state / rows.tp,
            act=np.array(self.acts[:kinds]) * tokens[:, None],
            state_capacity=np.where(rows.zero == 3, 0.7, 1.0) * self.host,
            act_capacity=self.host * ones,
            shared=np.where(rows.zero == 3, 0.0, 1.0),
            act_policy=self.policies.index("offload"),
        )

    def cell_costs(self, cells: Layout) -> tuple[StageCosts, Any]:
        ranks = cells.dp * cells.cp
        costs = self._costs(
            cells,
            beta=np.full(np.shape(cells.dp), 0.3),
            static=2.0 / ranks,
            gather=0.0 * ranks,
            step=0.2 / ranks,
            p2p=np.where(cells.pp > 1, 0.02, 0.0),
        )
        return costs, np.ones(np.shape(cells.dp)) * 0.5

    def _costs(
        self,
        rows: Layout,
        *,
        beta: Any,
        static: Any,
        gather: Any,
        step: Any,
        p2p: Any,
        host: HostBytes | None = None,
    ) -> StageCosts:
        kinds = self.num_kinds
        size = np.shape(rows.dp)
        seconds = np.array(self.seconds[:kinds])
        tokens = rows.micro_batch / (rows.tp * rows.cp)
        per_kind = seconds * tokens[:, None] * (1 + 0.07 * (rows.tp[:, None] - 1) ** 0.8)
        per_kind = per_kind + 0.05 * (rows.cp[:, None] - 1) + gather[:, None]
        if kinds > 1:
            per_kind[:, 1] += 0.03 * (rows.ep - 1)
        time = per_kind[:, :, None] * TIME
        for p, name in enumerate(self.policies):
            if name not in self.offered:
                time[:, :, p] = np.inf
        weights = np.array(self.weights[:kinds]) / rows.tp[:, None]
        if kinds > 1:
            weights[:, 1] /= rows.ep
        acts = np.array(self.acts[:kinds]) * tokens[:, None]
        ones = np.ones(size)
        return StageCosts(
            num_microbatches=self.batch / (rows.dp * rows.micro_batch),
            beta=beta,
            layer_s=time,
            layer_step_s=weights * step[:, None],
            layer_static_bytes=weights * static[:, None],
            layer_act_bytes=acts[:, :, None] * KEPT,
            working_bytes=self.working * acts[:, :, None] * WORK,
            stage_s=p2p * ones,
            first_s=0.31 * tokens,
            head_s=0.77 * tokens,
            first_step_s=0.13 * ones,
            head_step_s=0.4 / rows.tp,
            fixed_bytes=2.0 * ones,
            first_bytes=1.1 / rows.tp,
            head_bytes=1.9 / rows.tp,
            first_act_bytes=0.1 * tokens,
            constant_s=0.05 * ones,
            capacity_bytes=self.capacity,
            host=host,
        )

    def in_flight(self, rows: Layout, stage: Any) -> Any:
        m = self.batch // (rows.dp * rows.micro_batch)
        pp, vpp, schedule = (np.asarray(v) for v in (rows.pp, rows.vpp, rows.schedule))
        if np.ndim(stage) == 2:
            m, pp, vpp, schedule = m[:, None], pp[:, None], vpp[:, None], schedule[:, None]
        chunks = np.minimum(m * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp
        plain = np.where(schedule == SCHEDULES.index("gpipe"), m, np.minimum(m, pp - stage))
        both = (pp + 0.5) / 1.0 + 0.0 * np.asarray(stage)
        found = np.where(schedule == SCHEDULES.index("interleaved"), chunks, plain)
        return np.where(schedule == SCHEDULES.index("dualpipe"), both, found).astype(float)

    def head_stage(self, rows: Layout) -> Any:
        return np.where(rows.schedule == SCHEDULES.index("dualpipe"), 0, rows.pp - 1)


@pytest.fixture(scope="session")
def toy() -> type[ToyCosts]:
    """The class of toy cost models."""
    return ToyCosts
