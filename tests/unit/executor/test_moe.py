"""Experts: dispatch against the plain sum, the balancing loss, and tokens dealt in turns."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from executor.balancing import BiasBalancing  # noqa: E402
from executor.details import Details  # noqa: E402
from executor.moe import Moe  # noqa: E402
from executor.transformer import Transformer  # noqa: E402
from planner.specs import AttentionSpec, LayerSpec, ModelSpec, MoeSpec  # noqa: E402

SPEC = MoeSpec(6, 2, 16)


def moe_of(spec: MoeSpec = SPEC, **details: object) -> Moe:
    moe = Moe(spec, 32, None, Details(**details))
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return moe


def inputs(rows: int = 3, seq_len: int = 10) -> object:
    return torch.randn(rows, seq_len, 32, generator=torch.Generator().manual_seed(1))


def plain_sum(moe: Moe, x: object) -> object:
    """Every expert on every token, weighted."""
    _, weights, chosen = moe.route(x.flatten(0, -2))
    flat = x.flatten(0, -2)
    out = torch.zeros_like(flat)
    for expert in range(moe.spec.num_experts):
        up = functional.linear(flat, moe.experts.up[expert])
        if moe.experts.gate is None:
            wide = functional.silu(up)
        else:
            wide = functional.silu(functional.linear(flat, moe.experts.gate[expert])) * up
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        out = out + share * functional.linear(wide, moe.experts.down[expert])
    return out.view_as(x)


@pytest.mark.parametrize("gated", [True, False])
def test_dispatch_is_the_weighted_sum_over_experts(gated: bool) -> None:
    moe = moe_of(replace(SPEC, gated=gated)).eval()
    other = moe_of(replace(SPEC, gated=gated)).eval()
    x = inputs()
    own, expected = moe(x), plain_sum(other, x)
    torch.testing.assert_close(own, expected)
    grad = torch.randn_like(own)
    own.backward(grad)
    expected.backward(grad)
    for (name, p), q in zip(moe.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    moe = moe_of()
    moe(inputs(1, 1)).sum().backward()
    used = moe.experts.up.grad.flatten(1).any(-1)
    assert used.sum() == SPEC.num_experts_per_tok


def test_weights_of_chosen_experts_sum_to_one_where_rescaled() -> None:
    flat = inputs().flatten(0, -2)
    _, weights, _ = moe_of(routed_scaling_factor=2.5).route(flat)
    torch.testing.assert_close(weights.sum(-1), torch.full((30,), 2.5))
    probabilities, weights, chosen = moe_of(norm_topk_prob=False).route(flat)
    torch.testing.assert_close(weights, probabilities.gather(-1, chosen))


def test_correction_bias_steers_the_choice_and_not_the_weight() -> None:
    moe = moe_of(replace(SPEC, aux_free_bias=True), router_score="sigmoid", norm_topk_prob=False)
    flat = inputs().flatten(0, -2)
    before = moe.route(flat)[2]
    moe.correction_bias[4] = 10.0
    _, weights, chosen = moe.route(flat)
    assert (chosen == 4).any(-1).all()
    assert not torch.equal(before, chosen)
    assert weights.max() < 1.0


def test_balancing_loss_is_its_coefficient_where_tokens_are_spread_evenly() -> None:
    moe = moe_of(aux_loss_coefficient=0.5)
    even = torch.full((2, 6, 6), 1 / 6)
    chosen = torch.arange(12).view(1, 6, 2).expand(2, 6, 2) % 6
    assert moe.balancing_loss(even, chosen).item() == pytest.approx(2 * 0.5)
    one_sided = torch.zeros_like(chosen)
    steep = torch.zeros(2, 6, 6)
    steep[..., 0] = 1.0
    assert moe.balancing_loss(steep, one_sided).item() == pytest.approx(2 * 0.5 * 6)


def aux_gradient(parts: list, recompute: bool = False) -> tuple:
    moe = moe_of(aux_loss_coefficient=0.1)
    moe.aux_scale = 1.0
    for part in parts:
        x = part.clone().requires_grad_()
        out = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
        (0.0 * out).sum().backward()
    return moe.router.weight.grad, float(moe.aux_loss)


def test_balancing_loss_does_not_depend_on_the_cut_into_micro_batches() -> None:
    x = inputs(4)
    grad, loss = aux_gradient([x])
    assert grad.abs().max() > 1e-4
    for parts in (x.split(1), [x[:3], x[3:]]):
        other, other_loss = aux_gradient(list(parts))
        torch.testing.assert_close(other, grad)
        assert other_loss == pytest.approx(loss)


def test_a_recomputed_layer_books_its_balancing_loss_once() -> None:
    x = inputs()
    grad, loss = aux_gradient([x])
    again, again_loss = aux_gradient([x], recompute=True)
    torch.testing.assert_close(again, grad)
    assert again_loss == pytest.approx(loss)


def test_balancing_loss_of_a_cut_sequence_is_that_of_the_whole() -> None:
    moe = moe_of(aux_loss_coefficient=0.1)
    probabilities, _, chosen = moe.route(inputs(2, 8).flatten(0, -2))
    probabilities, chosen = probabilities.view(2, 8, 6), chosen.view(2, 8, 2)
    whole = moe.balancing_loss(probabilities, chosen)
    halves = []
    moe.sum_over_sequence = lambda x: halves.append(x) or x
    for half in (slice(0, 4), slice(4, 8)):
        moe.balancing_loss(probabilities[:, half], chosen[:, half])
    moe.sum_over_sequence = lambda x: halves[0] + halves[1]
    torch.testing.assert_close(moe.balancing_loss(probabilities[:, :4], chosen[:, :4]), whole)


def test_tokens_dealt_in_turns_are_counted_without_looking() -> None:
    moe = moe_of()
    moe.balanced = True
    _, _, chosen = moe.route(inputs(1, 7).flatten(0, -2))
    counts = torch.bincount(chosen.flatten(), minlength=6).tolist()
    assert counts == moe.balanced_counts(7) == [3, 3, 2, 2, 2, 2]


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_products_are_those_one_by_one(gated: bool) -> None:
    """The path of bf16 on a GPU, which runs on CPU too; an expert has no rows."""
    experts = moe_of(replace(SPEC, gated=gated)).experts
    counts = [5, 0, 3, 8, 1, 7]
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(2))
    weights = torch.rand(24, generator=torch.Generator().manual_seed(3))
    results = []
    for grouped in (False, True):
        experts.zero_grad()
        rows = x.clone().requires_grad_()
        if grouped:
            gate, up, down = experts.gate, experts.up, experts.down
            out = experts._grouped(rows, counts, weights[:, None], gate, up, down)
        else:
            out = experts(rows, counts, weights)
        out.square().sum().backward()
        results.append([out, rows.grad, *(p.grad.clone() for p in experts.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_bias_makes_a_crowded_expert_harder_to_choose() -> None:
    spec = replace(SPEC, aux_free_bias=True)
    kinds = (LayerSpec(AttentionSpec(4, 4, 8), moe=spec),)
    model = ModelSpec("tiny", 32, 50, kinds, (0,))
    module = Transformer(model, max_seq_len=16)
    module.init_weights(0)
    moe = module.moe_layers()[0]
    moe.details = Details(router_score="sigmoid", bias_update_speed=0.05)
    # All tokens would go to experts 0 and 1.
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.correction_bias[:2] = 0.3
    balancing = BiasBalancing([module], model)
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    module(tokens)
    counts = balancing.take_counts(torch.device("cpu"))
    assert counts.tolist() == [32, 32, 0, 0, 0, 0]
    assert balancing.take_counts(torch.device("cpu")).sum() == 0
    for _ in range(4):
        balancing.update(counts)
    torch.testing.assert_close(moe.correction_bias, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.2]))
    module(tokens)
    assert balancing.take_counts(torch.device("cpu"))[:2].sum() == 0
