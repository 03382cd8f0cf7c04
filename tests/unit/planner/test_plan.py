"""Plan files: what is saved comes back, equal plans are equal bytes, damaged ones are refused."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.codec import dumps, encode
from planner.errors import InputError, LayoutError, PlanFileError
from planner.files import write_whole
from planner.layout import SCHEDULES, Layout, StageLayout
from planner.mesh import coordinates, mesh_of
from planner.plan import Certificate, Plan, Prediction, load_plan, parse_plan, plan_text, save_plan
from planner.plan import Plan as PlanType
from planner.results import CommOp
from planner.specs import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, TrainSpec
from planner.stages import plan_stages
from planner.version import VERSION


def small_model() -> ModelSpec:
    """Two dense layers, then six of experts."""
    attention = AttentionSpec(num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    return ModelSpec(
        name="small-moe",
        hidden_size=1024,
        vocab_size=32000,
        kinds=(
            LayerSpec(attention, mlp=MlpSpec(4096)),
            LayerSpec(attention, moe=MoeSpec(8, 2, 1024)),
        ),
        layer_kinds=(0, 0, 1, 1, 1, 1, 1, 1),
        source="made up for this test",
    )


def small_plan() -> Plan:
    model = small_model()
    layout = Layout(dp=2, tp=2, pp=2, vpp=2, ep=2, zero=1, shard=2, schedule=2)
    # vpp=2: rank 0 holds layers 0, 1 and 4, 5; rank 1 holds 2, 3 and 6, 7
    stages = (
        StageLayout((2, 2), ((1, 0, 1, 0), (2, 0, 0, 0))),
        StageLayout((0, 4), ((0, 0, 0, 0), (1, 3, 0, 0))),
    )
    plan = PlanType(
        schema_version=1,
        shardwise_version=VERSION,
        model=model,
        train=TrainSpec(global_batch_size=32, seq_len=2048),
        cluster="dgx-h100",
        cluster_digest="0123456789abcdef",
        num_gpus=8,
        gpus_per_node=8,
        layout=layout,
        num_microbatches=16,
        stages=plan_stages(model, layout, stages),
        mesh=mesh_of(layout),
        prediction=Prediction(
            step_time_s=0.3,
            lower_s=0.25,
            upper_s=0.4,
            tokens_per_s_per_gpu=27306.666666666668,
            mfu=0.31,
            hfu=0.33,
            breakdown_s={"compute": 0.2, "bubble": 0.1},
            stage_s=(0.01, 0.012),
            memory_bytes=({"weights": 1e9}, {"weights": 2e9}),
            capacity_bytes=80e9,
            host_bytes_per_node=0.0,
        ),
        comm_ops=(CommOp("all_reduce", "tp", "forward", "attention output", 4194304, 128),),
        certificate=Certificate("optimal", 900, 700, 600, 550, 50, 0.3, 0.0),
    )
    return parse_plan(encode(plan))


def test_saved_plan_comes_back_equal(tmp_path: Path) -> None:
    plan, path = small_plan(), tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    assert path.read_text() == plan_text(load_plan(path))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_plan_says_where_each_layer_and_rank_sits() -> None:
    plan = small_plan()
    assert [chunk.layers for chunk in plan.stages[0].chunks] == [(0, 1), (4, 5)]
    assert plan.stages[0].chunks[0].recompute == ("full", "none")
    assert plan.stages[1].chunks[1].recompute == ("selective", "none")
    assert plan.mesh.ranks[5] == (1, 0, 0, 1, 0, 1, 0, 1)
    assert plan.schedule == "interleaved"


def test_plan_file_holds_no_wall_clock() -> None:
    text = plan_text(small_plan())
    assert "wall" not in text
    assert "date" not in json.loads(text)


def test_every_rank_sits_once() -> None:
    sizes = (2, 3, 4)
    assert len({coordinates(rank, sizes) for rank in range(24)}) == 24


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": 16}, "num_gpus is 16"),
        ({"num_microbatches": 8}, "global_batch_size"),
        ({"schema_version": 2}, "schema version 2"),
        ({"layout": {**encode(small_plan().layout), "tp": 4}}, "tp * pp * cp"),
        ({"layout": {**encode(small_plan().layout), "ep": 3}}, "does not divide"),
        ({"layout": {**encode(small_plan().layout), "schedule": "chimera"}}, "chimera"),
        ({"stages": []}, "0 stages"),
        ({"comm_ops": [{"kind": "broadcast"}]}, "comm_ops[0]"),
        ({"certificate": {"status": "optimal"}}, "certificate has no"),
        ({"gpus_per_node": True}, "true or false"),
        ({"extra": 1}, "extra"),
    ],
)
def test_contradiction_is_refused_with_its_place(change: dict[str, object], words: str) -> None:
    with pytest.raises(PlanFileError) as refusal:
        parse_plan(encode(small_plan()) | change)
    assert words in refusal.value.message
    assert "\n" not in refusal.value.message


def test_layers_in_the_wrong_chunk_are_refused() -> None:
    document = encode(small_plan())
    chunks = document["stages"][0]["chunks"]
    chunks[0]["layers"], chunks[1]["layers"] = chunks[1]["layers"], chunks[0]["layers"]
    with pytest.raises(PlanFileError, match="chunks"):
        parse_plan(document)


def test_addends_must_sum_to_the_step_time() -> None:
    document = encode(small_plan())
    document["prediction"]["breakdown_s"]["bubble"] = 0.05
    with pytest.raises(PlanFileError, match="sum to"):
        parse_plan(document)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'{"schema_version": 1',
        b'{"schema_version": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 200_000,
        b'{"schema_version": ' + b"9" * 6000 + b"}",
    ],
)
def test_file_that_is_no_plan(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError):
        load_plan(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read"):
        load_plan(tmp_path / "none.json")


def test_stages_that_do_not_hold_every_layer() -> None:
    with pytest.raises(LayoutError, match="8 layers"):
        plan_stages(
            small_model(), Layout(pp=1), [StageLayout((2, 5), ((2, 0, 0, 0), (5, 0, 0, 0)))]
        )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_every_layer_sits_once(schedule: str) -> None:
    model = replace(small_model(), layer_kinds=(1,) * 8)
    layout = Layout(pp=3, schedule=SCHEDULES.index(schedule))
    stages = [StageLayout((0, n), ((0, 0, 0, 0), (n, 0, 0, 0))) for n in (3, 3, 2)]
    placed = plan_stages(model, layout, stages)
    assert [i for stage in placed for chunk in stage.chunks for i in chunk.layers] == list(range(8))


TEXT = plan_text(small_plan())
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.lists(st.integers(0, 9), max_size=3),
)


def places(data: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path to every value of a document."""
    items = data.items() if isinstance(data, dict) else enumerate(data)  # type: ignore[arg-type]
    found: list[tuple[object, ...]] = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


