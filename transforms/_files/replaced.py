"""What tells files from those that replace them, so that a reader reads again in place of calling them damaged."""

from __future__ import annotations

import re
import time
from glob import escape
from pathlib import Path

from .document import HEAD_SIZE
from .errors import Damaged
from .reading import open_file

# Seconds to wait for a writer between its two renames.
_WAIT = 1.0


def identity(directory: Path, name: str) -> bytes | None:
    """Return what tells a directory from the one that replaces it; None if there is none, or it cannot be read.

    Args:
      directory: the directory, which `replace_directory` may be replacing.
      name: a document in it that is another one after each save; its first bytes have its checksum.
    """
    deadline, missed = time.monotonic() + _WAIT, 0
    # Found nowhere, it may have been moved aside before the first look and replaced before the second.
    while missed < 3 and time.monotonic() < deadline:
        try:
            with open_file("", directory / name, directory) as file:
                return file.read(HEAD_SIZE)
        except (Damaged, OSError):
            if left_aside(directory):
                time.sleep(0.001)
            else:
                missed += 1
    return None


def left_aside(directory: Path) -> list[Path]:
    """Return what `replace_directory` has moved aside, or what a process that was killed there has left."""
    name = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{32}}\.[0-9]+\.replaced")
    return sorted(x for x in directory.parent.glob(f".{escape(directory.name)}.*.replaced") if name.fullmatch(x.name))
