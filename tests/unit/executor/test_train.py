"""The step loop on one rank: it learns, says each step, and writes it as JSON."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from executor.train import Log, StepRecord, set_aux_scale, step_line  # noqa: E402
from executor.transformer import Transformer  # noqa: E402
from planner import api  # noqa: E402
from planner.plan import Plan  # noqa: E402
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec  # noqa: E402
from tests.parity.ranks import run_ranks  # noqa: E402
from tests.parity.running import run, run_leaving_out  # noqa: E402

ATTENTION = AttentionSpec(4, 2, 16)
DENSE = ModelSpec("tiny", 64, 256, (LayerSpec(ATTENTION, mlp=MlpSpec(128)),), (0, 0))
SPARSE = ModelSpec("tiny-moe", 64, 256, (LayerSpec(ATTENTION, moe=MoeSpec(4, 2, 64)),), (0, 0))


def plan_of(model: ModelSpec, **changes: str) -> Plan:
    options = {"precision": "fp32"} | changes
    return api.estimate(
        model,
        layout="micro_batch=8",
        cluster="local:1",
        gpus=1,
        global_batch_size=16,
        seq_len=32,
        runtime="shardwise",
        **options,
    ).plan


def learning(folder: Path) -> partial:
    """A run on a text that repeats itself."""
    path = folder / "poem.txt"
    path.write_text("the rain in spain stays mainly in the plain. " * 200)
    return partial(run, source=str(path))


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "moe"])
def test_it_learns_text(model: ModelSpec, tmp_path: Path) -> None:
    (found,) = run_ranks(learning(tmp_path), 1, plan_of(model), 40)
    losses = found.losses
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 2.0
    assert np.isfinite([record.grad_norm for record in found.records]).all()
    aux = found.records[-1].aux_loss
    # Two layers of coefficient 0.01 each, near 1 where the experts are used alike.
    assert 0.018 < aux < 0.04 if model.is_moe else aux == 0.0


def test_bf16_learns_as_well(tmp_path: Path) -> None:
    plan = plan_of(DENSE, precision="bf16")
    (found,) = run_ranks(learning(tmp_path), 1, plan, 40)
    assert found.losses[-1] < 2.0


def test_a_parameter_without_a_gradient_stops_the_run() -> None:
    (message,) = run_ranks(run_leaving_out, 1, plan_of(DENSE), "1.mlp.down")
    assert message.startswith("step 0 gave no gradient to 1 parameters")
    assert "layers.1.mlp.down.weight" in message
    (message,) = run_ranks(run_leaving_out, 1, plan_of(DENSE), "nothing")
    assert message == ""


RECORD = StepRecord(4, 2.5, 0.0, 1.25, 3e-4, 0.5, 8192.0, 0.412, 2.0**31)


def test_log_writes_a_line_a_step_and_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 3}\n')
    log = Log(path, quiet=True)
    log.step(RECORD)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert lines[1]["tokens_per_s"] == 8192.0


def test_log_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", quiet=True)
    log.step(StepRecord(4, math.nan, 0.0, math.inf, 3e-4, 0.5, 1.0, 0.1, 0.0))
    log.close()
    line = json.loads((tmp_path / "log.jsonl").read_text())
    assert line["loss"] is None
    assert line["grad_norm"] is None


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Log(total=20).step(RECORD)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == step_line(RECORD, 20) + "\n"
    Log(total=20, quiet=True).step(RECORD)
    assert capsys.readouterr() == ("", "")


def test_a_sequence_weighs_one_in_the_global_batch() -> None:
    module = Transformer(SPARSE, max_seq_len=32)
    set_aux_scale([module], plan_of(SPARSE))
    assert {moe.aux_scale for moe in module.moe_layers()} == {1 / 16}
