"""The reference model: counts, stages, seeds, what it keeps, and what it refuses."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from executor.attention import core_attention, rotate, window_mask  # noqa: E402
from executor.details import Details, RopeScaling  # noqa: E402
from executor.norms import RmsNorm, gated_activation  # noqa: E402
from executor.transformer import (  # noqa: E402
    Transformer,
    TransformerLayer,
    loss_sum,
    unsupported_parts,
)
from planner.errors import ModelError  # noqa: E402
from planner.flops import layer_operations  # noqa: E402
from planner.layout import Layout  # noqa: E402
from planner.operations import shard_of  # noqa: E402
from planner.parameters import total_parameters  # noqa: E402
from planner.presets_index import load_model  # noqa: E402
from planner.runtime import load_runtime  # noqa: E402
from planner.specs import (  # noqa: E402
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    TrainSpec,
)

GQA = AttentionSpec(4, 2, 16)
MLA = AttentionSpec(
    4, 4, 24, kind="mla", v_head_dim=16, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8
)
DENSE = LayerSpec(GQA, MlpSpec(128))
LATENT = LayerSpec(MLA, MlpSpec(128))
SPARSE = LayerSpec(GQA, moe=MoeSpec(8, 2, 32, shared_intermediate_size=48))
NEOX = LayerSpec(
    replace(GQA, qkv_bias=True, out_bias=True),
    MlpSpec(128, gated=False, bias=True, activation="gelu"),
    parallel=True,
)
GEMMA = LayerSpec(replace(GQA, window=8), MlpSpec(128, activation="gelu_new"), norms=4)
KINDS = {"dense": DENSE, "latent": LATENT, "sparse": SPARSE, "neox": NEOX, "gemma": GEMMA}


def model_of(*kinds: LayerSpec, **changes: object) -> ModelSpec:
    fields = {"name": "tiny", "hidden_size": 64, "vocab_size": 96} | changes
    return ModelSpec(kinds=kinds, layer_kinds=tuple(range(len(kinds))), **fields)


def built(model: ModelSpec, **options: object) -> Transformer:
    module = Transformer(model, max_seq_len=32, **options)
    module.init_weights(0)
    return module


def batch(model: ModelSpec, rows: int = 2) -> tuple:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (rows, 33), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b",
        "llama-3.2-1b",
        "qwen2.5-7b",
        "qwen3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "qwen1.5-moe-a2.7b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "gpt2",
        "pythia-6.9b",
        "phi-2",
        "gemma-2-2b",
        "olmo-2-7b",
    ],
)
def test_parameters_are_as_many_as_the_planner_counts(name: str) -> None:
    model = load_model(name)
    with torch.device("meta"):
        module = Transformer(model, max_seq_len=model.max_position_embeddings)
    assert sum(p.numel() for p in module.parameters()) == total_parameters(model)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    model = model_of(KINDS[kind], KINDS[kind], norm="layernorm" if kind == "neox" else "rmsnorm")
    module = built(model)
    inputs, labels = batch(model)
    loss_sum(module(inputs), labels).backward()
    silent = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()]
    # An expert without tokens has a gradient of zeros.
    assert [name for name in silent if "experts" not in name] == []
    assert all(p.grad is not None for p in module.parameters())


def test_stages_in_a_row_are_the_whole_model() -> None:
    model = model_of(DENSE, SPARSE, LATENT, replace(DENSE), positions="learned")
    whole = built(model)
    first = built(model, layers=[0, 1], has_head=False)
    last = built(model, layers=[2, 3], has_embedding=False)
    inputs, _ = batch(model)
    torch.testing.assert_close(last(first(inputs)), whole(inputs), rtol=0, atol=0)
    values = dict(whole.named_parameters())
    assert {n for part in (first, last) for n, _ in part.named_parameters()} == set(values)


def test_tied_head_is_the_embedding_on_every_device() -> None:
    model = model_of(DENSE, tie_word_embeddings=True)
    with torch.device("meta"):
        module = Transformer(model, max_seq_len=32)
    module.to_empty(device="cpu")
    module.init_weights(0)
    assert module.head.weight is module.embedding.weight
    apart = built(model, has_embedding=False)
    torch.testing.assert_close(apart.head.weight, module.head.weight, rtol=0, atol=0)


def test_seeds_differ_by_name_and_by_run() -> None:
    model = model_of(DENSE, DENSE)
    one, other = built(model), Transformer(model, max_seq_len=32)
    other.init_weights(1)
    q = [one.layers[i].attention.q.weight for i in "01"]
    assert not torch.equal(q[0], q[1])
    assert not torch.equal(q[0], other.layers["0"].attention.q.weight)
    assert float(q[0].detach().std()) == pytest.approx(0.02, rel=0.1)


def test_positions_may_come_in_any_order() -> None:
    model = model_of(replace(DENSE, attention=replace(GQA, causal=False)))
    module = built(model)
    inputs, _ = batch(model)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(inputs[:, order], order), module(inputs)[:, order])


def test_a_row_sees_nothing_after_itself_nor_before_its_window() -> None:
    model = model_of(replace(DENSE, attention=replace(GQA, window=4)))
    module = built(model)
    inputs, _ = batch(model, rows=1)
    changed = inputs.clone()
    changed[0, 10] = (changed[0, 10] + 1) % model.vocab_size
    differs = (module(inputs) != module(changed)).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [10, 11, 12, 13]


def test_window_masks() -> None:
    mask = window_mask(4, 2, causal=True, device=torch.device("cpu"))
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    both = window_mask(3, 2, causal=False, device=torch.device("cpu"))
    assert both.int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]


def test_attention_with_narrow_values_is_softmax_attention() -> None:
    q, k = torch.randn(2, 3, 8, 24), torch.randn(2, 3, 8, 24)
    v = torch.randn(2, 3, 8, 16)
    scores = q @ k.transpose(-2, -1) / 24**0.5
    scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    out = core_attention(q, k, v, causal=True, window=None)
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=1e-5, atol=1e-5)


def test_rotation_turns_pairs_by_their_angle() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 1, 4)
    angle = torch.tensor([[[torch.pi / 2, 0.0]]])
    turned = rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(turned.flatten(), torch.tensor([0.0, 0.0, 1.0, 2.0]))


def test_rms_norm_is_torchs() -> None:
    norm = RmsNorm(64, 1e-5)
    weight = torch.rand(64) + 0.5
    norm.weight.data.copy_(weight)
    x = torch.randn(4, 8, 64)
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    other = weight.clone().requires_grad_()
    grad = torch.randn(4, 8, 64)
    norm(own).backward(grad)
    torch.nn.functional.rms_norm(theirs, (64,), other, 1e-5).backward(grad)
    torch.testing.assert_close(own.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, other.grad)


@pytest.mark.parametrize("weighted", [False, True])
def test_gated_activation_has_the_gradient_of_its_value(weighted: bool) -> None:
    gate, up = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(5, 1, dtype=torch.float64, requires_grad=True) if weighted else None
    expected = torch.nn.functional.silu(gate) * up * (1.0 if weight is None else weight)
    torch.testing.assert_close(gated_activation("silu", gate, up, weight), expected)
    inputs = (gate, up) if weight is None else (gate, up, weight)
    assert torch.autograd.gradcheck(lambda *given: gated_activation("silu", *given), inputs)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_layer_keeps_what_the_planner_counts(kind: str) -> None:
    layer = replace(KINDS[kind], moe=SPARSE.moe) if kind == "sparse" else KINDS[kind]
    model = model_of(layer)
    module = built(model).layers["0"]
    expected = sum(
        float(op.kept_bytes)
        for op in layer_operations(model, layer, whole_batch(model, sequences=2, seq_len=32))
    )
    # Beside them: inverse deviations of norms, order and weights of the routed tokens.
    assert kept_bytes(module, torch.randn(2, 32, 64, requires_grad=True)) == pytest.approx(
        expected, rel=0.01 if kind == "dense" else 0.03
    )


def whole_batch(model: ModelSpec, sequences: int, seq_len: int) -> object:
    return shard_of(
        Layout(micro_batch=sequences),
        model,
        TrainSpec(sequences, seq_len, precision="fp32"),
        load_runtime("shardwise"),
        flash=True,
    )


def kept_bytes(module: TransformerLayer, x: object) -> int:
    """Bytes of the storages that a forward pass keeps, parameters and rotary tables left out."""
    kept: dict[int, int] = {}

    def pack(tensor):  # type: ignore[no-untyped-def]
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    tables = [t for pair in module.attention.rotary._tables.values() for t in pair]
    for tensor in [*module.parameters(), *tables]:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


def test_scaled_rotary_frequencies_keep_what_is_short() -> None:
    from executor.attention import inverse_frequencies

    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = inverse_frequencies(128, 5e5, None), inverse_frequencies(128, 5e5, scaling)
    assert torch.equal(scaled[:8], plain[:8])
    torch.testing.assert_close(scaled[-8:], plain[-8:] / 8)
    linear = inverse_frequencies(128, 5e5, RopeScaling("linear", 2.0))
    torch.testing.assert_close(linear, plain / 2)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        (model_of(replace(DENSE, attention=replace(GQA, sinks=True))), "attention sinks"),
        (model_of(DENSE, positions="alibi"), "alibi positions"),
        (model_of(replace(DENSE, norms=3)), "3 norms a layer"),
        (model_of(replace(DENSE, mlp=None)), "feed-forward"),
        (load_model("gpt-oss-20b"), "attention sinks"),
        (load_model("bloom-176b"), "alibi"),
    ],
)
def test_what_cannot_run_is_refused_by_name(model: ModelSpec, part: str) -> None:
    assert any(part in found for found in unsupported_parts(model))
    with pytest.raises(ModelError, match=part):
        Transformer(model, max_seq_len=32)


def test_details_of_a_router_balanced_by_bias() -> None:
    module = built(model_of(replace(SPARSE, moe=replace(SPARSE.moe, aux_free_bias=True))))
    assert module.details == Details(router_score="sigmoid", aux_loss_coefficient=0.0)
    assert not module.moe_layers()[0].correction_bias.any()
