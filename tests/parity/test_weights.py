"""Weights of any layout from and to Hugging Face folders, and into shards from a seed."""

from pathlib import Path

import numpy as np
import pytest

from executor.hf_weights import load_weights, read_details, save_weights
from executor.transformer import Transformer
from planner.specs import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from tests.parity.models import dense_model, of_layers
from tests.parity.ranks import run_ranks
from tests.parity.running import SEED, exported, refilled
from tests.parity.training import plan_of

MIXTRAL = of_layers("tiny-mixtral", LayerSpec(AttentionSpec(4, 2, 16), moe=MoeSpec(4, 2, 32)))
CASES = [
    (dense_model(2), 4, "tp=2 dp=2 zero=3"),
    (dense_model(2), 4, "pp=2 dp=2 zero=3"),
    (dense_model(2), 4, "pp=2 tp=2"),
    (MIXTRAL, 4, "dp=4 ep=2 zero=3"),
    (MIXTRAL, 4, "tp=2 dp=2 ep=4"),
]
IDS = [f"{model.name}-{layout}" for model, _, layout in CASES]


@pytest.mark.parametrize(("model", "gpus", "layout"), CASES, ids=IDS)
def test_every_layout_writes_the_whole_model_once(
    model: ModelSpec, gpus: int, layout: str, tmp_path: Path
) -> None:
    results = run_ranks(exported, gpus, plan_of(model, layout, gpus), str(tmp_path))
    (expected,) = run_ranks(exported, 1, plan_of(model, "micro_batch=8", 1), str(tmp_path / "one"))
    module = Transformer(model, max_seq_len=32, details=read_details(tmp_path))
    load_weights(module, model, tmp_path)
    values = dict(module.named_parameters())
    assert values.keys() == expected.keys()
    trained = {name: value for result in results for name, value in result.items()}
    for name, value in values.items():
        np.testing.assert_array_equal(value.detach().numpy(), trained[name], err_msg=name)
        np.testing.assert_allclose(trained[name], expected[name], atol=1e-5, rtol=0, err_msg=name)
    stages = {path.name[:14] for path in tmp_path.glob("*.safetensors")}
    assert len(stages) == (2 if "pp=2" in layout else 1)


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    [*CASES, (MIXTRAL, 8, "pp=2 tp=2 dp=2 ep=2 zero=3")],
    ids=[*IDS, "four axes"],
)
def test_shards_are_filled_as_they_lie(
    model: ModelSpec, gpus: int, layout: str, tmp_path: Path
) -> None:
    """Dimensions that tensor parallelism and FSDP both cut, and stages with parts of the model."""
    whole = Transformer(model, max_seq_len=32)
    whole.init_weights(SEED)
    save_weights([whole], model, tmp_path)
    for wrong in run_ranks(refilled, gpus, plan_of(model, layout, gpus), str(tmp_path)):
        assert wrong == []
