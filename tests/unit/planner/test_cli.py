"""The commands `plan` and `estimate`, from their words to what they print and write."""

import json
from pathlib import Path

import pytest

import shardwise
from planner.cli import assignments
from planner.errors import LayoutError
from planner.plan import load_plan

JOB = ["tinyllama-1.1b", "--cluster", "dgx-h100", "--gpus", "4", "--global-batch-size", "32"]
JOB += ["--seq-len", "2048"]


def test_plan_prints_its_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["plan", *JOB]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Use ")
    assert all(name in text for name in ("\nLayout", "\nTime", "\nMemory", "\nCertificate"))
    assert max(map(len, text.splitlines())) <= 80


def test_json_and_plan_file_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert shardwise.main(["plan", *JOB, "--json", "-o", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = load_plan(path)
    assert plan.num_gpus == 4
    assert plan.prediction.step_time_s == pytest.approx(document["prediction"]["step_time_s"])
    assert plan.layout.tp == document["layout"]["tp"]
    assert plan.certificate is not None
    assert plan.certificate.enumerated == document["search"]["enumerated"]


def test_equal_questions_make_equal_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        assert shardwise.main(["plan", *JOB, "--json", "-o", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_fixed_and_bounded_degrees_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--fix", "tp=2", "--max-degree", "pp=1", "--json"]
    assert shardwise.main(["plan", *JOB, *more]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["tp"], layout["pp"], layout["dp"] * layout["cp"]) == (2, 1, 2)


def test_top_bounds_the_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["plan", *JOB, "--top", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["alternatives"]) <= 1


def test_estimate_writes_trace_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plot = tmp_path / "step.json", tmp_path / "step.svg"
    files = ["--trace", str(trace), "--plot", str(plot)]
    layout = ["--layout", "tp=2 pp=2"]
    assert shardwise.main(["estimate", *JOB, *layout, *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"]["dp"] == 1
    total = sum(document["prediction"]["breakdown_s"].values())
    assert total == pytest.approx(document["prediction"]["step_time_s"])
    assert json.loads(trace.read_text())
    assert "<svg" in plot.read_text()


def test_what_does_not_fit_exits_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["llama-3.1-405b", "--cluster", "dgx-h100", "--gpus", "8"]
    job += ["--global-batch-size", "8", "--seq-len", "8192", "--json"]
    assert shardwise.main(["plan", *job]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "does not fit" in error["message"]
    assert error["values"]["missing_bytes"] > 0


def test_output_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardwise.main(["plan", *JOB, "-o", str(tmp_path / "none" / "plan.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--precision", "bf17", "bf16"),
        ("--optimizer", "adamm", "adamw"),
        ("--runtime", "megatron", "megatron-core"),
        ("--cluster", "dgx-h10", "dgx-h100"),
    ],
)
def test_near_names_are_told(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = (
        [*JOB, option, value]
        if option not in JOB
        else [value if w == "dgx-h100" else w for w in JOB]
    )
    assert shardwise.main(["plan", *job]) == 2
    assert words in capsys.readouterr().err


def test_assignments_name_their_option() -> None:
    assert assignments(["tp=8", "zero=1"], "--fix") == {"tp": 8, "zero": 1}
    with pytest.raises(LayoutError, match="--fix 'tp=8 tp=4'"):
        assignments(["tp=8", "tp=4"], "--fix")


def test_offload_beyond_host_memory_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve bytes a parameter of 405 billion are more than two nodes have in host memory."""
    job = ["llama-3.1-405b", "--cluster", "dgx-h100", "--nodes", "2", "--json"]
    job += ["--global-batch-size", "64", "--seq-len", "8192"]
    assert shardwise.main(["plan", *job]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "of host memory a node" in error["message"]
    assert error["values"]["memory"] == "host"
    assert error["values"]["missing_bytes"] > 1e12
    assert error["legal"] == {"gpus": [32]}
    layout = ["--layout", "tp=8 cp=2 zero=3 offload=optimizer-cpu recompute=full"]
    assert shardwise.main(["estimate", *job, *layout]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "does-not-fit"
    assert document["fit"]["memory"] == "host"
    assert document["prediction"]["host_bytes_per_node"] > 3e12


def test_machine_without_more_devices_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["llama-3.1-405b", "--cluster", "local:2", "--nodes", "1"]
    assert shardwise.main(["plan", *job, "--global-batch-size", "8", "--seq-len", "4096"]) == 3
    text = capsys.readouterr().err
    assert "has no more GPUs than that" in " ".join(text.split())
    assert "65,536" not in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "1" + "0" * 30], "must be at most 10,000,000"),
        (["--gpus", "1" + "0" * 4100], "must be at most 10,000,000"),
        (["--global-batch-size", "1" + "0" * 25], "global_batch_size is 1e+25"),
        (["--seq-len", "1" + "0" * 20], "seq_len is 1e+20"),
        (["--lora", "4096"], "a rank above hidden_size=2048 is not low"),
        (["--fix", "tp=4", "--max-degree", "tp=2"], "tp is fixed at 4 and bounded by 2"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardwise.main(["plan", *JOB, *more]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("bound", ["dp=1", "shard=1"])
def test_why_not_keeps_to_bounded_degrees(bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["plan", *JOB, "--max-degree", bound, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"][bound.partition("=")[0]] == 1
    if bound == "dp=1":
        assert all(row["degree"] != "dp" for row in document["why_not"])


@pytest.mark.parametrize("runtime", ["shardwise", "fsdp2"])
def test_certificate_counts_legal_layouts_alone(
    runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Split-backward schedules are refused with some ZeRO stages, after rows are built."""
    job = [word if word != "4" else "8" for word in JOB]
    assert shardwise.main(["plan", *job, "--runtime", runtime, "--json"]) == 0
    search = json.loads(capsys.readouterr().out)["search"]
    assert search["fits"] <= search["built"] <= search["legal"] <= search["enumerated"]
