"""The checkpoints of a run: which is the newest whole one, and which are no longer kept."""

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
    """The checkpoints of one run, `step_00000100` and so on, in a directory. What else is there stays as it is."""

    api: str
    directory: Path
    keep: int
    group: Group

    @classmethod
    def open(cls, api: str, directory: Any, keep: int, group: Group) -> RunDirectory:
        """Make the directory where it is missing, and remove what a run that was killed had begun to write there."""
        directory = Path(directory).resolve()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(
                f"{api}: checkpoint_dir={str(directory)!r} cannot be made: {error}; give another directory."
            ) from error
        if group.is_first:
            for path in directory.glob(".step_*.unfinished"):
                if re.fullmatch(r"\.step_\d{8,}\.[0-9a-f]{32}\.unfinished", path.name):
                    shutil.rmtree(path, ignore_errors=True)
        return cls(api, directory, keep, group)

    def newest(self, read: Callable[[Checkpoint], Found]) -> Found | None:
        """What `read` makes of the newest whole checkpoint, or None where there is none.

        Args:
          read: gives anything for a checkpoint. Where it raises `Damaged`, the one before is next, with a warning.
        """

        def open_and_read(path: Path) -> Found:
            checkpoint = Checkpoint.open(self.api, path)
            if "history" not in checkpoint.manifest:
                raise checkpoint.damaged("it has no history, so no run wrote it")
            return read(checkpoint)

        # All of them try those that the first one sees: another may see them later.
        names = self.group.gather([path.name for path in self._paths()])[0]
        for path in [self.directory / name for name in reversed(names)]:
            try:
                return self.group.agree(partial(open_and_read, path))
            except Damaged as error:
                # The user's line: it called the method, which called the function, which called this.
                warnings.warn(f"{error} It is skipped, and renamed when another takes its place.", stacklevel=4)
        return None

    def write(self, step: int, write: Callable[[Path], None]) -> None:
        """Let `write` write the checkpoint of a step at a path, and remove those that are no longer to be kept."""
        path = self.directory / f"step_{step:08d}"

        def make_room() -> None:
            if self.group.is_first and path.exists() and not self._is_whole(path):
                path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))

        def remove_old() -> None:
            if self.group.is_first:
                for old in [path for path in self._paths() if self._is_whole(path)][: -self.keep]:
                    shutil.rmtree(old)

        self.group.agree(make_room)
        write(path)
        self.group.agree(remove_old)

    def _paths(self) -> list[Path]:
        """What is named as a checkpoint, by step."""
        paths = [path for path in self.directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
        return sorted(paths, key=lambda path: int(path.name[5:]))

    def _is_whole(self, path: Path) -> bool:
        try:
            Checkpoint.open(self.api, path)
        except ValueError:
            return False
        return True
