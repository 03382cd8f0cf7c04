"""Predicted against published runs: limits on errors, rows worked by hand, wrong tables."""

from __future__ import annotations

import csv
import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import shardwise
from planner.errors import InputError
from planner.layout import RECOMPUTE, SCHEDULES
from reports.accuracy import document_of, half_of, validate
from reports.accuracy_page import accuracy_page
from reports.accuracy_text import CSV_COLUMNS, accuracy_lines, predictions_csv
from reports.predictions import Prediction, predictions
from reports.published_rows import case_of, vpp_by_run
from reports.published_table import COLUMNS, SHIPPED_TABLE, MissingField, read_table
from reports.sensitivity import sensitivity

# Regression limits, a little above what the model reaches: median and p90 of |error| in percent.
TIME_LIMITS = {
    "bloom": (8.4, 14.8),
    "dgxc": (3.8, 9.0),
    "fms_fsdp": (7.8, 11.0),
    "korthikanti": (2.5, 3.0),
    "llmfoundry": (6.1, 11.5),
    "bridge_skills": (33.5, 36.5),
    "megatron_bridge": (4.2, 19.5),  # p90: Qwen3, whose exchange takes longer
    "nanotron_oldbench": (23.5, 50.0),
    "nemo_fw": (11.0, 17.8),
    "papers": (6.0, 6.5),
    "torchtitan": (10.5, 26.0),
    "vtrain_multi": (3.7, 9.3),
    "vtrain_single": (7.7, 18.0),
}
MEMORY_LIMITS = {
    "bloom": (7.5, 13.3),
    "bridge_skills": (9.8, 11.5),
    "megatron_ci": (9.8, 19.0),
    "ml_engineering": (4.8, 16.5),
    "nanotron_oldbench": (0.5, 4.0),
    "torchtitan": (2.6, 14.2),
}
RANK_LIMITS = {
    "vtrain_single": (0.93, 9.0),
    "vtrain_multi": (0.9, 0.5),
    "bloom": (0.83, 0.8),
}  # Spearman, regret


@lru_cache
def found() -> tuple[Prediction, ...]:
    return tuple(predictions(read_table()))


@lru_cache
def document() -> dict[str, Any]:
    return document_of(found())


def test_a_composed_source_shows_in_its_times_and_counts_in_no_total() -> None:
    series: dict[tuple[str, ...], dict[float, float]] = {}
    for row in read_table():
        if row.source == "vtrain_single":
            names = ("hidden", "n_layers", "tp", "pp", "dp", "micro_batch")
            batch = (row.number("global_batch") or 0.0) / (row.number("dp") or 1.0)
            key = tuple(row.text(name) for name in names)
            step = row.number("measured_step_time_s") or 0.0
            series.setdefault(key, {})[batch / (row.number("micro_batch") or 1.0)] = step
    long = [sorted(points.items()) for points in series.values() if len(points) >= 3]
    assert len(long) >= 50
    for (m0, t0), (m1, t1), *rest in long:
        slope = (t1 - t0) / (m1 - m0)
        for m, t in rest:
            assert t0 + slope * (m - m0) == pytest.approx(t, rel=1e-12)
    assert list(document()["composed"]) == ["vtrain_single"]
    errors = document()["errors"]["step_time"]
    counted = sum(one["n"] for one in errors["source"].values())
    assert errors["all"]["all"]["n"] == counted - errors["source"]["vtrain_single"]["n"]


@pytest.mark.parametrize("source", TIME_LIMITS)
def test_step_times_stay_within_limits(source: str) -> None:
    errors = document()["errors"]["step_time"]["source"][source]
    median, p90 = TIME_LIMITS[source]
    assert errors["median"] <= median
    assert errors["p90"] <= p90


@pytest.mark.parametrize("source", MEMORY_LIMITS)
def test_memory_stays_within_limits(source: str) -> None:
    errors = document()["errors"]["memory"]["source"][source]
    median, p90 = MEMORY_LIMITS[source]
    assert errors["median"] <= median
    assert errors["p90"] <= p90


@pytest.mark.parametrize("source", RANK_LIMITS)
def test_layouts_are_ranked(source: str) -> None:
    ranking = document()["ranking"][source]
    spearman, regret = RANK_LIMITS[source]
    assert ranking["spearman_median"] >= spearman
    assert ranking["regret_mean"] <= regret


