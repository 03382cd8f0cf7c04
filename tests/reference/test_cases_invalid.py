"""Layouts that people reported as wrongly refused, wrongly accepted or badly explained.

`cases_invalid.csv` holds the 36 reports, each with its source. Every row has a judgement of its own
here, on a model of the row's dimensions; a test counts that none is left out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import LayoutError
from planner.layout import Layout
from planner.legality import (
    Situation,
    check,
    check_fixed,
    legal_mask,
    padded_vocab_size,
    parse_layout,
    statements,
    suggest_stages,
)
from planner.runtime import Runtime, load_runtime
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, TowerSpec
from tests import samples_legality as sample

Row = dict[str, str]
ROWS = {
    row["id"]: row
    for row in csv.DictReader(
        (Path(__file__).parent / "cases_invalid.csv").read_text(encoding="utf-8").splitlines()
    )
}
JUDGEMENTS: dict[str, Callable[[Row], None]] = {}
MEGATRON = load_runtime("megatron-core")


def judges(case: str) -> Callable[[Callable[[Row], None]], Callable[[Row], None]]:
    def note(function: Callable[[Row], None]) -> Callable[[Row], None]:
        assert case not in JUDGEMENTS
        JUDGEMENTS[case] = function
        return function

    return note


def model_of(row: Row) -> ModelSpec:
    """A model of the row's dimensions; what the row does not state is as in a 7B model."""

    def number(key: str, otherwise: int) -> int:
        return int(row[key]) if row[key] else otherwise

    return sample.model(
        row["model"],
        layers=number("n_layers", 32),
        hidden=number("hidden", 4096),
        ffn=number("ffn", 14336),
        heads=number("heads", 32),
        kv_heads=number("kv_heads", number("heads", 32)),
        vocab=number("vocab", 32000),
        experts=number("experts", 0),
        top_k=number("top_k", 0),
        moe_ffn=number("moe_ffn", 1024),
        head_dim=128,
    )


def judge(
    model: ModelSpec,
    layout: str,
    *,
    gpus: int | None = None,
    batch: int = 64,
    seq_len: int = 4096,
    runtime: Runtime = MEGATRON,
    cluster=None,
    stages: tuple[int, ...] | None = None,
    **train,
) -> list[str]:
    return check(
        parse_layout(layout, gpus),
        model,
        sample.train(batch, seq_len, **train),
        cluster or sample.cluster(),
        gpus,
        runtime,
        stages,
    )


def refused(*args, **kwargs) -> LayoutError:
    with pytest.raises(LayoutError) as caught:
        judge(*args, **kwargs)
    return caught.value


@judges("I-001")
def thirteen_b_on_three_cards(row: Row) -> None:
    error = refused(model_of(row), "tp=3", gpus=3)
    assert "num_attention_heads=40" in error.message
    assert "legal here: 1, 2, 4, 5, 8, 10, 20, 40" in error.message


@judges("I-003")
def fifty_two_heads(row: Row) -> None:
    error = refused(model_of(row), "tp=8", gpus=8)
    assert "a head is never split over ranks" in error.message
    assert "legal here: 1, 2, 4, 13, 26, 52" in error.message
    assert "tp=4 with dp=2 uses the same 8 GPUs" in error.message


@judges("I-005")
def twenty_eight_heads(row: Row) -> None:
    error = refused(model_of(row), "tp=8", gpus=8)
    assert "legal here: 1, 2, 4, 7, 14, 28" in error.message
    assert "of these the 4 key-value heads leave 1, 2, 4, 28" in error.message


@judges("I-007")
def twelve_heads(row: Row) -> None:
    error = refused(model_of(row), "tp=8", gpus=8)
    assert "num_attention_heads=12" in error.message
    assert 4 in error.legal["tp"]
    assert "tp=4 with dp=2 uses the same 8 GPUs" in error.message


@judges("I-009")
def twenty_five_heads(row: Row) -> None:
    error = refused(model_of(row), "tp=4", gpus=4)
    assert error.legal["tp"] == [1, 5, 25]


@judges("I-011")
def how_many_gpus_to_take(row: Row) -> None:
    # Given six GPUs, only tensor degrees that divide the heads are offered to the search.
    model, train, cluster = model_of(row), sample.train(48), sample.cluster()
    table = Layout(tp=np.array([1, 2, 3, 6]), dp=np.array([6, 3, 2, 1]))
    assert legal_mask(table, model, train, cluster, MEGATRON, 6).tolist() == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(LayoutError, match="legal here: 1, 2, 4, 8, 16, 32"):
        check_fixed({"tp": 6}, model, train, cluster, 6, MEGATRON)


