"""Pipeline parallelism: what stages send each other, and which rank holds embedding and head.

References: Narayanan2021; Qi2023; DualPipe in DeepSeekV3.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.layout import SCHEDULES
from planner.results import CommOp
from planner.runtime import Runtime
from planner.specs import ModelSpec

DUALPIPE = SCHEDULES.index("dualpipe")


def head_stage(schedule: Any, pp: Any) -> Any:
    """Rank that holds the output head: the last, or the first where chunks lie in a V.

    >>> int(head_stage(1, 4)), int(head_stage(DUALPIPE, 4))
    (3, 0)
    """
    return np.where(np.asarray(schedule) == DUALPIPE, 0, np.asarray(pp) - 1)


def send_bytes(
    model: ModelSpec, tokens: Any, tp: Any, element_bytes: float, runtime: Runtime
) -> Any:
    """Bytes that a rank sends to the next stage for a micro-batch: its rows of the residual stream.

    T h elements, divided by tp where sequence parallelism splits the stream, or where the ranks of
    a tensor-parallel group share the sending of what each of them holds whole.

    References: Narayanan2021.
    """
    split = runtime.sequence_parallel or runtime.scattered_sends
    rows = tokens / (np.asarray(tp) if split else 1)
    return rows * model.hidden_size * element_bytes


def gathers(runtime: Runtime) -> bool:
    """Whether receivers put a stage's output together again from the parts that tp ranks sent."""
    return runtime.scattered_sends and not runtime.sequence_parallel


def comm_ops(num_bytes: Any, pp: Any, vpp: Any, num_microbatches: Any) -> list[CommOp]:
    """Sends of a middle rank per step: one forward and one backward for each chunk and micro-batch.

    >>> [int(op.count) for op in comm_ops(1e6, 4, 2, 8)]
    [16, 16]
    """
    count = np.where(np.asarray(pp) > 1, np.asarray(vpp) * num_microbatches, 0)
    return [
        CommOp("send_recv", "pp", "forward", "stage output", num_bytes, count),
        CommOp("send_recv", "pp", "backward", "gradient of stage input", num_bytes, count),
    ]
