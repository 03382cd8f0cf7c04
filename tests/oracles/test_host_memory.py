"""Host memory as a limit: mixes against trying all, and answers that respect it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.results import HostBytes, StageCosts
from planner.search.columns import best_mixes, relaxed_times, stages
from planner.search.exhaustive import best_layout, best_stage
from planner.search.search import search

NUMBERS = st.sampled_from([0.0, 0.3, 1.0, 1.7, 2.9])


def row_of(seed: int, num_kinds: int, capacity: float, room: tuple[float, float]) -> StageCosts:
    """Random costs of one row with four policies, the last of which sends activations away."""
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> Any:
        return rng.choice([0.2, 0.5, 1.0, 1.4, 2.6], size=(1, *shape))

    act = some(num_kinds, 4)
    act[:, :, 3] = 0.0
    host = HostBytes(
        layer=some(num_kinds) - 0.2,
        first=some(),
        head=some(),
        act=some(num_kinds),
        state_capacity=np.array([room[0]]),
        act_capacity=np.array([room[1]]),
        shared=np.array([float(rng.integers(2))]),
        act_policy=3,
    )
    return StageCosts(
        num_microbatches=np.ones(1),
        beta=np.ones(1),
        layer_s=some(num_kinds, 4),
        layer_step_s=some(num_kinds),
        layer_static_bytes=some(num_kinds),
        layer_act_bytes=act,
        working_bytes=some(num_kinds, 4),
        stage_s=some(),
        first_s=some(),
        head_s=some(),
        first_step_s=some(),
        head_step_s=some(),
        fixed_bytes=some(),
        first_bytes=some(),
        head_bytes=some(),
        first_act_bytes=some(),
        constant_s=some(),
        capacity_bytes=capacity,
        host=host,
    )


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=2).filter(any),
    capacity=st.sampled_from([6.0, 11.0, 17.0, 40.0]),
    room=st.tuples(st.sampled_from([2.0, 5.0, 30.0]), st.sampled_from([1.0, 3.0, 6.0, 12.0])),
    in_flight=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_mixes_within_host_memory_are_the_best(
    seed: int, counts: list[int], capacity: float, room: tuple[float, float], in_flight: float
) -> None:
    costs = row_of(seed, len(counts), capacity, room)
    table = stages(costs, np.array([[in_flight]]), np.array([0]))
    kinds = tuple(k for k, n in enumerate(counts) for _ in range(n))
    main = counts.index(max(counts))
    zero = np.zeros(1, dtype=np.int64)
    time, mix, _ = best_mixes(table, zero, zero, np.array([counts]), main)
    want = best_stage(costs, 0, 0, in_flight, tuple(counts), kinds)
    relaxed = relaxed_times(table, np.array([[[counts]]], dtype=float), main)[0, 0, 0]
    if want is None:
        assert np.isinf(time[0])
        return
    assert time[0] == pytest.approx(want[0], rel=1e-12)
    assert mix[0].sum() == counts[main]
    assert relaxed <= want[0] * (1 + 1e-9)


def test_less_host_memory_is_never_faster(toy: Any) -> None:
    """The optimum is the oracle's at every size, and differs where the limit binds."""
    times = []
    for host in (None, 14.0, 9.0, 6.0, 3.0):
        provider = toy(
            layer_kinds=(0,) * 6,
            num_gpus=4,
            batch=8,
            capacity=13.0,
            acts=(6.0,),
            working=0.2,
            host=host,
            values={"vpp": (1,), "schedule": (0, 1)},
        )
        found, want = search(provider), best_layout(provider)
        assert (found.best is None) == (want is None)
        times.append(np.inf if want is None else want[0])
        if found.best is not None:
            assert found.best.time_s == pytest.approx(times[-1], rel=1e-9)
            continue
        assert found.nearest is not None
        assert found.nearest.missing_bytes > 0
        assert found.nearest.memory in ("device", "state", "activations")
    assert times == sorted(times)
    assert len(set(times)) > 2


def test_a_row_without_host_limits_takes_none() -> None:
    costs = replace(row_of(0, 1, 40.0, (1.0, 1.0)), host=None)
    assert costs.take(np.array([0])).host is None
    assert stages(costs, np.ones((1, 1)), np.array([0])).away_bytes.tolist() == [[0.0]]
