"""No layout with another degree is faster than the answer: each search proves the others."""

from typing import Any

import pytest

import shardwise

JOBS: dict[str, dict[str, Any]] = {
    # Offload on ranks that share nothing: the ZeRO stage still says what is offloaded.
    "offloaded": {"model": "qwen2.5-32b", "cluster": "rtx4090", "gpus": 8, "seq_len": 4096},
    "one gpu": {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 1, "seq_len": 4096},
    "experts": {"model": "mixtral-8x7b", "cluster": "dgx-a100-80gb", "gpus": 32, "seq_len": 4096},
    "long": {"model": "llama-3-8b", "cluster": "dgx-h100", "gpus": 16, "seq_len": 131072},
    "sharded": {
        "model": "qwen3-8b",
        "cluster": "l40s",
        "gpus": 16,
        "seq_len": 2048,
        "runtime": "fsdp2",
    },
    "kinds": {"model": "gemma-3-12b", "cluster": "dgx-h200", "gpus": 16, "seq_len": 8192},
}


@pytest.mark.parametrize("name", sorted(JOBS))
def test_no_neighbour_is_faster(name: str) -> None:
    job = dict(JOBS[name])
    answer = shardwise.plan(job.pop("model"), global_batch_size=64, **job)
    best_s = answer["prediction"]["step_time_s"]
    faster = [
        (row["degree"], row["value"], row["step_time_s"])
        for row in answer["why_not"]
        if row["step_time_s"] is not None and row["step_time_s"] < best_s * (1 - 1e-6)
    ]
    assert answer["why_not"]
    assert faster == []
