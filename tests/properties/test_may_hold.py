"""Where a job cannot keep its state once, no search finds a layout that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hwprofiles.loader import load_cluster
from planner.memory import may_hold
from planner.presets_index import load_model
from planner.provider import ModelProvider
from planner.runtime import load_runtime
from planner.search.search import fits
from planner.setting import Setting
from planner.specs import TrainSpec

JOBS = [
    ("llama-3-70b", "dgx-a100-80gb", "megatron-core"),
    ("llama-3-70b", "rtx4090", "fsdp2"),
    ("mixtral-8x22b", "l40s", "megatron-core"),
    ("qwen3-30b-a3b", "rtx4090", "megatron-core"),
]


@pytest.mark.parametrize(("model", "cluster", "runtime"), JOBS)
def test_nothing_fits_where_the_state_does_not(model: str, cluster: str, runtime: str) -> None:
    train = TrainSpec(64, 1024, runtime=runtime)
    setting = Setting(load_model(model), train, load_cluster(cluster), load_runtime(runtime), 8)
    refused = 0
    for num_gpus in (1, 2, 4, 8, 16, 32):
        one = ModelProvider(replace(setting, num_gpus=num_gpus), {}, {})
        values = one.space().values
        if not may_hold(one.setting, values["zero"], values["offload"]):
            refused += 1
            assert not fits(one)
    assert 0 < refused < 6
