"""The order of every schedule: complete, without deadlock, within its memory; refusals in words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.layout import SCHEDULES
from planner.schedules import (
    bubble_beta,
    build_schedule,
    check_schedule,
    in_flight,
    rank_of,
    schedule_is_legal,
    stage_of,
)
from planner.simulate import simulate

SPLIT = ("zero-bubble", "dualpipe")


@st.composite
def legal_pipelines(draw, max_pp=8, max_vpp=4, max_microbatches=32):
    code = draw(st.integers(0, len(SCHEDULES) - 1))
    schedule = SCHEDULES[code]
    pp = draw(st.integers(1 if schedule in ("gpipe", "1f1b") else 2, max_pp))
    vpp = 2 if schedule == "dualpipe" else 1
    if schedule == "interleaved":
        vpp = draw(st.integers(2, max_vpp))
    least = 2 * pp if schedule == "dualpipe" else 1
    return code, pp, vpp, draw(st.integers(least, max_microbatches))


def written(schedule, pp, vpp, num_microbatches):
    """Each rank in one line: F0 is chunk 0, f0 chunk 1, and so on."""
    return [
        " ".join(
            (action.op if action.stage < pp else action.op.lower()) + str(action.microbatch)
            for action in mine
        )
        for mine in build_schedule(schedule, pp, vpp, num_microbatches)
    ]


@given(legal_pipelines())
@settings(max_examples=150, deadline=None)
def test_every_stage_runs_every_microbatch_once(pipeline):
    code, pp, vpp, m = pipeline
    actions = build_schedule(SCHEDULES[code], pp, vpp, m)
    assert len(actions) == pp
    cells = [(a.op, a.stage, a.microbatch) for mine in actions for a in mine]
    assert len(set(cells)) == len(cells)
    everything = {(s, i) for s in range(pp * vpp) for i in range(m)}
    for op in "FB":
        assert {(s, i) for o, s, i in cells if o == op} == everything
    weights = {(s, i) for o, s, i in cells if o == "W"}
    if SCHEDULES[code] == "zero-bubble":
        assert weights == everything
    elif SCHEDULES[code] == "dualpipe":
        assert weights
        assert weights < everything
    else:
        assert not weights


@given(legal_pipelines())
@settings(max_examples=150, deadline=None)
def test_actions_are_on_the_rank_of_their_stage_and_in_local_order(pipeline):
    code, pp, vpp, m = pipeline
    for rank, mine in enumerate(build_schedule(SCHEDULES[code], pp, vpp, m)):
        place = {(a.op, a.stage, a.microbatch): i for i, a in enumerate(mine)}
        for (op, stage, microbatch), i in place.items():
            assert rank_of(SCHEDULES[code], stage, pp, vpp) == rank
            before = {"B": "F", "W": "B"}.get(op)
            if before:
                assert place[before, stage, microbatch] < i


@given(legal_pipelines(), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_runs_to_its_end_and_peak_is_the_closed_form(pipeline, seed):
    code, pp, vpp, m = pipeline
    rng = np.random.default_rng(seed)
    durations = rng.uniform(0.1, 2.0, (3, pp * vpp))
    actions = build_schedule(SCHEDULES[code], pp, vpp, m)
    timeline = simulate(actions, *durations, p2p_s=rng.uniform(0, 0.5))
    assert [len(spans) for spans in timeline.spans] == [len(mine) for mine in actions]
    np.testing.assert_allclose(
        timeline.peak_in_flight, in_flight(code, pp, vpp, m, np.arange(pp)), rtol=1e-12
    )


@given(
    st.integers(0, len(SCHEDULES) - 1),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 12),
)
def test_mask_and_refusal_agree(code, pp, vpp, m):
    # The mask is asked about tables of positive degrees only.
    legal = bool(schedule_is_legal(code, pp, vpp, m))
    if legal:
        check_schedule(SCHEDULES[code], pp, vpp, m)
    else:
        with pytest.raises(LayoutError) as refusal:
            check_schedule(SCHEDULES[code], pp, vpp, m)
        assert refusal.value.legal
        assert refusal.value.values["pp"] == pp


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "m", "legal"),
    [
        ("1f1b", 4, 2, 8, {"vpp": [1], "schedule": ["interleaved"]}),
        ("interleaved", 1, 2, 8, {"pp": [2], "schedule": ["1f1b"]}),
        ("interleaved", 4, 1, 8, {"vpp": [2], "schedule": ["1f1b"]}),
        ("dualpipe", 4, 3, 8, {"vpp": [2]}),
        ("dualpipe", 4, 2, 7, {"num_microbatches": [8], "pp": [3]}),
        ("1f1b", 0, 1, 8, {"pp": [1]}),
        ("gpipe", 2, 1, 2.5, {"num_microbatches": [1]}),
        ("zerobubble", 2, 1, 8, {"schedule": ["zero-bubble"]}),
    ],
)
def test_refusals_name_values_and_nearest_legal_ones(schedule, pp, vpp, m, legal):
    with pytest.raises(LayoutError) as refusal:
        build_schedule(schedule, pp, vpp, m)
    assert refusal.value.legal == legal
    name, nearest = next(iter(legal.items()))
    asked, rule = refusal.value.message.split(maxsplit=1)
    assert asked.startswith(("schedule=", name))
    assert str(nearest[0]) in rule


def test_nearest_legal_values_are_legal():
    for schedule, pp, vpp, m in (("dualpipe", 4, 2, 7), ("interleaved", 1, 2, 8)):
        with pytest.raises(LayoutError) as refusal:
            check_schedule(schedule, pp, vpp, m)
        for pp_instead in refusal.value.legal["pp"]:
            check_schedule(schedule, pp_instead, vpp, m)


def test_orders_by_hand():
    assert written("gpipe", 2, 1, 3) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert written("1f1b", 3, 1, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    # Narayanan2021 Figure 4 has this order, for 4 ranks.
    assert written("interleaved", 2, 2, 4) == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
        "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    ]
    # Qi2023 Figure 2, ZB-H1: the last rank owes pp - 1 weight gradients, the first one none.
    assert written("zero-bubble", 2, 1, 3) == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]
    # DualPipeV: the last rank turns the V at once, the drain splits the backward.
    assert written("dualpipe", 2, 2, 4) == [
        "F0 F1 F2 f0 b0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 B2 W2 B3 W3",
        "F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 b3 B3 w3 W3",
    ]


def test_placement_is_a_bijection():
    for schedule, pp, vpp in (("interleaved", 4, 3), ("dualpipe", 5, 2), ("1f1b", 6, 1)):
        stages = [
            stage_of(schedule, rank, chunk, pp, vpp) for rank in range(pp) for chunk in range(vpp)
        ]
        assert sorted(stages) == list(range(pp * vpp))
        assert [rank_of(schedule, stage, pp, vpp) for stage in stages] == [
            rank for rank in range(pp) for _ in range(vpp)
        ]
        as_array = rank_of(schedule, np.array(stages), pp, vpp)
        assert as_array.tolist() == [rank for rank in range(pp) for _ in range(vpp)]
    # In a V the embedding and the head are both on rank 0.
    assert rank_of("dualpipe", 0, 4, 2) == rank_of("dualpipe", 7, 4, 2) == 0


def test_closed_forms_broadcast_over_tables():
    codes = np.array([0, 1, 2, 3, 4])
    vpp = np.array([1, 1, 2, 1, 2])
    table = in_flight(codes[:, None], 4, vpp[:, None], 8, np.arange(4))
    assert table.shape == (5, 4)
    assert table[1].tolist() == [4, 3, 2, 1]
    # Rank 0 with groups of p: p + (p - 1) / v.
    assert table[2].tolist() == [5.5, 4.5, 3.5, 2.5]
    beta = bubble_beta(codes, vpp, np.full((3, 1), 1.0), 1.2, 0.9, pp=4, num_microbatches=8)
    assert beta.shape == (3, 5)
    assert np.all((beta >= 0) & (beta <= 1))


@given(
    st.integers(0, len(SCHEDULES) - 1),
    st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3),
    st.integers(2, 16),
    st.integers(1, 40),
)
def test_beta_is_a_share(code, durations, pp, m):
    vpp = {"interleaved": 3, "dualpipe": 2}.get(SCHEDULES[code], 1)
    exact = float(bubble_beta(code, vpp, *durations, pp=pp, num_microbatches=m))
    assert 0 <= exact <= 1 + 1e-12
    # Without pp and m: the long pipeline with enough micro-batches.
    limit = float(bubble_beta(code, vpp, *durations))
    assert 0 <= limit <= 1 + 1e-12
    assert limit == pytest.approx(
        float(bubble_beta(code, vpp, *durations, pp=10**9, num_microbatches=10**9)), abs=1e-6
    )


def test_beta_with_microbatches_wants_pp():
    with pytest.raises(ValueError, match="wants pp"):
        bubble_beta(3, 1, 1.0, 1.0, 1.0, num_microbatches=4)
