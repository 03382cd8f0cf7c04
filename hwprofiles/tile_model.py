"""The tile and wave form of GEMM time, on plain numbers.

`planner.roofline` evaluates it for a Device and `hwprofiles.fit_gemm` fits its constants, so the
equation has one home. Where it matters what a GEMM reads and writes, see `element_bytes`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hwprofiles.profile import Array

# Bytes per element of (operands, result). Block scales are counted as bytes of the operand.
ELEMENT_BYTES: dict[str, tuple[float, float]] = {
    "fp32": (4.0, 4.0),
    "tf32": (4.0, 4.0),
    "bf16": (2.0, 2.0),
    "fp16": (2.0, 2.0),
    "fp8": (1.0, 2.0),
    "fp8_block": (1.0 + 4.0 / 128.0, 2.0),
    "fp4": (0.5 + 1.0 / 16.0, 2.0),
}


def wave_s(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    batch: ArrayLike = 1.0,
    num_sms: float,
    tile_flops_per_s: float,
    prologue_k: float,
    tiles: tuple[tuple[int, int, float], ...],
) -> Array:
    """Time of the waves of output tiles, best over tile shapes [s].

    t = min over (x, y, e) of w S 2 x y (k + k0) / (R e),  w = ceil(g ceil(m/x) ceil(n/y) / S);
    g = batch, S = num_sms, k0 = prologue_k (steps of k that filling and draining a tile costs),
    R = tile_flops_per_s of the whole device, e = efficiency of a tile shape.

    Assumes that tiles of all products of a batch share the waves.

    References: Derived here from the output tiles of a blocked GEMM.

    >>> w = wave_s(1024, 1024, 1000, num_sms=32, tile_flops_per_s=1e12, prologue_k=0.0,
    ...            tiles=((256, 128, 1.0),))
    >>> abs(float(w) / (2 * 1024 * 1024 * 1000 / 1e12) - 1) < 1e-12
    True
    """
    m_ = np.asarray(m, dtype=np.float64)
    n_ = np.asarray(n, dtype=np.float64)
    k_ = np.asarray(k, dtype=np.float64)
    g = np.asarray(batch, dtype=np.float64)
    cost: Array | None = None
    for rows, columns, efficiency in tiles:
        num_tiles = g * np.ceil(m_ / rows) * np.ceil(n_ / columns)
        one = np.ceil(num_tiles / num_sms) * (rows * columns / efficiency)
        cost = one if cost is None else np.minimum(cost, one)
    assert cost is not None
    seconds: Array = cost * (k_ + prologue_k) * (2.0 * num_sms / tile_flops_per_s)
    return seconds


def operand_bytes(
    m: ArrayLike, n: ArrayLike, k: ArrayLike, precision: str, batch: ArrayLike = 1.0
) -> Array:
    """Bytes that one GEMM reads and writes once [bytes].

    q = g (e (m k + k n) + o m n);  e, o = bytes per operand and result element, g = batch.

    >>> float(operand_bytes(10, 10, 10, "bf16"))
    600.0
    """
    operand, result = ELEMENT_BYTES[precision]
    m_ = np.asarray(m, dtype=np.float64)
    n_ = np.asarray(n, dtype=np.float64)
    k_ = np.asarray(k, dtype=np.float64)
    total: Array = np.asarray(batch, dtype=np.float64) * (
        operand * k_ * (m_ + n_) + result * m_ * n_
    )
    return total
