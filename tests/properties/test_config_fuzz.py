"""Any damage to a model file gives a ModelSpec or a ModelError, and nothing else."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import ModelError
from planner.hf_config import model_from_config, model_from_path
from planner.model_flops import model_flops_per_token
from planner.parameters import total_parameters
from planner.presets_index import PRESET_DIR
from planner.specs import ModelSpec

CONFIGS = sorted((Path(__file__).parents[1] / "reference" / "hf_configs").glob("*.json"))
TEXTS = {path.stem: path.read_text() for path in CONFIGS}
TOMLS = {path.stem: path.read_text() for path in sorted(PRESET_DIR.glob("*.toml"))}
ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**63, 10**400, -(10**30), 0.5, -0.0, 1e308,
    math.nan, math.inf, "", "12", "llama", "\ud800", "x" * 10_000, [], [1], ["full_attention"],
    [None] * 5000, {}, {"a": 1}, {"hidden_size": 8}, [[[[]]]],
]  # fmt: skip
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `value`."""
    children = (
        value.items() if isinstance(value, dict) else
        enumerate(value) if isinstance(value, list) else ()
    )  # fmt: skip
    found = []
    for key, child in children:
        found += [(*path, key), *places(child, (*path, key))]
    return found


def usable(model: ModelSpec) -> None:
    """A model that was accepted can be counted."""
    assert total_parameters(model) >= 0
    assert math.isfinite(model_flops_per_token(model, 4096).total_flops)
    assert model.num_hidden_layers == len(model.layer_kinds)


@FUZZ
@given(data=st.data(), name=st.sampled_from(sorted(TEXTS)))
def test_changed_configs(data: st.DataObject, name: str) -> None:
    config = json.loads(TEXTS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        spots = [spot for spot in places(config) if len(spot) < 5]
        if not spots:
            break
        *way, last = data.draw(st.sampled_from(spots))
        inside: Any = config
        for step in way:
            inside = inside[step]
        if data.draw(st.booleans()):
            inside[last] = copy.deepcopy(data.draw(st.sampled_from(ODD_VALUES)))
        else:
            del inside[last]
    try:
        usable(model_from_config(config, name))
    except ModelError as error:
        assert len(error.message) < 1000
        json.dumps(error.as_json())
        error.message.encode()


@FUZZ
@given(data=st.data(), name=st.sampled_from(sorted(TEXTS | TOMLS)))
def test_damaged_files(data: st.DataObject, name: str, tmp_path: Path) -> None:
    suffix = ".json" if name in TEXTS else ".toml"
    content = bytearray((TEXTS | TOMLS)[name].encode())
    start = data.draw(st.integers(0, len(content)))
    kind = data.draw(st.sampled_from(["cut", "noise", "swap"]))
    if kind == "cut":
        del content[start:]
    elif kind == "noise":
        content[start : start + 4] = data.draw(st.binary(max_size=8))
    else:
        content[start : start + 1] = data.draw(
            st.sampled_from([b"9", b"-", b"{", b'"', b"=", b"]"])
        )
    path = tmp_path / f"model{suffix}"
    path.write_bytes(bytes(content))
    try:
        usable(model_from_path(path))
    except ModelError as error:
        assert error.message


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: type(value).__name__)
def test_what_is_no_config_at_all(value: Any) -> None:
    with pytest.raises(ModelError):
        model_from_config(value, "odd")
