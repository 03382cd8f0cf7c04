"""Files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from planner.errors import InputError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` to `path` through a temporary file beside it and a rename.

    Links are followed. What is no regular file, as a pipe or /dev/stdout, is written to directly: a
    rename would put a file in its place.

    Raises
    ------
    InputError
        The folder does not exist or cannot be written.
    """
    check_target(path)
    target = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = ""
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.write(data)
            return
        target = target.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise InputError(
            f"cannot write {target}: {error.strerror or error}", values={"path": str(target)}
        ) from error
    except BaseException:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise


def check_target(path: str | os.PathLike[str]) -> None:
    """Refuse a path that no file can be written to, before any work is done for it."""
    target = Path(path)
    why = ""
    if not os.fspath(path) or target.is_dir():
        why = "Is a directory"
    elif not target.parent.is_dir():
        why = f"{target.parent} is no folder"
    if why:
        raise InputError(f"cannot write {target}: {why}", values={"path": str(target)})


def current_umask() -> int:
    """The process's umask; the only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
