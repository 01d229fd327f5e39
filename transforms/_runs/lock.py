"""A lock on a directory, so that two runs do not write their checkpoints to the same one."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_NAME = "run.lock"
# The errors with which a file system without locks answers.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
# The descriptors of the locks that this process holds.
_held: set[int] = set()


@contextmanager
def locked(api: str, directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: a file with the host and the process id, which is removed at the end.

    The operating system releases the lock of a process that is killed, and the next run takes the file over. On file
    systems without locks, the existence of the file is the lock; it is taken over if its process ran on this host and
    has ended.

    Raises:
      BlockingIOError: another run, of this process or another one, holds the lock.
      OSError: the file cannot be written.
    """
    path = directory / _NAME
    descriptor = _acquire(api, path)
    _release_in_children()
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
        yield
    finally:
        if descriptor in _held:  # not in a child process that was forked in between
            _held.remove(descriptor)
            with suppress(OSError):
                path.unlink()
            os.close(descriptor)
            if fcntl is None:  # Windows removes no file that is open
                with suppress(OSError):
                    path.unlink()


def _acquire(api: str, path: Path) -> int:
    """Return a descriptor of the file that holds its lock."""
    while True:
        new = True
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            new = False
            try:
                descriptor = os.open(path, os.O_RDWR)
            except FileNotFoundError:  # released since then
                continue
        mine = False
        try:
            has_locks, mine = _flock(descriptor)
            owner = _owner(descriptor)
            if not has_locks:
                if not new and _has_ended(owner):
                    path.unlink(missing_ok=True)
                    continue
                mine = new
            if not mine:
                by = f"process {owner['process']} on {owner['host']}" if owner else "another process"
                remedy = "wait for its end, or use another directory"
                if not has_locks:
                    remedy += f"; if it has been killed, delete {path}"
                raise BlockingIOError(f"{api}: a run of {by} is writing to {path.parent}; {remedy}.")
            # A run removes its file before it unlocks it: a lock on a removed file excludes nobody.
            mine = False
            with suppress(FileNotFoundError):
                mine = os.path.samestat(os.fstat(descriptor), path.stat())
            if mine:
                return descriptor
        finally:
            if not mine:
                os.close(descriptor)


def _flock(descriptor: int) -> tuple[bool, bool]:
    """Return whether the file system has locks, and whether the file is locked now."""
    if fcntl is None:
        return False, False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False, False
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return True, False
    return True, True


def _owner(descriptor: int) -> dict[str, Any] | None:
    """Return the host and the process id in the file; None if they are not written yet."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0) if hasattr(os, "pread") else os.read(descriptor, 4096))
        return {"host": str(owner["host"]), "process": int(owner["process"])}
    except (ValueError, KeyError, TypeError):
        return None


def _has_ended(owner: dict[str, Any] | None) -> bool:
    """Return whether it is known that a process has ended."""
    if owner is None or owner["host"] != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user
        return False
    return False


@lru_cache(maxsize=1)
def _release_in_children() -> None:
    """Close the locks in forked processes: a worker that outlives its killed parent would keep them."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
