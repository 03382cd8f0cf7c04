"""Masks and sentences agree on random layouts, and any text is a layout or a LayoutError."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.layout import CP_KINDS, OFFLOADS, RECOMPUTE, SCHEDULES, Layout
from planner.layout_text import KEYS, WORDS
from planner.legality import check, check_fixed, format_layout, legal_mask, parse_layout
from planner.runtime import load_runtime
from planner.runtimes.loader import available_runtimes
from tests import samples_legality as sample

CLUSTERS = (
    sample.cluster(),
    sample.cluster(precisions=("fp32", "bf16"), nvme_bytes=1e13, network="efa-v2"),
)
MODELS = (
    sample.model(heads=32, kv_heads=8),
    sample.model(heads=28, kv_heads=4, layers=28, hidden=3584, ffn=18944),
    sample.model(layers=46, heads=96, kv_heads=8, experts=128, top_k=8, moe_ffn=1408),
    sample.model(layers=61, heads=128, kind="mla", head_dim=192, v_head_dim=128, kv_lora_rank=512),
    sample.model(layers=26, heads=8, kv_heads=4, hidden=2304, window=4096),
)
TRAINS = (
    sample.train(64, 4096),
    sample.train(30, 2047),
    sample.train(256, 8192, precision="fp8"),
    sample.train(48, 4096, precision="fp32", optimizer="lion"),
)
RUNTIMES = tuple(load_runtime(name) for name in available_runtimes())
SMALL = (1, 2, 3, 4, 6, 8, 12, 16)


def rows(seed: int, count: int) -> Layout:
    """Random layouts, most of them with a chance to be legal."""
    rng = np.random.default_rng(seed)

    def pick(values: tuple[int, ...], first: float = 0.5) -> np.ndarray:
        weights = np.full(len(values), (1 - first) / max(1, len(values) - 1))
        weights[0] = first
        return rng.choice(np.asarray(values), size=count, p=weights / weights.sum())

    dp, cp, zero = pick(SMALL, 0.2), pick(SMALL, 0.6), rng.integers(0, 4, count)
    shard = np.where(zero == 0, 1, dp * cp)
    shard = np.where(rng.random(count) < 0.15, pick(SMALL), shard)
    vpp = pick((1, 2, 3), 0.7)
    schedule = np.where(vpp > 1, 2, rng.choice([0, 1, 1, 1, 3], count))
    schedule = np.where(rng.random(count) < 0.1, rng.integers(0, len(SCHEDULES), count), schedule)
    odd = rng.random(count) < 0.02
    table = Layout(
        dp=np.where(odd, rng.integers(-2, 2, count), dp),
        tp=pick(SMALL, 0.3),
        pp=pick(SMALL, 0.4),
        cp=cp,
        vpp=vpp,
        ep=pick(SMALL, 0.7),
        etp=pick(SMALL, 0.9),
        zero=zero,
        shard=shard,
        micro_batch=pick(SMALL, 0.5),
        recompute=rng.integers(0, len(RECOMPUTE), count),
        schedule=np.where(rng.random(count) < 0.01, 9, schedule),
        cp_kind=rng.integers(0, len(CP_KINDS), count),
        offload=rng.choice([0, 0, 0, *range(len(OFFLOADS))], count),
    )
    plain = rng.random(count) < 0.15  # data parallelism alone, legal in every runtime
    return Layout(
        **{
            f.name: np.where(plain, getattr(Layout(), f.name), getattr(table, f.name))
            for f in fields(Layout)
            if f.name not in ("dp", "micro_batch")
        },
        dp=table.dp,
        micro_batch=table.micro_batch,
    )


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda runtime: runtime.name)
def test_mask_is_true_exactly_where_check_accepts(runtime):
    seen = {True: 0, False: 0}
    for seed, model in enumerate(MODELS):
        for train in TRAINS:
            cluster = CLUSTERS[seed % 2]
            table = rows(seed, 60)
            mask = legal_mask(table, model, train, cluster, runtime)
            for index, legal in enumerate(mask):
                layout = table.take(index)
                try:
                    check(layout, model, train, cluster, None, runtime)
                    accepted = True
                except LayoutError as error:
                    accepted = False
                    assert error.values, error.message
                    json.dumps(error.as_json(), allow_nan=False)
                    assert isinstance(error.legal, dict), error.message
                    assert error.message.endswith("."), error.message
                assert accepted == legal, layout
                seen[accepted] += 1
    assert seen[False] > 100
    assert seen[True] > 0, "the random rows never hit a legal layout: the test shows nothing"


def test_a_fixed_degree_is_refused_only_if_no_layout_of_the_table_has_it():
    runtime, model, train, cluster = RUNTIMES[-1], MODELS[0], TRAINS[0], CLUSTERS[0]
    table = rows(7, 20_000)
    gpus = np.asarray(table.num_gpus)
    table = table.take(np.flatnonzero(gpus == 16))
    mask = legal_mask(table, model, train, cluster, runtime, 16)
    assert mask.any()
    for key in ("tp", "pp", "cp", "zero", "micro_batch", "shard", "vpp"):
        for value in np.unique(getattr(table, key)[mask]):
            check_fixed({key: int(value)}, model, train, cluster, 16, runtime)


words = st.one_of(
    st.text(max_size=12),
    st.builds(
        "{}={}".format,
        st.sampled_from([*KEYS, "stages", "tensor", "mbs", "TP"]),
        st.one_of(
            st.integers(-3, 10**12),
            st.floats(),
            st.text(max_size=6),
            st.sampled_from([w for words in WORDS.values() for w in words]),
        ),
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(words, max_size=6), st.one_of(st.none(), st.integers(1, 4096)))
def test_any_text_is_a_layout_or_a_layout_error(parts, gpus):
    text = " ".join(parts)
    try:
        layout = parse_layout(text, gpus)
    except LayoutError as error:
        assert len(error.message) < 400
        return
    assert isinstance(layout, Layout)
    assert parse_layout(format_layout(layout)) == layout


huge = st.one_of(st.integers(1, 16), st.integers(1, 10**7))


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries({key: huge for key in KEYS if key not in WORDS and key != "zero"}),
    st.sampled_from(RUNTIMES),
    st.sampled_from(MODELS),
)
def test_any_degrees_are_judged_and_quickly(values, runtime, model):
    layout = Layout(**values)
    try:
        check(layout, model, TRAINS[0], CLUSTERS[0], None, runtime)
    except LayoutError as error:
        assert len(error.message) < 600


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({f.name: st.integers(1, 64) for f in fields(Layout)}))
def test_what_is_written_is_read_back(values):
    for key, options in WORDS.items():
        values[key] %= len(options)
    values["zero"] %= 4
    layout = Layout(**values)
    assert parse_layout(format_layout(layout)) == layout
