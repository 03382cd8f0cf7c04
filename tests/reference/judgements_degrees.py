"""Judgements of reports on tensor, context and pipeline degrees, and on uneven stages."""

from dataclasses import replace

import numpy as np
import pytest

from planner.errors import LayoutError
from planner.layout import Layout
from planner.legality import (
    Situation,
    check_fixed,
    legal_mask,
    parse_layout,
    statements,
    suggest_stages,
)
from planner.runtime import load_runtime
from tests import samples_legality as sample
from tests.reference.reported import MEGATRON, Row, judge, judges, model_of, refused


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
