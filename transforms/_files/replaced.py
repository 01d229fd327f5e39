"""Read again what another process replaces or removes meanwhile, in place of calling it damaged."""

from __future__ import annotations

import os
import time
from glob import escape
from pathlib import Path

Identity = tuple[int, int, int] | None

# Seconds to wait for a writer between its two renames.
_WAIT = 1.0


def identity(directory: Path, name: str) -> Identity:
    """Return what tells a directory from the one that replaces it; None if there is none.

    Args:
      directory: the directory, which `replace_directory` may be replacing.
      name: a file in it that each writer writes anew.
    """
    deadline, missed = time.monotonic() + _WAIT, 0
    # Found nowhere, it may have been moved aside before the first look and replaced before the second.
    while missed < 3 and time.monotonic() < deadline:
        try:
            state = os.stat(directory / name)
        except OSError:
            if left_aside(directory):
                time.sleep(0.001)
            else:
                missed += 1
        else:
            return state.st_ino, state.st_mtime_ns, state.st_size
    return None


def left_aside(directory: Path) -> list[Path]:
    """Return what `replace_directory` has moved aside, or what a process that was killed there has left."""
    return sorted(directory.parent.glob(f".{escape(directory.name)}.*.replaced"))
