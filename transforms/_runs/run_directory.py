"""The checkpoints of a run: lock their directory, find the newest undamaged one, write new ones, remove old ones.

A process that is alone writes them in a thread while the run goes on, from copies of the arrays. Several processes
agree after each part of the work, by programs that must not run between those of the steps, so they wait.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._core.memory import in_words
from .._core.prng import is_key
from .checkpoint import Checkpoint
from .lock import locked
from .processes import Damaged, Group

Found = TypeVar("Found")
Resume = bool | Literal["auto"]


@dataclass(frozen=True)
class RunDirectory:
    """The checkpoints of one run, `step_00000100` and so on, in a directory. Other files in it are left alone.

    Attributes:
      api: the caller's name in errors.
      directory: the directory.
      keep: the number of checkpoints to keep.
      group: the processes of the run.
      resume: whether to go on from the checkpoints: "auto" for those of the same run.
    """

    api: str
    directory: Path
    keep: int
    group: Group
    resume: Resume
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _written: list[tuple[int, Future[None]]] = field(default_factory=list)  # the last one, until its end is noticed

    @classmethod
    @contextmanager
    def open(
        cls, api: str, directory: Any, keep: int, group: Group, resume: Resume, step: int
    ) -> Iterator[RunDirectory | None]:
        """Lock the directory, and yield it; None without a directory. At the end the last checkpoint is written.

        The directory is created if it is missing, and unfinished checkpoints of killed runs are removed.

        Raises:
          OSError: the directory cannot be created or written, or another run holds its lock. `step` is the step of the
            state, for the message.
        """
        if directory is None:
            yield None
            return
        directory = Path(directory).resolve()
        with ExitStack() as stack:

            def lock() -> None:
                with _naming(f"{api}: checkpoint_dir cannot be written at step {step}", directory):
                    directory.mkdir(parents=True, exist_ok=True)
                    if group.is_first:
                        stack.enter_context(locked(api, directory))
                # Only one process cleans up: if two removed the same directories, one of them would fail.
                for path in directory.glob(".step_*.unfinished") if group.is_first else ():
                    if re.fullmatch(r"\.step_\d{8,}\.[0-9a-f]{32}\.unfinished", path.name):
                        shutil.rmtree(path, ignore_errors=True)

            group.agree(lock)
            store = cls(api, directory, keep, group, resume)
            try:
                yield store
            finally:
                try:
                    store.written()
                finally:
                    store._thread.shutdown()  # waits, so that the lock is held until the thread has ended

    def newest(self, read: Callable[[Checkpoint], Found]) -> Found | None:
        """Return the result of `read` for the newest undamaged checkpoint, or None if there is none.

        With `resume=False`, rename all checkpoints and return None.

        Args:
          read: a function of a checkpoint. If it raises `Damaged`, warn and try the previous checkpoint.
        """

        def open_and_read(path: Path) -> Found:
            return read(Checkpoint.open(self.api, path))

        if self.resume is False:
            self.group.agree(self._set_aside)
        # All processes try the checkpoints that the first one lists: others may see them later on a shared file system.
        names = self.group.gather([path.name for path in self._paths()])[0]
        for path in [self.directory / name for name in reversed(names)]:
            try:
                return self.group.agree(partial(open_and_read, path))
            except Damaged as error:
                # Level 5 is the user's line: it called the method, which called two functions, which called this.
                warnings.warn(f"{error} It is skipped, and will be renamed if a new one has its name.", stacklevel=5)
        return None

    def going_on(self, step: int, differences: Sequence[str]) -> None:
        """Print that the run goes on from a checkpoint, with what differs from the run that wrote it."""
        but = f", although {'; '.join(differences)}" if differences else ""
        self._print(f"going on from step {step} in {self.directory}{but}.")

    def check_room(self, step: int, state: Any) -> None:
        """Raise if the disk has no room for a checkpoint of a state.

        Raises:
          OSError: there are fewer free bytes than the arrays of the state have.
        """

        def check() -> None:
            needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            free = shutil.disk_usage(self.directory).free
            if free < needed:
                room = f"needs {in_words(needed)}, but the disk has {in_words(free)} left"
                raise OSError(errno.ENOSPC, f"{self.api}: a checkpoint after step {step} {room}", str(self.directory))

        self.group.agree(check)

    def write(self, step: int, held: Found, write: Callable[[Path, Found], None]) -> None:
        """Write the checkpoint of a step, and remove all but the newest `keep`.

        If the disk is full, or fails in another way, warn: a run does not end for lack of a checkpoint.

        Args:
          step: the step.
          held: a pytree with the arrays, whose memory the run may reuse afterwards.
          write: a function of the path and of `held`, or a copy of it.
        """
        self._settle(stacklevel=8, last=False)  # the user's line: above `save`, `run`, `train` and `fit`
        if self.group.is_alone:
            self._written.append((step, self._thread.submit(self._write, step, _copied(held), write)))
            return
        try:
            self._write(step, held, write)
        except OSError as error:
            self._warn(step, error, stacklevel=7, last=False)

    def written(self) -> None:
        """Wait until the last checkpoint is written; warn if it could not be."""
        self._settle(stacklevel=7, last=True)

    def _write(self, step: int, held: Found, write: Callable[[Path, Found], None]) -> None:
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
        write(path, held)
        self.group.agree(remove_old)

    def _settle(self, stacklevel: int, last: bool) -> None:
        while self._written:
            step, work = self._written[0]
            error = work.exception()  # waits; Ctrl-C may interrupt that, and leaves it to the next call
            self._written.pop()
            if isinstance(error, OSError):
                self._warn(step, error, stacklevel, last)
            elif error is not None:
                raise error

    def _warn(self, step: int, error: OSError, stacklevel: int, last: bool) -> None:
        what = f"the checkpoint of step {step} in {self.directory} cannot be written: {error}"
        goes_on = "The run goes on, and tries again at its next checkpoint; only memory holds the steps until then."
        then = "It was the last one of the run; save the state that `fit` returns." if last else goes_on
        warnings.warn(f"{self.api}: {what}. {then}", stacklevel=stacklevel)

    def _set_aside(self) -> None:
        """Rename all checkpoints, so that no run goes on from them, and none is removed for newer ones."""
        if not self.group.is_first or not (paths := self._paths()):
            return
        for path in paths:
            path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.earlier"))
        self._print(f"the checkpoints in {self.directory} are renamed to step_*.earlier, and the run starts anew.")

    def _print(self, text: str) -> None:
        from tqdm import tqdm

        if self.group.is_first:
            tqdm.write(f"{self.api}: {text}", file=sys.stderr)

    def _paths(self) -> list[Path]:
        """Return the paths with names of checkpoints, by step."""
        paths = [path for path in self.directory.iterdir() if re.fullmatch(r"step_\d{8,}", path.name)]
        return sorted(paths, key=lambda path: int(path.name[5:]))


def _copied(held: Found) -> Found:
    """Return copies of the arrays, in the memory of the host."""

    def copy(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            # Numbers become arrays here, since JAX's settings of a thread, such as `enable_x64`, are not the caller's.
            return np.array(x) if isinstance(x, np.ndarray) else jnp.asarray(x)
        # NumPy has no keys, which are small.
        return jnp.copy(x) if is_key(x) or all(d.platform == "cpu" for d in x.devices()) else np.array(x)

    return jax.tree.map(copy, held)


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint.open("", path)
    except ValueError:
        return False
    return True


@contextmanager
def _naming(what: str, directory: Path) -> Iterator[None]:
    """Add to an error of the operating system what failed, and the directory."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # our own
            raise
        raise OSError(error.errno, f"{what}: {error.strerror}", str(directory)) from error
