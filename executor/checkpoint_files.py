"""Which checkpoints on disk are whole: every rank vouches for the files that it wrote.

A checkpoint is a folder ``step-00000100``. torch's distributed checkpoint writes the data, then
each rank a manifest with size and CRC-32 of its own files. A checkpoint without a manifest of
every rank, or with a file that differs from it, is not whole. Reading unpickles nothing but the
few classes of the table of contents.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from planner.errors import InputError
from planner.files import write_whole

STEP_FOLDER = re.compile(r"step-(\d{8,})")
CONTENTS = ".metadata"
RUN = "run.json"
FORMAT = 1


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def stored_steps(root: Path) -> list[int]:
    """Steps of which there is a folder, newest first, whole or not."""
    if not root.is_dir():
        return []
    names = (STEP_FOLDER.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"manifest-{rank}.json"


def write_manifest(folder: Path, rank: int) -> None:
    """Vouch for the files of this rank; rank 0 also for the table of contents and the run."""
    paths = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        paths += [folder / CONTENTS, folder / RUN]
    files = {path.name: [path.stat().st_size, crc_of(path)] for path in paths}
    write_whole(manifest_path(folder, rank), json.dumps({"format": FORMAT, "files": files}))


def crc_of(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            crc = zlib.crc32(piece, crc)
    return crc


def read_run(folder: Path) -> dict[str, Any]:
    """What the run wrote beside the tensors: step, world size, position in the data.

    Raises
    ------
    InputError
        The file is missing or damaged.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder.name} has no readable {RUN}: it was not finished") from error
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        raise InputError(
            f"{folder.name} is of format {str(run)[:20]}, and this shardwise reads {FORMAT}"
        )
    return run


def fault_of(folder: Path, *, part: int = 0, parts: int = 1) -> str:
    """Why a checkpoint is not whole, in words; empty where nothing is wrong.

    Sizes are checked of all files, contents of every `parts`-th one from `part` on, so that ranks
    can share the reading.
    """
    try:
        world_size = int(read_run(folder)["world_size"])
    except InputError as error:
        return error.message
    except (KeyError, TypeError, ValueError):
        return f"{folder.name} has a damaged {RUN}"
    vouched: dict[str, tuple[int, int]] = {}
    for rank in range(world_size):
        try:
            manifest = json.loads(manifest_path(folder, rank).read_text(encoding="utf-8"))
            files = {name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()}
        except FileNotFoundError:
            return (
                f"{folder.name} was not finished: rank {rank} of {world_size} did not vouch for it"
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{folder.name} has a damaged manifest of rank {rank}"
        vouched |= files
    if CONTENTS not in vouched:
        return f"{folder.name} has no table of contents"
    for index, (name, (size, crc)) in enumerate(sorted(vouched.items())):
        path = folder / name
        if "/" in name or not path.is_file():
            return f"{folder.name} lacks its file {name}"
        found = path.stat().st_size
        if found != size:
            return f"{folder.name} is damaged: {name} has {found} bytes and was written with {size}"
        if index % parts == part and crc_of(path) != crc:
            return f"{folder.name} is damaged: the contents of {name} have changed"
    return ""


def remove(folder: Path) -> None:
    """Delete a checkpoint: first what makes it whole, so that an interruption leaves no half."""
    for path in [folder / RUN, *folder.glob("manifest-*.json")]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class ContentsUnpickler(pickle.Unpickler):
    """Reads a table of contents and nothing else: no other class is ever looked up."""

    ALLOWED = frozenset(
        {
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    "Metadata",
                    "TensorStorageMetadata",
                    "BytesStorageMetadata",
                    "TensorProperties",
                    "ChunkStorageMetadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
            ("pathlib._local", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )
    DTYPES = frozenset(
        {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
        | {"int64", "int32", "int16", "int8", "uint8", "bool"}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.ALLOWED or (module == "torch" and name in self.DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a table of contents")


class SafeReader(FileSystemReader):
    """torch's reader, which runs nothing that a checkpoint names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / CONTENTS
        try:
            metadata = ContentsUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise InputError(f"{path} is no table of contents of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise InputError(f"{path} is no table of contents of a checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor stored.

        Raises
        ------
        InputError
            Something stored is no tensor: it would have to be unpickled.
        """
        stored = self.read_metadata().state_dict_metadata
        for name, entry in stored.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise InputError(f"{self.path} holds {name[:80]!r}, which is no tensor")
        return {name: tuple(entry.size) for name, entry in stored.items()}
