"""Files that are whole or not there."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from functools import partial
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write a file, or replace it in one step once the new one is on the disk; its folder is made where it is missing.

    Who may read and write it is `mode`, less what the umask of the process takes away.

    Raises:
      OSError: it cannot be written. What was there before is there still, and nothing beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have the disk keep what was written to a file, or which files a folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
