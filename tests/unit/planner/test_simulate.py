"""The simulator against dependencies checked one by one, and against small cases by hand."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.layout import SCHEDULES
from planner.results import Action
from planner.schedules import build_schedule, rank_of
from planner.simulate import critical_path, simulate

PIPELINES = [
    ("gpipe", 3, 1, 5),
    ("1f1b", 4, 1, 7),
    ("interleaved", 3, 2, 7),
    ("interleaved", 2, 4, 6),
    ("zero-bubble", 4, 1, 9),
    ("dualpipe", 3, 2, 8),
]


def times(timeline):
    return {
        (a.op, a.stage, a.microbatch): (start, end)
        for spans in timeline.spans
        for a, start, end in spans
    }


@given(st.sampled_from(PIPELINES), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_action_starts_at_the_earliest_moment(pipeline, seed, exposed):
    schedule, pp, vpp, m = pipeline
    n = pp * vpp
    rng = np.random.default_rng(seed)
    forward, backward, weight = rng.uniform(0.1, 2.0, (3, n))
    p2p = rng.uniform(0.0, 0.5, n - 1)
    actions = build_schedule(schedule, pp, vpp, m)
    timeline = simulate(actions, forward, backward, weight, p2p, p2p_exposed=exposed)
    when = times(timeline)
    split = {(s, i) for op, s, i in when if op == "W"}

    def hop(a, b):
        same = rank_of(schedule, a, pp, vpp) == rank_of(schedule, b, pp, vpp)
        return 0.0 if same else p2p[min(a, b)]

    for spans in timeline.spans:
        free = 0.0
        for action, start, end in spans:
            op, s, i = action.op, action.stage, action.microbatch
            earliest = [free]
            if op == "F":
                length = forward[s]
                earliest += [when["F", s - 1, i][1] + hop(s - 1, s)] if s else []
                target = s + 1
            elif op == "B":
                length = backward[s] + (0.0 if (s, i) in split else weight[s])
                earliest.append(when["F", s, i][1])
                earliest += [when["B", s + 1, i][1] + hop(s + 1, s)] if s + 1 < n else []
                target = s - 1
            else:
                length = weight[s]
                earliest.append(when["B", s, i][1])
                target = -1
            assert start == pytest.approx(max(earliest), abs=1e-12)
            assert end - start == pytest.approx(length, rel=1e-9)
            free = end + (hop(s, target) if exposed and 0 <= target < n else 0.0)
    assert timeline.total_s == max(end for _, end in when.values())


@given(st.sampled_from(PIPELINES), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_bubble_is_the_idle_share_and_time_is_never_less_than_the_work(pipeline, seed):
    schedule, pp, vpp, m = pipeline
    durations = np.random.default_rng(seed).uniform(0.1, 2.0, (3, pp * vpp))
    timeline = simulate(build_schedule(schedule, pp, vpp, m), *durations)
    of_rank = np.zeros(pp)
    for stage in range(pp * vpp):
        of_rank[rank_of(schedule, stage, pp, vpp)] += m * durations[:, stage].sum()
    assert timeline.total_s >= of_rank.max() - 1e-9
    assert timeline.bubble_fraction == pytest.approx(1 - of_rank.sum() / (pp * timeline.total_s))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_transfers_only_delay(pipeline):
    schedule, pp, vpp, m = pipeline
    actions = build_schedule(schedule, pp, vpp, m)
    ones = np.ones(pp * vpp)
    free, hidden = simulate(actions, ones, ones, ones), simulate(actions, ones, ones, ones, 0.1)
    exposed = simulate(actions, ones, ones, ones, 0.1, p2p_exposed=True)
    assert free.total_s < hidden.total_s <= exposed.total_s
    assert times(free).keys() == times(hidden).keys()


def test_by_hand_with_transfers():
    # Two ranks, one micro-batch: F 1, send 0.5, F 2, B 2 + 3, send 0.5, B 1 + 1.
    timeline = simulate(build_schedule("1f1b", 2, 1, 1), [1, 2], [1, 2], [1, 3], 0.5)
    assert [[(s, e) for _, s, e in spans] for spans in timeline.spans] == [
        [(0, 1), (9, 11)],
        [(1.5, 3.5), (3.5, 8.5)],
    ]
    assert timeline.total_s == 11
    assert timeline.peak_in_flight == (1, 1)


def test_exposed_send_keeps_the_sender_busy():
    actions = build_schedule("gpipe", 2, 1, 2)
    hidden = simulate(actions, [1, 1], [1, 1], [0, 0], 0.5)
    exposed = simulate(actions, [1, 1], [1, 1], [0, 0], 0.5, p2p_exposed=True)
    assert [start for _, start, _ in hidden.spans[0][:2]] == [0, 1]
    assert [start for _, start, _ in exposed.spans[0][:2]] == [0, 1.5]


@given(st.sampled_from(PIPELINES), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_critical_path_is_an_unbroken_chain(pipeline, seed, exposed):
    schedule, pp, vpp, m = pipeline
    rng = np.random.default_rng(seed)
    durations = rng.uniform(0.1, 2.0, (3, pp * vpp))
    p2p = rng.uniform(0, 0.5, pp * vpp - 1)
    timeline = simulate(build_schedule(schedule, pp, vpp, m), *durations, p2p, p2p_exposed=exposed)
    path = critical_path(timeline, p2p, p2p_exposed=exposed)
    assert path[0][2] == 0.0
    assert path[-1][3] == timeline.total_s
    for (rank, action, _, end), (next_rank, _, start, _) in pairwise(path):
        gap = start - end
        edge = action.stage if action.op == "F" else action.stage - 1
        transfer = p2p[edge] if action.op != "W" and 0 <= edge < len(p2p) else 0.0
        if rank != next_rank:
            assert gap == pytest.approx(transfer, abs=1e-9)
        else:
            # On one rank only a sender that waits leaves a gap.
            allowed = (0.0, transfer) if exposed else (0.0,)
            assert min(abs(gap - wait) for wait in allowed) < 1e-9


def test_shortening_off_the_critical_path_changes_nothing():
    # The slow last rank decides; its neighbour's slack does not.
    actions = build_schedule("1f1b", 2, 1, 6)
    timeline = simulate(actions, [1, 3], [1, 3], [0, 3])
    on_path = {(a.op, a.stage, a.microbatch) for _, a, _, _ in critical_path(timeline)}
    assert ("F", 0, 3) not in on_path
    assert ("F", 1, 3) in on_path


def test_deadlock_is_named():
    actions = build_schedule("1f1b", 2, 1, 2)
    actions[0] = [a for a in actions[0] if a.op == "B"] + [a for a in actions[0] if a.op == "F"]
    with pytest.raises(LayoutError, match="deadlocks: rank 0 at B of stage 0, micro-batch 0") as e:
        simulate(actions, [1, 1], [1, 1], [1, 1])
    assert {"rank": 1, "op": "F", "stage": 1, "microbatch": 0} in e.value.values["waiting"]


def test_small_last_group_would_deadlock():
    # Why _group_sizes spreads what does not divide: 4 ranks, 3 chunks, micro-batches 4 + 1.
    groups = [range(4), range(4, 5)]
    ranks = []
    for rank in range(4):
        f = [Action(4 * c + rank, "F", i) for g in groups for c in range(3) for i in g]
        b = [Action(4 * c + rank, "B", i) for g in groups for c in (2, 1, 0) for i in g]
        warmup = min(len(f), 2 * (3 - rank) + 2 * 4)
        steady = [a for pair in zip(f[warmup:], b, strict=False) for a in pair]
        ranks.append(f[:warmup] + steady + b[len(f) - warmup :])
    ones = np.ones(12)
    with pytest.raises(LayoutError, match="deadlocks"):
        simulate(ranks, ones, ones, ones)
    simulate(build_schedule("interleaved", 4, 3, 5), ones, ones, ones)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda acts: acts[0].append(acts[0][0]), "scheduled twice"),
        (lambda acts: acts[0].pop(), "is not scheduled"),
        (lambda acts: acts[1].append(Action(0, "W", 0)), "on ranks 0 and 1"),
        (lambda acts: acts[0].append(Action(0, "X", 0)), "op must be F, B or W"),
        (lambda acts: acts[0].append(Action(7, "F", 0)), "one of the 2"),
        (lambda acts: [mine.clear() for mine in acts], "is not scheduled"),
    ],
)
def test_broken_schedules_are_refused(change, words):
    actions = build_schedule("1f1b", 2, 1, 2)
    change(actions)
    with pytest.raises(LayoutError, match=words):
        simulate(actions, [1, 1], [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("durations", "words"),
    [
        (([1], [1, 1], [1, 1]), "backward_input_s has shape"),
        (([1, float("nan")], [1, 1], [1, 1]), "forward_s"),
        (([1, 1], [1, 1], [1, -1]), "weight_s"),
        (([1, 1], [1, 1], [1, 1], [1, 1]), "p2p_s has shape"),
        (([1, 1], [1, 1], [1, 1], -1), "p2p_s"),
    ],
)
def test_bad_durations_are_refused(durations, words):
    with pytest.raises(LayoutError, match=words):
        simulate(build_schedule("1f1b", 2, 1, 2), *durations)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s in ("interleaved", "dualpipe")])
def test_large_pipelines_are_quick(schedule):
    stages = np.ones(32)
    start = time.process_time()
    simulate(build_schedule(schedule, 16, 2, 2048), stages, stages, stages, 0.1)
    # Half a second here; the limit leaves room for a slow machine, not for a slower algorithm.
    assert time.process_time() - start < 5.0
