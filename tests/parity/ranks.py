"""Runs a function on several Gloo ranks, each a process of its own, and collects what they return.

Processes are forked from a server that has imported torch and run nothing: threads of a backward
pass would not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["tests.parity.preload"]


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time."""


def entry(
    function: Callable[..., Any], rank: int, size: int, store: str, out: Connection, args: Any
) -> None:
    """One rank: join the group, call, send what came of it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        out.send((True, function(*args)))
    except BaseException:
        out.send((False, traceback.format_exc()))
    finally:
        out.close()
        # Destructors of process groups may wait for peers that have gone.
        os._exit(0)


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 100.0
) -> list[Any]:
    """What `function(*args)` returns on each of `size` ranks.

    Raises
    ------
    RankFailed
        With the traceback of the first rank that failed.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=entry, args=(function, rank, size, store, sender, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """Results in order of rank, or the first failure."""
    results: dict[int, Any] = {}
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        left = deadline - time.monotonic()
        ready = mp.connection.wait(list(open_pipes.values()), timeout=max(0.0, left))
        if not ready:
            raise RankFailed(f"ranks {sorted(open_pipes)} did not end in time")
        for rank, pipe in list(open_pipes.items()):
            if pipe not in ready:
                continue
            del open_pipes[rank]
            try:
                done, value = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if not done:
                raise RankFailed(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]
