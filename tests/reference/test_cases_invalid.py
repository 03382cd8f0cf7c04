"""Layouts that people reported as wrongly refused, wrongly accepted or badly explained.

A test counts that no report is left without a judgement.
"""

from dataclasses import replace

import pytest

from planner.specs import AttentionSpec, LayerSpec, MlpSpec, TowerSpec
from tests import samples_legality as sample
from tests.reference import judgements_batch_and_experts, judgements_degrees
from tests.reference.reported import JUDGEMENTS, ROWS, refused

# Importing them fills JUDGEMENTS.
assert {function.__module__ for function in JUDGEMENTS.values()} == {
    judgements_batch_and_experts.__name__,
    judgements_degrees.__name__,
}


def test_every_report_has_a_judgement():
    assert len(ROWS) == 36
    assert set(JUDGEMENTS) == set(ROWS)


@pytest.mark.parametrize("case", sorted(ROWS))
def test_report(case):
    JUDGEMENTS[case](ROWS[case])


def test_a_head_of_the_tower_counts():
    tower_heads = AttentionSpec(12, 12, 64)
    model = sample.model(heads=32, kv_heads=8)
    tower = TowerSpec(768, 12, LayerSpec(tower_heads, mlp=MlpSpec(3072)), 196, 1_000_000)
    error = refused(replace(model, tower=tower), "tp=8", gpus=8)
    assert "vision tower" in error.message
    assert error.legal["tp"] == [1, 2, 4]
