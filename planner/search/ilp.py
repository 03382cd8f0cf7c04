"""The mixed integer program over the last few layouts and their stage columns.

    min  sum_l A_l M_l + beta_l sum_sj t_lsj x_lsj + E_l + C_l y_l          A = m - beta
    choice       sum_l y_l = 1
    columns      sum_j x_lsj = y_l                          every problem l, stage s
    layers       sum_sj j x_lsj = length_l y_l              every l            (layers placed)
    flow         a path over positions instead of both, where columns depend on the position
    bottleneck   sum_j t_lsj x_lsj <= M_l,  sum_j e_lsj x_lsj <= E_l       every l, s
    cuts         M_l >= Mmin_l y_l,  E_l >= Emin_l y_l      every l

x and y are binary. l runs over (layout, pattern). Every l has its own M and E and no big-M: the
relaxation is the best of the layouts' own. Memory is in the columns (which mixes fit), so that rows
hold seconds only. Columns slower than any answer may be are left out (the window).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from planner.search.bounds import RowBound
from planner.search.columns import Stages
from planner.search.orders import LayerOrder, Pattern
from planner.search.positions import Positions
from planner.search.solver import solve
from planner.search.split import Path, paths, step_time

Problem = tuple[Stages, "tuple[Pattern, ...] | Positions", LayerOrder, RowBound]
Terms = list[tuple[Any, float]]


@dataclass(slots=True)
class Model:
    """The program and its variables: `chosen[l]` is y, `columns[l]` maps (s, x, j) to x."""

    program: pulp.LpProblem
    scale: float  # seconds per unit of the objective
    layouts: list[Stages]
    paths: list[Path]
    chosen: list[Any]
    slowest: list[Any]
    step: list[Any]
    columns: list[dict[tuple[int, int, int], Any]]


def define_model(problems: Sequence[Problem], limit_s: float) -> Model:
    """The whole program for split problems of layouts, with columns for answers up to `limit_s`."""
    layouts: list[Stages] = []
    found: list[Path] = []
    for table, splits, order, bound in problems:
        for path in paths(table, splits, order, bound, limit_s):
            layouts.append(table)
            found.append(path)
    # Seconds per step, so that coefficients are near one.
    model = Model(
        pulp.LpProblem("stage_split", pulp.LpMinimize), limit_s, layouts, found, [], [], [], []
    )
    define_columns(model)
    define_objective(model)
    define_choice(model)
    define_layers(model)
    define_bottleneck(model)
    define_cuts(model)
    return model


def define_columns(model: Model) -> None:
    """Variables: y and x (binary), M and E of every problem."""
    for number, path in enumerate(model.paths):
        model.chosen.append(model.program.add_variable(f"y_{number}", cat=pulp.LpBinary))
        model.slowest.append(model.program.add_variable(f"M_{number}", lowBound=0))
        model.step.append(model.program.add_variable(f"E_{number}", lowBound=0))
        model.columns.append(
            {
                (int(s), int(x), int(j)): model.program.add_variable(
                    f"x_{number}_{s}_{x}_{j}", cat=pulp.LpBinary
                )
                for s, x, j in zip(*np.nonzero(np.isfinite(path.times)), strict=True)
            }
        )


def define_objective(model: Model) -> None:
    """Step time, in units of `scale`."""
    terms: Terms = []
    for number, path in enumerate(model.paths):
        costs = model.layouts[number].costs
        m, beta = float(costs.num_microbatches[0]), float(costs.beta[0])
        terms.append((model.slowest[number], m - beta))
        terms.append((model.step[number], 1.0))
        terms.append((model.chosen[number], float(costs.constant_s[0]) / model.scale))
        terms += [
            (variable, beta * float(path.times[at]) / model.scale)
            for at, variable in model.columns[number].items()
        ]
    model.program.setObjective(pulp.LpAffineExpression(terms))


def define_choice(model: Model) -> None:
    """One problem is chosen."""
    _add(model, [(y, 1.0) for y in model.chosen], "==", 1.0, "choice")


def define_layers(model: Model) -> None:
    """Every stage of the chosen problem takes one column, and together they place all layers."""
    for number, path in enumerate(model.paths):
        y = model.chosen[number]
        columns = model.columns[number]
        num_stages, ends, _ = path.times.shape
        if ends > 1:
            _define_flow(model, number, path)
            continue
        for s in range(num_stages):
            terms: Terms = [(v, 1.0) for at, v in columns.items() if at[0] == s]
            _add(model, [*terms, (y, -1.0)], "==", 0.0, f"columns_{number}_{s}")
        placed: Terms = [(v, float(at[2])) for at, v in columns.items()]
        _add(
            model,
            [*placed, (y, -float(path.length))],
            "==",
            0.0,
            f"layers_{number}",
        )


def _define_flow(model: Model, number: int, path: Path) -> None:
    """A path over positions: what ends at x after stage s - 1 starts at x in stage s."""
    num_stages = path.times.shape[0]
    balance: dict[tuple[int, int], Terms] = {}
    for (s, x, j), variable in model.columns[number].items():
        balance.setdefault((s, x - j), []).append((variable, -1.0))
        balance.setdefault((s + 1, x), []).append((variable, 1.0))
    y = model.chosen[number]
    for node in ((0, 0), (num_stages, path.length)):
        balance.setdefault(node, []).append((y, 1.0 if node[0] == 0 else -1.0))
    for (s, x), terms in sorted(balance.items(), key=lambda item: item[0]):
        _add(model, terms, "==", 0.0, f"flow_{number}_{s}_{x}")


def define_bottleneck(model: Model) -> None:
    """M and E are at least what every stage has."""
    for number, path in enumerate(model.paths):
        for s in range(path.times.shape[0]):
            mine = [(at, v) for at, v in model.columns[number].items() if at[0] == s]
            for name, variable, column in (
                ("slowest", model.slowest[number], path.times),
                ("step", model.step[number], np.broadcast_to(path.steps, path.times.shape)),
            ):
                terms: Terms = [(v, float(column[at]) / model.scale) for at, v in mine]
                _add(
                    model,
                    [*terms, (variable, -1.0)],
                    "<=",
                    0.0,
                    f"{name}_{number}_{s}",
                )


def define_cuts(model: Model) -> None:
    """M and E are at least their smallest possible values: nearly closes the relaxation."""
    for number, path in enumerate(model.paths):
        steps = np.where(np.isfinite(path.times), path.steps, np.inf)
        least_step = float(steps.min(axis=(1, 2)).max())
        for name, variable, value in (
            ("slowest", model.slowest[number], path.slowest),
            ("step", model.step[number], least_step),
        ):
            _add(
                model,
                [(variable, 1.0), (model.chosen[number], -value / model.scale)],
                ">=",
                0.0,
                f"{name}_cut_{number}",
            )


def confirm(
    problems: Sequence[Problem], best_s: float, *, time_limit_s: float | None = 20.0
) -> Mapping[str, Any]:
    """Solve the program over `problems` and compare with the exact split's step time `best_s` [s].

    Returns status, solver, step time recomputed from the chosen columns (never the solver's own
    objective), bound_s, number of variables and of problems, agrees (to 1e-7 relative).
    """
    model = define_model(problems, best_s * (1 + 1e-6))
    solution = solve(model.program, time_limit_s=time_limit_s)
    num_variables = sum(len(c) + 3 for c in model.columns)
    report: dict[str, Any] = {
        "status": solution.status,
        "solver": solution.solver,
        "variables": num_variables,
        "layouts": len(problems),
        "problems": len(model.paths),
    }
    time = recomputed(model) if solution.status in ("optimal", "feasible") else float("inf")
    agrees = abs(time - best_s) <= 1e-7 * best_s
    # Where both agree the proof of the exact search stands. Where not, the worse bound is told.
    proven = best_s if agrees and solution.status == "optimal" else solution.bound * model.scale
    return {**report, "time_s": time, "agrees": agrees, "bound_s": min(best_s, proven)}


def recomputed(model: Model) -> float:
    """Step time of the chosen columns [s]."""
    best = float("inf")
    for number, path in enumerate(model.paths):
        if (model.chosen[number].value() or 0.0) < 0.5:
            continue
        at = [key for key, v in model.columns[number].items() if (v.value() or 0.0) > 0.5]
        if len(at) != path.times.shape[0]:
            continue
        index = tuple(np.array(sorted(at)).T)
        steps = np.broadcast_to(path.steps, path.times.shape)
        best = min(best, step_time(model.layouts[number], path.times[index], steps[index]))
    return best


def _add(model: Model, terms: Terms, sense: str, value: float, name: str) -> None:
    # From pairs: summing expressions is quadratic.
    expression = pulp.LpAffineExpression(terms)
    row = {"==": expression == value, "<=": expression <= value, ">=": expression >= value}[sense]
    model.program += row, name
