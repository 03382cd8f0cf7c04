"""A run, its measurements and a calibration on GPUs, by the same code as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from executor.calibrate import calibrate  # noqa: E402
from executor.compare import compare  # noqa: E402
from executor.launch import start  # noqa: E402
from executor.run import RunOptions, run_plan  # noqa: E402
from hwprofiles.loader import load_cluster  # noqa: E402
from planner import api  # noqa: E402
from planner.plan import Plan  # noqa: E402
from tests.parity.models import dense_model  # noqa: E402


def plan_of(layout: str, gpus: int, precision: str) -> Plan:
    return api.estimate(
        dense_model(vocab_size=96),
        layout=layout,
        cluster="dgx-h100",
        gpus=gpus,
        global_batch_size=8,
        seq_len=64,
        runtime="shardwise",
        precision=precision,
    ).plan


def losses(layout: str, gpus: int, precision: str, device: str) -> list[float]:
    options = RunOptions(steps=4, device=device, quiet=True, timeout_s=60.0)
    plan = plan_of(layout, gpus, precision)
    method = "spawn" if device == "cuda" else "fork"
    found = start(run_plan, gpus, (plan, options), time_limit_s=100.0, method=method)[0]
    assert found.device_type == device
    if device == "cuda":
        assert {rank.memory_kind for rank in found.ranks} == {"allocated"}
        assert compare(plan, found)["time"]["counts"]
    return [step.loss for step in found.steps]


def test_one_gpu_learns_as_the_cpu_does() -> None:
    # The same data; weights come from another generator, so only the way down is alike.
    found = losses("dp=1", 1, "fp32", "cuda")
    assert found[-1] < found[0]


def test_half_precision_follows_full_precision() -> None:
    full, half = (losses("dp=1", 1, precision, "cuda") for precision in ("fp32", "bf16"))
    assert half == pytest.approx(full, abs=0.05)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=3", "tp=2", "pp=2", "cp=2"])
def test_two_gpus_are_one(layout: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("each of its two ranks needs a GPU of its own: NCCL refuses to share one")
    assert losses(layout, 2, "fp32", "cuda") == pytest.approx(
        losses("dp=1", 1, "fp32", "cuda"), abs=1e-3
    )


def test_a_gpu_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    told = calibrate(path, device="cuda", nproc=None, quick=True)
    cluster = load_cluster(path)
    assert told["device_type"] == "cuda"
    assert cluster.device.gemm["bf16"].kind == "measured"
    # bf16 products on tensor cores beat fp32 ones.
    assert told["gemm_flops_per_s"]["bf16"] > told["gemm_flops_per_s"]["fp32"]
