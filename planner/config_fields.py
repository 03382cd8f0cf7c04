"""Reads fields of a config that nobody vouches for: each value is checked, none is guessed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from planner.errors import ModelError

MAX_WIDTH = 1 << 22
MAX_LAYERS = 4096
MAX_COUNT = 1 << 26

T = TypeVar("T")


def shown(value: Any) -> str:
    """`value` short enough for an error message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer too long to print
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names most like `name`."""
    import difflib  # only where something is wrong

    return difflib.get_close_matches(name[:80], list(known), n=5, cutoff=0.5)


class Fields:
    """A table of values with the name it goes by in messages.

    `read` collects the keys that were asked for, so that a strict reader can refuse the others.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table = table
        self.where = where
        self.read: set[str] = set()

    def has(self, key: str) -> bool:
        self.read.add(key)
        return self.table.get(key) is not None

    def raw(self, key: str) -> Any:
        self.read.add(key)
        return self.table.get(key)

    def fail(self, message: str, **values: Any) -> ModelError:
        """A ModelError about this table, to be raised by the caller."""
        return ModelError(
            f"{self.where}: {message}", values={name: shown(v) for name, v in values.items()}
        )

    def refuse(self, key: str, rule: str) -> ModelError:
        value = self.raw(key)
        return self.fail(f"{key}={shown(value)} is wrong, it must be {rule}.", **{key: value})

    def missing(self, *keys: str) -> ModelError:
        return self.fail(f"{' or '.join(keys)} is missing, and has no default.", missing=keys[0])

    def integer(self, *keys: str, default: int | None = None, low: int = 1, high: int) -> int:
        """The first of `keys` that is set, as an int in [low, high]; `default` if none is set."""
        for key in keys:
            if self.has(key):
                value = self.table[key]
                if isinstance(value, float) and math.isfinite(value) and value == int(value):
                    value = int(value)
                if isinstance(value, bool) or not isinstance(value, int):
                    raise self.refuse(key, f"an integer from {low} to {high}")
                if not low <= value <= high:
                    raise self.refuse(key, f"an integer from {low} to {high}")
                return value
        if default is None:
            raise self.missing(*keys)
        return default

    def width(self, *keys: str, default: int | None = None, low: int = 1) -> int:
        return self.integer(*keys, default=default, low=low, high=MAX_WIDTH)

    def count(self, *keys: str, default: int | None = None, low: int = 0) -> int:
        return self.integer(*keys, default=default, low=low, high=MAX_COUNT)

    def number(self, key: str, default: float) -> float:
        if not self.has(key):
            return default
        value = self.table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "a number above 0")
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise self.refuse(key, f"a number from 0 to {MAX_WIDTH}")
        if not (math.isfinite(value) and 0 < value <= MAX_WIDTH):
            raise self.refuse(key, f"a number above 0 and at most {MAX_WIDTH}")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        for key in keys:
            if self.has(key):
                value = self.table[key]
                if not isinstance(value, bool):
                    raise self.refuse(key, "true or false")
                return value
        return default

    def word(self, key: str, default: str = "", legal: Iterable[str] | None = None) -> str:
        if not self.has(key):
            return default
        value = self.table[key]
        if not isinstance(value, str) or len(value) > 400:
            raise self.refuse(key, "a short text")
        if legal is not None and value not in tuple(legal):
            raise self.refuse(key, "one of " + ", ".join(legal))
        return value

    def sub(self, key: str) -> Fields | None:
        """The table under `key`, or None."""
        if not self.has(key):
            return None
        value = self.table[key]
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.refuse(key, "a table of named values")
        return Fields(value, f"{self.where}: {key}")

    def items(self, key: str, kind: type[T], length: int | None = None) -> list[T] | None:
        """The list under `key`, every item of type `kind`, of the given length; or None."""
        if not self.has(key):
            return None
        value = self.table[key]
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise self.refuse(key, f"a list of at most {MAX_LAYERS} items")
        for item in value:
            if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
                raise self.refuse(key, f"a list of {kind.__name__} only")
        if length is not None and len(value) != length:
            raise self.fail(
                f"{key} has {len(value)} items, it must have one for each of the {length} layers.",
                **{key: len(value), "num_hidden_layers": length},
            )
        return list(value)
