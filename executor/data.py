"""Training data: windows of tokens, each replica its own, resumable under any layout.

Sources: ``synthetic``; a file of token ids (``.bin``: uint16, or uint32 where the vocabulary needs
it; ``.u16``, ``.u32``, ``.npy``), mapped and not read; any other file as text, byte by byte; a
folder, whose files are joined in order of name.

The order of windows depends on the seed alone. All replicas take turns in it, so a step's batch
is the same whatever the number of replicas, and a run may go on under another layout.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.errors import InputError

Tokens = NDArray[Any]
BYTES = 256  # vocabulary of text


class Source(Protocol):
    """Numbered windows of seq_len + 1 tokens."""

    def __len__(self) -> int: ...

    def window(self, index: int) -> Tokens: ...


class Synthetic:
    """Sequences with something to learn: each counts up by its own stride, one token in ten is
    noise.

    There is a window for every number; the same number and seed give the same tokens.
    """

    def __init__(self, seq_len: int, vocab_size: int, seed: int) -> None:
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return 1 << 40

    def window(self, index: int) -> Tokens:
        rng = np.random.default_rng((self.seed, index))
        start, stride = rng.integers(self.vocab_size), 1 + rng.integers(4)
        tokens = (start + stride * np.arange(self.seq_len + 1)) % self.vocab_size
        noise = rng.random(self.seq_len + 1) < 0.1
        tokens[noise] = rng.integers(self.vocab_size, size=int(noise.sum()))
        return tokens


class Files:
    """Windows of mapped files, side by side; a file's tail that fills no window is left out."""

    def __init__(self, arrays: dict[str, Tokens], seq_len: int, vocab_size: int) -> None:
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.arrays = {name: array for name, array in arrays.items() if array.shape[0] > seq_len}
        counts = [(array.shape[0] - 1) // seq_len for array in self.arrays.values()]
        self.ends = np.cumsum(counts).tolist()
        if not self.arrays:
            longest = max((array.shape[0] for array in arrays.values()), default=0)
            raise InputError(
                f"the data has at most {longest} tokens in a file, and a sequence with its labels "
                f"takes seq_len + 1 = {seq_len + 1}",
                values={"tokens": longest, "seq_len": seq_len},
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def window(self, index: int) -> Tokens:
        file = bisect.bisect_right(self.ends, index)
        name, array = list(self.arrays.items())[file]
        start = (index - (self.ends[file - 1] if file else 0)) * self.seq_len
        tokens = np.asarray(array[start : start + self.seq_len + 1], dtype=np.int64)
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            bad = tokens[(tokens >= self.vocab_size) | (tokens < 0)][0]
            raise InputError(
                f"{name} has token {bad} near position {start}, and the model's vocab_size is "
                f"{self.vocab_size}",
                values={"token": int(bad), "vocab_size": self.vocab_size},
                legal={"token": [0, self.vocab_size - 1]},
            )
        return tokens


def open_source(source: str, seq_len: int, vocab_size: int, seed: int) -> Source:
    """The source of a name or path.

    Raises
    ------
    InputError
        There is no such file, it holds no whole window, or text does not fit the vocabulary.
    """
    if source == "synthetic":
        return Synthetic(seq_len, vocab_size, seed)
    path = Path(source)
    if not path.exists():
        raise InputError(
            f"data {source!r} is neither a file, a folder nor 'synthetic'", values={"data": source}
        )
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    return Files({str(p): map_tokens(p, vocab_size) for p in files}, seq_len, vocab_size)


def map_tokens(path: Path, vocab_size: int) -> Tokens:
    """The tokens of one file, mapped into memory."""
    kinds = {".u16": np.uint16, ".u32": np.uint32}
    kinds[".bin"] = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InputError(
                f"{path} holds {array.dtype} of shape {array.shape}; tokens are a row of integers",
                values={"path": str(path)},
            )
        return array
    kind: Any = kinds.get(path.suffix, np.uint8)
    size = path.stat().st_size
    if kind is np.uint8 and vocab_size < BYTES:
        raise InputError(
            f"{path} is read as bytes, which takes a vocab_size of {BYTES}; the model has "
            f"{vocab_size}",
            values={"vocab_size": vocab_size},
            legal={"vocab_size": [BYTES]},
        )
    if size % np.dtype(kind).itemsize:
        raise InputError(
            f"{path} has {size} bytes, which are no whole number of {np.dtype(kind).name} tokens",
            values={"path": str(path), "bytes": size},
        )
    if size == 0:
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")


def shuffled(index: int, size: int, seed: int) -> int:
    """Place of `index` in a random order of ``range(size)``: four Feistel rounds, in no memory.

    Numbers that leave the range are sent on until they are back in it, so it is a permutation.

    >>> sorted(shuffled(i, 10, 7) for i in range(10)) == list(range(10))
    True
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (mix(right, seed * 4 + turn) & mask)
        index = left << half | right
        if index < size:
            return index


def mix(value: int, key: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64).

    References: Steele2014.
    """
    z = (value + 0x9E3779B97F4A7C15 * (key + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ z >> 31


class Data:
    """Micro-batches (tokens, labels) [micro_batch, seq_len] of one replica, without end.

    `position` counts the sequences that all replicas together have taken.
    """

    def __init__(
        self, source: Source, *, micro_batch: int, dp_rank: int, dp_size: int, seed: int
    ) -> None:
        self.source = source
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.seed = seed
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        first = self.position + self.dp_rank * self.micro_batch
        windows = [self.sequence(first + row) for row in range(self.micro_batch)]
        self.position += self.dp_size * self.micro_batch
        rows = torch.from_numpy(np.stack(windows).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def sequence(self, number: int) -> Tokens:
        """The window that is `number`-th in the order; each pass over the data has its own."""
        size = len(self.source)
        turn, index = divmod(number, size)
        return self.source.window(shuffled(index, size, self.seed * 1_000_003 + turn))

    def step_batch(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """This replica's sequences of a whole step, micro-batch after micro-batch."""
        drawn = [next(self) for _ in range(num_microbatches)]
        return torch.cat([tokens for tokens, _ in drawn]), torch.cat(
            [labels for _, labels in drawn]
        )

    def state_dict(self) -> dict[str, int]:
        """Where it is; loads under any number of replicas."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a stored position.

        Raises
        ------
        InputError
            The state is of another order of the data.
        """
        if int(state["seed"]) != self.seed:
            raise InputError(
                f"the run was started with seed {state['seed']} and goes on with {self.seed}; data "
                "would come twice, give the same seed",
                values={"seed": self.seed},
                legal={"seed": [int(state["seed"])]},
            )
        self.position = int(state["position"])


def make_data(
    source: str,
    *,
    seq_len: int,
    vocab_size: int,
    micro_batch: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
) -> Data:
    """The data of one replica; see the module for what `source` may be."""
    opened = open_source(source, seq_len, vocab_size, seed)
    return Data(opened, micro_batch=micro_batch, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
