"""Weights from and to Hugging Face folders: logits are those of `transformers` on the same
weights."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from executor.details import Details, details_from_config  # noqa: E402
from executor.hf_names import config_of, family_of  # noqa: E402
from executor.hf_weights import (  # noqa: E402
    load_weights,
    read_config,
    read_details,
    save_weights,
)
from executor.transformer import Transformer  # noqa: E402
from planner.errors import InputError, ModelError  # noqa: E402
from planner.hf_config import model_from_config  # noqa: E402
from planner.specs import ModelSpec  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 120,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3-scaled": {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48} | QWEN_MOE,
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True} | QWEN_MOE,
}


def config_named(name: str) -> dict[str, Any]:
    return SIZES | CONFIGS[name]


def model_named(name: str) -> ModelSpec:
    return model_from_config(config_named(name), "tiny")


def built(name: str, details: Details | None = None) -> Transformer:
    found = details or details_from_config(config_named(name))
    module = Transformer(model_named(name), max_seq_len=64, details=found)
    module.init_weights(0)
    # Larger than usual, so that differences show in the logits.
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5.0)
        else:
            parameter.data.add_(torch.rand(parameter.shape) * 0.5)
    return module.eval()


def tokens() -> Any:
    return torch.randint(0, 120, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Their random weights loaded here, and ours loaded there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config_named(name))
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = Transformer(
        model_named(name), max_seq_len=64, details=read_details(tmp_path / "theirs")
    ).eval()
    load_weights(ours, ours.model, tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)
        other = built(name)
        save_weights([other], other.model, tmp_path / "ours")
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", dtype=torch.float32
        ).eval()
        torch.testing.assert_close(other(tokens()), back(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_loads_as_it_was(name: str, tmp_path: Path) -> None:
    module = built(name)
    save_weights([module], module.model, tmp_path)
    config = read_config(tmp_path)
    again = model_from_config(config, "tiny")
    assert again.kinds == module.model.kinds
    assert again.layer_kinds == module.model.layer_kinds
    other = Transformer(again, max_seq_len=64, details=read_details(tmp_path))
    load_weights(other, again, tmp_path)
    values = dict(other.named_parameters())
    for key, value in module.named_parameters():
        assert torch.equal(values[key], value), key


def test_stages_load_their_own_part(tmp_path: Path) -> None:
    module = built("llama")
    save_weights([module], module.model, tmp_path)
    part = Transformer(module.model, layers=[2], has_embedding=False, max_seq_len=64)
    load_weights(part, module.model, tmp_path)
    assert torch.equal(part.head.weight, module.head.weight)
    assert torch.equal(part.layers["2"].mlp.up.weight, module.layers["2"].mlp.up.weight)


def test_large_models_come_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.hf_weights.MAX_FILE_BYTES", 50_000)
    module = built("qwen3")
    save_weights([module], module.model, tmp_path)
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert set(index["weight_map"].values()) == files
    size = sum(p.numel() * 4 for p in module.parameters())
    assert index["metadata"]["total_size"] == size
    other = Transformer(module.model, max_seq_len=64)
    load_weights(other, module.model, tmp_path)
    assert torch.equal(
        other.layers["1"].attention.k_norm.weight, module.layers["1"].attention.k_norm.weight
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelError, match="'bert'"):
        read_config(tmp_path)
    module = built("llama")
    (tmp_path / "config.json").write_text(json.dumps(config_named("llama")))
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        load_weights(module, module.model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="damaged"):
        load_weights(module, module.model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": "../model.safetensors"}})
    )
    with pytest.raises(InputError, match="lacks its file"):
        load_weights(module, module.model, tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    module = built("llama")
    save_weights([module], module.model, tmp_path)
    wider = Transformer(
        model_from_config(config_named("llama") | {"intermediate_size": 100}, "wider"),
        max_seq_len=64,
    )
    with pytest.raises(InputError, match=r"mlp\.gate\.weight as \(96, 64\)"):
        load_weights(wider, wider.model, tmp_path)
    deeper = model_from_config(config_named("llama") | {"num_hidden_layers": 4}, "deeper")
    with pytest.raises(InputError, match=r"lacks model.layers.3\."):
        load_weights(Transformer(deeper, max_seq_len=64), deeper, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"n_group": 8}, "n_group=8"),
        ({"scoring_func": "tanh"}, "tanh"),
    ],
)
def test_details_that_are_not_run_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        details_from_config(config_named("llama") | change)


def test_configs_round_trip() -> None:
    for name in CONFIGS:
        config = config_named(name)
        details = details_from_config(config)
        again = config_of(model_named(name), details)
        assert details_from_config(again) == details, name
        expected = "llama" if name.startswith("llama") else name
        assert family_of(model_named(name)) == expected
    from planner.presets_index import load_model

    with pytest.raises(ModelError, match="no model that Hugging Face"):
        family_of(load_model("gpt2"))
