"""The root of everything that shardwise refuses; the whole tree is drawn in planner/errors.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ShardwiseError(Exception):
    """Base of all refusals.

    Parameters
    ----------
    message
        One sentence for a person.
    values
        The offending values by name, for ``--json``.
    legal
        The legal values nearest to what was asked, by name, for ``--json``.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        values: Mapping[str, Any] | None = None,
        legal: Mapping[str, Sequence[Any]] | Sequence[Any] | None = None,
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.message = " ".join(message.split())
        self.values = dict(values or {})
        self.legal: Any = dict(legal) if isinstance(legal, Mapping) else list(legal or [])

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` prints for this error."""
        return {"error": {"message": self.message, "values": self.values, "legal": self.legal}}


class InputError(ShardwiseError):
    """A value that a person gave is wrong."""


class ProfileError(InputError):
    """A device, link or cluster profile is wrong, or a fact is missing."""
