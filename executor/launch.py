"""How processes start and find each other: our own, torchrun's or Slurm's, by one code path.

Whoever starts the processes, each finds its place in the environment as torchrun sets it (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Before the first collective all ranks compare
their plan, world size and library versions through the key-value store, and refuse to start where
they differ: afterwards a difference would end in a hang or in the wrong numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from executor.mesh import BACKENDS
from planner.errors import InputError, ShardwiseError
from planner.plan import Plan

LOOPBACK = "127.0.0.1"
GRACE_S = 10.0  # for the other ranks to say what they were doing, after one has failed
PORT = 29400  # torchrun's own default


class RunError(ShardwiseError):
    """A run that started and could not go on: a rank died, hung or diverged."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among all."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int

    @property
    def spans_nodes(self) -> bool:
        return self.world_size > self.ranks_per_node


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list.

    >>> first_host("gpu[003-005,9],login1"), first_host("a1,a2")
    ('gpu003', 'a1')
    """
    found = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", nodelist)
    if found is None:
        raise InputError(f"cannot read the Slurm node list {nodelist[:60]!r}")
    return "".join(part or "" for part in found.groups())


def environment_of_slurm(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would set, from those that srun sets; none outside of srun.

    >>> found = environment_of_slurm({"SLURM_PROCID": "3", "SLURM_NTASKS": "4",
    ...     "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77",
    ...     "SLURM_NNODES": "2"})
    >>> found["RANK"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]
    ('3', '2', 'n1', '20077')
    """
    if "SLURM_PROCID" not in given or int(given.get("SLURM_NTASKS", "1")) < 2:
        return {}
    tasks, nodes = int(given["SLURM_NTASKS"]), int(given.get("SLURM_NNODES", "1"))
    job = int(given.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": given["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": given.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_ADDR": first_host(given.get("SLURM_JOB_NODELIST", LOOPBACK)),
        "MASTER_PORT": str(20000 + job % 20000),  # the same on all nodes of a job
    }


def place_of_environment() -> Place | None:
    """This process's place, or None where nobody has started it as one of several."""
    os.environ.update(
        {k: v for k, v in environment_of_slurm(os.environ).items() if "RANK" not in os.environ}
    )
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Place(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
    )


def torchrun_line(plan: Plan, arguments: Sequence[str]) -> str:
    """The exact command that starts this plan on every node; `arguments` follow ``run``."""
    nodes = -(-plan.num_gpus // plan.gpus_per_node)
    if nodes == 1:
        where = ["--standalone", f"--nproc-per-node={plan.num_gpus}"]
    else:
        where = [
            f"--nnodes={nodes}",
            f"--nproc-per-node={plan.gpus_per_node}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=FIRST_NODE:{PORT}",
        ]
    return shlex.join(["torchrun", *where, "-m", "executor", "run", *arguments])


# --- meeting --------------------------------------------------------------------------------------


def connect_store(place: Place, timeout_s: float) -> dist.Store:
    """The key-value store that all ranks share: the agent's, or one that rank 0 serves."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ.get("MASTER_ADDR", LOOPBACK),
        int(os.environ.get("MASTER_PORT", PORT)),
        is_master=place.rank == 0 and not agent,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def round_store(store: dist.Store) -> dist.Store:
    """A part of the store for this start of the group: restarts must not see older keys."""
    return dist.PrefixStore(f"round{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree(store: dist.Store, place: Place, facts: Mapping[str, Any]) -> None:
    """Refuse to start where two ranks differ in any of `facts` or in the world size.

    Raises
    ------
    InputError
        Names the rank, what differs, and both values; on every rank.
    """
    mine = {"world size": place.world_size, **facts}
    store.set(f"facts/{place.rank}", json.dumps(mine))
    if place.rank > 0:
        if verdict := difference(0, facts_of(store, 0), place.rank, mine):
            raise InputError(verdict, values={"rank": place.rank})
        if verdict := store.get("verdict").decode():
            raise InputError(verdict)
        return
    verdicts = [difference(0, mine, r, facts_of(store, r)) for r in range(place.world_size)]
    verdict = next(filter(None, verdicts), "")
    store.set("verdict", verdict)
    if verdict:
        raise InputError(verdict)


def facts_of(store: dist.Store, rank: int) -> dict[str, Any]:
    """What a rank says of itself.

    Raises
    ------
    RunError
        The rank never came.
    """
    try:
        found: dict[str, Any] = json.loads(store.get(f"facts/{rank}"))
    except (dist.DistStoreError, RuntimeError) as error:
        raise RunError(
            f"rank {rank} did not start within {store.timeout.total_seconds():.0f} s",
            values={"rank": rank},
        ) from error
    return found


def difference(first: int, one: Mapping[str, Any], second: int, two: Mapping[str, Any]) -> str:
    """A sentence on the first fact in which two ranks differ; empty where they agree.

    >>> difference(0, {"plan": "a", "torch": "2"}, 3, {"plan": "a", "torch": "3"})
    'rank 3 has torch 3 and rank 0 has 2; all ranks of a run must have the same'
    """
    for name in {**one, **two}:
        if one.get(name) != two.get(name):
            return (
                f"rank {second} has {name} {two.get(name)} and rank {first} has {one.get(name)}; "
                "all ranks of a run must have the same"
            )
    return ""


def join(
    place: Place, device_type: str, facts: Mapping[str, Any], timeout_s: float
) -> tuple[dist.Store, torch.device]:
    """Meet the other ranks, compare `facts` with theirs and open the default process group."""
    if device_type == "cpu" and not place.spans_nodes and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else need reach it
    store = round_store(connect_store(place, timeout_s))
    agree(store, place, facts)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device_type],
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device_type == "cuda" else None,
    )
    return store, device


# --- our own processes ----------------------------------------------------------------------------


def listen_on_loopback() -> dist.TCPStore:
    """A store server on a port that the system chooses, which only this machine can reach."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    # The store takes the descriptor over and closes it.
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def start(
    function: Callable[..., Any],
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    time_limit_s: float | None = None,
    method: str = "fork",
) -> list[Any]:
    """Run `function(*arguments)` in `world_size` processes of this machine; results by rank.

    Every process finds its place in the environment. None outlives the call.

    Raises
    ------
    RunError
        A process raised, died or ran over the time limit; names the first one.
    """
    store = listen_on_loopback()
    context = get_context(method)
    parent = 0 if method == "forkserver" else os.getpid()  # whose end is theirs
    channels, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=child,
            args=(rank, world_size, store.port, there, function, tuple(arguments), parent),
            name=f"rank {rank}",
        )
        process.start()
        there.close()
        channels.append(here)
        processes.append(process)
    try:
        with handing_on_sigterm(processes):
            return collect(channels, processes, time_limit_s)
    finally:
        for process in processes:
            stop(process)