def test_nearly_every_complete_row_is_predicted() -> None:
    coverage = document()["coverage"]
    assert coverage["complete_rows_predicted_percent"] >= 99.0
    assert coverage["rows"] == 1284
    assert sum(coverage["skipped"].values()) == coverage["rows"] - coverage["predicted"]


def test_every_skip_says_why() -> None:
    for p in found():
        assert (p.peak_memory_gib is None) == bool(p.skipped_reason)
        if p.skipped_reason:
            assert any(column in p.skipped_reason for column in (*COLUMNS, "experts"))


def test_halves_do_not_depend_on_errors() -> None:
    rows = read_table()
    assert {half_of(row) for row in rows} == {"A", "B"}
    assert all(half_of(row) == half_of(rows[0]) for row in rows if row.source == rows[0].source
               and row.text("family") == rows[0].text("family"))  # fmt: skip


def row_named(name: str) -> Any:
    return next(row for row in read_table() if row.id == name)


def case_named(name: str) -> Any:
    return case_of(row_named(name), vpp_by_run(read_table()))


def test_a_bloom_row_by_hand() -> None:
    """bf16 rows give embedding and head a place each: 70 + 2 layers on 12 ranks is 6 a rank."""
    case = case_named("bloom_129_176B_tp4pp12dp8_mbs2_gbs2048_h112_bf16")
    assert [sum(stage.layers) for stage in case.stages] == [5, *[6] * 10, 5]
    assert case.setting.model.vocab_size == 250_880
    assert case.setting.cluster.name == "jean-zay-a100"
    assert case.setting.runtime.name == "megatron-deepspeed"
    assert RECOMPUTE[case.layout.recompute] == "full"
    assert case.setting.kernel == "unfused"
    assert case.setting.train.global_batch_size == 2048
    assert case.layout.shard == 8


def test_an_interleaved_row_by_hand() -> None:
    case = case_named("dgxc_llama3.1-405b_bf16_512")
    assert SCHEDULES[case.layout.schedule] == "interleaved"
    assert (case.layout.vpp, case.layout.cp, case.layout.dp) == (8, 2, 4)
    assert sum(sum(stage.layers) for stage in case.stages) == 126
    assert case.layout.num_gpus == 512


def test_a_selective_row_by_hand() -> None:
    """Sequence parallelism comes and goes with the row; selective means the attention core."""
    selective, full = case_named("korth22_1T_seqsel"), case_named("korth22_1T_full")
    assert selective.setting.runtime.sequence_parallel
    assert not full.setting.runtime.sequence_parallel
    assert selective.setting.runtime.selective_modules == ("core_attention",)
    assert full.setting.model.dropout


def test_a_row_with_recomputed_layers_by_hand() -> None:
    """fms-fsdp: 3 (HFU / MFU - 1) of the layers are recomputed."""
    row = row_named("fms_llama2-34b_H100_96")
    share = 3 * (row.number("hfu_pct") / row.number("mfu_pct") - 1)
    stage = case_named(row.id).stages[0]
    assert stage.policies[0][RECOMPUTE.index("full")] == round(min(1.0, share) * 48)
    assert case_named(row.id).setting.cluster.node_scale_out_bytes_per_s < 100e9


def test_a_nanotron_row_by_hand() -> None:
    """Layer 4 x 2048 + 3 x 4096 = 20480 a unit of h, head 50257: 541777 in all, 135444 a rank."""
    case = case_named("nanotron_1b_8g_dp2_tp1_pp4_mbs4")
    assert [sum(stage.layers) for stage in case.stages] == [7, 7, 6, 4]


def test_an_unpadded_vocabulary_bounds_nanotron() -> None:
    """The head's products, 6 x 16384 x 50257 x 2048 = 10.1 TFLOP, at 97.4 TFLOP/s: 104 ms each."""
    one = next(p for p in found() if p.row.id == "nanotron_1b_8g_dp2_tp1_pp4_mbs4")
    assert abs(one.time_error or 99) < 3
    assert abs(one.memory_error or 99) < 1
    assert 0.104 * 128 < one.breakdown_s["head"] < 0.14 * 128


def test_a_published_parameter_count() -> None:
    """MPT-7B of the table has 6,658,859,008 parameters: learned positions and biases."""
    from planner.parameters import total_parameters

    case = case_named("llmfoundry_039_7b_s2048_8xh100_80gb_amp_bf16")
    assert total_parameters(case.setting.model) == 6_658_859_008


