"""Run independent work on two cores: half of it in a forked child.

Plain sequential work where forking is not possible (no fork on this system, one core, other threads
running) or too little is to be done; results and their order are the same. Results are plain values
that JSON can hold.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
FEWEST = 4


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def in_halves(run: Callable[[Sequence[Task]], list[Result]], tasks: Sequence[Task]) -> list[Result]:
    """Apply `run` to the tasks, to every second one in a child process.

    >>> in_halves(lambda some: [x * x for x in some], [1, 2, 3, 4, 5])
    [1, 4, 9, 16, 25]
    """
    alone = len(tasks) < FEWEST or cores() < 2 or threading.active_count() > 1
    if alone or not hasattr(os, "fork"):
        return run(tasks)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_leave(run, tasks[1::2], reading, writing)
    os.close(writing)
    try:
        mine = run(tasks[0::2])
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
    finally:
        os.waitpid(child, 0)
    # A child that failed sent nothing: its work is done here, where an error can be shown.
    theirs = json.loads(data) if data else run(tasks[1::2])
    results: list[Result] = [mine[0]] * len(tasks)
    results[0::2], results[1::2] = mine, theirs
    return results


def _work_and_leave(
    run: Callable[[Sequence[Task]], list[Result]],
    tasks: Sequence[Task],
    reading: int,
    writing: int,
) -> None:
    """The child: work, send, and end without running anything of the parent's."""
    code = 1
    try:
        os.close(reading)
        data = json.dumps(run(tasks)).encode()
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(data)
        code = 0
    finally:
        os._exit(code)
