"""Everything that shardwise refuses, as one tree.

ShardwiseError                exit code 2, one sentence
├── InputError                a value a person gave is wrong
│   ├── ModelError            a model config or preset
│   ├── ProfileError          a device, link or cluster file
│   ├── LayoutError           degrees that do not fit model, cluster, batch or runtime
│   └── PlanFileError         a plan.json that is damaged, of another version or inconsistent
└── DoesNotFit                every legal layout needs more memory than there is; exit code 3

A message says what is wrong, the values, the rule and the nearest legal values, in one sentence.
"""

from __future__ import annotations

from hwprofiles.errors import InputError, ProfileError, ShardwiseError

__all__ = [
    "DoesNotFit",
    "InputError",
    "LayoutError",
    "ModelError",
    "PlanFileError",
    "ProfileError",
    "ShardwiseError",
]


class ModelError(InputError):
    """A model config, preset name or model TOML is wrong or not supported."""


class LayoutError(InputError):
    """A layout does not fit the model, the cluster, the batch or the runtime."""


class PlanFileError(InputError):
    """A plan file is damaged, of another version or inconsistent."""


class DoesNotFit(ShardwiseError):
    """No legal layout fits in memory."""

    exit_code = 3
