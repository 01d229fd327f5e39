"""Write files and directories atomically, so that they are complete or absent."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write a file, or replace it in one step once the new one is on the disk; create a missing folder.

    The file's permissions are `mode`, restricted by the umask of the process.

    Raises:
      OSError: the file cannot be written. A previous file is unchanged, and no unfinished file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(pieces)
            file.flush()
            # Before the rename: a file system may write the new name first, and lose the contents in a power failure.
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)  # the new name is stored in the folder, which has to reach the disk too
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush the contents of a file, or the file names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(new: Path, path: Path) -> None:
    """Replace the directory `path` with `new`. Between the two renames `path` is absent, but never incomplete."""
    # A single rename cannot replace a directory that is not empty.
    old = new.with_suffix(".replaced")
    if not path.exists():
        new.rename(path)
    else:
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