@judges("I-013")
def two_key_value_heads(row: Row) -> None:
    error = refused(model_of(row), "tp=4", gpus=4, runtime=load_runtime("torchtitan"))
    assert "num_key_value_heads=2" in error.message
    assert error.legal["tp"] == [1, 2]
    # Megatron replicates them, and says so; MLA has no key-value heads to split.
    assert any("2 key-value heads" in text for text in judge(model_of(row), "tp=4", gpus=4))
    latent = sample.model(heads=16, kv_heads=2, kind="mla", head_dim=192, kv_lora_rank=512)
    assert judge(latent, "tp=4", gpus=4, runtime=load_runtime("torchtitan")) == []


@judges("I-015")
def sixteen_ranks_eight_heads(row: Row) -> None:
    warnings = judge(model_of(row), "tp=16", gpus=16)
    assert any(
        "each is held by 2 ranks, a plain column split would be wrong" in w for w in warnings
    )
    error = refused(model_of(row), "tp=16", gpus=16, runtime=load_runtime("fsdp2"))
    assert "does not replicate them" in error.message


@judges("I-017")
def ulysses_of_forty_heads(row: Row) -> None:
    layout = "cp=16 cp_kind=ulysses"
    error = refused(
        model_of(row), layout, gpus=16, seq_len=65536, runtime=load_runtime("deepspeed")
    )
    assert error.legal["cp"] == [1, 2, 4, 8, 40]
    assert "legal here: 1, 2, 4, 8, 40" in error.message
    eight = "cp=8 cp_kind=ulysses"
    judge(model_of(row), eight, gpus=16, seq_len=65536, runtime=load_runtime("deepspeed"))


@judges("I-019")
def ulysses_of_twenty_eight_heads(row: Row) -> None:
    error = refused(
        model_of(row), "cp=8 cp_kind=ulysses", gpus=8, runtime=load_runtime("deepspeed")
    )
    assert "the query heads allow 1, 2, 4, 7, 14, 28" in error.message
    assert error.legal["cp"] == [1, 2, 4, 28]


@judges("I-021")
def eighty_layers_in_thirty_two_chunks(row: Row) -> None:
    old = load_runtime("megatron-lm-2021")
    error = refused(model_of(row), "pp=16 vpp=2", gpus=16, runtime=old)
    assert "80 layers" in error.message
    assert "2.5 each is not whole, and no layer may be dropped" in error.message
    assert 5 in error.legal["vpp"]
    assert 8 in error.legal["pp"]
    # A runtime with uneven stages takes all 80, and says how.
    warnings = judge(model_of(row), "pp=16 vpp=2", gpus=16)
    assert any("80 layers" in text and "none is dropped" in text for text in warnings)
    assert sum(suggest_stages(80, 32)) == 80


@judges("I-023")
def thirty_layers_on_four_stages(row: Row) -> None:
    warnings = judge(model_of(row), "pp=4", gpus=4)
    assert any("8, 8, 7, 7" in text and "first and last" in text for text in warnings)


@judges("I-025")
def forty_six_layers_on_four_stages(row: Row) -> None:
    # ep=16 x pp=4 does not divide 32 GPUs: the report's layout is refused for that, too.
    full = "tp=8 pp=4 cp=1 ep=16 micro_batch=2 recompute=full"
    error = refused(model_of(row), full, gpus=32, batch=16)
    assert "etp=1 x ep=16 x pp=4 = 64 does not divide the 32 GPUs" in error.message
    even = replace(MEGATRON, uneven_stages=False)
    error = refused(model_of(row), full.replace("ep=16", "ep=8"), gpus=32, batch=16, runtime=even)
    assert "12, 12, 11, 11" in error.message
    assert 2 in error.legal["pp"]


@judges("I-027")
def uneven_counts_after_an_override(row: Row) -> None:
    error = refused(model_of(row), "pp=4 vpp=3", gpus=4, stages=(4, 24, 24, 8))
    assert "4 layers of a stage do not divide into vpp=3 chunks" in error.message
    assert error.legal["stage_layers"] == [5] * 12
    assert judge(model_of(row), "pp=4 vpp=3", gpus=4, stages=(15, 15, 15, 15)) == []
    error = refused(model_of(row), "pp=4 vpp=3", gpus=4, stages=(12, 12, 12, 12))
    assert "add up to 48, not to the 60 layers" in error.message


@judges("I-029")
def ninety_four_layers_uneven(row: Row) -> None:
    warnings = judge(
        model_of(row), "tp=1 pp=4 ep=4 micro_batch=1", gpus=16, batch=64, stages=(24, 24, 24, 22)
    )
    assert warnings == []


@judges("I-031")
def embedding_and_head_weigh(row: Row) -> None:
    assert suggest_stages(30, 4, first_weight=1, last_weight=1) == (7, 8, 8, 7)
    with pytest.raises(LayoutError, match="smaller than what the embedding"):
        suggest_stages(8, 8, first_weight=1, last_weight=4)


