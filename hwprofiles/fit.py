"""Fit the measured tables again: `python -m hwprofiles.fit` writes calibrations/*.json.

The tables are in calibrations/measured with the place each row was read; the fits are in
fit_gemm.py, fit_attention.py and fit_collectives.py. Takes a few seconds; the result is the same
on every run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hwprofiles.fit_attention import fit_attention
from hwprofiles.fit_collectives import fit_collectives
from hwprofiles.fit_gemm import fit_gemm

CALIBRATIONS = Path(__file__).parent / "calibrations"
WRITTEN = "by `python -m hwprofiles.fit` from calibrations/measured; do not edit"


def write(path: Path, document: dict[str, Any]) -> None:
    """One JSON file, an entry a line: JSON because it loads ten times as fast as TOML."""
    lines = []
    for key, value in {"written": WRITTEN, **document}.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n".join("  " + json.dumps(entry) for entry in value)
            lines.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(folder: Path = CALIBRATIONS) -> None:
    """Write every calibration file."""
    (folder / "collectives").mkdir(parents=True, exist_ok=True)
    write(folder / "gemm.json", fit_gemm())
    write(folder / "attention.json", fit_attention())
    for family, document in fit_collectives().items():
        write(folder / "collectives" / f"{family}.json", document)


if __name__ == "__main__":
    main()
