"""Processes start, agree, fail and end as promised."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from executor.launch import (  # noqa: E402
    RunError,
    environment_of_slurm,
    first_host,
    join,
    place_of_environment,
    start,
    torchrun_line,
)
from executor.watch import Watch  # noqa: E402
from planner.plan import Plan  # noqa: E402
from tests.parity.models import dense_model  # noqa: E402
from tests.parity.ranks import PRELOADED  # noqa: E402
from tests.parity.training import plan_of  # noqa: E402

# Forked from a server that has run nothing: the threads of a backward pass do not survive a fork.
SERVER = "forkserver"
get_context(SERVER).set_forkserver_preload(PRELOADED)


def ranks(
    function: object, size: int = 2, *arguments: object, limit_s: float = 60.0
) -> list[object]:
    return start(function, size, arguments, time_limit_s=limit_s, method=SERVER)  # type: ignore[arg-type]


def sum_of_ranks() -> tuple[int, float]:
    place = place_of_environment()
    assert place is not None
    join(place, "cpu", {"plan": "a"}, 30.0)
    total = torch.ones(1) * (place.rank + 1)
    dist.all_reduce(total)
    return place.rank, float(total)


def fail_at_one() -> None:
    place = place_of_environment()
    assert place is not None
    if place.rank == 1:
        raise ValueError("one is broken")
    time.sleep(60)


def die_at_one() -> None:
    place = place_of_environment()
    assert place is not None
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def differ() -> None:
    place = place_of_environment()
    assert place is not None
    join(place, "cpu", {"plan": "ab"[place.rank], "torch": "2"}, 20.0)


def another_world() -> None:
    if os.environ["RANK"] == "1":
        os.environ["WORLD_SIZE"] = "3"
    place = place_of_environment()
    assert place is not None
    join(place, "cpu", {"plan": "a"}, 5.0)


def hang_at_one() -> str:
    place = place_of_environment()
    assert place is not None
    store, _ = join(place, "cpu", {}, 2.0)
    watch = Watch(store, place.rank, place.world_size, {"pp": 0, "dp": place.rank})
    watch.at(7, "forward and backward")
    if place.rank == 1:
        watch.at(6, "optimizer")
        time.sleep(12)
        return "woke up"
    begin = time.monotonic()
    try:
        with watch.guard():
            dist.all_reduce(torch.ones(4))
    except RunError as error:
        return f"{time.monotonic() - begin:.1f} {error.message}"
    return "nothing"


def test_results_come_by_rank() -> None:
    assert ranks(sum_of_ranks, 3) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def test_an_exception_names_its_rank_and_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"rank 1 raised ValueError: one is broken"):
        ranks(fail_at_one)
    assert time.monotonic() - begin < 40


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RunError, match=r"rank 1 was killed by SIGKILL"):
        ranks(die_at_one)


def test_a_time_limit_ends_all() -> None:
    begin = time.monotonic()
    with pytest.raises(RunError, match="2 ranks still ran after 3 s"):
        ranks(time.sleep, 2, 60, limit_s=3.0)
    assert time.monotonic() - begin < 30


def test_ranks_with_another_plan_are_refused() -> None:
    with pytest.raises(RunError, match="rank 1 has plan b and rank 0 has a"):
        ranks(differ)


def test_ranks_of_another_world_are_refused() -> None:
    with pytest.raises(RunError, match="rank 1 has world size 3 and rank 0 has 2"):
        ranks(another_world)


def test_a_hanging_rank_is_named_with_its_place() -> None:
    waited, _ = ranks(hang_at_one)
    seconds, _, sentence = str(waited).partition(" ")
    assert float(seconds) < 8  # time-out of 2 s, and the time to ask around
    assert "rank 1 (pp=0, dp=1) in step 6 (optimizer)" in sentence
    assert "rank 0 waited in step 7 (forward and backward)" in sentence


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(dense_model(), "dp=2", 2)


def test_the_line_for_torchrun(plan: Plan) -> None:
    assert torchrun_line(plan, ["my plan.json", "--steps", "5"]) == (
        "torchrun --standalone --nproc-per-node=2 -m executor run 'my plan.json' --steps 5"
    )


def test_the_line_for_torchrun_over_nodes(plan: Plan) -> None:
    from dataclasses import replace

    wide = replace(plan, num_gpus=16, gpus_per_node=8)
    assert torchrun_line(wide, ["plan.json"]) == (
        "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d "
        "--rdzv-endpoint=FIRST_NODE:29400 -m executor run plan.json"
    )


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("node7", "node7"), ("n[01-04,9]", "n01"), ("a-b[3,5]x", "a-b3x"), ("x1,x2", "x1")],
)
def test_the_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_one_task_of_slurm_starts_its_own_processes() -> None:
    assert environment_of_slurm({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == {}
