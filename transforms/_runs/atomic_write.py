"""Files that are complete or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write a file, or replace it in one step once the new one is on the disk; make its folder if it is missing.

    Its permissions are `mode`, without those that the umask of the process takes away.

    Raises:
      OSError: it cannot be written. Whatever was there before is still there, and no unfinished file besides.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(pieces)
            file.flush()
            # Before the rename: a file system may write the new name first, and lose the contents in a power cut.
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)  # the name is in the folder, which has to reach the disk too
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush to the disk what was written to a file, or the names of the files in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
