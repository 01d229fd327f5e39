"""The checkpoints of a run: lock their directory, find the newest undamaged one, write new ones, remove old ones.

They are written in a thread while the run goes on, from copies of the arrays. Several processes agree on what became of
a checkpoint when they begin the next one, and at the end: the programs by which they do must not run between those of
the steps.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from .._core.memory import in_words
from .checkpoint import Checkpoint
from .checkpoint_writer import CheckpointWriter, Written
from .lock import locked
from .processes import Damaged, Group

Found = TypeVar("Found")
Resume = bool | Literal["auto"]

# Seconds between looks for the notes of other processes, and for a checkpoint that is being written when a run fails:
# other processes may be dead.
_LOOK, _PATIENCE = 0.1, 10.0


class _Pending:
    """A checkpoint that a thread is writing, or that could not be begun.

    Attributes:
      step: its step.
      rows: what this process has written.
      published: the end of the work; in the first process, until the checkpoint has its name.
      told: set once the processes have told each other what they have written.
      all_rows: that, or None if one of them has failed.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows, self.published = Future[Written](), Future[None]()
        self.told = threading.Event()
        self.all_rows: list[Written] | None = None

    @classmethod
    def failed(cls, step: int, error: Exception) -> _Pending:
        """Return a checkpoint that could not be begun."""
        pending = cls(step)
        pending.rows.set_exception(error)
        pending.published.set_result(None)
        return pending

    @classmethod
    def started(
        cls, step: int, thread: ThreadPoolExecutor, writer: CheckpointWriter, then: Callable[[], None]
    ) -> _Pending:
        """Let a thread write a checkpoint, and call `then` when it is published."""
        pending = cls(step)
        pending.rows = thread.submit(pending._write_rows, writer)
        pending.published = thread.submit(pending._publish, writer, then)
        return pending

    def settle(self, group: Group) -> None:
        """Wait until it is published; raise in all processes if one of them has failed. All processes call it."""
        try:
            self.all_rows = group.gather(group.agree(self.rows.result))
        except Exception:  # but not Ctrl-C, which leaves the threads at work
            self.told.set()
            raise
        self.told.set()
        group.agree(self.published.result)

    def _write_rows(self, writer: CheckpointWriter) -> Written:
        rows = writer.write_rows()
        if not writer.group.is_alone:
            writer.leave_note(rows)
        return rows

    def _publish(self, writer: CheckpointWriter, then: Callable[[], None]) -> None:
        if not writer.group.is_first:
            return
        try:
            if (rows := self._rows_of_all(writer)) is not None:
                writer.publish(rows)
                then()
        finally:
            writer.discard()

    def _rows_of_all(self, writer: CheckpointWriter) -> list[Written] | None:
        if writer.group.is_alone:
            return [self.rows.result()]
        while (rows := writer.notes()) is None:
            if self.told.wait(_LOOK):
                return self.all_rows
        return rows


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
    _pending: list[_Pending] = field(default_factory=list)  # the last one, until it is settled

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
                store.written()
            except BaseException:
                store._fail()
                raise
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

    def write(self, step: int, begin: Callable[[Path], CheckpointWriter]) -> None:
        """Write the checkpoint of a step while the run goes on, and remove all but the newest `keep`.

        If the disk is full, or fails in another way, warn: a run does not end for lack of a checkpoint.

        Args:
          step: the step.
          begin: a function of the path. The run may reuse the memory of all arrays afterwards.
        """
        self._settle(stacklevel=8, last=False)  # the user's line: above `save`, `run`, `train` and `fit`
        path = self.directory / f"step_{step:08d}"

        def make_room() -> None:
            # A damaged checkpoint is renamed, not removed: it may be all that is left of a long run.
            if self.group.is_first and path.exists() and not _is_whole(path):
                path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))

        def remove_old() -> None:
            # Damaged checkpoints do not count, so that `keep` readable checkpoints are always left.
            for old in [path for path in self._paths() if _is_whole(path)][: -self.keep]:
                shutil.rmtree(old)

        try:
            self.group.agree(make_room)
            pending = _Pending.started(step, self._thread, begin(path), remove_old)
        except OSError as error:
            pending = _Pending.failed(step, error)
        self._pending.append(pending)

    def written(self) -> None:
        """Wait until the last checkpoint is written; warn if it could not be."""
        self._settle(stacklevel=7, last=True)

    def _settle(self, stacklevel: int, last: bool) -> None:
        for pending in list(self._pending):
            try:
                pending.settle(self.group)  # Ctrl-C may interrupt that, and leaves it to `_fail`
            except OSError as error:
                self._warn(pending.step, error, stacklevel, last)
            except Exception:
                self._pending.clear()
                raise
            self._pending.clear()

    def _fail(self) -> None:
        """Leave the run after an error, which may be that of this process only, so that others do not answer."""
        if self.group.is_alone:
            self.written()
        for pending in self._pending:
            wait([pending.published], _PATIENCE)
            pending.told.set()

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
