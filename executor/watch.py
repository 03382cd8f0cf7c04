"""Who hangs: every rank says where it is in the shared store; one that fails reads the others.

Time-outs of Gloo and NCCL name no rank. Here a rank whose collective fails waits a moment for the
others to report the same, and names those that did not: their rank, mesh coordinates, step and
operation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from executor.launch import RunError
from planner.errors import ShardwiseError

REPORT_S = 3.0  # how long a failed rank waits for the others to report


class Watch:
    """This rank's entry in the store, and the sentence when one of them fails."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, coordinates: Mapping[str, int]
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.coordinates = dict(coordinates)
        self.step = 0
        self.operation = "start"
        self.at(0, "start")

    def at(self, step: int, operation: str) -> None:
        """Say that this rank now does `operation` of `step`."""
        self.step, self.operation = step, operation
        self.store.set(f"at/{self.rank}", self.words())

    def words(self) -> str:
        return json.dumps(
            {"step": self.step, "operation": self.operation, "coordinates": self.coordinates}
        )

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an error of a collective into a sentence that names who caused it.

        Raises
        ------
        RunError
            Names the ranks that did not come, or that failed first, and where they were.
        """
        try:
            yield
        except ShardwiseError:
            self.report("refused")
            raise
        except Exception as error:
            is_echo = isinstance(error, dist.DistError) or is_connection_error(error)
            self.report("lost" if is_echo else f"{type(error).__name__}: {error}")
            if not is_echo:
                raise
            raise RunError(
                self.explain(error), values={"rank": self.rank, "step": self.step}
            ) from error

    def report(self, why: str) -> None:
        """Say that this rank has stopped, and why."""
        self.store.set(f"stopped/{self.rank}", why[:300])

    def explain(self, error: Exception) -> str:
        """Which rank is behind the failure of this rank's collective."""
        deadline = time.monotonic() + REPORT_S
        missing = [r for r in range(self.world_size) if r != self.rank]
        while missing and time.monotonic() < deadline:
            missing = [r for r in missing if not self.store.check([f"stopped/{r}"])]
            time.sleep(0.05)
        here = f"rank {self.rank} waited in step {self.step} ({self.operation})"
        if missing:
            named = "; ".join(self.place_of(r) for r in missing[:4])
            return f"{named}: it did not answer, or has died; {here}"
        reasons = {
            r: self.store.get(f"stopped/{r}").decode()
            for r in range(self.world_size)
            if r != self.rank
        }
        broken = [r for r, why in reasons.items() if why != "lost"]
        if broken:
            named = "; ".join(f"{self.place_of(r)} stopped: {reasons[r]}" for r in broken[:2])
            return f"{named}; {here}"
        return f"the connection failed on all ranks; {here}: {str(error)[:200]}"

    def place_of(self, rank: int) -> str:
        """Rank, coordinates, step and operation of a rank, as far as it has said them."""
        if not self.store.check([f"at/{rank}"]):
            return f"rank {rank} (never started)"
        at = json.loads(self.store.get(f"at/{rank}"))
        where = ", ".join(f"{axis}={place}" for axis, place in at["coordinates"].items())
        return f"rank {rank} ({where}) in step {at['step']} ({at['operation']})"


CONNECTION_WORDS = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "gloo",
    "nccl",
    "socket",
)


def is_connection_error(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is a collective that another rank broke.

    >>> is_connection_error(RuntimeError("[x] Timed out waiting 4000ms for recv operation"))
    True
    >>> is_connection_error(ValueError("timed out"))
    False
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(word in text for word in CONNECTION_WORDS):
            return True
        seen = seen.__cause__
    return False
