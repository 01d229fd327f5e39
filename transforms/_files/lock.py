"""A lock on a directory, so that two runs do not write their checkpoints to the same one."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from .document import parse_json
from .schema import decode

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_NAME = "run.lock"
# The errors with which a file system without locks answers.
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}
_MOST = 4096  # bytes of a lock
# The descriptors of the locks that this process holds.
_held: set[int] = set()


@dataclass(frozen=True)
class _Owner:
    """The process that holds a lock."""

    host: str
    process: int


@contextmanager
def locked(api: str, directory: Path) -> Iterator[None]:
    """Hold the lock of a directory: a file with the host and the process id, which is removed at the end.

    The operating system releases the lock of a process that is killed, and the next run takes the file over. On file
    systems without locks, the existence of the file is the lock; it is taken over if its process ran on this host and
    has ended.

    Raises:
      BlockingIOError: another run, of this process or another one, holds the lock.
      FileExistsError: the file is a link, or another file of the user, which would be overwritten.
      OSError: the file cannot be written.
    """
    path = directory / _NAME
    descriptor = _acquire(api, path)
    _release_in_children()
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(asdict(_Owner(socket.gethostname(), os.getpid()))).encode())
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
            new, existing = False, _open(api, path)
            if existing is None:  # released since then
                continue
            descriptor = existing
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
                by = f"process {owner.process} on {owner.host}" if owner else "another process"
                remedy = "wait for its end, or use another directory"
                if not has_locks:
                    remedy += f"; if it has been killed, delete {path}"
                raise BlockingIOError(f"{api}: a run of {by} is writing to {path.parent}; {remedy}.")
            # A run removes its file before it unlocks it: a lock on a removed file excludes nobody.
            mine = False
            with suppress(FileNotFoundError):
                mine = os.path.samestat(os.fstat(descriptor), os.lstat(path))
            if mine:
                return descriptor
        finally:
            if not mine:
                os.close(descriptor)


def _open(api: str, path: Path) -> int | None:
    """Return a descriptor of an existing lock; None if it is gone.

    Raises:
      FileExistsError: it is no lock of this library. Writing to it would destroy somebody's file.
    """
    flags = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = None
    try:
        is_file = stat.S_ISREG(os.lstat(path).st_mode)
        descriptor = os.open(path, flags) if is_file else None
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link since then
            raise
    if descriptor is not None:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1 and _is_lock(_read(descriptor)):
            return descriptor
        os.close(descriptor)
    raise FileExistsError(f"{api}: {path} is not a lock of this library; move it, or use another directory.")


def _is_lock(content: bytes) -> bool:
    """Return whether a file has what `locked` writes, or the beginning of it, as after a crash."""
    begin = json.dumps({"host": ""}).encode()[:-2]
    return len(content) <= _MOST and (content.startswith(begin) or begin.startswith(content))


def _read(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _MOST + 1)


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


def _owner(descriptor: int) -> _Owner | None:
    """Return the host and the process id in the file; None if they are not written yet."""
    try:
        owner = decode(_Owner, parse_json(_read(descriptor)), "owner")
    except ValueError:
        return None
    return owner if 0 < owner.process < 2**31 else None


def _has_ended(owner: _Owner | None) -> bool:
    """Return whether it is known that a process has ended."""
    if owner is None or owner.host != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(owner.process, 0)
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
