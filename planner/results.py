"""Result types that rooms share. No formula lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CommOp:
    """One kind of collective that every rank of an axis issues.

    Attributes
    ----------
    kind
        all_reduce, all_gather, reduce_scatter, all_to_all, send_recv.
    axis
        Mesh axis or group: tp, cp, ep, etp, dp, shard, replicate, edp, pp, tied.
    phase
        forward, backward, recompute, step.
    what
        The tensor, in words.
    num_bytes
        Bytes of one call as nccl-tests counts them (all_gather: gathered total; reduce_scatter:
        input total; all_reduce and all_to_all: buffer per rank; send_recv: bytes sent). Array or
        number.
    count
        Calls per rank and training step. Array or number.
    exposed_s, total_s
        Seconds per step not hidden behind compute, and in all.
    """

    kind: str
    axis: str
    phase: str
    what: str
    num_bytes: Any
    count: Any
    total_s: Any = 0.0
    exposed_s: Any = 0.0


@dataclass(frozen=True, slots=True)
class HostBytes:
    """What a rank of a table of R layouts keeps outside of its device, and the room there.

    For stage s, with the names of `StageCosts`,

        state_s = [s == 0] first + [s == head_stage] head + sum_k n[k] layer[k] <= state_capacity
        shared state_s + in_flight[s] sum_k n[k, act_policy] act[k]             <= act_capacity

    State is in host memory (shared is 1) or on NVMe (0); activations are in host memory. A rank may
    use its equal share of what its node has; infinite capacity: not known.
    """

    layer: Array  # (R, K)
    first: Array  # (R,)
    head: Array  # (R,)
    act: Array  # (R, K) per micro-batch in flight, of layers under the policy `act_policy`
    state_capacity: Array  # (R,)
    act_capacity: Array  # (R,)
    shared: Array  # (R,)
    act_policy: int  # index on axis P, -1: none sends activations away

    def take(self, index: NDArray[np.int64]) -> HostBytes:
        """Rows `index`."""
        columns = {
            name: getattr(self, name)[index]
            for name in self.__dataclass_fields__
            if name != "act_policy"
        }
        return HostBytes(**columns, act_policy=self.act_policy)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What the search sees of a table of R layouts: a pure mathematical problem.

    Stage ``s`` of ``pp`` ranks holds ``n[k,p]`` layers of kind k under recompute policy p. Then

        t_s = stage_s + [s == 0] first_s + [s == head_stage] head_s + sum_kp n[k,p] layer_s[k,p]
        e_s = [s == 0] first_step_s + [s == head_stage] head_step_s + sum_k n[k] layer_step_s[k]
        bytes_s = fixed_bytes + [s == 0] first_bytes + [s == head_stage] head_bytes
                  + sum_k n[k] layer_static_bytes[k]
                  + in_flight[s] * (sum_kp n[k,p] layer_act_bytes[k,p] + [s == 0] first_act_bytes)
                  + max over used (k,p) of working_bytes[k,p]       must be <= capacity_bytes

        T = (m - beta) * max_s t_s + beta * sum_s t_s + max_s e_s + constant_s

    with m = num_microbatches. `head_stage` is ``pp - 1``, or 0 where the chunks lie in a V.
    Leading axis R everywhere; K kinds, P policies (a policy that is not allowed has infinite
    layer_s). Seconds and bytes. `host` bounds what offload keeps elsewhere; None: nothing is.
    """

    num_microbatches: Array  # (R,)
    beta: Array  # (R,) share of the bubble that remains, in [0, 1]
    layer_s: Array  # (R, K, P) forward + backward + recompute of one micro-batch
    layer_step_s: Array  # (R, K) exposed once per step
    layer_static_bytes: Array  # (R, K)
    layer_act_bytes: Array  # (R, K, P) per micro-batch in flight
    working_bytes: Array  # (R, K, P) transient while such a layer runs backward
    stage_s: Array  # (R,)
    first_s: Array  # (R,)
    head_s: Array  # (R,)
    first_step_s: Array  # (R,)
    head_step_s: Array  # (R,)
    fixed_bytes: Array  # (R,)
    first_bytes: Array  # (R,)
    head_bytes: Array  # (R,)
    first_act_bytes: Array  # (R,)
    constant_s: Array  # (R,)
    capacity_bytes: float
    host: HostBytes | None = None

    def take(self, index: NDArray[np.int64]) -> StageCosts:
        """Rows `index`."""
        return StageCosts(
            **{
                name: getattr(self, name)[index]
                for name in self.__dataclass_fields__
                if name not in ("capacity_bytes", "host")
            },
            capacity_bytes=self.capacity_bytes,
            host=None if self.host is None else self.host.take(index),
        )


@dataclass(frozen=True, slots=True)
class Action:
    """One cell of a pipeline schedule: what a rank does, on which chunk and micro-batch.

    `op` is F (forward), B (backward: whole, or for the input alone where W is scheduled apart),
    W (backward for the weights). `stage` is the virtual stage, 0 to ``pp * vpp - 1``.
    """

    stage: int
    op: str
    microbatch: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step: when every action of every rank runs.

    `spans[rank]` is a list of (action, start_s, end_s) in order of start.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    total_s: float
    bubble_fraction: float  # idle share of all ranks' time
    peak_in_flight: tuple[float, ...]  # per rank, in whole-rank micro-batches


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time and memory of one layout with its stages.

    `breakdown_s` are named addends that sum to `step_time_s`; `memory_bytes[s]` the named addends
    of stage s. `lower_s` hides all communication, `upper_s` hides none.
    """

    step_time_s: float
    lower_s: float
    upper_s: float
    breakdown_s: Mapping[str, float]
    stage_s: tuple[float, ...]
    memory_bytes: tuple[Mapping[str, float], ...]
    capacity_bytes: float
    tokens_per_s_per_gpu: float
    mfu: float
    hfu: float
    comm_ops: tuple[CommOp, ...] = ()
    host_bytes_per_node: float = 0.0
    nvme_bytes_per_node: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_memory_bytes(self) -> float:
        return max(sum(stage.values()) for stage in self.memory_bytes)
