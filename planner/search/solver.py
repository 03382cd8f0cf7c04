"""The one place that knows which solver runs: HiGHS through PuLP, CBC where HiGHS is missing.

Statuses are read with care. PuLP calls a stop at the time limit "Optimal": `sol_status` tells them
apart, and the bound comes from the solver's own information.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pulp

from planner.errors import ShardwiseError

GAP = 1e-9  # relative; PuLP's HiGHS would stop at 1e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver says of a minimisation: `status` is ``optimal``, ``feasible`` (stopped early
    with a solution), ``infeasible`` or ``unknown``; `bound` is below every solution, -inf if not
    known."""

    status: str
    value: float
    bound: float
    solver: str


def solve(problem: pulp.LpProblem, *, time_limit_s: float | None = None) -> Solution:
    """Minimise `problem`; the values of its variables are then set if the status has a solution."""
    engine, name = _engine(time_limit_s)
    problem.solve(engine)
    value = pulp.value(problem.objective)
    solved = problem.sol_status == pulp.LpSolutionOptimal
    status = {
        pulp.LpSolutionOptimal: "optimal",
        pulp.LpSolutionIntegerFeasible: "feasible",
        pulp.LpSolutionInfeasible: "infeasible",
    }.get(problem.sol_status, "unknown")
    bound = -math.inf
    if name == "HiGHS":
        info: Any = problem.solverModel.getInfo()
        if info.mip_node_count >= 0 and math.isfinite(info.mip_dual_bound):
            bound = float(info.mip_dual_bound)
        # A limit that was hit is reported as optimal by some versions: the gap is the judge.
        if solved and math.isfinite(info.mip_gap) and info.mip_gap > 1e-6:
            status = "feasible"
    if status == "optimal":
        bound = max(bound, float(value)) if bound == -math.inf else bound
    return Solution(status, math.nan if value is None else float(value), bound, name)


def _engine(time_limit_s: float | None) -> tuple[Any, str]:
    if _has_highs():
        # HiGHS keeps the thread count of its first solve in a process: always one.
        return pulp.HiGHS(msg=False, threads=1, gapRel=GAP, timeLimit=time_limit_s), "HiGHS"
    # PuLP 3 ships a CBC program, later ones take that of the system or of the extra pulp[cbc].
    shipped = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    program = pulp.COIN_CMD(path=shipped, msg=False, threads=1, gapRel=GAP, timeLimit=time_limit_s)
    if not program.available():
        raise ShardwiseError(
            "no solver is installed: the search confirms its answer with HiGHS or CBC; "
            "pip install highspy",
            legal={"solver": ["HiGHS", "CBC"]},
        )
    return program, "CBC"


@lru_cache
def _has_highs() -> bool:
    """Whether highspy is there. Its first object prints a banner, past Python, on file descriptor
    1: that goes nowhere, since stdout may be a document."""
    try:
        from highspy import Highs
    except ImportError:
        return False
    try:
        kept = os.dup(1)
    except OSError:  # stdout is closed: nothing to keep clean
        return True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        start: Any = Highs
        start()
    finally:
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
    return True