PLACES = places(json.loads(TEXT))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(PLACES), st.sampled_from(["set", "drop", "add"]), JUNK)
def test_changed_plan_is_a_plan_or_refused(
    path: tuple[object, ...], how: str, junk: object
) -> None:
    document = json.loads(TEXT)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if how == "drop":
        del parent[path[-1]]
    elif how == "add" and isinstance(parent, list):
        parent.append(junk)
    elif how == "add":
        parent["unheard_of"] = junk
    else:
        parent[path[-1]] = junk
    try:
        plan = parse_plan(document)
    except PlanFileError as refusal:
        assert refusal.message
        return
    # What was accepted must be sound enough to be written and read again.
    assert plan_text(parse_plan(encode(plan))) == plan_text(plan)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, len(TEXT) - 1), st.binary(max_size=3))
def test_damaged_bytes_are_a_plan_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, damage: bytes
) -> None:
    content = TEXT.encode()
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(content[:at] + damage + (content[at + len(damage) :] if damage else b""))
    try:
        assert isinstance(load_plan(path), Plan)
    except PlanFileError as refusal:
        assert refusal.message


def test_text_keeps_plain_lists_on_one_line() -> None:
    assert dumps({"b": [1, 2], "a": {}}) == '{\n  "a": {},\n  "b": [1, 2]\n}'


@pytest.mark.parametrize("target", ["", "missing/plan.json", "."])
def test_no_file_can_be_there(tmp_path, target):
    with pytest.raises(InputError, match="cannot write"):
        write_whole(tmp_path / target if target else "", "text")
    assert list(tmp_path.iterdir()) == []


def test_pipes_and_links_stay_what_they_are(tmp_path):
    """A rename would put a file in the place of a pipe or of /dev/stdout."""
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
