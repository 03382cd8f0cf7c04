"""Layout: the degrees of parallelism of a run, and where each rank sits.

A `Layout` holds integers, or integer arrays of one shape: then it is a table of layouts, a column
a field. Formulas broadcast over either. Enumerated fields hold codes, the index into the tuples
below, so that a column of them is an integer array too.

Axis order, fastest first: dense layers ``tp, cp, dp, pp``; expert layers ``etp, ep, edp, pp``,
folded over the same ranks (``edp = tp * cp * dp / (etp * ep)``). The optimizer and FSDP shard over
the joined ``cp x dp`` axis (stride ``tp``), of which `shard` neighbours hold one copy (HSDP where
``shard < cp * dp``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

type_int = "int | NDArray[np.int64]"
Int = Any  # an int, or an int64 array; mypy cannot express arithmetic over both

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe")
RECOMPUTE = ("none", "selective", "full", "offload")
CP_KINDS = ("ring", "all-gather", "ulysses")
OFFLOADS = ("none", "optimizer-cpu", "optimizer-nvme", "params-cpu", "params-nvme")


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism, one layout or a table of them.

    Attributes
    ----------
    dp, tp, pp, cp
        Data, tensor, pipeline and context parallel degrees; their product is the number of GPUs.
    vpp
        Model chunks per pipeline rank (1: not interleaved; dualpipe: 2, placed in a V).
    ep, etp
        Expert and expert-tensor parallel degrees, folded over the same ranks.
    zero
        ZeRO stage 0 to 3 (3: parameters sharded, FSDP).
    shard
        Ranks that hold one sharded copy, a divisor of ``cp * dp`` (1 when zero is 0).
    micro_batch
        Sequences per model replica and pass.
    recompute
        Code into `RECOMPUTE`: the policy of every layer, where the stages do not say otherwise.
    schedule, cp_kind, offload
        Codes into `SCHEDULES`, `CP_KINDS`, `OFFLOADS`.
    """

    dp: Int = 1
    tp: Int = 1
    pp: Int = 1
    cp: Int = 1
    vpp: Int = 1
    ep: Int = 1
    etp: Int = 1
    zero: Int = 0
    shard: Int = 1
    micro_batch: Int = 1
    recompute: Int = 0
    schedule: Int = 1
    cp_kind: Int = 0
    offload: Int = 0

    @property
    def num_gpus(self) -> Int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> Int:
        """Expert data-parallel degree: replicas of one expert shard."""
        return self.dp * self.tp * self.cp // (self.ep * self.etp)

    def take(self, index: NDArray[np.int64] | int) -> Layout:
        """The rows `index` of a table; with an int, one layout of plain ints."""
        if isinstance(index, int | np.integer):
            return Layout(
                **{
                    f.name: int(
                        np.asarray(getattr(self, f.name)).reshape(-1)[index]
                        if np.ndim(getattr(self, f.name))
                        else getattr(self, f.name)
                    )
                    for f in fields(self)
                }
            )
        return Layout(
            **{f.name: v[index] if np.ndim(v := getattr(self, f.name)) else v for f in fields(self)}
        )

    def with_(self, **changes: Int) -> Layout:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What one pipeline rank holds: `layers` per kind, and of each kind how many under each policy.

    `layers[k]` counts layers of kind k; `policies[k][p]` counts those under ``RECOMPUTE[p]``.
    """

    layers: tuple[int, ...]
    policies: tuple[tuple[int, ...], ...]
