"""The search against brute force on generated small problems, and its bounds against optima."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.layout import RECOMPUTE, Layout
from planner.search import ilp, solver
from planner.search.best_first import BestFirst
from planner.search.bounds import split_bound
from planner.search.candidates import candidates, expand, rows
from planner.search.exhaustive import best_layout, best_time, every_layout
from planner.search.orders import layer_order
from planner.search.positions import Positions
from planner.search.search import best_with, fits, least_gpus, neighbours, search

SETTINGS = settings(
    max_examples=220,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Arguments of a toy cost model: one to three kinds, few GPUs, memory of all sorts."""
    num_layers = draw(st.integers(2, 6))
    cut = draw(st.integers(1, num_layers - 1))
    kinds = {
        "one": (0,) * num_layers,
        "prefix": (0,) * cut + (1,) * (num_layers - cut),
        "suffix": (1,) * cut + (0,) * (num_layers - cut),
        "alternating": tuple(i % 2 for i in range(num_layers)),
        "any": tuple(draw(st.lists(st.integers(0, 2), min_size=num_layers, max_size=num_layers))),
    }[draw(st.sampled_from(["one", "one", "prefix", "prefix", "suffix", "alternating", "any"]))]
    policies = draw(
        st.sampled_from(
            [RECOMPUTE, RECOMPUTE, ("none", "full"), ("none", "selective", "full"), ("full",)]
        )
    )
    return {
        "layer_kinds": kinds,
        "num_gpus": draw(st.sampled_from([2, 4, 6, 8])),
        "batch": draw(st.sampled_from([8, 12, 24])),
        "capacity": draw(st.sampled_from([4.0, 5.5, 7.3, 9.1, 13.7, 21.3, 90.0])),
        "host": draw(st.sampled_from([None, 0.8, 1.7, 3.1, 6.3, 14.0])),
        "working": draw(st.sampled_from([0.0, 1.0, 3.0])),
        "seconds": tuple(draw(st.sampled_from([0.6, 1.0, 1.7, 2.9])) for _ in range(3)),
        "offered": policies,
        "values": {
            "ep": (1, 2) if max(kinds) else (1,),
            "cp": draw(st.sampled_from([(1,), (1, 2)])),
            "vpp": draw(st.sampled_from([(1,), (1, 2), (1, 2, 3)])),
            "schedule": draw(st.sampled_from([(1, 2), (0, 1, 3), (1, 4), (2, 3), (1, 2, 4)])),
            "zero": draw(st.sampled_from([(0, 1), (1, 3), (0, 3)])),
        },
    }


@pytest.mark.timeout(400)
@SETTINGS
@given(problem=problems())
def test_search_equals_brute_force(toy: Any, problem: dict[str, Any]) -> None:
    provider = toy(**problem)
    found = search(provider)
    want = best_layout(provider)
    if want is None:
        assert found.status == "infeasible"
        assert found.best is None
        return
    assert found.status == "optimal"
    assert found.best is not None
    assert found.best.time_s == pytest.approx(want[0], rel=1e-9)
    # The layout that is named has that time, and the program over columns finds it too.
    assert best_time(provider, found.best.layout) == pytest.approx(want[0], rel=1e-9)
    assert found.milp["agrees"]
    assert found.milp["time_s"] == pytest.approx(want[0], rel=1e-7)
    assert found.bound_s <= want[0] * (1 + 1e-12)
    times = [solved.time_s for solved in found.near]
    assert all(a <= b * (1 + 1e-8) for a, b in pairwise(times))
    for solved in found.near[1:3]:
        assert best_time(provider, solved.layout) == pytest.approx(solved.time_s, rel=1e-9)


@settings(SETTINGS, max_examples=40)
@given(problem=problems())
def test_near_ties_are_complete(toy: Any, problem: dict[str, Any]) -> None:
    """Every layout within the distance is kept, up to the number asked for."""
    provider = toy(**{**problem, "num_gpus": 4})
    found = search(provider, keep=5, near=0.05, milp=False)
    times = [best_time(provider, layout) for layout in every_layout(provider)]
    times = sorted(t for t in times if t is not None)
    want = [t for t in times if t <= times[0] * 1.05][:5]
    assert [solved.time_s for solved in found.near] == pytest.approx(want, rel=1e-8)


