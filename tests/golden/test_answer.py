"""The printed answer of `plan`, word for word. The figures of answer.json are made up."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.render import answer_text, print_answer

HERE = Path(__file__).parent
DOCUMENT: dict[str, Any] = json.loads((HERE / "answer.json").read_text(encoding="utf-8"))
SECTIONS = ["Layout", "Speed", "Time", "Memory per stage", "Alternatives", "Why not", "Warnings"]
SECTIONS += ["Certificate"]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiPipe(io.StringIO):
    encoding = "ascii"


@pytest.mark.parametrize("width", [80, 120])
def test_answer_is_as_reviewed(width: int) -> None:
    golden = (HERE / f"answer_{width}.txt").read_text(encoding="utf-8")
    assert answer_text(DOCUMENT, width) == golden


def test_sections_stand_in_their_order() -> None:
    text = answer_text(DOCUMENT)
    places = [text.index(f"\n{name}") for name in SECTIONS]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    document = copy.deepcopy(DOCUMENT)
    for row in document["alternatives"]:
        row["layout"] |= {"cp": 16, "ep": 64, "etp": 2, "dp": 2048, "offload": "optimizer-nvme"}
    for stage in document["prediction"]["memory_bytes"]:
        stage["unsharded parameters"] = 123e9
        stage["adapters"] = 1e9
    assert max(map(len, answer_text(document, width).splitlines())) <= width


def test_pipe_gets_plain_text_at_80_columns() -> None:
    pipe = io.StringIO()
    print_answer(DOCUMENT, pipe)
    assert pipe.getvalue() == answer_text(DOCUMENT, 80)
    assert "\x1b" not in pipe.getvalue()


def test_terminal_gets_the_same_words_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    print_answer(DOCUMENT, terminal)
    assert "\x1b[" in terminal.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == answer_text(DOCUMENT, 80)


def test_ascii_pipe_is_readable() -> None:
    pipe = AsciiPipe()
    print_answer(DOCUMENT, pipe)
    assert pipe.getvalue().isascii()
    assert "?" not in pipe.getvalue()
    assert "####" in pipe.getvalue()


def test_stage_that_does_not_fit_says_so() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["prediction"]["capacity_bytes"] = 70 * 2**30
    document["fit"] = {"fits": False, "text": "This layout does not fit: 1.1 GiB are missing."}
    text = answer_text(document)
    assert text.splitlines()[0] == document["fit"]["text"]
    assert [line.endswith("too much") for line in text.splitlines() if "█  " in line].count(
        True
    ) == 1


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("shard", 2, "2"),
        ("cp_kind", "ulysses", "ulysses"),
        ("offload", "optimizer-cpu", "optimizer-cpu"),
        ("schedule", "zero-bubble", "zero-bubble"),
        ("etp", 2, "2"),
    ],
)
def test_rows_of_the_alternatives_never_look_alike(field: str, value: Any, told: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    first = document["alternatives"][0]
    first["layout"]["cp"] = document["layout"]["cp"] = 2
    second = copy.deepcopy(first)
    second["layout"][field] = value
    document["alternatives"] = [first, second]
    section = answer_text(document, 120).partition("Alternatives")[2].partition("Why not")[0]
    rows = [line.split()[1:] for line in section.splitlines() if line.split()[:1] in (["2"], ["3"])]
    assert len(rows) == 2
    assert rows[0] != rows[1]
    assert told in rows[1]


def test_rows_of_the_alternatives_tell_another_recompute() -> None:
    document = copy.deepcopy(DOCUMENT)
    row = document["alternatives"][0] | {"recompute": {"none": 0, "full": 80}}
    document["alternatives"] = [row]
    assert re.search(r"^  2 .* full$", answer_text(document, 120), re.MULTILINE)


def test_what_all_have_in_common_takes_no_column() -> None:
    document = copy.deepcopy(DOCUMENT)
    for layout in (document["layout"], *(row["layout"] for row in document["alternatives"])):
        layout["offload"] = "optimizer-cpu"
    section = answer_text(document, 120).partition("Alternatives")[2].partition("Why not")[0]
    assert "offload" not in section
    assert "as in the layout above" in section


def test_estimate_without_search_leaves_its_sections_out() -> None:
    document = {key: DOCUMENT[key] for key in ("request", "layout", "prediction", "warnings")}
    text = answer_text(document | {"warnings": []})
    assert "Certificate" not in text
    assert "Alternatives" not in text
    assert text.rstrip().endswith("none")


def test_deep_pipeline_has_every_bar_and_three_itemised_stages() -> None:
    document = copy.deepcopy(DOCUMENT)
    first = document["prediction"]["memory_bytes"][0]
    stages = [first | {"activations": (40 - abs(s - 5)) * 1e9} for s in range(32)]
    document["prediction"]["memory_bytes"] = stages
    memory = answer_text(document).partition("Memory per stage")[2].partition("Alternatives")[0]
    assert sum("█" in line for line in memory.splitlines()) == 32
    rows = memory.partition("  stage")[2].splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["0", "5", "31"]


def test_kinds_of_layers_are_named() -> None:
    document = copy.deepcopy(DOCUMENT)
    for stage in document["prediction"]["stages"]:
        stage["layers_by_kind"] = {"dense": 3, "moe": 17}
    assert "3 dense, 17 moe" in answer_text(document)
