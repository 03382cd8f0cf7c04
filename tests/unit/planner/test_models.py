"""Reading models: what a config means, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import InputError, ModelError
from planner.hf_config import model_from_config, model_from_path
from planner.model_flops import model_flops_per_token
from planner.model_toml import model_from_table, model_from_toml
from planner.models_cli import model_lines, models_document
from planner.parameters import layer_parameters, padded_vocab, total_parameters
from planner.presets_index import ALIASES, _load_preset, available_models, load_model, plain_name

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
QWEN_MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (LLAMA, {"hidden_size": None}, ["hidden_size is missing"]),
        (LLAMA, {"hidden_size": -1}, ["hidden_size=-1"]),
        (LLAMA, {"hidden_size": 10**30}, ["hidden_size=1000"]),
        (LLAMA, {"hidden_size": "64"}, ["hidden_size='64'"]),
        (LLAMA, {"hidden_size": True}, ["hidden_size=True"]),
        (LLAMA, {"hidden_size": float("nan")}, ["hidden_size=nan"]),
        (LLAMA, {"hidden_size": 66}, ["hidden_size=66", "num_attention_heads=8", "head_dim"]),
        (LLAMA, {"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=8"]),
        (LLAMA, {"layer_types": ["full_attention"]}, ["layer_types has 1", "4 layers"]),
        (LLAMA, {"layer_types": ["magic"] * 4}, ["'magic'", "full_attention"]),
        (LLAMA, {"model_type": "lama"}, ["'lama'", "llama"]),
        (LLAMA, {"model_type": None, "architectures": ["XForCausalLM"]}, ["XForCausalLM"]),
        (LLAMA, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'"]),
        (QWEN_MOE, {"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "num_experts=8"]),
        (QWEN_MOE, {"mlp_only_layers": [7]}, ["mlp_only_layers", "0 to 3"]),
        (QWEN_MOE, {"mlp_only_layers": [True]}, ["mlp_only_layers"]),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(
    base: dict[str, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        model_from_config(base | change, "tested")
    for word in words:
        assert word in caught.value.message
    assert caught.value.message.startswith("tested: ")
    assert caught.value.values


def test_kv_heads_error_lists_the_legal_ones() -> None:
    with pytest.raises(ModelError) as caught:
        model_from_config(LLAMA | {"num_key_value_heads": 3}, "tested")
    assert caught.value.legal == {"num_key_value_heads": [1, 2, 4, 8]}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b'{"model_type": "llama", "hidden', "not valid JSON"),
        (b"\xff\xfe\x00\x01", "not text"),
        (b"[1, 2]", "must be a JSON object"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "twice"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=word):
        model_from_path(path)


def test_a_folder_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"auto_map": {"AutoModel": "x.Y"}}))
    assert load_model(folder).name == "my-model"
    with pytest.raises(ModelError, match="no such file"):
        model_from_path(tmp_path / "absent.json")


def test_windows_follow_the_family() -> None:
    gemma = load_model("gemma-3-12b")
    windows = [gemma.kinds[kind].attention.window for kind in gemma.layer_kinds]
    assert windows[:6] == [1024] * 5 + [None]
    oss = load_model("gpt-oss-20b")
    assert [oss.kinds[kind].attention.window for kind in oss.layer_kinds[:4]] == [128, None] * 2
    maverick = load_model("llama-4-maverick")
    assert [maverick.kinds[k].moe is not None for k in maverick.layer_kinds[:4]] == [
        False, True, False, True,
    ]  # fmt: skip


def test_first_layers_are_dense() -> None:
    model = load_model("deepseek-v3")
    assert [model.kinds[kind].moe is None for kind in model.layer_kinds[:5]] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert model.mtp_layers == 1


def test_names_that_people_write_find_the_preset() -> None:
    for name in ("llama-3-70b", "Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct"):
        assert load_model(name).name == "llama-3-70b"
    assert plain_name("google/gemma-2-9b-it") == "gemma-2-9b"
    for alias, preset in ALIASES.items():
        assert alias not in available_models()
        assert load_model(alias).name == preset


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(ModelError) as caught:
        load_model("lama-3-70b")
    assert "llama-3-70b" in caught.value.legal["model"]


def test_parameters_per_rank_replicate_key_value_heads_beyond_their_number() -> None:
    model = load_model("llama-3-8b")  # 8 key-value heads
    counts = layer_parameters(model, 0)
    per_rank = counts.dense_per_rank(np.array([1, 8, 16]))
    assert per_rank[0] == counts.dense == counts.total
    assert per_rank[1] == counts.dense_tp / 8 + counts.dense_kv / 8 + counts.dense_replicated
    assert per_rank[2] == counts.dense_tp / 16 + counts.dense_kv / 8 + counts.dense_replicated


def test_the_shards_of_a_layer_add_up() -> None:
    for name in available_models():
        model = load_model(name)
        for kind in range(len(model.kinds)):
            counts = layer_parameters(model, kind)
            shards = counts.dense_tp, counts.dense_kv, counts.dense_replicated, counts.expert
            assert sum(shards) == counts.total
            assert counts.expert_per_rank(4, 2) == counts.expert / 8


def test_padded_vocab_broadcasts() -> None:
    model = load_model("gpt2")
    assert padded_vocab(model, 128, np.array([1, 2, 8])).tolist() == [50304, 50432, 51200]


def test_flops_approach_six_per_parameter_where_attention_is_small() -> None:
    model = load_model("llama-3-70b")
    matrices = total_parameters(model) - model.vocab_size * model.hidden_size
    flops = model_flops_per_token(model, 1)
    assert flops.total_flops == pytest.approx(6 * matrices, rel=1e-3)


def test_causal_flops_are_half_of_full_ones_and_windows_save() -> None:
    model = load_model("llama-3-8b")
    causal = model_flops_per_token(model, 4096).forward["attention_scores"]
    full = model_flops_per_token(model, 4096, causal=False).forward["attention_scores"]
    assert causal / full == pytest.approx(0.5, rel=1e-3)
    local = load_model("gemma-3-27b")
    short, long = (
        model_flops_per_token(local, n).forward["attention_scores"] for n in (1024, 8192)
    )
    assert short < long < 4 * short


def test_gpt3_flops_follow_the_published_formula() -> None:
    """Narayanan 2021, equation 3: 72 B s l h^2 (1 + s / 6h + V / 12 l h), without recompute.

    Its causal=False convention; biases and norms are no matrices in either.
    """
    model = load_model("gpt-3-175b")
    h, layers, s, vocab = 12288, 96, 2048, 51200
    expected = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    got = model_flops_per_token(model, s, causal=False).total_flops
    assert got == pytest.approx(expected, rel=1e-12)


def test_toml_says_the_same_as_the_config(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(
        """
        hidden_size = 64
        vocab_size = 1000
        [[layers]]
        count = 4
        attention = { num_attention_heads = 8, num_key_value_heads = 2, head_dim = 8 }
        mlp = { intermediate_size = 128 }
        """
    )
    model, config = model_from_toml(path), model_from_config(LLAMA, "small")
    assert (model.kinds, model.layer_kinds) == (config.kinds, config.layer_kinds)
    assert total_parameters(model) == total_parameters(config)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hiden_size": 3}, "near: hidden_size"),
        ({"layers": []}, "layers"),
        ({"layers": [{"attention": {"num_attention_heads": 8}}]}, "num_key_value_heads is missing"),
        ({"norm": "batchnorm"}, "rmsnorm, layernorm"),
        ({"repeat": 5000}, "repeat=5000"),
    ],
)
def test_toml_refuses(change: dict[str, Any], word: str) -> None:
    attention = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    table = {"hidden_size": 64, "vocab_size": 100, "layers": [{"attention": attention}]}
    assert model_from_table(table, "fine").num_hidden_layers == 1
    with pytest.raises(ModelError, match=word):
        model_from_table(table | change, "tested")


def test_documents_are_json_and_fit_a_terminal() -> None:
    document = models_document("deepseek-v3.2")
    assert (
        json.loads(json.dumps(document))["parameters"]["total"] == document["parameters"]["total"]
    )
    parts = ("embedding", "layers", "final_norm", "head", "tower")
    counts = document["parameters"]
    assert counts["total"] == sum(counts[part] for part in parts)
    flops = document["flops_per_token"]
    assert flops["forward"] == pytest.approx(sum(flops["forward_by_part"].values()))
    for shown in (models_document(), document, models_document("vit-base")):
        assert all(len(line) <= 80 for line in model_lines(shown))
    with pytest.raises(InputError, match="seq_len=0"):
        models_document("gpt2", 0)


def test_a_preset_loads_in_milliseconds() -> None:
    def seconds(name: str) -> float:
        _load_preset.cache_clear()
        start = time.perf_counter()
        load_model(name)
        return time.perf_counter() - start

    for name in ("llama-3.1-405b", "gpt-3-175b", "deepseek-v3"):
        assert min(seconds(name) for _ in range(5)) < 5e-3
