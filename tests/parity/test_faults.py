"""A rank that is killed: torchrun starts the group again, and training goes on from its
checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from planner.plan import save_plan
from tests.parity.models import dense_model
from tests.parity.training import plan_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
KILLED_AFTER = 3
TIME_LIMIT_S = 110


def started(plan: Path, folder: Path, *more: str) -> subprocess.Popen:
    """A run under torchrun with two ranks, which saves after every step and goes on by itself."""
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=3", "--monitor-interval=0.1", "-m", "executor", "run", str(plan)),
    ]
    options = [
        *("--steps", str(STEPS), "--checkpoint-dir", str(folder / "checkpoints")),
        *("--checkpoint-every", "1", "--resume", "--timeout", "20", "--device", "cpu"),
        *("--log-file", str(folder / "log.jsonl"), "--save-hf", str(folder / "weights"), *more),
    ]
    with (folder / "stderr.txt").open("w") as stderr:
        return subprocess.Popen(
            torchrun + options,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


def steps_logged(folder: Path) -> list[int]:
    path = folder / "log.jsonl"
    return (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def pid_of_rank(agent: int, rank: int) -> int:
    """The process that an agent started for a rank, by its environment."""
    for folder in Path("/proc").iterdir():
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            given = set((folder / "environ").read_bytes().split(b"\0"))
        except (OSError, IndexError):
            continue
        if parent == str(agent) and f"RANK={rank}".encode() in given:
            return int(folder.name)
    raise AssertionError(f"rank {rank} has no process")


def finish(process: subprocess.Popen, folder: Path) -> None:
    try:
        code = process.wait(TIME_LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (folder / "stderr.txt").read_text()[-3000:]


def weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    found: dict[str, np.ndarray] = {}
    for path in (folder / "weights").glob("*.safetensors"):
        found |= load_file(path)
    return found


def kill_after_steps(process: subprocess.Popen, folder: Path, rank: int) -> None:
    """Kill a rank in the midst of training; the whole run where that fails."""
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        while len(steps_logged(folder)) < KILLED_AFTER:
            assert process.poll() is None, (folder / "stderr.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pid_of_rank(process.pid, rank), signal.SIGKILL)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="needs /proc to find a rank")
def test_training_goes_on_after_a_rank_is_killed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    save_plan(plan_of(dense_model(2), "dp=2 zero=3", 2), plan)
    folders = [tmp_path / name for name in ("killed", "undisturbed")]
    for folder in folders:
        folder.mkdir()
    process = started(plan, folders[0])
    kill_after_steps(process, folders[0], rank=1)
    finish(process, folders[0])
    finish(started(plan, folders[1]), folders[1])
    logged = steps_logged(folders[0])
    assert logged[-1] == STEPS - 1
    assert len(logged) - len(set(logged)) <= 2, "more than the steps since the checkpoint ran again"
    restarts = [i for i in range(1, len(logged)) if logged[i] <= logged[i - 1]]
    assert all(logged[i] > 0 for i in restarts), "training began anew"
    found, expected = weights(folders[0]), weights(folders[1])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, rtol=0, err_msg=name)