def test_a_missing_field_is_named() -> None:
    row = row_named("mlm_h100_1.7B_48")
    with pytest.raises(MissingField, match="tied_embeddings is not stated; a default of 0"):
        case_of(row, {})


def test_csv_has_a_line_for_every_row() -> None:
    lines = list(csv.DictReader(predictions_csv(document()["rows"]).splitlines()))
    assert [line["id"] for line in lines] == [row.id for row in read_table()]
    assert tuple(lines[0]) == CSV_COLUMNS
    assert all(bool(line["skipped_reason"]) != bool(line["predicted_peak_memory_gib"])
               for line in lines)  # fmt: skip


def test_text_and_page_hold_every_source() -> None:
    text, page = "\n".join(accuracy_lines(document())), accuracy_page(document())
    for source in document()["errors"]["step_time"]["source"]:
        assert source in text
        assert source in page
    assert "<script" not in page
    assert "http" not in page


def test_an_assumed_constant_moves_errors() -> None:
    """Fewer bytes a second of NIC, or more launches, change the times of the runs they touch."""
    some = [p for p in found() if p.row.source in ("fms_fsdp", "korthikanti")]
    rows = sensitivity(some)
    assert rows
    moved = [row for row in rows if row["constant"].endswith("(time)")]
    assert any(row["down"] != row["base"] for row in moved)
    assert len({row["constant"] for row in rows}) == len(rows)


def test_document_is_json() -> None:
    json.dumps(document(), allow_nan=False)


def changed(tmp_path: Path, change: Any) -> Path:
    """The first 40 lines of the shipped table, changed."""
    text = "".join(SHIPPED_TABLE.read_text(encoding="utf-8").splitlines(keepends=True)[:40])
    rows = list(csv.DictReader(text.splitlines()))
    change(rows)
    path = tmp_path / "table.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_names_are_escaped(tmp_path: Path) -> None:
    def inject(rows: list[dict[str, str]]) -> None:
        rows[0]["id"] = "<script>alert(1)</script>"

    page = accuracy_page(validate(changed(tmp_path, inject)))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("tp", "two", "tp is 'two'"),
        ("tp", "0", "tp is '0'"),
        ("tp", "1.5", "tp is '1.5'"),
        ("hidden", "nan", "hidden is 'nan'"),
        ("measured_step_time_s", "-3", "measured_step_time_s"),
        ("measured_step_time_s", "inf", "measured_step_time_s"),
        ("id", "", "has no id"),
    ],
)
def test_a_wrong_field_is_refused(tmp_path: Path, column: str, value: str, words: str) -> None:
    def spoil(rows: list[dict[str, str]]) -> None:
        rows[3][column] = value

    with pytest.raises(InputError, match=words) as caught:
        validate(changed(tmp_path, spoil))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "a,b\n1,2\n", "id\n1\n", ",".join(COLUMNS) + "\n", "\x00", '"', "<html></html>"],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        validate(path)


def test_garbage_is_refused_or_skipped(tmp_path: Path) -> None:
    """Any text in any field gives a refusal or a reason, never another error."""
    rng = random.Random(7)
    words = [
        "",
        "1",
        "7",
        "1e9",
        "-1",
        "nan",
        "x" * 300,
        "é\u2028",
        "selective",
        "0",
        "3.0",
        "99999",
    ]
    path = tmp_path / "t.csv"
    path.write_bytes(bytes(rng.randrange(256) for _ in range(4000)))
    with pytest.raises(InputError):
        validate(path)
    for _ in range(60):

        def spoil(rows: list[dict[str, str]]) -> None:
            del rows[4:]
            for _ in range(rng.randrange(1, 5)):
                rows[rng.randrange(len(rows))][rng.choice(COLUMNS)] = rng.choice(words)

        try:
            result = validate(changed(tmp_path, spoil))
        except InputError:
            continue
        assert len(result["rows"]) == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "p.csv", tmp_path / "p.html"
    words = [
        "validate",
        "--source",
        "korthikanti",
        "--csv",
        str(out),
        "--html",
        str(page),
        "--json",
    ]
    assert shardwise.main(words) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4
    assert len(out.read_text().splitlines()) == 5
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shardwise.main(["validate", str(tmp_path / "none.csv")]) == 2
    assert shardwise.main(["validate", "--source", "nobody"]) == 2
    assert shardwise.main(["validate", "--csv", str(tmp_path / "no" / "x.csv")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3
