"""Runtime files: every shipped one loads, every damaged one is refused in a sentence."""

from __future__ import annotations

import re
import time

import pytest

from hwprofiles.errors import ProfileError
from planner.layout import SCHEDULES
from planner.runtime import RUNTIME_DIR, load_runtime
from planner.runtimes.loader import LAUNCHES, PASS_BYTES, available_runtimes, read_runtime

TEXT = (RUNTIME_DIR / "megatron-core.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", available_runtimes())
def test_a_shipped_runtime_is_consistent(name):
    runtime = load_runtime(name)
    assert runtime.name == name
    assert set(runtime.pass_bytes) == set(PASS_BYTES)
    assert set(runtime.launches) == set(LAUNCHES)
    assert set(runtime.zero_with_pp) <= set(runtime.zero_stages)
    assert set(runtime.reduce_every_microbatch) <= set(runtime.zero_stages) | {2, 3}
    assert set(runtime.overlap_p2p) <= set(SCHEDULES)
    assert {"none"} <= set(runtime.recompute)
    assert {"none"} <= set(runtime.offloads)
    assert "1f1b" in runtime.schedules
    assert ("selective" in runtime.recompute) == bool(runtime.selective_modules)
    assert runtime.logit_bytes_peak >= runtime.logit_bytes_kept
    for fact in runtime.facts.values():
        assert fact.unit
        assert fact.kind
        assert fact.source


def test_bytes_per_parameter_add_up_to_the_published_sums():
    # Persistent state of bf16 training with Adam's two fp32 moments, one rank.
    def total(name: str) -> float:
        runtime = load_runtime(name)
        compute_copy = 0 if runtime.weight_shard_is_master else runtime.weight_bytes
        return compute_copy + runtime.grad_bytes + runtime.master_bytes + 8

    assert total("megatron-core") == 18
    assert total("fsdp2") == 16
    assert total("ddp") == 20  # with the bucket copy
    assert total("deepspeed") == 16
    assert total("nanotron") == 18
    assert total("megatron-lm-2021") == 16


def test_step_traffic_adds_up_with_the_moments():
    # Per owned parameter, with the 8 bytes of moments read and written.
    assert load_runtime("megatron-core").step_bytes_owned + 16 == 46
    assert load_runtime("nemo").step_bytes_owned + 16 == 52
    assert load_runtime("ddp").step_bytes_owned + 16 == 40


def test_compiled_passes_move_no_more_than_eager_ones():
    eager, compiled = load_runtime("shardwise").pass_bytes, load_runtime("fsdp2").pass_bytes
    names = ("norm_backward", "residual_forward", "gated_forward", "gated_backward", "loss")
    assert all(compiled[name] < eager[name] for name in names)


def test_a_file_loads_in_milliseconds():
    path = RUNTIME_DIR / "megatron-core.toml"
    best = min(_seconds(path) for _ in range(7))
    assert best < 0.02  # 3 ms alone on one core


def _seconds(path) -> float:
    start = time.perf_counter()
    read_runtime(path)
    return time.perf_counter() - start


def test_an_unknown_name_offers_near_ones():
    with pytest.raises(ProfileError, match="did you mean megatron-core") as caught:
        load_runtime("megatron-cor")
    assert "megatron-core" in caught.value.legal["runtime"]


FLAG = "hsdp = true"
WEIGHT = re.search(r"^weight_bytes = .*$", TEXT, re.MULTILINE).group()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (WEIGHT, "weight_bytes = 2", "must be { value, unit, kind, source }"),
        (WEIGHT, "", r"\[memory\] lacks weight_bytes"),
        (WEIGHT, WEIGHT + "\nweigth = 1", "unknown key 'weigth'"),
        (WEIGHT, WEIGHT.replace('unit = "B/param", ', ""), "needs a unit"),
        (WEIGHT, WEIGHT.replace("B/param", "furlongs"), "needs a unit"),
        (WEIGHT, re.sub(r'kind = "\w+", ', "", WEIGHT), "needs a kind"),
        (WEIGHT, re.sub(r'source = "[\w-]+"', 'source = "hearsay"', WEIGHT), "needs a source"),
        (WEIGHT, re.sub(r"value = 2", "value = -2", WEIGHT), "finite and not negative"),
        (WEIGHT, re.sub(r"value = 2", "value = nan", WEIGHT), "finite and not negative"),
        (WEIGHT, re.sub(r"value = 2", "value = true", WEIGHT), "needs a number"),
        (WEIGHT, re.sub(r"value = 2", 'value = 2, color = "red"', WEIGHT), "unknown key 'color'"),
        (FLAG, 'hsdp = "yes"', "must be true or false"),
        ("[launches]", "[launchs]", "unknown key 'launchs'"),
        ('default = "flash_attn_2"', "", "lacks 'default'"),
        ('["1f1b", "interleaved"]', '["1f1b", "zigzag"]', "holds 'zigzag'"),
        ('reduce_op = "reduce_scatter"', 'reduce_op = "sum"', "reduce_op must be"),
        ("[offers]", "[offers", "cannot be read as TOML"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, old, new, said):
    assert old in TEXT
    path = tmp_path / "damaged.toml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ProfileError, match=said):
        read_runtime(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot be read as TOML"):
        read_runtime(path)


def test_a_fraction_is_at_most_one(tmp_path):
    line = re.search(r"^tp_overlap_fraction = .*$", TEXT, re.MULTILINE).group()
    path = tmp_path / "fraction.toml"
    path.write_text(TEXT.replace(line, line.replace("value = 0.25", "value = 1.5")), "utf-8")
    with pytest.raises(ProfileError, match="at most 1"):
        read_runtime(path)
