"""In which ways layers of several kinds can fall on pipeline ranks.

The space of a stage split, everywhere in the search: layers lie in their order on the virtual
stages; every rank holds at least one layer per chunk; the chunks of a rank are as equal as
possible, the longer ones later. Then a rank's share is one number, its layers on all chunks
together, except for where layers of different kinds meet. Three forms of model:

one     one kind of layer.
prefix  k layers of one kind, then another kind (first-k-dense mixtures of experts), k <=
        MAX_PREFIX: a *pattern* says how many of the first k each rank holds; the others are one
kind. Any vpp. any     any other order. vpp = 1: a stage is a range of positions. vpp > 1: only
        equal chunks (num_layers divisible by pp * vpp), where every count is determined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MAX_PREFIX = 8  # 2**(k-1) patterns
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """The layers of a model as the search sees them.

    Attributes
    ----------
    kinds
        Kind of each layer.
    counts
        Layers of each kind.
    main
        The kind with most layers (the first of equals): its layers mix policies freely in a stage,
        all layers of other kinds in one stage share one policy.
    form
        ``one``, ``prefix`` or ``any``.
    prefix
        Number of leading layers of the first kind, for the form ``prefix``; else 0.
    """

    kinds: tuple[int, ...]
    counts: tuple[int, ...]
    main: int
    form: str
    prefix: int

    @property
    def num_layers(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Layers per rank that are given, and the range of those that are chosen.

    Rank s holds ``base[s, k]`` layers of kind k and ``lo[s] <= q[s] <= hi[s]`` more of kind `free`,
    with ``sum q = total``.
    """

    base: Index  # (S, K)
    lo: Index  # (S,)
    hi: Index  # (S,)
    free: int
    total: int


def layer_order(kinds: tuple[int, ...], num_kinds: int) -> LayerOrder:
    """Classify the order of layers.

    >>> layer_order((0, 0, 1, 1, 1), 2).form, layer_order((0, 1, 0, 1), 2).form
    ('prefix', 'any')
    """
    counts = tuple(kinds.count(k) for k in range(num_kinds))
    main = counts.index(max(counts))
    prefix = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    if prefix == len(kinds):
        return LayerOrder(kinds, counts, main, "one", 0)
    if len(set(kinds[prefix:])) == 1 and prefix <= MAX_PREFIX:
        return LayerOrder(kinds, counts, main, "prefix", prefix)
    return LayerOrder(kinds, counts, main, "any", 0)


def chunk_sizes(num_layers: int, vpp: int) -> tuple[int, ...]:
    """Layers of each chunk of a rank: as equal as possible, longer ones later.

    >>> chunk_sizes(8, 3)
    (2, 3, 3)
    """
    short, longer = divmod(num_layers, vpp)
    return tuple(short + (c >= vpp - longer) for c in range(vpp))


def place(virtual_stage: int, pp: int, v_shape: bool) -> tuple[int, int]:
    """Rank and chunk of a virtual stage; in a V every second chunk runs backwards over the
    ranks."""
    chunk, position = divmod(virtual_stage, pp)
    return (pp - 1 - position if v_shape and chunk % 2 else position), chunk


def patterns(order: LayerOrder, pp: int, vpp: int, v_shape: bool) -> tuple[Pattern, ...]:
    """All patterns of a model on `pp` ranks of `vpp` chunks; empty where no split exists.

    Not for the form ``any`` at vpp = 1, whose stages are ranges of positions.
    """
    return _patterns(order.kinds, len(order.counts), order.form, order.prefix, pp, vpp, v_shape)


@lru_cache(maxsize=4096)
def _patterns(
    kinds: tuple[int, ...],
    num_kinds: int,
    form: str,
    prefix: int,
    pp: int,
    vpp: int,
    v_shape: bool,
) -> tuple[Pattern, ...]:
    num_layers = len(kinds)
    if num_layers < pp * vpp:
        return ()
    if form == "any":
        return _equal_chunks(kinds, num_kinds, pp, vpp, v_shape)
    sizes = np.array([chunk_sizes(n, vpp) for n in range(num_layers + 1)])  # (L+1, vpp)
    free = kinds[-1]
    found = []
    for parts in _compositions(prefix, pp * vpp):
        allowed = np.ones((pp, num_layers + 1), dtype=bool)
        allowed[:, :vpp] = False
        base = np.zeros((pp, num_kinds), dtype=np.int64)
        for stage, part in enumerate(parts):
            rank, chunk = place(stage, pp, v_shape)
            last = stage == len(parts) - 1
            size = sizes[:, chunk]
            allowed[rank] &= (size >= part) if last else (size == part)
            base[rank, kinds[0]] += part
        if not allowed.any(axis=1).all():
            continue
        given = base.sum(axis=1)
        # The sizes of a chunk rise with n: what is allowed is an interval.
        lo = np.maximum(allowed.argmax(axis=1) - given, 0)
        hi = num_layers - allowed[:, ::-1].argmax(axis=1) - given
        total = num_layers - prefix
        if lo.sum() <= total <= hi.sum():
            found.append(Pattern(base, lo, np.minimum(hi, total), free, total))
    return tuple(found)


def _compositions(total: int, most: int) -> Iterator[tuple[int, ...]]:
    """Ordered sums of positive parts; the empty one for 0."""
    if total == 0:
        yield ()
        return
    if most == 0:
        return
    for part in range(total, 0, -1):
        for rest in _compositions(total - part, most - 1):
            yield (part, *rest)


def _equal_chunks(
    kinds: tuple[int, ...], num_kinds: int, pp: int, vpp: int, v_shape: bool
) -> tuple[Pattern, ...]:
    size, rest = divmod(len(kinds), pp * vpp)
    if rest:
        return ()
    base = np.zeros((pp, num_kinds), dtype=np.int64)
    for stage in range(pp * vpp):
        rank, _ = place(stage, pp, v_shape)
        for kind in kinds[stage * size : (stage + 1) * size]:
            base[rank, kind] += 1
    none = np.zeros(pp, dtype=np.int64)
    return (Pattern(base, none, none, kinds[-1], 0),)