@settings(SETTINGS, max_examples=40)
@given(problem=problems(), seed=st.integers(0, 10_000))
def test_no_bound_exceeds_the_optimum(toy: Any, problem: dict[str, Any], seed: int) -> None:
    """Cell, row and both split bounds of a layout are at most its own best time."""
    provider = toy(**problem)
    table = candidates(provider)
    assume(table.num_legal)
    run = BestFirst(provider, table, 1, 0.0, None)
    cell_bound, cell_floor = run.cell_bounds()
    cell, local = expand(table, np.arange(table.num_cells))
    chosen = np.array(random.Random(seed).sample(range(cell.size), min(12, cell.size)))
    for group in run.staged(cell[chosen], local[chosen]):
        times = {mix: run.bound_splits(group, np.inf, mix) for mix in ("fractional", "integer")}
        for i, position in enumerate(chosen[group.index]):
            at = np.array([position])
            layout = rows(table, cell[at], local[at]).take(0)
            best = best_time(provider, layout)
            if best is None:
                continue
            limit = best * (1 + 1e-9)
            assert cell_bound[cell[position]] <= limit
            assert cell_floor[cell[position]] <= provider.capacity
            assert group.bound.floor_bytes[i] <= provider.capacity * (1 + 1e-9)
            assert group.bound.time_s[i] <= limit
            assert times["fractional"][i] <= limit
            assert times["fractional"][i] <= times["integer"][i] * (1 + 1e-9)
            assert times["integer"][i] <= limit
            # A bound for a limit just above the optimum must not hide it.
            one = group.take(np.array([i]))
            for mix in ("fractional", "integer"):
                assert run.bound_splits(one, limit * (1 + 1e-6), mix)[0] <= limit


@settings(SETTINGS, max_examples=40)
@given(problem=problems())
def test_legal_count_has_a_closed_form(toy: Any, problem: dict[str, Any]) -> None:
    """Rows expanded, less the refused = layouts from plain loops, each once and legal."""
    provider = toy(**problem)
    table = candidates(provider)
    cell, local = expand(table, np.arange(table.num_cells))
    assert cell.size == table.num_legal + table.refused
    built = rows(table, cell, local)
    legal = np.flatnonzero(provider.legal(built))
    assert legal.size == table.num_legal == len(every_layout(provider))
    names = Layout.__dataclass_fields__
    keys = {tuple(int(getattr(built.take(i), n)) for n in names) for i in legal}
    want = {tuple(int(getattr(layout, n)) for n in names) for layout in every_layout(provider)}
    assert keys == want


def test_stages_are_what_their_time_says(toy: Any) -> None:
    """Mixes add up to the layers, fit in memory, and give the step time of the answer."""
    provider = toy(layer_kinds=(0, 0, 1, 1, 1, 1, 1, 1), num_gpus=8, capacity=20.0, acts=(3.0, 4.0))
    found = search(provider, fixed={"pp": 4, "zero": 1, "offload": 0})
    assert found.best is not None
    layout, stages = found.best.layout, found.best.stages
    table = Layout(**{n: np.array([getattr(layout, n)]) for n in Layout.__dataclass_fields__})
    costs = provider.stage_costs(table)
    assert sum(sum(stage.layers) for stage in stages) == 8
    times, steps = [], []
    recomputed = 0
    for s, stage in enumerate(stages):
        first, head = s == 0, s == provider.head_stage(table)[0]
        mix = np.array(stage.policies)
        assert tuple(mix.sum(axis=1)) == stage.layers
        recomputed += int(mix[:, 1:].sum())
        live = (mix * costs.layer_act_bytes[0]).sum() + first * costs.first_act_bytes[0]
        held = costs.fixed_bytes[0] + first * costs.first_bytes[0] + head * costs.head_bytes[0]
        held += np.array(stage.layers) @ costs.layer_static_bytes[0]
        held += provider.in_flight(table, s)[0] * live
        held += costs.working_bytes[0][mix > 0].max()
        assert held <= provider.capacity * (1 + 1e-9)
        used = np.where(mix > 0, mix * costs.layer_s[0], 0.0).sum()
        times.append(costs.stage_s[0] + first * costs.first_s[0] + head * costs.head_s[0] + used)
        steps.append(
            np.array(stage.layers) @ costs.layer_step_s[0]
            + first * costs.first_step_s[0]
            + head * costs.head_step_s[0]
        )
    assert recomputed > 0
    m, beta = costs.num_microbatches[0], costs.beta[0]
    value = (m - beta) * max(times) + beta * sum(times) + max(steps) + costs.constant_s[0]
    assert value == pytest.approx(found.best.time_s, rel=1e-12)


def test_same_answer_every_time(toy: Any) -> None:
    arguments = {"layer_kinds": (0,) + (1,) * 7, "num_gpus": 8, "capacity": 14.0}
    first = search(toy(**arguments))
    again = search(toy(**arguments))
    assert first.near == again.near
    assert first.counts == again.counts
    assert first.bound_s == again.bound_s


def test_equal_times_go_to_the_simplest_layout(toy: Any) -> None:
    """On one GPU all schedules, shards and ZeRO stages come to the same; the plain one is named."""
    found = search(toy(layer_kinds=(0,) * 4, num_gpus=1, capacity=90.0))
    assert found.best is not None
    assert (found.best.layout.zero, found.best.layout.offload) == (0, 0)


