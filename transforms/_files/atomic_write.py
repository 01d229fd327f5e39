"""Write files and directories atomically, so that they are complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
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
    """Replace the directory `path` with `new`. Between the two renames `path` is absent, but never incomplete.

    Of several processes that do it at the same time, the last one wins.
    """
    aside: list[Path] = []
    try:
        # A single rename cannot replace a directory that is not empty.
        while not _renamed(new, path):
            old = new.with_name(f"{new.name.removesuffix('.unfinished')}.{len(aside)}.replaced")
            with suppress(FileNotFoundError):  # another process has moved it aside
                path.rename(old)
                aside.append(old)
    except BaseException:
        if aside:
            _renamed(aside[-1], path)
        raise
    sync(path.parent)
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory; whoever reads it meets all of its files or none."""
    removed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.removed")
    path.rename(removed)
    try:
        shutil.rmtree(removed)
    except OSError:
        if os.path.lexists(removed):  # such as without permission for its files
            removed.rename(path)
        raise


def _renamed(new: Path, path: Path) -> bool:
    """Rename a directory; return whether there was none at the new path."""
    try:
        new.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
