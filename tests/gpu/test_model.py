"""The reference model on a GPU does what it does on the CPU, in fp32, in bf16 and compiled."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor.moe import Moe
from executor.run import RunOptions, run_plan
from executor.transformer import Transformer, loss_sum
from planner.specs import ModelSpec
from tests.parity.models import DEEPSEEK3, GEMMA2, GPT2, QWEN2_MOE, QWEN3, dense_model
from tests.parity.training import plan_of

MODELS = {m.name: m for m in (dense_model(2), GPT2, QWEN3, GEMMA2, DEEPSEEK3, QWEN2_MOE)}


def built(model: ModelSpec, dtype: torch.dtype = torch.float32) -> Transformer:
    module = Transformer(model, max_seq_len=32)
    module.init_weights(0)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return module.to(dtype)


def gradients(module: Transformer, device: str, wrap: Callable = lambda module: module) -> dict:
    """Loss and gradients of one batch, on the CPU again."""
    module = module.to(device)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, module.model.vocab_size, (4, 33), generator=generator).to(device)
    loss = loss_sum(wrap(module)(tokens[:, :-1]), tokens[:, 1:]) / 128
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in module.named_parameters()}
    return found | {"loss": loss.detach().float().cpu()}


def assert_near(found: dict, expected: dict, tolerance: float) -> None:
    """By the norm of each gradient; those that are rounding alone, as of key biases, by the
    rest."""
    least = 1e-2 * max(value.norm() for value in expected.values())
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=least)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_the_cpus(name: str) -> None:
    model = MODELS[name]
    assert_near(gradients(built(model), "cuda"), gradients(built(model), "cpu"), 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_near(name: str) -> None:
    model = MODELS[name]
    found = gradients(built(model, torch.bfloat16), "cuda")
    expected = gradients(built(model), "cpu")
    assert abs(found["loss"] - expected["loss"]) < 0.03
    assert all(value.isfinite().all() for value in found.values())
    if not model.is_moe:
        assert_near(found, expected, 0.1)


def test_grouped_products_of_bf16_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiplying all experts in one launch or in turns: the same router, the same rows."""
    moe = built(QWEN2_MOE, torch.bfloat16).to("cuda").moe_layers()[0]
    x = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    grouped = run_moe(moe, x)
    monkeypatch.setattr(
        type(moe.experts),
        "_grouped",
        lambda self, rows, counts, scale, *_: one_by_one(self, rows, counts, scale),
    )
    single = run_moe(moe, x)
    for one, other in zip(grouped, single, strict=True):
        assert (one - other).float().norm() < 0.02 * other.float().norm()


def run_moe(moe: Moe, x: torch.Tensor) -> list[torch.Tensor]:
    moe.zero_grad()
    rows = x.clone().requires_grad_()
    out = moe(rows)
    out.square().sum().backward()
    return [out.detach(), rows.grad, moe.experts.up.grad.clone(), moe.experts.down.grad.clone()]


def one_by_one(experts, rows, counts, scale):  # type: ignore[no-untyped-def]
    outs, start = [], 0
    for expert, count in enumerate(counts):
        part, factor = rows[start : start + count], scale[start : start + count]
        gate = torch.nn.functional.silu(part @ experts.gate[expert].T)
        wide = gate * (part @ experts.up[expert].T)
        outs.append((wide * factor) @ experts.down[expert].T)
        start += count
    return torch.cat(outs)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_compiled_is_the_same() -> None:
    model = dense_model(2)
    plain = gradients(built(model), "cuda")
    compiled = gradients(built(model), "cuda", wrap=torch.compile)
    assert_near(compiled, plain, 1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_runs_on_one_gpu(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL with one rank: the same code path as on CPU."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    plan = plan_of(dense_model(2), "micro_batch=4", 1, precision=precision)
    options = RunOptions(steps=8, device="cuda", quiet=True, checkpoint_dir=tmp_path, every=4)
    try:
        measured = run_plan(plan, replace(options, learning_rate=1e-2))
    finally:
        torch.distributed.destroy_process_group()
    losses = [step.loss for step in measured.steps]
    assert losses[-1] < losses[0]
    assert measured.device_type == "cuda"
    assert all(rank.memory_kind == "allocated" for rank in measured.ranks)