@contextlib.contextmanager
def handing_on_sigterm(processes: Sequence[Any]) -> Iterator[None]:
    """Let SIGTERM reach the processes, which may save what they have, and not end this one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return

    def hand_on(*_: object) -> None:
        for process in processes:
            if process.is_alive():
                process.terminate()

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop(process: Any) -> None:
    """End a process that may still run."""
    if process.is_alive():
        process.terminate()
        process.join(2)
    if process.is_alive():
        process.kill()
    process.join()


def collect(
    channels: Sequence[Connection], processes: Sequence[Any], time_limit_s: float | None
) -> list[Any]:
    """Results of all processes, or the error of the first that failed."""
    until = time.monotonic() + time_limit_s if time_limit_s else None
    open_ranks = set(range(len(channels)))
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while open_ranks:
        left = None if until is None else max(0.0, until - time.monotonic())
        ready = wait([channels[rank] for rank in open_ranks], left)
        if not ready and errors:
            break
        if not ready:
            raise RunError(f"{len(open_ranks)} ranks still ran after {time_limit_s:g} s")
        for rank in sorted(open_ranks):
            if channels[rank] not in ready:
                continue
            open_ranks.remove(rank)
            try:
                succeeded, value = channels[rank].recv()
            except EOFError:
                succeeded, value = False, death_of(processes[rank])
            (results if succeeded else errors)[rank] = value
        if errors and (until is None or until > time.monotonic() + GRACE_S):
            until = time.monotonic() + GRACE_S
    if errors:
        raise RunError("; ".join(first_errors(errors)), values={"ranks": sorted(errors)})
    return [results[rank] for rank in range(len(channels))]


def death_of(process: Any) -> str:
    """How a process ended that sent nothing."""
    process.join(2)
    code = process.exitcode
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def first_errors(errors: Mapping[int, str], most: int = 3) -> list[str]:
    """The errors worth reading: a rank that broke, before those that only lost its connection.

    >>> first_errors({0: "Connection closed by peer", 1: "was killed by SIGKILL"})
    ['rank 1 was killed by SIGKILL']
    """
    echoes = ("onnection closed", "onnection reset", "roken pipe")
    roots = {r: e for r, e in errors.items() if not any(echo in e for echo in echoes)}
    return [f"rank {rank} {error}" for rank, error in sorted((roots or dict(errors)).items())][
        :most
    ]


def child(
    rank: int,
    world_size: int,
    port: int,
    channel: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    parent: int,
) -> None:
    """One process: set its place, run, send what came of it."""
    end_with_parent(parent)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        channel.send((True, function(*arguments)))
    except ShardwiseError as error:
        channel.send((False, f"stopped: {error.message}"))
    except BaseException as error:
        told = "".join(traceback.format_exception(error)[-4:]).strip()
        channel.send((False, f"raised {type(error).__name__}: {error}\n{told}"))
    finally:
        channel.close()
        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a peer has gone first
                dist.destroy_process_group()
        # Threads of the backend may still wait for a peer: leave without asking them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def end_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, and end now if it has."""
    if sys.platform != "linux" or not parent:
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
