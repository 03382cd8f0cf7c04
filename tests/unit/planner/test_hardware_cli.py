"""The two commands that time one operation, through the front door."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from planner.errors import InputError, ProfileError
from planner.hardware_cli import collective, collective_document, gemm, gemm_document


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("gemm")(gemm)
    app.command("collective")(collective)
    return app


def _run(app: typer.Typer, line: str) -> Any:
    return CliRunner().invoke(app, line.split())


def test_gemm_prints_one_document(app: typer.Typer) -> None:
    line = "gemm --device h100-sxm --precision bf16 --m 8192 --n 8192 --k 8192"
    result = _run(app, line + " --json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    flops = 2 * 8192**3
    assert document["flops_per_s"] == pytest.approx(flops / document["seconds"])
    assert document["efficiency"] == pytest.approx(document["flops_per_s"] / 989e12, rel=1e-3)
    assert document["kind"] == "measured"
    assert document["source"] == "aic_h100_sxm"
    assert "seconds" in _run(app, line).stdout


def test_collective_prints_one_document(app: typer.Typer) -> None:
    line = "collective --cluster dgx-h100 --op all_reduce --bytes 1073741824 --gpus"
    inside = json.loads(_run(app, line + " 8 --json").stdout)
    assert inside["algorithm"] == "measured"
    assert inside["kind"] == "measured"
    assert inside["busbw_bytes_per_s"] == pytest.approx(inside["algbw_bytes_per_s"] * 1.75)
    across = json.loads(_run(app, line + " 8 --nodes 8 --json").stdout)
    assert across["stride"] == 8
    assert across["kind"] == "derived"
    assert across["seconds"] > 5 * inside["seconds"]


def test_a_group_smaller_than_its_node_stays_in_it() -> None:
    six = collective_document("dgx-h100", "all_reduce", 2**30, 6)
    assert six["algorithm"] == "measured"
    assert six == collective_document("dgx-h100", "all_reduce", 2**30, 6, nodes=1)


def test_bad_values_are_refused_with_the_legal_ones() -> None:
    with pytest.raises(InputError, match="each node must hold the same") as spread:
        collective_document("dgx-h100", "all_reduce", 1, 12, nodes=5)
    assert spread.value.legal == {"nodes": [3, 6, 12]}
    with pytest.raises(InputError, match="gpus=0"):
        collective_document("dgx-h100", "all_reduce", 1, 0)
    with pytest.raises(InputError, match="unknown collective 'gossip'"):
        collective_document("dgx-h100", "gossip", 1, 8)
    with pytest.raises(InputError, match="m=-1"):
        gemm_document("h100-sxm", "bf16", -1, 1, 1)
    with pytest.raises(ProfileError, match="fp4"):
        gemm_document("h100-sxm", "fp4", 1, 1, 1)
    with pytest.raises(ProfileError):
        gemm_document("h100-sxn", "bf16", 1, 1, 1)
    with pytest.raises(ProfileError):
        collective_document("no-such", "all_reduce", 1, 8)
