"""Frozen dataclasses to and from JSON, strictly: every key present, none unknown, every type exact.

`encode` gives plain dicts, lists, numbers and strings. `decode` reads them back by the type hints
of the dataclass and refuses anything else with the place where it stands, such as
``model.kinds[0].attention.head_dim``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import PlanFileError

T = TypeVar("T")

MAX_FILE_BYTES = 64 * 2**20
MAX_INT = 2**63 - 1  # what an int64 array holds


# Types that are not read field by field: ``encoders[cls](value)``, ``decoders[cls](data, where)``.
ENCODERS: dict[Any, Callable[[Any], Any]] = {}
DECODERS: dict[Any, Callable[[Any, str], Any]] = {}


def encode(value: Any) -> Any:
    """The plain form of a value.

    >>> from planner.specs import LoraSpec
    >>> encode(LoraSpec(rank=8, targets=("qkv",)))
    {'rank': 8, 'targets': ['qkv'], 'quantized': False}
    """
    if type(value) in ENCODERS:
        return ENCODERS[type(value)](value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if hasattr(value, "tolist"):  # numpy numbers and arrays
        return encode(value.tolist())
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PlanFileError(f"a plan holds finite numbers only, not {value}")
        # Twelve digits: more would tell one processor's rounding from another's.
        return float(f"{value:.12g}")
    raise TypeError(f"no JSON form for {type(value).__name__}")


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """A value of dataclass `cls` from its plain form.

    Raises
    ------
    PlanFileError
        A key missing or unknown, or a value of another type, with its place in the document.
    """
    return typing.cast("T", decode_hint(cls, data, where))


def decode_hint(hint: Any, data: Any, where: str) -> Any:
    if hint in DECODERS:
        return DECODERS[hint](data, where)
    if dataclasses.is_dataclass(hint):
        return decode_fields(hint, data, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return decode_hint(inner, data, where)
    if origin is tuple:
        return decode_tuple(arguments, data, where)
    if origin is not None and issubclass(origin, Mapping):
        items = expect(dict, data, where)
        return {key: decode_hint(arguments[1], item, at(where, key)) for key, item in items.items()}
    if hint is float:
        return decode_number(data, where)
    if hint is int:
        if abs(expect(int, data, where)) > MAX_INT:
            raise PlanFileError(f"{where} is beyond 2^63: {str(data)[:24]}...")
        return data
    if hint in (str, bool):
        return expect(hint, data, where)
    raise TypeError(f"no way to read {where} as {hint}")


def decode_fields(cls: Any, data: Any, where: str) -> Any:
    items = expect(dict, data, where)
    hints = field_hints(cls)
    if missing := sorted(hints.keys() - items.keys()):
        raise PlanFileError(
            f"{where or 'the plan'} has no {', '.join(missing)}", values={"missing": missing}
        )
    if unknown := sorted(items.keys() - hints.keys()):
        raise PlanFileError(
            f"{where or 'the plan'} has keys that a plan does not know: "
            f"{', '.join(name[:40] for name in unknown)}",
            values={"unknown": unknown},
            legal=sorted(hints),
        )
    return cls(
        **{name: decode_hint(hint, items[name], at(where, name)) for name, hint in hints.items()}
    )


def decode_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    items = expect(list, data, where)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(decode_hint(arguments[0], x, f"{where}[{i}]") for i, x in enumerate(items))
    if len(items) != len(arguments):
        raise PlanFileError(f"{where} has {len(items)} entries where {len(arguments)} belong")
    return tuple(
        decode_hint(hint, x, f"{where}[{i}]")
        for i, (hint, x) in enumerate(zip(arguments, items, strict=True))
    )


def decode_number(data: Any, where: str) -> float:
    if isinstance(data, int) and not isinstance(data, bool) and abs(data) <= MAX_INT:
        return float(data)
    number = expect(float, data, where)
    if not math.isfinite(number):
        raise PlanFileError(f"{where} is {number}, and a plan holds finite numbers only")
    return number


def expect(cls: type[T], data: Any, where: str) -> T:
    """`data` if it is exactly of type `cls`; bool is no int here."""
    if type(data) is not cls:
        raise PlanFileError(
            f"{where or 'the plan'} is {type_name(data)} where {NAMES[cls]} belongs",
            values={where or "plan": repr(data)[:80]},
        )
    return data


NAMES: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def type_name(data: Any) -> str:
    return NAMES.get(type(data), type(data).__name__)


def at(where: str, key: str) -> str:
    return f"{where}.{key[:40]}" if where else key[:40]


@cache
def field_hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def dumps(data: Any, indent: str = "") -> str:
    """JSON text with sorted keys, a list of plain values on one line; equal data, equal bytes."""
    inner = indent + "  "
    if isinstance(data, dict) and data:
        lines = [f"{inner}{json.dumps(k)}: {dumps(data[k], inner)}" for k in sorted(data)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(data, list) and any(isinstance(item, dict | list) for item in data):
        return "[\n" + ",\n".join(inner + dumps(x, inner) for x in data) + f"\n{indent}]"
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def read_json(path: Path) -> Any:
    """The document in a JSON file, without NaN, repeated keys or endless depth."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PlanFileError(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise PlanFileError(
            f"cannot read {path}: {error.strerror or error}", values={"path": str(path)}
        ) from error


def parse_json(content: bytes, where: str) -> Any:
    """As `read_json`, from bytes."""
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=refuse_constant
        )
    except RecursionError as error:
        raise PlanFileError(f"{where} is nested too deeply to be a plan") from error
    except ValueError as error:
        # Broken UTF-8, broken JSON and numbers too long to convert are all ValueError.
        reason = " ".join(str(error).split())
        raise PlanFileError(
            f"{where} is not valid JSON: {reason}", values={"path": where}
        ) from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {repeated[:40]!r} stands twice in one object")
    return items


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that a plan may hold")
