"""Open files to read: regular files only, and inside a directory of ours no links that could lead out of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import Damaged

# Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# The errors that tell of the path, not of this process or of the disk.
_OF_THE_PATH = {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(what: str, path: Path, within: Path | None = None) -> BinaryIO:
    """Open a regular file to read.

    Args:
      what: the beginning of errors, such as "load: the checkpoint at /runs/a".
      path: its path.
      within: a directory that contains it. No part of the path below may be a link then, since it could lead to
        another file of the user. Without it links are followed, as for any path that a user passes.

    Raises:
      FileNotFoundError: there is no such file.
      Damaged: it is a link within a directory, or no regular file: a pipe would block, a device might never end.
      OSError: it cannot be opened, for a reason that tells nothing about the file.
    """
    where, flags = what, _FLAGS
    if within is not None:
        name = path.relative_to(within)
        where, flags = f"{what} is damaged: {name.as_posix()}", _FLAGS | getattr(os, "O_NOFOLLOW", 0)
    try:
        if within is not None and any(x.is_symlink() for x in [path, *path.parents[: len(name.parts) - 1]]):
            raise Damaged(f"{where} is a link; put the file itself there.")
        _check_regular(where, os.stat(path))  # opening some devices has effects
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _OF_THE_PATH:
            raise Damaged(f"{where} cannot be opened: {error.strerror}.") from error
        raise
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(where, os.fstat(descriptor))
    except BaseException:
        file.close()
        raise
    return file


def size_of(file: BinaryIO) -> int:
    """Return the number of bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def _check_regular(where: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise Damaged(f"{where} is {kind}, not a file; put a file there.")
