"""Every shipped model and every config of the reference set can be costed, odd layers included."""

from pathlib import Path

import numpy as np
import pytest

from planner.presets_index import available_models
from planner.problem import make_setting
from planner.provider import ModelProvider
from planner.search.candidates import candidates, expand, rows

CONFIGS = sorted((Path(__file__).parents[1] / "reference" / "hf_configs").glob("*.json"))


@pytest.mark.parametrize("name", [*available_models(), *map(str, CONFIGS)], ids=lambda n: n[-40:])
def test_a_legal_layout_has_finite_costs(name: str) -> None:
    setting = make_setting(name, cluster="dgx-h100", gpus=8, global_batch_size=16, seq_len=2048)
    provider = ModelProvider(setting)
    table = candidates(provider)
    cell, local = expand(table, np.arange(min(2, table.num_cells)))
    assert cell.size
    costs = provider.stage_costs(rows(table, cell, local))
    assert np.isfinite(costs.layer_static_bytes).all()
    assert np.isfinite(costs.layer_s.min(axis=2)).all()
    assert (costs.layer_s > 0).all()
