"""Biases that balance experts follow the tokens of all ranks: they are a single process's."""

import numpy as np
import pytest

from tests.parity.models import DEEPSEEK3
from tests.parity.ranks import run_ranks
from tests.parity.running import correction_biases
from tests.parity.training import plan_of

STEPS = 3
LAYOUTS = [(2, "dp=2 ep=2"), (2, "pp=2"), (2, "tp=2 ep=2"), (2, "cp=2 recompute=full")]


@pytest.fixture(scope="module")
def alone() -> dict:
    (found,) = run_ranks(correction_biases, 1, plan_of(DEEPSEEK3, "micro_batch=8", 1), STEPS)
    return found


@pytest.mark.parametrize(("gpus", "layout"), LAYOUTS, ids=[layout for _, layout in LAYOUTS])
def test_biases_are_a_single_processes(gpus: int, layout: str, alone: dict) -> None:
    ((name, bias),) = alone.items()
    assert name == "layers.1.moe.correction_bias"
    # Each step moves a bias by 0.001 up or down, or not where an expert has just the mean.
    assert np.abs(bias).max() == pytest.approx(0.001 * STEPS, abs=0.0011)
    assert bias.min() < 0 < bias.max()
    results = run_ranks(correction_biases, gpus, plan_of(DEEPSEEK3, layout, gpus), STEPS)
    held = [result[name] for result in results if name in result]
    assert len(held) == (1 if "pp=2" in layout else gpus)
    for found in held:
        np.testing.assert_allclose(found, bias, rtol=0, atol=1e-7)
