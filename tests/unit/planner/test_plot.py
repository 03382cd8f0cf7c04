"""The picture of a timeline: well-formed, complete, in scale."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from planner.errors import InputError
from planner.plot import COLOURS, IDLE, timeline_svg, write_plot
from planner.schedules import build_schedule
from planner.simulate import simulate
from planner.trace import StepSpan

SVG = "{http://www.w3.org/2000/svg}"


def drawn(schedule, pp, vpp, m, **options):
    stages = np.full(pp * vpp, 2e-3)
    timeline = simulate(build_schedule(schedule, pp, vpp, m), stages, stages, stages)
    return timeline, ET.fromstring(timeline_svg(timeline, **options))


def test_a_cell_per_action_in_scale():
    timeline, svg = drawn("zero-bubble", 3, 1, 5)
    cells = [
        (rect.find(f"{SVG}title").text, float(rect.get("x")), float(rect.get("width")))
        for rect in svg.iter(f"{SVG}rect")
        if rect.find(f"{SVG}title") is not None
    ]
    spans = [span for mine in timeline.spans for span in mine]
    assert len(cells) == len(spans)
    left = min(x for _, x, _ in cells)
    scale = cells[0][2] / (spans[0][2] - spans[0][1])
    for (name, x, width), (action, start, end) in zip(cells, spans, strict=True):
        assert name.startswith(f"{action.op} chunk0 mb{action.microbatch}: ")
        assert x - left == pytest.approx(start * scale, abs=0.1)
        assert width == pytest.approx((end - start) * scale, abs=0.1)


def test_words_say_what_the_timeline_says():
    timeline, svg = drawn("1f1b", 4, 1, 8, title="a <b> & c")
    words = [text.text for text in svg.iter(f"{SVG}text")]
    assert words[0] == "a <b> & c"
    assert words[1] == "4 ranks, 8 micro-batches: 66 ms, 27.3 % of it idle"
    assert {"rank 0", "rank 3", "time [ms]", "forward", "backward", "idle"} <= set(words)
    assert [words[words.index(f"rank {rank}") + 2] for rank in range(4)] == ["4", "3", "2", "1"]
    assert timeline.total_s == pytest.approx(66e-3)


def test_the_legend_holds_only_what_is_drawn():
    _, plain = drawn("gpipe", 2, 1, 3)
    assert "weight gradient" not in [text.text for text in plain.iter(f"{SVG}text")]
    _, split = drawn("dualpipe", 2, 2, 4)
    assert "weight gradient" in [text.text for text in split.iter(f"{SVG}text")]


def test_later_chunks_are_lighter_and_idle_is_none_of_the_colours():
    _, svg = drawn("interleaved", 2, 3, 4)
    fills = {rect.get("fill") for rect in svg.iter(f"{SVG}rect")}
    forward = "#{:02x}{:02x}{:02x}".format(*COLOURS["F"])
    assert forward in fills
    assert IDLE in fills
    assert len(fills) == 2 * 3 + 2  # two ops in three shades, idle, white ground


def test_many_cells_are_sampled_to_the_right_shares():
    timeline, svg = drawn("gpipe", 2, 1, 3000)
    assert "sampled" in svg.find(f"{SVG}desc").text
    forward = "#{:02x}{:02x}{:02x}".format(*COLOURS["F"])
    row = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("height") == "26"]
    pixels = sum(float(r.get("width")) for r in row if r.get("fill") == forward)
    across = sum(float(r.get("width")) for r in row if r.get("fill") == IDLE)
    # F takes a third of a rank's work: 2 of 6 ms.
    assert pixels / across == pytest.approx((1 - timeline.bubble_fraction) / 3, abs=0.002)
    assert len(row) < 4000


def test_step_spans_lengthen_the_axis():
    timeline, without = drawn("1f1b", 2, 1, 4)
    end = timeline.total_s
    _, svg = drawn("1f1b", 2, 1, 4, step_spans=[StepSpan(0, "optimizer", end, 2 * end)])
    hints = [title.text for title in svg.iter(f"{SVG}title")]
    assert hints.count("optimizer") == 1
    assert "once per step" in [text.text for text in svg.iter(f"{SVG}text")]
    assert "once per step" not in [text.text for text in without.iter(f"{SVG}text")]


def test_step_spans_of_unknown_ranks_are_refused():
    with pytest.raises(InputError, match="step span 'optimizer' on rank 2"):
        drawn("1f1b", 2, 1, 4, step_spans=[StepSpan(2, "optimizer", 0.0, 1.0)])


def test_other_formats_are_refused(tmp_path):
    timeline, _ = drawn("1f1b", 2, 1, 2)
    with pytest.raises(InputError, match=r"ends in \.svg") as refusal:
        write_plot(timeline, tmp_path / "step.png")
    assert refusal.value.legal == {"path": [str(tmp_path / "step.svg")]}
    write_plot(timeline, tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text().startswith("<svg ")
