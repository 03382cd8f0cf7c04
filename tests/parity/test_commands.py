"""``run``, its trace and ``compare`` as commands, on two processes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.plan import save_plan
from tests.parity.models import dense_model
from tests.parity.training import plan_of

ROOT = Path(__file__).resolve().parents[2]


def shardwise(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_plan(plan_of(dense_model(vocab_size=96), "pp=2 micro_batch=2", 2), folder / "plan.json")
    return folder


def test_a_run_is_measured_traced_and_compared(folder: Path) -> None:
    run = ("run", "plan.json", "--steps", "4", "--device", "cpu", "-o", "m.json", "--trace", "tr")
    done = shardwise(folder, *run)
    assert done.returncode == 0, done.stderr
    assert "torchrun --standalone --nproc-per-node=2 -m executor run plan.json" in done.stderr
    assert "step 4/4  loss" in done.stderr

    (trace,) = (folder / "tr").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    names = [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert sorted(names) == sorted(f"{op} chunk0 mb{m}" for op in "FB" for m in range(4))

    done = shardwise(folder, "compare", "plan.json", "m.json", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["collectives_equal"]
    assert [row["kind"] for row in document["collectives"]] == ["send_recv"]
    for row in document["memory"]:
        # The plan adds what its allocator may waste.
        assert 0.9 < row["measured_state_bytes"] / row["planned_state_bytes"] <= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc", "3"), "the plan is for 2 ranks"),
        (("--steps", "0"), "--steps is 0"),
        (("--device", "abacus"), "legal: auto, cpu"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_a_sentence(
    folder: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = shardwise(folder, "run", "plan.json", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 2  # the line for torchrun, and the sentence


def test_a_dry_run_needs_no_group(folder: Path) -> None:
    done = shardwise(folder, "run", "plan.json", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    traced = json.loads(done.stdout)["traced"]
    assert [(row["kind"], row["count"]) for row in traced["collectives"]] == [("send_recv", 4.0)]
