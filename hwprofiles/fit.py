"""Fit the measured tables again: `python -m hwprofiles.fit` writes calibrations/*.toml.

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
HEADER = "# Written by `python -m hwprofiles.fit` from calibrations/measured; do not edit.\n"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(float(value))
    return json.dumps(value)


def to_toml(document: dict[str, Any]) -> str:
    """TOML of plain values, tables and arrays of tables (one level)."""
    plain = {k: v for k, v in document.items() if not isinstance(v, dict) and not _tables(v)}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in document.items():
        if key in plain:
            continue
        for table in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
            for name, inner in table.items():
                if isinstance(inner, dict):
                    fields = ", ".join(f"{k} = {_value(v)}" for k, v in inner.items())
                    lines.append(f"{name} = {{ {fields} }}")
                else:
                    lines.append(f"{name} = {_value(inner)}")
    return HEADER + "\n".join(lines) + "\n"


def _tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def main(folder: Path = CALIBRATIONS) -> None:
    """Write every calibration file."""
    (folder / "collectives").mkdir(parents=True, exist_ok=True)
    (folder / "gemm.toml").write_text(to_toml(fit_gemm()))
    (folder / "attention.toml").write_text(to_toml(fit_attention()))
    for family, document in fit_collectives().items():
        (folder / "collectives" / f"{family}.toml").write_text(to_toml(document))


if __name__ == "__main__":
    main()
