"""Checkpoints move between layouts, and those that are not whole are passed over."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor import checkpoint_files as files
from planner.errors import InputError
from planner.plan import Plan
from tests.parity.models import QWEN3, dense_model, moe_model
from tests.parity.ranks import RankFailed, run_ranks
from tests.parity.running import (
    Run,
    run,
    run_asked_to_stop,
    run_into_nan,
    run_short_of_space,
)
from tests.parity.training import plan_of

STEPS_EACH = 2
DENSE_CHAIN = [
    (4, "dp=4 zero=3"),
    (4, "tp=2 pp=2"),
    (2, "dp=2 zero=1"),
    (1, "micro_batch=8"),
    (4, "tp=2 dp=2 zero=3"),
]
MOE_CHAIN = [(4, "dp=4 ep=2 zero=3"), (2, "dp=2 ep=2"), (1, "micro_batch=8"), (2, "pp=2")]


def runs_in_a_row(plans: list[Plan], folder: Path) -> list[Run]:
    """Each plan trains some steps on from where the one before it ended; rank 0's runs."""
    found = []
    for index, plan in enumerate(plans):
        steps = (index + 1) * STEPS_EACH
        results = run_ranks(run, plan.num_gpus, plan, steps, str(folder))
        assert all(result.first_step == index * STEPS_EACH for result in results)
        found.append(joined(results))
    return found


def joined(results: list[Run]) -> Run:
    """Rank 0's run, with the parameters of all stages."""
    params = {name: value for result in results for name, value in result.params.items()}
    return replace(results[0], params=params)


def assert_same(found: Run, expected: Run) -> None:
    assert found.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        np.testing.assert_allclose(found.params[name], value, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("model", "chain"),
    [(dense_model(2), DENSE_CHAIN), (moe_model(2), MOE_CHAIN), (QWEN3, DENSE_CHAIN[2:])],
    ids=["dense", "moe", "tied"],
)
def test_a_run_moves_from_layout_to_layout(model, chain, tmp_path: Path) -> None:
    plans = [plan_of(model, layout, gpus) for gpus, layout in chain]
    found = runs_in_a_row(plans, tmp_path)
    (expected,) = run_ranks(run, 1, plan_of(model, "micro_batch=8", 1), len(chain) * STEPS_EACH)
    losses = [loss for part in found for loss in part.losses]
    np.testing.assert_allclose(losses, expected.losses, atol=1e-5, rtol=0)
    assert_same(found[-1], expected)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(dense_model(2), "dp=2 zero=3", 2)


@pytest.fixture(scope="module")
def stored(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    run_ranks(run, 2, plan, 3, str(path), 1)
    assert files.stored_steps(path) == [3, 2]
    return path


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 3."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(plan: Plan) -> Run:
    """Four steps without a stop."""
    return run_ranks(run, 2, plan, 4)[0]


def resumed(plan: Plan, folder: Path) -> Run:
    return run_ranks(run, 2, plan, 4, str(folder))[0]


def damage(folder: Path, how: str) -> None:
    """Do to the newest checkpoint what may happen to it."""
    newest = files.step_folder(folder, 3)
    data = newest / "__1_0.distcp"
    if how == "truncated":
        os.truncate(data, data.stat().st_size - 100)
    elif how == "flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(bytes(content))
    elif how == "half-written":
        files.manifest_path(newest, 1).unlink()
    elif how == "lost file":
        data.unlink()
    elif how == "no contents":
        (newest / files.CONTENTS).unlink()
    elif how == "garbled manifest":
        files.manifest_path(newest, 0).write_text("{")
    elif how == "empty":
        for path in newest.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "damaged: __1_0.distcp has"),
        ("flipped", "contents of __1_0.distcp have changed"),
        ("half-written", "was not finished: rank 1 of 2"),
        ("lost file", "lacks its file __1_0.distcp"),
        ("no contents", "lacks its file .metadata"),
        ("garbled manifest", "damaged manifest of rank 0"),
        ("empty", "no readable run.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(
    how: str, words: str, plan: Plan, folder: Path, undisturbed: Run
) -> None:
    damage(folder, how)
    found = resumed(plan, folder)
    assert found.first_step == 2
    assert words in found.said[0]
    assert "older one is used" in found.said[0]
    assert_same(found, undisturbed)


def test_without_a_whole_checkpoint_a_run_starts_anew(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    found = resumed(plan, tmp_path)
    assert found.first_step == 0
    assert "step-00000009 has no readable run.json" in found.said[0]


def test_another_model_is_refused(folder: Path) -> None:
    other = plan_of(dense_model(2, vocab_size=99, name="other"), "dp=2 zero=3", 2)
    with pytest.raises(RankFailed, match="'tiny', and the plan's 'other' differs"):
        resumed(other, folder)


def test_what_is_no_table_of_contents_is_not_unpickled(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (folder / "touched",))

    newest = files.step_folder(folder, 3)
    (newest / files.CONTENTS).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match="no table of contents"):
        files.SafeReader(newest).tensors()
    assert not (folder / "touched").exists()


@pytest.mark.parametrize("how", ["name is taken", "files may not grow"])
def test_a_full_disk_loses_nothing_older(how: str, plan: Plan, folder: Path) -> None:
    """Step 4 cannot be written: not at all, or not to its end on rank 1; step 5 can."""
    if how == "name is taken":
        files.step_folder(folder, 4).write_text("in the way")
        results = run_ranks(run, 2, plan, 5, str(folder), 1)
    else:
        results = run_ranks(run_short_of_space, 2, plan, 5, str(folder), 3)
    for found in results:
        assert found.first_step == 3
        assert any("checkpoint of step 4 could not be written" in line for line in found.said)
        assert any("last good one is step 3" in line for line in found.said)
    assert files.fault_of(files.step_folder(folder, 5)) == ""
    assert files.fault_of(files.step_folder(folder, 3)) == ""


def test_sigterm_of_one_rank_saves_on_all(plan: Plan, tmp_path: Path, undisturbed: Run) -> None:
    found = run_ranks(run_asked_to_stop, 2, plan, str(tmp_path), 1)
    assert {result.error for result in found} == {
        "SIGTERM was received in step 1; go on from step 2"
    }
    again = resumed(plan, tmp_path)
    assert again.first_step == 2
    assert_same(again, undisturbed)


def test_nan_stops_with_the_step_and_the_last_good_checkpoint(plan: Plan, tmp_path: Path) -> None:
    found = run_ranks(run_into_nan, 2, plan, str(tmp_path), 2)
    assert {result.error for result in found} == {"the loss is nan in step 2; go on from step 2"}
    again = resumed(plan, tmp_path)
    assert again.first_step == 2
    assert np.isfinite(again.losses).all()


def test_a_manifest_names_every_file(folder: Path) -> None:
    newest = files.step_folder(folder, 3)
    named = set()
    for rank in range(2):
        named |= json.loads(files.manifest_path(newest, rank).read_text())["files"].keys()
    found = {path.name for path in newest.iterdir() if not path.name.startswith("manifest-")}
    assert named == found
