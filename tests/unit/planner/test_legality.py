"""Single rules, their sentences, warnings, and the text form of layouts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import LayoutError
from planner.layout import Layout
from planner.legality import (
    RULES,
    Situation,
    check,
    check_fixed,
    legal_mask,
    parse_layout,
    parse_request,
    suggest_chunks,
    suggest_stages,
)
from planner.runtime import load_runtime
from tests import samples_legality as sample

MODEL = sample.model(heads=32, kv_heads=8)
MOE = sample.model(heads=32, kv_heads=8, experts=64, top_k=4, moe_ffn=2048)
MEGATRON = load_runtime("megatron-core")
OURS = load_runtime("shardwise")
NO_HOST_RATE = replace(sample.cluster(), host_memory_bytes_per_s=0.0)


def judge(layout, *, gpus, model=MODEL, runtime=MEGATRON, cluster=None, batch=64, **train):
    training = sample.train(batch, train.pop("seq_len", 4096), **train)
    where = cluster or sample.cluster()
    return check(parse_layout(layout, gpus), model, training, where, gpus, runtime)


@pytest.mark.parametrize(
    ("text", "said", "legal"),
    [
        ("", "A layout is empty", "key"),
        ("tp=8 micro_bach=4", "did you mean micro_batch", "key"),
        ("tp=8 tp=4", "tp is given twice", None),
        ("tp=", "lacks a value", None),
        ("tp", "lacks a value", None),
        ("tp=eight", "whole number", "tp"),
        ("tp=0", "whole number", "tp"),
        ("tp=-1", "whole number", "tp"),
        ("tp=2.5", "whole number", "tp"),
        ("tp=99999999999", "whole number", "tp"),
        ("zero=4", "whole number", "zero"),
        ("schedule=interleavd", "did you mean interleaved", "schedule"),
        ("recompute=some", "legal: none, selective, full, offload", "recompute"),
    ],
)
def test_garbage_is_named(text, said, legal):
    with pytest.raises(LayoutError, match=said) as caught:
        parse_layout(text)
    assert legal is None or caught.value.legal[legal]


def test_dp_is_derived_only_where_it_divides():
    assert parse_layout("tp=8 pp=2", 64).dp == 4
    assert parse_layout("tp=8 pp=2").dp == 1
    with pytest.raises(LayoutError, match="tp=3 x pp=1 x cp=1 = 3 does not divide the 8 GPUs"):
        parse_layout("tp=3", 8)


def test_stages_are_part_of_a_request_only():
    request = parse_request("pp=4 stages=12/12/11/11")
    assert request.stage_layers == (12, 12, 11, 11)
    assert request.given == {"pp"}
    with pytest.raises(LayoutError, match="stages="):
        parse_layout("pp=4 stages=12/12/11/11")


REFUSALS = [
    ("world", "dp=3 tp=2", {"gpus": 8}),
    ("limits", "pp=2", {"gpus": 2, "runtime": load_runtime("ddp")}),
    ("training", "dp=8", {"gpus": 8, "precision": "fp4"}),
    ("training", "dp=8", {"gpus": 8, "optimizer": "adafactor"}),
    ("experts", "ep=2", {"gpus": 8}),
    ("experts", "ep=3 dp=3", {"gpus": 3, "model": MOE}),
    ("experts", "etp=2", {"gpus": 2, "model": MOE, "runtime": OURS}),
    ("expert_grid", "ep=16", {"gpus": 8, "model": MOE}),
    ("context", "cp=2 cp_kind=all-gather", {"gpus": 2, "runtime": OURS}),
    ("context", "cp=2", {"gpus": 2, "model": sample.model(window=1024)}),
    ("schedule", "pp=2 vpp=2 schedule=1f1b", {"gpus": 2}),
    ("schedule", "pp=2 schedule=interleaved", {"gpus": 2}),
    ("schedule", "pp=2 schedule=zero-bubble", {"gpus": 2}),
    ("schedule", "vpp=2", {"gpus": 2}),
    ("schedule", "pp=2 vpp=2", {"gpus": 2, "runtime": load_runtime("megatron-lm-2021")}),
    ("schedule", "pp=2 vpp=1 schedule=dualpipe", {"gpus": 2, "runtime": OURS}),
    ("layers", "pp=64", {"gpus": 64}),
    ("batch", "dp=8 micro_batch=3", {"gpus": 8}),
    (
        "microbatches",
        "pp=2 vpp=2 zero=2 schedule=dualpipe",
        {"gpus": 2, "batch": 3, "runtime": OURS},
    ),
    ("microbatches", "pp=4 schedule=1f1b", {"gpus": 4, "batch": 3, "runtime": OURS}),
    ("zero", "zero=1", {"gpus": 8, "runtime": load_runtime("fsdp2")}),
    ("zero", "pp=2 zero=2", {"gpus": 8}),
    ("zero", "pp=2 schedule=zero-bubble", {"gpus": 8, "runtime": OURS}),
    ("shard", "zero=0 shard=2", {"gpus": 8}),
    ("shard", "zero=1 shard=3", {"gpus": 8}),
    ("shard", "zero=1 shard=2", {"gpus": 8, "runtime": load_runtime("nanotron")}),
    ("offload", "zero=1 offload=params-cpu", {"gpus": 8, "runtime": load_runtime("deepspeed")}),
    ("offload", "zero=3 offload=params-nvme", {"gpus": 8, "runtime": load_runtime("deepspeed")}),
    ("offload", "zero=1 offload=optimizer-nvme", {"gpus": 8}),
    ("recompute", "recompute=offload", {"gpus": 8, "runtime": OURS}),
    ("recompute", "recompute=offload", {"gpus": 8, "cluster": NO_HOST_RATE}),
    ("offload", "zero=1 offload=optimizer-cpu", {"gpus": 8, "cluster": NO_HOST_RATE}),
    ("low_precision", "cp=2", {"gpus": 2, "precision": "fp8", "seq_len": 4108}),
]


@pytest.mark.parametrize(("name", "layout", "given"), REFUSALS)
def test_each_rule_refuses_what_it_is_for(name, layout, given):
    with pytest.raises(LayoutError) as caught:
        judge(layout, **given)
    error = caught.value
    assert error.values
    assert any(error.legal.values()) or not error.legal, error.message
    request = parse_layout(layout, given["gpus"])
    rest = {k: v for k, v in given.items() if k in ("precision", "optimizer", "seq_len")}
    training = sample.train(given.get("batch", 64), **({"seq_len": 4096} | rest))
    situation = Situation(
        given.get("model", MODEL),
        training,
        given.get("cluster", sample.cluster()),
        given.get("runtime", MEGATRON),
        given["gpus"],
    )
    broken = [rule.name for rule in RULES if not np.all(rule.allowed(request, situation))]
    assert broken[0] == name, (broken, error.message)


def test_fp8_is_refused_where_the_device_has_none():
    old = sample.cluster(precisions=("fp32", "bf16", "fp16"))
    with pytest.raises(LayoutError, match="has no fp8 tensor cores; legal here: fp32, bf16, fp16"):
        judge("dp=8", gpus=8, precision="fp8", cluster=old)


def test_legal_values_of_a_sentence_are_legal():
    with pytest.raises(LayoutError) as caught:
        judge("dp=8 micro_batch=3", gpus=8)
    for value in caught.value.legal["micro_batch"]:
        judge(f"dp=8 micro_batch={value}", gpus=8)
    for batch in caught.value.legal["global_batch_size"]:
        judge("dp=8 micro_batch=3", gpus=8, batch=batch)


def test_warnings_name_slow_links():
    said = " ".join(judge("tp=16", gpus=16))
    assert "tp=16 leaves the scale-up domain of 8 GPUs" in said
    slow = sample.cluster(nics=1, nic_bytes_per_s=12.5e9)
    assert any("bound by the network" in w for w in judge("zero=3", gpus=64, cluster=slow))
    assert judge("zero=3 shard=8", gpus=64, cluster=slow) == []
    assert judge("zero=3", gpus=64, seq_len=65536) == []


def test_network_bound_by_hand():
    # Two gathers of 2 B and a reduction of 4 B over 11.25 GB/s are 0.711 ns a parameter;
    # 6 T FLOPs at half of 1e15 FLOP/s take as long at T = 59,259 tokens.
    slow = sample.cluster(nics=1, nic_bytes_per_s=12.5e9)
    assert judge("zero=3", gpus=64, cluster=slow, seq_len=59_000) != []
    assert judge("zero=3", gpus=64, cluster=slow, seq_len=59_500) == []


def test_stages_are_balanced_and_complete():
    for layers in (30, 46, 61, 94, 126):
        for stages in (2, 4, 8, 16):
            split = suggest_stages(layers, stages)
            assert sum(split) == layers
            assert max(split) - min(split) <= 1
    with pytest.raises(LayoutError, match="at most 4 stages"):
        suggest_stages(4, 5)


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(126, 16, 8), (94, 32, 3), (95, 32, 3)])
def test_embedding_and_head_may_be_chunks_of_their_own(layers, pp, vpp):
    # Published Megatron runs: Llama-3.1-405B and Qwen3-235B count both as layers of the split.
    model = sample.model(layers=layers)
    layout = parse_layout(f"pp={pp} vpp={vpp}", pp)
    training, where = sample.train(4 * pp), sample.cluster()
    warnings = check(layout, model, training, where, pp, MEGATRON)
    assert any("none is dropped" in text for text in warnings)
    split = suggest_chunks(layers, layout)
    assert len(split) == pp * vpp
    assert sum(split) == layers
    assert check(layout, model, training, where, pp, MEGATRON, split) == []
    short = sample.model(layers=pp * vpp - 3)
    with pytest.raises(LayoutError, match="at least one layer"):
        check(layout, short, training, where, pp, MEGATRON)


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ({"tp": 3}, "tp=3 does not divide num_attention_heads=32"),
        ({"tp": 16, "pp": 8}, "does not divide the 64 GPUs"),
        ({"dp": 3}, "is not the 64 GPUs"),
        ({"micro_batch": 5}, "global_batch_size=64"),
        ({"ep": 2}, "has no experts"),
        ({"pp": 2, "zero": 3}, "pp must be 1"),
        ({"vpp": 2, "pp": 1}, "nothing to interleave"),
        ({"schedule": 3}, "not offered"),
        ({"zero": 7}, "not a ZeRO stage"),
        ({"banana": 2}, "cannot be fixed"),
    ],
)
def test_what_can_never_be_legal_is_refused_at_once(fix, said):
    with pytest.raises(LayoutError, match=said):
        check_fixed(fix, MODEL, sample.train(64), sample.cluster(), 64, MEGATRON)


@pytest.mark.parametrize(
    "fix",
    [{"tp": 8}, {"vpp": 2}, {"schedule": 2}, {"shard": 8}, {"dp": 4, "cp": 2}, {"offload": 1}],
)
def test_what_can_be_legal_is_left_alone(fix):
    check_fixed(fix, MODEL, sample.train(64), sample.cluster(), 64, MEGATRON)


def test_a_table_is_judged_fast():
    rng = np.random.default_rng(1)
    count = 100_000
    table = Layout(
        dp=rng.integers(1, 65, count),
        tp=2 ** rng.integers(0, 5, count),
        pp=2 ** rng.integers(0, 5, count),
        cp=2 ** rng.integers(0, 3, count),
    )
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        legal_mask(table, MODEL, sample.train(64), sample.cluster(), MEGATRON)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0  # a loop over layouts would take minutes


def test_fixed_degrees_are_judged_fast_on_any_number_of_gpus():
    start = time.perf_counter()
    check_fixed({"schedule": 2}, MODEL, sample.train(5040), sample.cluster(), 5040, MEGATRON)
    assert time.perf_counter() - start < 3.0  # an unfiltered product of axes would take minutes