def test_nothing_fits_names_what_misses_least(toy: Any) -> None:
    provider = toy(layer_kinds=(0,) * 6, num_gpus=2, capacity=2.5)
    found = search(provider)
    assert found.status == "infeasible"
    assert found.nearest is not None
    assert found.nearest.missing_bytes == pytest.approx(found.nearest.needed_bytes - 2.5)
    assert sum(found.nearest.terms_bytes.values()) == pytest.approx(found.nearest.needed_bytes)
    # With what it misses it fits, with a little less it does not.
    assert fits(toy(layer_kinds=(0,) * 6, num_gpus=2, capacity=found.nearest.needed_bytes + 1e-9))
    assert not fits(toy(layer_kinds=(0,) * 6, num_gpus=2, capacity=2.5))


def test_least_gpus_is_the_least(toy: Any) -> None:
    def make(number: int) -> Any:
        return toy(layer_kinds=(0,) * 6, num_gpus=number, capacity=5.0, batch=24)

    found = least_gpus(make, step=2, most=64)
    want = next(n for n in range(2, 65, 2) if fits(make(n)))
    assert (found.num_gpus, found.proven) == (want, True)
    assert want > 2
    assert least_gpus(make, step=2, most=want - 2).num_gpus is None


def test_fixed_degrees_are_kept_and_bad_ones_refused(toy: Any) -> None:
    provider = toy(layer_kinds=(0,) * 8, num_gpus=8)
    found = best_with(provider, {"tp": 2, "pp": 2})
    assert found.best is not None
    assert (found.best.layout.tp, found.best.layout.pp) == (2, 2)
    everything = [
        best_time(provider, layout)
        for layout in every_layout(provider)
        if (layout.tp, layout.pp) == (2, 2)
    ]
    assert found.best.time_s == pytest.approx(min(t for t in everything if t is not None))
    with pytest.raises(LayoutError, match="tp=3 is not possible"):
        best_with(provider, {"tp": 3})
    with pytest.raises(LayoutError, match="recompute cannot be fixed"):
        best_with(provider, {"recompute": 1})
    best = search(provider).best
    assert best is not None
    around = neighbours(provider, best.layout, ("tp", "micro_batch"))
    for field, answers in around.items():
        for value, answer in answers.items():
            if answer.best is not None:
                assert getattr(answer.best.layout, field) == value
                assert answer.best.time_s >= best.time_s * (1 - 1e-9)


def test_time_limit_is_told(toy: Any) -> None:
    """Stopped at once: no claim beyond the bound."""
    found = search(toy(layer_kinds=(0,) * 8, num_gpus=8), time_limit_s=0.0)
    want = search(toy(layer_kinds=(0,) * 8, num_gpus=8)).best
    assert want is not None
    assert found.status == "feasible"
    assert found.bound_s <= want.time_s


def test_alternating_layers_use_positions(toy: Any) -> None:
    order = layer_order((0, 1) * 4, 2)
    assert order.form == "any"
    provider = toy(layer_kinds=(0, 1) * 4, num_gpus=4, capacity=900.0)
    table = candidates(provider)
    run = BestFirst(provider, table, 1, 0.0, None)
    cell, local = expand(table, np.arange(table.num_cells))
    groups = run.staged(cell, local)
    assert any(isinstance(group.splits, Positions) for group in groups)
    patterned = [g for g in groups if not isinstance(g.splits, Positions)]
    # Interleaved stages of a mixed order need equal chunks: 8 layers do not divide by 3 chunks.
    assert patterned
    for group in patterned:
        num_stages = group.table.in_flight.shape[1]
        vpp = int(rows(table, cell[group.index[:1]], local[group.index[:1]]).vpp[0])
        assert len(group.splits) == (8 % (num_stages * vpp) == 0)
        value = split_bound(group.table, group.splits, order, group.bound, np.inf, "fractional")
        assert np.isfinite(value).any() == (8 % (num_stages * vpp) == 0)


def test_other_solver_agrees(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HiGHS is missing CBC runs, and finds the same."""
    arguments = {"layer_kinds": (0,) + (1,) * 7, "num_gpus": 8, "capacity": 14.0}
    want = search(toy(**arguments))
    assert want.milp["solver"] == "HiGHS"
    monkeypatch.setattr(solver, "_has_highs", lambda: False)
    found = search(toy(**arguments))
    assert found.milp["solver"] == "CBC"
    assert found.milp["agrees"]
    assert found.near == want.near


def test_solver_that_stops_early_is_not_called_a_proof(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worse bound is told: a solver's gap is not hidden by the exact split's proof."""

    def stopped(program: Any, **more: Any) -> solver.Solution:
        return replace(solver.solve(program, **more), status="feasible", bound=0.9)

    monkeypatch.setattr(ilp, "solve", stopped)
    found = search(toy(layer_kinds=(0,) * 6, num_gpus=4))
    assert found.best is not None
    assert found.status == "feasible"
    assert found.gap == pytest.approx(0.1, abs=1e-5)
    assert found.bound_s == pytest.approx(0.9 * found.best.time_s, rel=1e-5)
