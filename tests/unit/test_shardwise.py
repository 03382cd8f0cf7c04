"""The front door: names, exit codes, and one sentence for everything that is refused."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import shardwise
from planner.errors import DoesNotFit, LayoutError

ROOT = Path(__file__).resolve().parents[2]


def add_command(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Mount a command of the test's own under the name `probe`."""
    module = types.ModuleType("probe_room")
    module.probe = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "probe_room", module)
    monkeypatch.setitem(shardwise.COMMANDS, "probe", shardwise.Command("probe_room:probe", "test"))


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in shardwise.COMMANDS)
    assert shardwise.main([]) == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize("name", sorted(shardwise.NAMES))
def test_public_name_is_there(name: str) -> None:
    assert getattr(shardwise, name).__name__ == name


@pytest.mark.parametrize("name", sorted(shardwise.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main([name, "--help"]) == 0
    assert "Usage: shardwise" in capsys.readouterr().out


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        shardwise.plann  # noqa: B018


def test_unknown_command_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["plann"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "shardwise: there is no command 'plann'; nearest: plan\n"


@pytest.mark.parametrize(("error", "code"), [(LayoutError, 2), (DoesNotFit, 3)])
def test_refusal_is_one_sentence_and_its_code(
    error: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(as_json: bool = False) -> None:
        raise error("tp=6 does not divide 32 heads", values={"tp": 6}, legal={"tp": [4, 8]})

    add_command(monkeypatch, probe)
    assert shardwise.main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "shardwise: tp=6 does not divide 32 heads\n"


def test_refusal_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    def probe(as_json: bool = typer.Option(False, "--json")) -> None:
        raise LayoutError("tp=6 does not divide 32 heads", values={"tp": 6}, legal={"tp": [4, 8]})

    add_command(monkeypatch, probe)
    assert shardwise.main(["probe", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "error": {
            "message": "tp=6 does not divide 32 heads",
            "values": {"tp": 6},
            "legal": {"tp": [4, 8]},
        }
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "llama-3-8b", "--seq-len", "4096"],
        ["plan", "llama-3-8b", "--no-such-option"],
        ["estimate", "m", "--cluster", "c", "--global-batch-size", "many", "--seq-len", "1"],
    ],
)
def test_wrong_usage_is_refused_in_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardwise.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("shardwise: ")
    assert captured.err.count("\n") == 1
    assert shardwise.main([*arguments, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert set(error) == {"message", "values", "legal"}


PLAN = ["plan", "llama-3-8b", "--cluster", "dgx-h100", "--global-batch-size", "64"]
PLAN += ["--seq-len", "4096"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "neither is given"),
        (["--nodes", "1", "--gpus", "8"], "both are given (1 and 8)"),
        (["--nodes", "0"], "--nodes is 0, and must be at least 1"),
        (["--gpus", "8", "--top", "0"], "--top is 0, and must be at least 1"),
        (["--gpus", "8", "--fix", "tpp=8"], "--fix 'tpp=8'"),
        (["--gpus", "8", "--max-degree", "schedule=1f1b"], "schedule is a name"),
    ],
)
def test_plan_refuses_what_cannot_be_meant(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shardwise.main(PLAN + more) == 2
    assert words in capsys.readouterr().err


def test_our_own_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise ZeroDivisionError

    add_command(monkeypatch, probe)
    with pytest.raises(ZeroDivisionError):
        shardwise.main(["probe"])


def test_keyboard_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise KeyboardInterrupt

    add_command(monkeypatch, probe)
    assert shardwise.main(["probe"]) == 130


@pytest.mark.parametrize("command", [["models", "--json"], ["--help"]])
def test_a_reader_that_leaves_is_no_fault(command: list[str]) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    with writer.stderr as errors:
        assert errors.read() == b""
    assert writer.wait(60) == 0


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_full_or_closed_output_is_no_traceback() -> None:
    job = "tinyllama-1.1b --cluster dgx-h100 --gpus 1 --global-batch-size 4 --seq-len 512"
    command = f"{sys.executable} -m shardwise plan {job}"
    for redirect, code in (("> /dev/full", 2), (">&-", 0)):
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirect}"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == (1 if code else 0)
