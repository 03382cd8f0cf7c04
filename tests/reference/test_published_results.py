"""What is published says what its files say, and nothing by hand."""

from __future__ import annotations

import csv
import re

import pytest

from reports.case_rows import ready
from reports.deepseek_step import deepseek_step, profile_ms
from reports.publish import PUBLISHED_DIR, README, published, read, with_section
from reports.published_table import read_table
from reports.published_text import accuracy_markdown, readme_section
from reports.sensitivity import is_assumed
from reports.targets import targets, time_targets
from tests.reference.test_cases import case

DATES = sorted(
    re.sub(r"accuracy-(.*)\.md", r"\1", path.name) for path in PUBLISHED_DIR.glob("accuracy-*.md")
)


def test_something_is_published() -> None:
    assert DATES


@pytest.mark.parametrize("date", DATES)
def test_the_text_is_what_its_files_say(date: str) -> None:
    text = (PUBLISHED_DIR / f"accuracy-{date}.md").read_text(encoding="utf-8")
    assert text == accuracy_markdown(*published(date), date)


def test_the_summary_in_the_readme_is_the_newest() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_section(text, readme_section(*published(DATES[-1]))) == text


def test_every_run_is_in_the_newest_predictions() -> None:
    lines = read(PUBLISHED_DIR / f"predictions-{DATES[-1]}.csv")
    assert [line["id"] for line in lines] == [row.id for row in read_table()]
    for line in lines:
        assert bool(line["skipped_reason"]) != bool(line["predicted_peak_memory_gib"])


def test_the_page_of_the_newest_shows_every_case() -> None:
    page = (PUBLISHED_DIR / f"accuracy-{DATES[-1]}.html").read_text(encoding="utf-8")
    for line in read(PUBLISHED_DIR / f"cases-{DATES[-1]}.csv"):
        assert f"<td>{line['id']}</td>" in page


def test_a_group_is_met_where_all_its_figures_are() -> None:
    found, *_ = published(DATES[-1])
    judged = [p for p in found if p.row.text("quality") in ("A", "B")]
    rows = {row["name"]: row for row in time_targets(judged)}
    assert len(rows) == len(targets()["groups"])
    for row in rows.values():
        good = row["median"] <= row["target_median"] and row["p90"] <= (row["target_p90"] or 1e9)
        good = good and abs(row["bias"]) <= (row["target_bias"] or 1e9)
        assert row["met"] == good
    moe = rows["megatron_bridge, bridge_skills, all mixtures of experts"]
    assert moe["n"] > sum(p.row.source == "megatron_bridge" and p.time_error is not None
                          for p in judged)  # fmt: skip


def test_the_profile_adds_up() -> None:
    """Compute parts fill the time that compute streams were busy, up to what ran side by side."""
    profile = profile_ms()
    parts = sum(profile[name][1] for name in ("attention", "gemm", "passes"))
    assert profile["busy"][1] <= parts <= 1.1 * profile["span"][1]
    assert profile["busy"][1] <= profile["span"][1]


def test_the_step_adds_up_and_is_near_the_published() -> None:
    rows = deepseek_step()
    whole = next(row["predicted"] for row in rows if row["what"] == "step time")
    parts = sum(row["predicted"] for row in rows if row["table"] == "step")
    assert 0.98 * whole <= parts <= whole * (1 + 1e-9)
    hours = rows[0]
    assert hours["unit"] == "h"
    assert hours["predicted"] == pytest.approx(hours["published"], rel=0.25)
    published_step = next(row["published"] for row in rows if row["what"] == "step time")
    assert published_step == pytest.approx(15360 * 4096 / 2048 * 180e3 * 3600 / 1e12)


def test_a_constant_moves_only_where_it_is_assumed() -> None:
    measured, derived = ready(case("T-089")), ready(case("T-042"))
    assert not is_assumed(measured, "device", "peak_bf16")
    assert is_assumed(derived, "device", "peak_bf16") == (
        derived.setting.cluster.device.facts["peak_bf16"].kind == "assumed"
    )


def test_numbers_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory) -> None:
    found, cases, moved, step = published(DATES[-1])
    assert all(isinstance(row["base"], float) for row in moved)
    assert all(row["published"] is None or isinstance(row["published"], float) for row in step)
    with open(PUBLISHED_DIR / f"cases-{DATES[-1]}.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [row["id"] for row in cases] == [line["id"] for line in lines]
    assert any(p.step_time_s for p in found)
