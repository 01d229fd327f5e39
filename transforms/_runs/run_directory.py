"""The checkpoints of a run: find the newest undamaged one, write new ones, and remove old ones."""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .checkpoint import Checkpoint
from .processes import Damaged, Group

Found = TypeVar("Found")


@dataclass(frozen=True)
class RunDirectory:
    """The checkpoints of one run, `step_00000100` and so on, in a directory. Other files in it are left alone."""

    api: str
    directory: Path
    keep: int
    group: Group

    @classmethod
    def open(cls, api: str, directory: Any, keep: int, group: Group) -> RunDirectory:
        """Create the directory if it is missing, remove unfinished checkpoints of killed runs, and return it."""
        directory = Path(directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        # Only one process cleans up: if two removed the same directories, one of them would fail.
        for path in directory.glob(".step_*.unfinished") if group.is_first else ():
            if re.fullmatch(r"\.step_\d{8,}\.[0-9a-f]{32}\.unfinished", path.name):
                shutil.rmtree(path, ignore_errors=True)
        return cls(api, directory, keep, group)

    def newest(self, read: Callable[[Checkpoint], Found]) -> Found | None:
        """Return the result of `read` for the newest undamaged checkpoint, or None if there is none.

        Args:
          read: a function of a checkpoint. If it raises `Damaged`, warn and try the previous checkpoint.
        """

        def open_and_read(path: Path) -> Found:
            return read(Checkpoint.open(self.api, path))

        # All processes try the checkpoints that the first one lists: others may see them later on a shared file system.
        names = self.group.gather([path.name for path in self._paths()])[0]
        for path in [self.directory / name for name in reversed(names)]:
            try:
                return self.group.agree(partial(open_and_read, path))
            except Damaged as error:
                # Level 4 is the user's line: it called the method, which called the function, which called this.
                warnings.warn(f"{error} It is skipped, and will be renamed if a new one has its name.", stacklevel=4)
        return None

    def write(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the checkpoint of a step by calling `write` with its path, and remove all but the newest `keep`."""
        path = self.directory / f"step_{step:08d}"

        def make_room() -> None:
            # A damaged checkpoint is renamed, not removed: it may be all that is left of a long run.
            if self.group.is_first and path.exists() and not _is_whole(path):
                path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))

        def remove_old() -> None:
            # Damaged checkpoints do not count, so that `keep` readable checkpoints are always left.
            if self.group.is_first:
                for old in [path for path in self._paths() if _is_whole(path)][: -self.keep]:
                    shutil.rmtree(old)

        self.group.agree(make_room)
        write(path)
        self.group.agree(remove_old)

    def _paths(self) -> list[Path]:
        """Return the paths with names of checkpoints, by step."""
        paths = [path for path in self.directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
        return sorted(paths, key=lambda path: int(path.name[5:]))


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint.open("", path)
    except ValueError:
        return False
    return True
