"""The checkpoints of a run: lock their directory, find the newest undamaged one, write new ones, remove old ones.

They are written in a thread while the run goes on, from copies of the arrays. Several processes agree on what became of
a checkpoint when they begin the next one, and at the end: the programs by which they do must not run between those of
the steps.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import threading
import traceback
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
from .._files.atomic_write import remove_directory
from .._files.errors import Damaged
from .._files.lock import locked
from .checkpoint import Checkpoint
from .checkpoint_writer import CheckpointWriter, Written, others_in
from .manifest import MANIFEST
from .processes import Group

Found = TypeVar("Found")
Resume = bool | Literal["auto"]

# Seconds between looks for the notes of other processes.
_LOOK = 0.1
# A process that leaves a run by an error waits for the others to finish their parts of a checkpoint, and gives it up
# when nothing has been written for so many seconds: they may be dead.
_PATIENCE = 60.0


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
        self._writer: CheckpointWriter | None = None

    def start(
        self, thread: ThreadPoolExecutor, writer: CheckpointWriter, then: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        """Let a thread write the checkpoint, call `then` when it is published, and `ended` in any case."""
        self._writer = writer
        self.rows = thread.submit(self._write_rows, writer)
        self.published = thread.submit(self._publish, writer, then, ended)

    def fail(self, error: OSError) -> None:
        """Note that it could not be begun."""
        self.rows.set_exception(error.with_traceback(None))  # which would hold the state
        self.published.set_result(None)

    def settle(self, group: Group) -> Exception | None:
        """Once all have written their rows, wait until it is published; return why it is not, in all processes."""
        try:
            if not any(group.gather(self.rows.exception() is not None)):
                self.all_rows = group.gather(self.rows.result())
        finally:
            self.told.set()
        group.agree(partial(wait, [self.published]))
        try:
            group.agree(self.rows.result)
            group.agree(self.published.result)
        except Exception as error:  # a failing disk, which the caller warns of, or a mistake, which it raises
            return error
        return None

    def abandon(self) -> BaseException | None:
        """Wait until it is published, or until nothing more is written; return why it is not. Others are not asked."""
        try:
            wait([self.rows])
            while self._writer is not None and self.rows.exception() is None and not self.published.done():
                before = self._writer.bytes_written()
                wait([self.published], _PATIENCE)
                if self._writer.bytes_written() == before:
                    break
        finally:
            self.told.set()
        wait([self.published])
        return self.rows.exception() or self.published.exception()

    def _write_rows(self, writer: CheckpointWriter) -> Written:
        try:
            rows = writer.write_rows()
            if not writer.group.is_alone:
                writer.leave_note(rows)
        except Exception as error:  # whatever failed, its frames would hold the copies until a collection of garbage
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            writer.held.clear()
        return rows

    def _publish(self, writer: CheckpointWriter, then: Callable[[], None], ended: Callable[[], None]) -> None:
        try:
            if not writer.group.is_first:
                return
            rows = self._rows_of_all(writer)
            if rows is None:
                raise OSError("not all processes have written their parts")
            writer.publish(rows)
            then()
        finally:
            writer.discard()
            ended()

    def _rows_of_all(self, writer: CheckpointWriter) -> list[Written] | None:
        if writer.group.is_alone:
            return [self.rows.result()]
        if self.rows.exception() is not None:  # others may write still
            self.told.wait()
            return None
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
    _damaged: list[Path] = field(default_factory=list)  # those that were skipped, until they are renamed

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
        directory = Path(os.path.realpath(directory))
        with ExitStack() as stack:

            def lock() -> None:
                with _naming(f"{api}: checkpoint_dir cannot be written at step {step}", directory):
                    directory.mkdir(parents=True, exist_ok=True)
                    if group.is_first:
                        stack.enter_context(locked(api, directory))
                # Only one process cleans up: if two removed the same directories, one of them would fail.
                for path in directory.glob(".step_*") if group.is_first else ():
                    if re.fullmatch(r"\.step_\d{8,}\.[0-9a-f]{32}\.(unfinished|removed)", path.name):
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
            if path.is_symlink():
                raise Damaged(f"{self.api}: {path} is a link, not a checkpoint.")
            return read(Checkpoint.open(self.api, path))

        if self.resume is False:
            self.group.agree(self._set_aside)
        # All processes try the checkpoints that the first one lists: others may see them later on a shared file system.
        names = self.group.gather([path.name for path in self._paths()])[0]
        for path in [self.directory / name for name in reversed(names)]:
            try:
                return self.group.agree(partial(open_and_read, path))
            except Damaged as error:
                then = "It is skipped, and will be renamed if a new one has its name."
                if path.is_symlink() or os.path.lexists(path / MANIFEST):  # others are not ours
                    self._damaged.append(path)
                    then = "It is skipped, and will be renamed to *.damaged when the next one is written."
                # Level 5 is the user's line: it called the method, which called two functions, which called this.
                warnings.warn(f"{error} {then}", stacklevel=5)
        return None

    def going_on(self, step: int, differences: Sequence[str], taken_over: str = "") -> None:
        """Print that the run goes on from a checkpoint, with what it takes over, and what differs from its run."""
        taken = f", with {taken_over}" if taken_over else ""
        but = f", although {'; '.join(differences)}" if differences else ""
        self._print(f"going on from step {step} in {self.directory}{taken}{but}.")

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

    def write(
        self, step: int, begin: Callable[[Path], CheckpointWriter], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Write the checkpoint of a step while the run goes on, and remove all but the newest `keep`.

        If the disk is full, or fails in another way, warn: a run does not end for lack of a checkpoint.

        Args:
          step: the step.
          begin: a function of the path. The run may reuse the memory of all arrays afterwards.
          ended: called once it is on the disk, or cannot be written, perhaps in another thread.
        """
        self._settle(stacklevel=8, last=False)  # the user's line: above `save`, `run`, `train` and `fit`
        path = self.directory / f"step_{step:08d}"

        def make_room() -> None:
            # Renamed, not removed: a damaged checkpoint may be all that is left of a long run.
            skipped = [old for old in self._damaged if os.path.lexists(old)]
            if path not in skipped and os.path.lexists(path) and not _is_whole(path):
                skipped.append(path)
            for old in skipped if self.group.is_first else ():
                old.rename(old.with_name(f"{old.name}.{uuid.uuid4().hex}.damaged"))
            self._damaged.clear()

        def remove_old() -> None:
            try:
                self._remove_old()
            except OSError as error:  # the new one is there all the same
                what = f"old checkpoints in {self.directory} cannot be removed: {error}"
                warnings.warn(f"{self.api}: {what}.", stacklevel=2)

        pending = _Pending(step)
        try:
            self._pending.append(pending)
            self.group.agree(make_room)
            pending.start(self._thread, begin(path), remove_old, ended)
        except OSError as error:
            pending.fail(error)
            ended()
        except BaseException:
            self._pending.clear()
            pending.told.set()
            raise

    def _remove_old(self) -> None:
        """Remove all but the newest `keep` checkpoints; raise the first error after all have been tried."""
        whole, errors = list[Path](), list[OSError]()
        for path in self._paths():
            try:
                if _is_whole(path):  # others do not count, so that `keep` readable checkpoints are always left
                    whole.append(path)
            except OSError as error:
                errors.append(error)
        for old in whole[: -self.keep]:
            try:
                if not others_in(self.api, old):  # whoever put files there wants to keep it
                    remove_directory(old)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def written(self) -> None:
        """Wait until the last checkpoint is written; warn if it could not be."""
        self._settle(stacklevel=7, last=True)

    def _settle(self, stacklevel: int, last: bool) -> None:
        goes_on = "The run goes on, and tries again at its next checkpoint; only memory holds the steps until then."
        then = "It was the last one of the run; save the state that `fit` returns." if last else goes_on
        for pending in list(self._pending):
            self.group.agree(partial(wait, [pending.rows]))  # Ctrl-C may interrupt that, and leaves it to `_fail`
            error = pending.settle(self.group)
            self._pending.clear()
            if isinstance(error, OSError):
                self._warn(pending.step, error, then, stacklevel)
            elif error is not None:
                raise error

    def _fail(self) -> None:
        """Leave the run after an error, which may be that of this process only: the others may not answer."""
        then = "The run ends by another error; it can go on from the checkpoint before."
        for pending in self._pending:
            if (error := pending.abandon()) is not None:
                self._warn(pending.step, error, then, stacklevel=6)

    def _warn(self, step: int, error: BaseException, then: str, stacklevel: int) -> None:
        what = f"the checkpoint of step {step} in {self.directory} cannot be written: {error}"
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
    """Return whether a checkpoint has a manifest of this version, and files of the right sizes."""
    if path.is_symlink():
        return False
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
