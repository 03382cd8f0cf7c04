"""`hardware`, `hardware NAME` and `hardware COMMAND` through the real parser."""

import json

import pytest
import typer

from hwprofiles.cli import app, hardware_document
from hwprofiles.errors import ProfileError
from hwprofiles.loader import available_clusters, available_devices


def run(*arguments: str) -> None:
    typer.main.get_command(app).main(list(arguments), prog_name="hardware", standalone_mode=False)


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    text = capsys.readouterr().out
    assert all(name in text for name in [*available_clusters(), *available_devices()])
    assert max(map(len, text.splitlines())) <= 100
    run("--json")
    document = json.loads(capsys.readouterr().out)
    assert len(document["clusters"]) == len(available_clusters())


@pytest.mark.parametrize("name", ["dgx-h100", "h100-sxm", "ib-ndr"])
def test_a_name_shows_every_fact(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(name)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    run(name, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(json.dumps(hardware_document(name)))
    for fact, entry in document["facts"].items():
        assert f"  {fact} " in text
        assert entry["source"][:23] in text


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(ProfileError) as refusal:
        run("dgx-h1")
    assert "dgx-h100" in refusal.value.legal["name"]
