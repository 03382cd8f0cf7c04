"""``torchrun ... -m executor run PLAN``: the commands of `executor.cli` without the front door."""

from __future__ import annotations

import sys

from executor.cli import main

if __name__ == "__main__":
    sys.exit(main())