@judges("I-033")
def micro_batch_follows_from_the_batch(row: Row) -> None:
    error = refused(model_of(row), "dp=2 micro_batch=3", gpus=2, batch=8)
    assert error.legal["micro_batch"] == [1, 2, 4]
    for layout, gpus in (("dp=2 micro_batch=4", 2), ("dp=4 tp=2 micro_batch=2", 8)):
        situation = Situation(model_of(row), sample.train(8), sample.cluster(), MEGATRON, gpus)
        judge(model_of(row), layout, gpus=gpus, batch=8)
        assert statements(parse_layout(layout, gpus), situation)[0].startswith("Global batch 8 = ")


@judges("I-035")
def micro_batch_of_eight(row: Row) -> None:
    judge(model_of(row), "tp=4 micro_batch=8", gpus=16, batch=64)
    assert parse_layout("tp=4 micro_batch=8", 16).dp == 4
    fix = {"tp": 4, "micro_batch": 8}
    check_fixed(fix, model_of(row), sample.train(64), sample.cluster(), 16, MEGATRON)


@judges("I-037")
def fewer_micro_batches_than_stages(row: Row) -> None:
    warnings = judge(model_of(row), "pp=4", gpus=4, batch=2)
    assert any("2 micro-batches are fewer than the pp=4 stages" in text for text in warnings)
    error = refused(model_of(row), "pp=4", gpus=4, batch=2, runtime=load_runtime("torchtitan"))
    assert "or the run hangs" in error.message
    assert 4 in error.legal["num_microbatches"]


@judges("I-039")
def interleaved_rounds(row: Row) -> None:
    torch_runtime = load_runtime("fsdp2")
    for batch in (10, 3):
        judge(model_of(row), "pp=4 vpp=2", gpus=4, batch=batch, runtime=torch_runtime)
    error = refused(model_of(row), "pp=4 vpp=2", gpus=4, batch=10)
    assert "wants a multiple of pp=4" in error.message
    assert {8, 12} <= set(error.legal["num_microbatches"])


@judges("I-041")
def batch_ramp(row: Row) -> None:
    layout = "tp=8 pp=4 dp=12 micro_batch=1"
    runtime = load_runtime("megatron-deepspeed")
    judge(model_of(row), layout, gpus=384, batch=2040, seq_len=2048, runtime=runtime)
    error = refused(model_of(row), layout, gpus=384, batch=2043, seq_len=2048, runtime=runtime)
    assert 9 in error.legal["dp"]
    assert error.legal["global_batch_size"] == [2040, 2052]


@judges("I-043")
def two_grids(row: Row) -> None:
    # 8 GPUs: tp=4 and ep=8 share the ranks; a product of 32 would be wrong.
    assert judge(model_of(row), "tp=4 pp=1 cp=1 ep=8 etp=1", gpus=8) == []


@judges("I-045")
def expert_grid_prints_its_factors(row: Row) -> None:
    error = refused(model_of(row), "tp=1 pp=2 vpp=24 cp=1 ep=4 micro_batch=1", gpus=4, batch=512)
    assert "etp=1 x ep=4 x pp=2 = 8 does not divide the 4 GPUs" in error.message
    assert "dp=2 x tp=1 x pp=2 x cp=1 = 4" in error.message
    assert error.legal["ep"] == [1, 2]


