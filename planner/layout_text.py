"""A layout as people write it: ``tp=8 pp=4 vpp=2 dp=16 micro_batch=2 recompute=selective``.

Definitions, stated because nothing is defaulted in silence: a degree that is not named is 1; `dp`
that is not named is GPUs / (tp pp cp) where the number of GPUs is known; `zero` is 0; `shard` is
``dp * cp`` where zero > 0 and 1 where it is 0; `schedule` is 1f1b, or interleaved where vpp > 1;
`recompute`, `cp_kind` and `offload` are none, ring and none. ``stages=12/12/11/11`` gives the
layers of each stage.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields

from planner.errors import LayoutError
from planner.layout import CP_KINDS, OFFLOADS, RECOMPUTE, SCHEDULES, Layout

WORDS = {
    "recompute": RECOMPUTE,
    "schedule": SCHEDULES,
    "cp_kind": CP_KINDS,
    "offload": OFFLOADS,
}
KEYS = tuple(f.name for f in fields(Layout))
MAX_DEGREE = 10**7  # more GPUs than any cluster has; keeps products inside int64


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """What a person asked for: the layout, layers of each stage, and the keys that were written."""

    layout: Layout
    stage_layers: tuple[int, ...] | None
    given: frozenset[str]


def parse_layout(text: str, num_gpus: int | None = None) -> Layout:
    """Read a layout from text.

    Raises
    ------
    LayoutError
        Anything but known keys, each once, with whole numbers or known words; or `dp` cannot be
        derived because tp pp cp do not divide `num_gpus`.

    Examples
    --------
    >>> layout = parse_layout("tp=8 pp=2 zero=1", num_gpus=64)
    >>> layout.dp, layout.shard
    (4, 4)
    """
    request = parse_request(text, num_gpus)
    if request.stage_layers is not None:
        raise LayoutError(
            "stages= is not part of a layout here; give the layout alone.",
            values={"stages": list(request.stage_layers)},
            legal={"key": list(KEYS)},
        )
    return request.layout


def parse_request(text: str, num_gpus: int | None = None) -> LayoutRequest:
    """Read a layout, and the layers of each stage where ``stages=`` gives them."""
    values: dict[str, int] = {}
    stages: tuple[int, ...] | None = None
    if not isinstance(text, str) or not text.strip():
        raise LayoutError(
            f"A layout is empty; write for example 'tp=8 pp=4 dp=16'; keys: {', '.join(KEYS)}.",
            legal={"key": list(KEYS)},
        )
    for word in re.split(r"[\s,]+", text.strip(" ,\t\r\n")):
        key, equals, value = word.partition("=")
        if key not in KEYS and key != "stages":
            raise _unknown_key(key, word)
        if not equals or not value:
            raise LayoutError(
                f"{_short(word)} lacks a value: write {key}=VALUE.", values={key: value}
            )
        if key in values or (key == "stages" and stages is not None):
            raise LayoutError(
                f"{key} is given twice in the layout; write it once.", values={key: value}
            )
        if key == "stages":
            stages = tuple(_whole("stages", part) for part in value.split("/"))
        else:
            values[key] = _value(key, value)
    return LayoutRequest(_complete(values, num_gpus), stages, frozenset(values))


def format_layout(layout: Layout) -> str:
    """Write a layout so that `parse_layout` reads the same one back.

    Examples
    --------
    >>> format_layout(Layout(dp=4, tp=8, pp=2, zero=1, shard=4))
    'dp=4 tp=8 pp=2 cp=1 zero=1 micro_batch=1'
    """
    always = ("dp", "tp", "pp", "cp", "micro_batch")
    shortest = {key: int(getattr(layout, key)) for key in ("dp", "tp", "pp", "cp", "vpp", "zero")}
    implied = _complete(shortest, None)
    words = []
    for key in KEYS:
        value = int(getattr(layout, key))
        if key in always or key in ("vpp", "zero"):
            shown = key in always or value != getattr(Layout(), key)
        else:
            shown = value != getattr(implied, key)
        if shown:
            words.append(f"{key}={WORDS[key][value] if key in WORDS else value}")
    return " ".join(words)


def _complete(values: dict[str, int], num_gpus: int | None) -> Layout:
    values = dict(values)
    if "dp" not in values and num_gpus is not None:
        tp, pp, cp = (values.get(key, 1) for key in ("tp", "pp", "cp"))
        if num_gpus % (tp * pp * cp):
            raise LayoutError(
                f"dp cannot be derived: tp={tp} x pp={pp} x cp={cp} = {tp * pp * cp} does not "
                f"divide the {num_gpus} GPUs; choose degrees whose product divides {num_gpus}.",
                values={"tp": tp, "pp": pp, "cp": cp, "num_gpus": num_gpus},
                legal={"tp * pp * cp": divisors(num_gpus)},
            )
        values["dp"] = num_gpus // (tp * pp * cp)
    if "shard" not in values and values.get("zero", 0) > 0:
        values["shard"] = values.get("dp", 1) * values.get("cp", 1)
    if "schedule" not in values and values.get("vpp", 1) > 1:
        values["schedule"] = SCHEDULES.index("interleaved")
    return Layout(**values)


def _value(key: str, value: str) -> int:
    if key not in WORDS:
        return _whole(key, value)
    if value not in WORDS[key]:
        near = difflib.get_close_matches(value, WORDS[key], n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise LayoutError(
            f"{key}={_short(value)} is unknown; legal: {', '.join(WORDS[key])}{hint}",
            values={key: value},
            legal={key: near or list(WORDS[key])},
        )
    return WORDS[key].index(value)


def _whole(key: str, value: str) -> int:
    least = 0 if key == "zero" else 1
    most = 3 if key == "zero" else MAX_DEGREE
    if not re.fullmatch(r"[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise LayoutError(
            f"{key}={_short(value)} is not legal: it must be a whole number, {least} to {most}.",
            values={key: value},
            legal={key: [0, 1, 2, 3] if key == "zero" else [1]},
        )
    return int(value)


def _unknown_key(key: str, word: str) -> LayoutError:
    near = difflib.get_close_matches(key, (*KEYS, "stages"), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "."
    return LayoutError(
        f"{_short(word)} is not part of a layout: legal keys are {', '.join(KEYS)} and "
        f"stages{hint}",
        values={"key": key},
        legal={"key": near or [*KEYS, "stages"]},
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def divisors(number: int) -> list[int]:
    """All divisors, in order.

    Examples
    --------
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i != number]
