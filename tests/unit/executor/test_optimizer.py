"""Optimizer, learning rate and clipping in one process; `tests/parity` has the meshes."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from executor.optimizer import (  # noqa: E402
    Hyperparameters,
    clip_grad_norm,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from planner.errors import InputError  # noqa: E402
from planner.specs import TrainSpec  # noqa: E402

TRAIN = TrainSpec(8, 32)
HYPER = Hyperparameters(learning_rate=1e-2, warmup_steps=0, weight_decay=0.1)


def parameters() -> list:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in [(4, 3), (3,)]
    ]


def set_gradients(params: list, factor: float = 1.0) -> None:
    for index, p in enumerate(params):
        p.grad = factor * torch.sin(torch.arange(p.numel()) + index).view_as(p)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_updates_are_torchs(name: str) -> None:
    own, other = parameters(), parameters()
    optimizer = make_optimizer(own, TrainSpec(8, 32, optimizer=name), 0, HYPER)
    groups = [{"params": other[:1], "weight_decay": 0.1}, {"params": other[1:], "weight_decay": 0}]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    adaptive = {} if name == "sgd" else {"betas": HYPER.betas, "eps": HYPER.eps}
    reference = kind(groups, lr=HYPER.learning_rate, **adaptive)
    for step in range(3):
        for params, some in ((own, optimizer), (other, reference)):
            set_gradients(params, 1.0 + step)
            some.step()
    for p, q in zip(own, other, strict=True):
        torch.testing.assert_close(p, q)


def test_vectors_do_not_decay() -> None:
    params = parameters()
    optimizer = make_optimizer(params, TRAIN, 0, HYPER)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert [decays[id(p)] for p in params] == [0.1, 0.0]


def test_other_optimizers_and_whole_parameters_under_zero_are_refused() -> None:
    with pytest.raises(InputError, match="legal are adamw, adam, sgd"):
        make_optimizer(parameters(), TrainSpec(8, 32, optimizer="muon"), 0)
    with pytest.raises(InputError, match="zero=2"):
        make_optimizer(parameters(), TRAIN, 2)


def test_clipping_is_torchs_and_a_vector_may_ride_along() -> None:
    own, other = parameters(), parameters()
    set_gradients(own)
    set_gradients(other)
    beside = torch.tensor([1.0, 2.0])
    norm = clip_grad_norm(own, 0.5, beside=beside)
    expected = torch.nn.utils.clip_grad_norm_(other, 0.5)
    assert float(norm) == pytest.approx(float(expected))
    assert norm > 0.5
    for p, q in zip(own, other, strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert beside.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("limit", [0.0, 100.0])
def test_small_gradients_are_left_alone(limit: float) -> None:
    params = parameters()
    set_gradients(params)
    before = params[0].grad.clone()
    clip_grad_norm(params, limit)
    torch.testing.assert_close(params[0].grad, before, rtol=0, atol=0)


def test_learning_rate_rises_then_falls_along_a_cosine() -> None:
    hyper = Hyperparameters(1.0, warmup_steps=4, total_steps=24, final_fraction=0.2)
    rates = [learning_rate(step, hyper) for step in range(30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[14] == pytest.approx(0.6)
    assert rates[24:] == pytest.approx([0.2] * 6)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    optimizer = make_optimizer(parameters(), TRAIN, 0)
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
