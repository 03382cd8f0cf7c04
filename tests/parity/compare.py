"""Compares a run on several ranks with the same run in one process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.plan import Plan, plan_text
from tests.parity.ranks import run_ranks
from tests.parity.training import Result, reference_plan, train

TOLERANCE = 1e-5
RELATIVE = 1e-4  # of the largest value of a tensor: small gradients are held to more than 1e-5
NOISE = 1e-9  # a key's bias has no gradient but what rounding leaves: softmax does not see it
_references: dict[str, Result] = {}


def reference(plan: Plan) -> Result:
    """The single process; several plans share one."""
    alone = reference_plan(plan)
    key = plan_text(alone)
    if key not in _references:
        (_references[key],) = run_ranks(train, 1, alone)
    return _references[key]


def assert_parity(plan: Plan, *, timeout_s: float = 100.0) -> list[Result]:
    """Loss, norm, every gradient and every updated parameter are those of a single process."""
    expected = reference(plan)
    assert expected.missing == []
    assert expected.norms[-1] > 0.2, "clipping does not bite, so it is not tested"
    results = run_ranks(train, plan.num_gpus, plan, timeout_s=timeout_s)
    held: set[str] = set()
    for rank, result in enumerate(results):
        assert result.missing == [], f"rank {rank} has no gradient for {result.missing[:4]}"
        np.testing.assert_allclose(result.losses, expected.losses, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(result.norms, expected.norms, atol=TOLERANCE, rtol=1e-5)
        for what, found, wanted in (
            ("gradient", result.grads, expected.grads),
            ("parameter", result.params, expected.params),
        ):
            held |= found.keys()
            assert worst(found, wanted) == [], f"{what}s of rank {rank}: {worst(found, wanted)[:4]}"
    assert held == expected.params.keys()
    return results


def worst(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> list[str]:
    """Names whose values differ, and by how much, the worst first."""
    rows = []
    for name, value in found.items():
        assert value.shape == wanted[name].shape, name
        error = float(np.abs(value - wanted[name]).max())
        scale = float(np.abs(wanted[name]).max())
        if not error <= min(TOLERANCE, max(RELATIVE * scale, NOISE)):
            rows.append((error, f"{name}: {error:.2e} of {scale:.2e}"))
    return [text for _, text in sorted(rows, reverse=True)]