@judges("I-047")
def ep_is_not_clamped(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    error = refused(model, "ep=16", gpus=8)
    assert error.values["ep"] == 16
    assert error.legal["ep"] == [1, 2, 4, 8]


@judges("I-049")
def experts_over_efa(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    efa = sample.cluster(network="efa-v2")
    warnings = judge(model, "ep=16", gpus=16, cluster=efa)
    assert any("DeepEP kernels do not run there" in text for text in warnings)
    assert any("ep=8 keeps it inside" in text for text in warnings)
    assert judge(model, "ep=8", gpus=16, cluster=efa) == []


@judges("I-051")
def sequence_multiple(row: Row) -> None:
    model = model_of(row)
    judge(model, "cp=4 tp=4", gpus=16, seq_len=16)
    error = refused(model, "cp=4 tp=4", gpus=16, seq_len=8)
    assert error.values["multiple"] == 16
    judge(model, "cp=2 tp=1", gpus=2, seq_len=4)
    assert refused(model, "cp=2 tp=1", gpus=2, seq_len=2).values["multiple"] == 4


@judges("I-053")
def odd_sequence_with_sequence_parallelism(row: Row) -> None:
    error = refused(model_of(row), "tp=4", gpus=4, seq_len=2047)
    assert "tp=4 with sequence parallelism" in error.message
    assert error.legal["seq_len"] == [2044, 2048]
    assert "cp=4" in refused(model_of(row), "cp=4", gpus=4, seq_len=2047).message


@judges("I-055")
def pad_for_ulysses(row: Row) -> None:
    runtime = load_runtime("deepspeed")
    error = refused(model_of(row), "cp=8 cp_kind=ulysses", gpus=8, seq_len=8423, runtime=runtime)
    assert "pad 8423 to 8424" in error.message


@judges("I-057")
def fp8_shapes(row: Row) -> None:
    error = refused(model_of(row), "cp=2", gpus=2, seq_len=4104, precision="fp8")
    assert "2052 is not a multiple of 16" in error.message
    assert "pad it to 2064" in error.message
    assert error.legal["seq_len"] == [4128]
    judge(model_of(row), "cp=2", gpus=2, seq_len=4128, precision="fp8")


@judges("I-059")
def vocabulary_of_six_ranks(row: Row) -> None:
    assert padded_vocab_size(151552, 1, 6) == 151554
    error = refused(model_of(row), "tp=6", gpus=6, runtime=load_runtime("fsdp2"))
    assert "num_key_value_heads=8" in error.message
    assert "num_attention_heads" not in error.message  # 96 heads are fine
    assert error.legal["tp"] == [1, 2, 4, 8]


@judges("I-061")
def padded_rows_are_stripped(row: Row) -> None:
    situation = Situation(model_of(row), sample.train(), sample.cluster(), load_runtime("fsdp2"), 2)
    text = " ".join(statements(parse_layout("tp=2", 2), situation))
    assert "Vocabulary 65535 is padded to 65536" in text
    assert "stripped from a saved checkpoint" in text


@judges("I-063")
def padded_alike(row: Row) -> None:
    assert padded_vocab_size(49159, 64, 1) == 49216
    runtime = replace(load_runtime("fsdp2"), vocab_multiple=32)  # 32 x tp=2 is the report's 64
    situation = Situation(model_of(row), sample.train(), sample.cluster(), runtime, 2)
    text = " ".join(statements(parse_layout("tp=2", 2), situation))
    assert "padded to 49216" in text
    assert "embedding and head alike" in text


@judges("I-065")
def whole_moe_recompute_with_overlap(row: Row) -> None:
    model = sample.model(experts=64, top_k=2, moe_ffn=1024)
    overlapped = replace(MEGATRON, ep_overlap_fraction=0.9, selective_modules=("moe",))
    error = refused(model, "ep=8 recompute=selective", gpus=8, runtime=overlapped)
    assert "dispatch included" in error.message
    assert "selective" not in error.legal["recompute"]
    assert "full" not in error.legal["recompute"]
    judge(model, "ep=8 recompute=selective", gpus=8)
    kept = replace(overlapped, selective_modules=("moe_activation",))
    judge(model, "ep=8 recompute=selective", gpus=8, runtime=kept)


@judges("I-067")
def sharded_parameters_and_pipeline(row: Row) -> None:
    error = refused(model_of(row), "pp=2 zero=3", gpus=8)
    assert "pp must be 1" in error.message
    assert error.legal["pp"] == [1]
    judge(model_of(row), "pp=1 zero=3", gpus=8)


@judges("I-069")
def one_model_at_a_time(row: Row) -> None:
    # Reinforcement learning runs several models; here each is a layout of its own, and its GPUs are
    # the product of its degrees: four of 8 and four engines of tp=2.
    trained = parse_layout("tp=1 dp=8").num_gpus
    engine = parse_layout("tp=2 dp=1").num_gpus
    assert 4 * trained + 4 * engine == int(row["n_gpus"])


@judges("I-071")
def fp32_by_omission(row: Row) -> None:
    warnings = judge(model_of(row), "dp=8", gpus=8, precision="fp32")
    assert any("Precision is fp32" in text and "bf16" in text for text in warnings)
    assert judge(model_of(row), "dp=8", gpus=8, precision="bf16") == []


def test_every_report_has_a_judgement():
    assert len(ROWS) == 36
    assert set(JUDGEMENTS) == set(ROWS)


@pytest.mark.parametrize("case", sorted(ROWS))
def test_report(case):
    JUDGEMENTS[case](ROWS[case])


def test_a_head_of_the_tower_counts():
    tower_heads = AttentionSpec(12, 12, 64)
    model = sample.model(heads=32, kv_heads=8)
    tower = TowerSpec(768, 12, LayerSpec(tower_heads, mlp=MlpSpec(3072)), 196, 1_000_000)
    error = refused(replace(model, tower=tower), "tp=8", gpus=8)
    assert "vision tower" in error.message
    assert error.legal["tp"] == [1, 2, 4]
