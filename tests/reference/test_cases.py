"""Reported cases: which agree and must go on agreeing, which cannot be judged, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import shardwise
from planner.layout import RECOMPUTE
from reports.accuracy import report
from reports.accuracy_text import case_lines
from reports.case_rows import LENIENT, ready
from reports.case_table import ReportedCase, case_rules, published_row, read_cases
from reports.cases import AGREES_PERCENT, estimated, judge, judged_cases
from reports.published_table import MissingField, NotPredictable

# Reports that are understood: each agrees, and none may stop to. By source.
AGREE = {
    "torchtitan": "M-001 M-003 M-005 M-007 M-008 M-010 M-019 M-084 T-043 T-049 T-050 T-059 T-061",
    "bloom": "M-022 M-024 M-028 M-029 M-031 M-033 M-036 T-096 T-097 T-099 T-103 T-104 T-106 T-108",
    "korthikanti": "M-038 M-040 M-044 M-045 T-115 T-117 T-118 T-122",
    "layers on a B200 node": "M-047 M-049 M-051 M-052",
    "out of memory": "M-072 M-076 M-077 M-099 M-102 M-138 M-161",
    "Megatron-SWIFT": "M-145 M-147 M-151 M-158 M-159 M-168 T-179 T-184 T-186 T-187",
    "MPT": "T-001 T-003 T-008 T-014 T-015 T-017 T-019 T-021 T-022 T-024 T-026 T-028 T-031",
    "LitGPT": "M-130 M-131 M-133 M-135 M-137",
    "others": "T-033 T-035 T-063 T-064 T-066 T-082 T-089 T-092 T-094 T-110 T-216",
}


@lru_cache
def document() -> dict[str, Any]:
    return judged_cases()


def case(name: str) -> ReportedCase:
    return next(one for one in read_cases() if one.id == name)


@pytest.mark.parametrize("name", " ".join(AGREE.values()).split())
def test_an_understood_report_agrees(name: str) -> None:
    row = next(row for row in document()["rows"] if row["id"] == name)
    assert row["judgement"] == "agrees", (row["predicted"], row["predicted_value"])


def test_every_case_is_judged_or_says_why_not() -> None:
    rows = document()["rows"]
    assert len(rows) == 207
    assert {row["judgement"] for row in rows} <= {"agrees", "borderline", "differs", "skipped"}
    assert sum(document()["counts"].values()) == len(rows)
    for row in rows:
        assert (row["judgement"] == "skipped") == bool(row["reason"])
        assert (row["judgement"] == "skipped") == (row["predicted_value"] is None)


def test_what_is_said_of_single_cases_is_of_cases_that_are_there() -> None:
    known = {one.id for one in read_cases()}
    assert set(case_rules()["rows"]) <= known
    sources = {one.fields["source"] for one in read_cases()}
    for name in case_rules()["sources"]:
        assert any(source.startswith(name) for source in sources), name


def test_activations_as_the_paper_counts_them() -> None:
    """M-038: s b h L (10 + 24/t + 5 a s / (h t)), the formula behind the figure."""
    s, b, h, layers, t, a = 2048, 4, 6144, 48, 8, 64
    by_hand = s * b * h * layers * (10 + 24 / t + 5 * a * s / (h * t)) / 2**30
    assert by_hand == pytest.approx(case("M-038").value, rel=1e-3)
    row = judge(case("M-038"))
    assert row["predicted_value"] == pytest.approx(by_hand, rel=0.1)


def test_sequence_parallelism_comes_and_goes_with_the_report() -> None:
    assert ready(case("T-118")).setting.runtime.sequence_parallel
    assert not ready(case("T-117")).setting.runtime.sequence_parallel


def test_what_is_left_open_is_taken_at_its_least_for_out_of_memory() -> None:
    """M-072 states no length: its states alone do not fit, so that the length does not matter."""
    with pytest.raises(MissingField):
        ready(case("M-072"))
    found = ready(case("M-072"), lenient=True)
    assert found.setting.train.seq_len == int(LENIENT["seq_len"])
    assert RECOMPUTE[found.layout.recompute] == "full"
    assert estimated(found).peak_memory_bytes > 80e9
    assert judge(case("M-072"))["judgement"] == "agrees"


def test_where_the_least_fits_nothing_is_concluded() -> None:
    row = judge(case("M-109"))
    assert row["judgement"] == "skipped"
    assert "recompute is not stated" in row["reason"]


def test_a_report_beyond_the_peak_of_its_gpu_is_no_evidence() -> None:
    """T-156: 7 B parameters, 524288 tokens in 10.3 s on 8 A100 are over 400 TFLOP/s each."""
    assert 6 * 6.6e9 * 524288 / 10.329 / 8 > 0.8 * 312e12  # before any attention
    assert "peak of its GPU" in judge(case("T-156"))["reason"]


def test_groups_of_a_rack_stay_inside_its_domain() -> None:
    assert ready(case("T-076")).setting.cluster.domain_gpus == 64


def test_a_shortened_mixture_keeps_one_dense_layer() -> None:
    model = ready(case("T-129")).setting.model
    held = [model.kinds[kind].moe is not None for kind in model.layer_kinds]
    assert held == [False, True, True, True]


def test_uneven_stages_as_reported() -> None:
    assert [sum(stage.layers) for stage in ready(case("T-179")).stages] == [13, 11]


def test_a_gigabyte_is_what_the_report_calls_one() -> None:
    row = judge(case("M-137"))
    found = ready(case("M-137"))
    assert row["predicted_value"] == pytest.approx(estimated(found).peak_memory_bytes / 1e9)


def test_no_case_outside_the_model_is_forced_into_it() -> None:
    one = case("M-144")
    other = replace(one, fields={**one.fields, "offload": "weights to tape"})
    with pytest.raises(NotPredictable, match="weights to tape"):
        ready(other)
    unknown = replace(one, fields={**one.fields, "experts": "8", "model": "nobody-8x1b"})
    with pytest.raises(NotPredictable, match="nobody-8x1b"):
        ready(unknown)
    wider = replace(one, fields={**one.fields, "hidden": "4096"})
    assert "hidden is 4096" in judge(wider)["reason"]


def test_a_value_far_off_differs() -> None:
    one = case("M-019")
    double = replace(one, fields={**one.fields, "expected_value": "94"})
    row = judge(double)
    assert row["judgement"] == "differs"
    assert abs(row["error_percent"]) > AGREES_PERCENT


def test_precision_of_a_report() -> None:
    wanted = {"T-063": "fp8", "T-082": "fp4", "M-001": "bf16", "T-083": "fp8"}
    for name, precision in wanted.items():
        assert published_row(case(name), {}).text("precision") == precision


def test_no_disagreement_is_hidden() -> None:
    text = "\n".join(case_lines(document()))
    for row in document()["rows"]:
        if row["judgement"] in ("differs", "borderline"):
            assert f"  {row['id']} " in text
    for reason in document()["skipped"]:
        assert reason in text


def test_the_report_of_the_shipped_table_has_the_cases() -> None:
    assert report([], with_cases=True)["cases"]["counts"] == document()["counts"]
    assert "cases" not in report([], with_cases=False)


def test_the_command_shows_cases_of_the_shipped_table_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shardwise.main(["validate", "--source", "korthikanti", "--json"]) == 0
    assert '"cases"' not in capsys.readouterr().out
