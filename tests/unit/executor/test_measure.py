"""Collectives are counted by kind, axis and bytes, whoever calls them; files are read strictly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import _functional_collectives as functional  # noqa: E402

from executor.measure import (  # noqa: E402
    MEASUREMENTS_VERSION,
    Collective,
    CollectiveCounter,
    Measurements,
    RankMeasure,
    StepMeasure,
    load_measurements,
    save_measurements,
)
from planner.errors import InputError  # noqa: E402
from tests.parity.ranks import run_ranks  # noqa: E402


def call_each() -> tuple[Collective, ...]:
    """Every collective once, on buffers of 8 floats (32 bytes) in all."""
    group = dist.group.WORLD
    assert group is not None
    whole, part, other = torch.ones(8), torch.ones(4), torch.ones(8)
    counter = CollectiveCounter({str(group.group_name): ("shard", "ep")})
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    peer = 1 - dist.get_rank()
    with counter:
        dist.all_reduce(whole)
        gather(whole, part)
        scatter(part, whole)
        dist.all_to_all_single(other, whole)
        sends = dist.P2POp(dist.isend, whole, peer)
        receives = dist.P2POp(dist.irecv, other, peer)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        functional.all_reduce(whole, "sum", group).sum()
        functional.all_gather_tensor(part, 0, group).sum()
        functional.reduce_scatter_tensor(whole, "sum", 0, group).sum()
        functional.all_to_all_single(whole, None, None, group).sum()
    return counter.collectives()


def test_every_collective_counts_as_the_plan_counts_it() -> None:
    for counted in run_ranks(call_each, 2):
        assert counted == (
            Collective("all_gather", "shard", 32.0, 2),
            Collective("all_reduce", "shard", 32.0, 2),
            Collective("all_to_all", "ep", 32.0, 2),
            Collective("reduce_scatter", "shard", 32.0, 2),
            Collective("send_recv", "shard", 32.0, 1),
        )


def sample(**changes: object) -> Measurements:
    steps = tuple(StepMeasure(i, 2.0, s, 1e3, 0.1, 1e6) for i, s in enumerate((9, 8, 1, 3, 2)))
    rank = RankMeasure(0, {"pp": 0}, 4.0, 4.0, 8.0, 100.0, "resident", ())
    return replace(
        Measurements(MEASUREMENTS_VERSION, "d", "cpu", 2, 2, 2, "2.14", steps, (rank,)), **changes
    )


def test_the_first_steps_warm_up() -> None:
    assert sample().step_time_s == 2.0
    assert sample(steps=sample().steps[:1]).step_time_s == 9


def test_more_processes_than_cores_share_them() -> None:
    assert not sample().shares_cores
    assert sample(ranks_per_node=4).shares_cores
    assert not sample(ranks_per_node=4, device_type="cuda").shares_cores


def test_a_file_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    save_measurements(sample(), path)
    assert load_measurements(path) == sample()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "not a measurements file"),
        ('{"measurements_version": 9}', "of version 1"),
        ('{"measurements_version": 1}', "has no"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        load_measurements(path)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    save_measurements(sample(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": 1}))
    with pytest.raises(InputError, match="extra"):
        load_measurements(path)
