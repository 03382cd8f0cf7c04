"""Data: every replica its own part, the same batch under any layout, resumable, and what is
refused."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from executor.data import Data, Files, Synthetic, make_data, shuffled  # noqa: E402
from planner.errors import InputError  # noqa: E402


def data_of(source: str, dp_rank: int = 0, dp_size: int = 1, **changes: int) -> Data:
    options = {"seq_len": 8, "vocab_size": 1000, "micro_batch": 2, "seed": 3} | changes
    return make_data(source, dp_rank=dp_rank, dp_size=dp_size, **options)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    np.arange(401, dtype=np.uint16).tofile(path)
    return path


def step_rows(source: str, dp: int, micro_batch: int, steps: int = 2) -> list[set[tuple]]:
    """The global batch of 8 sequences of each step, as a set."""
    replicas = [data_of(source, r, dp, micro_batch=micro_batch) for r in range(dp)]
    count = 8 // (dp * micro_batch)
    return [
        {tuple(row.tolist()) for data in replicas for row in data.step_batch(count)[0]}
        for _ in range(steps)
    ]


@pytest.mark.parametrize("source", ["synthetic", "file"])
def test_a_step_has_the_same_batch_under_every_layout(source: str, tokens: Path) -> None:
    name = str(tokens) if source == "file" else source
    expected = step_rows(name, 1, 8)
    assert all(len(rows) == 8 for rows in expected)
    assert not expected[0] & expected[1]
    for dp, micro_batch in [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1)]:
        assert step_rows(name, dp, micro_batch) == expected


def test_labels_are_the_next_tokens(tokens: Path) -> None:
    inputs, labels = next(data_of(str(tokens)))
    assert inputs.shape == labels.shape == (2, 8)
    assert torch.equal(labels, inputs + 1)
    assert inputs.dtype == torch.int64


def test_a_pass_takes_every_window_once_and_passes_differ(tokens: Path) -> None:
    data = data_of(str(tokens), micro_batch=1)
    assert len(data.source) == 50
    passes = [[int(next(data)[0][0, 0]) for _ in range(50)] for _ in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(0, 400, 8))
    assert passes[0] != passes[1]
    assert passes[0] != sorted(passes[0])


@pytest.mark.parametrize("size", [1, 2, 3, 10, 257, 1000])
def test_shuffling_is_a_permutation(size: int) -> None:
    assert sorted(shuffled(i, size, 5) for i in range(size)) == list(range(size))


def test_it_goes_on_where_it_stopped_under_another_layout(tokens: Path) -> None:
    whole = data_of(str(tokens), micro_batch=4)
    next(whole)
    expected = next(whole)[0]
    first = [data_of(str(tokens), r, 2) for r in range(2)]
    for data in first:
        next(data)
    later = [data_of(str(tokens), r, 4, micro_batch=1) for r in range(4)]
    for data in later:
        data.load_state_dict(first[0].state_dict())
    assert torch.equal(torch.cat([next(data)[0] for data in later]), expected)


def test_another_seed_is_refused(tokens: Path) -> None:
    with pytest.raises(InputError, match="seed"):
        data_of(str(tokens), seed=4).load_state_dict(data_of(str(tokens)).state_dict())


def test_text_is_read_byte_by_byte_and_folders_are_joined(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopq", encoding="utf-8")
    (tmp_path / "b.txt").write_text("tiny", encoding="utf-8")
    (tmp_path / ".hidden").write_text("x" * 100, encoding="utf-8")
    data = data_of(str(tmp_path), vocab_size=256)
    assert len(data.source) == 2
    found = {bytes(row.tolist()).decode() for row in next(data)[0]}
    assert found == {"abcdefgh", "ijklmnop"}


@pytest.mark.parametrize(
    ("name", "kind"), [("t.u32", np.uint32), ("t.u16", np.uint16), ("t.npy", np.int32)]
)
def test_kinds_of_files(tmp_path: Path, name: str, kind: type) -> None:
    values = np.arange(17, dtype=kind)
    np.save(tmp_path / name, values) if name.endswith("npy") else values.tofile(tmp_path / name)
    rows = data_of(str(tmp_path / name), micro_batch=1)
    assert {int(next(rows)[0][0, 0]) for _ in range(2)} == {0, 8}


def test_a_large_vocabulary_means_wider_tokens(tmp_path: Path) -> None:
    np.arange(17, dtype=np.uint32).tofile(tmp_path / "t.bin")
    assert len(data_of(str(tmp_path / "t.bin"), vocab_size=100_000).source) == 2


def test_files_are_mapped_and_not_read(tokens: Path) -> None:
    (array,) = data_of(str(tokens)).source.arrays.values()
    assert isinstance(array, np.memmap)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.bin", np.arange(8, dtype=np.uint16).tobytes(), "at most 8 tokens"),
        ("odd.bin", b"x" * 41, "41 bytes"),
        ("wrong.bin", np.full(20, 5000, dtype=np.uint16).tobytes(), "token 5000"),
        ("empty.u16", b"", "at most 0 tokens"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        next(data_of(str(tmp_path / name)))


def test_bad_arrays_names_and_vocabularies_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros((3, 3)))
    with pytest.raises(InputError, match="a row of integers"):
        data_of(str(tmp_path / "f.npy"))
    with pytest.raises(InputError, match="neither a file"):
        data_of(str(tmp_path / "none"))
    (tmp_path / "t.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(InputError, match="vocab_size of 256"):
        data_of(str(tmp_path / "t.txt"), vocab_size=100)


def test_synthetic_sequences_can_be_learnt() -> None:
    source = Synthetic(64, 1000, seed=0)
    steps = np.diff(source.window(5)) % 1000
    values, counts = np.unique(steps, return_counts=True)
    assert values[counts.argmax()] in range(1, 5)
    assert counts.max() > 40
    assert np.array_equal(source.window(5), Synthetic(64, 1000, seed=0).window(5))
    assert not np.array_equal(source.window(5), source.window(6))


def test_negative_tokens_are_refused() -> None:
    source = Files({"x": np.full(9, -1)}, 8, 100)
    with pytest.raises(InputError, match="token -1"):
        source.window(0)
