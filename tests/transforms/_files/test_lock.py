"""One run at a time writes to a directory. This file is also the script of the other processes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plurax.transforms._files import lock
from plurax.transforms._files.lock import locked

HOST = socket.gethostname()


def refused(path: Path, by: str) -> None:
    match = rf"^fit: a run of {by} is writing to {re.escape(str(path))}; wait"
    with pytest.raises(BlockingIOError, match=match), locked("fit", path):
        pass


@contextmanager
def other_process(role: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start this file as a script, and wait until it prints a line."""
    with subprocess.Popen([sys.executable, __file__, role, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def without_locks(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Let the file system, or the operating system, have no locks."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if how == "windows":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", fail)


@pytest.mark.parametrize("how", ["flock", "no locks", "windows"])
def test_a_directory_is_locked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how != "flock":
        without_locks(monkeypatch, how)
    for _ in range(2):
        with locked("fit", tmp_path):
            held = json.loads((tmp_path / "run.lock").read_text())
            assert held == {"host": HOST, "process": os.getpid()}
            refused(tmp_path, f"process {os.getpid()} on {HOST}")
            refused(tmp_path, f"process {os.getpid()} on {HOST}")  # a refusal releases nothing
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), locked("fit", tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["flock", "no locks"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling", "hard link", "pipe", "folder", "large"])
def test_a_file_of_the_user_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    if how != "flock":
        without_locks(monkeypatch, how)
    home, mine = tmp_path / "home", tmp_path / "thesis"
    home.mkdir()
    text = json.dumps({"host": HOST, "process": 1}) if kind in ("link", "hard link") else "mine"
    mine.write_text(text)
    path = home / "run.lock"
    if kind == "file":
        path.write_text(text)
    elif kind == "large":
        path.write_text(json.dumps({"host": "x" * 10_000, "process": 1}))
    elif kind == "hard link":
        path.hardlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(mine if kind == "link" else "nothing")
    match = r"^fit: .*run.lock is not a lock of this library; move it, or use another directory"
    with pytest.raises(FileExistsError, match=match), locked("fit", home):
        pass
    assert mine.read_text() == text
    assert os.path.lexists(path)
    assert not (home / "nothing").exists()


def test_a_lock_that_was_not_written_whole_is_taken_over(tmp_path: Path) -> None:
    whole = json.dumps({"host": HOST, "process": os.getpid()})
    for size in range(len(whole) + 1):
        (tmp_path / "run.lock").write_text(whole[:size])
        with locked("fit", tmp_path):
            assert (tmp_path / "run.lock").read_text() == whole
        assert list(tmp_path.iterdir()) == []


def test_another_process_is_named_and_the_lock_of_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    with other_process("hold", tmp_path) as process:
        refused(tmp_path, f"process {process.pid} on {HOST}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "run.lock").exists()
        with locked("fit", tmp_path):
            assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()


def test_a_worker_that_outlives_its_killed_parent_holds_no_lock(tmp_path: Path) -> None:
    with other_process("fork", tmp_path) as process:
        refused(tmp_path, f"process {process.pid} on {HOST}")
        process.send_signal(signal.SIGKILL)
        process.wait()
        for _ in range(100):  # the worker may still be about to close the lock
            try:
                with locked("fit", tmp_path):
                    return
            except BlockingIOError:
                time.sleep(0.1)
        pytest.fail("the worker holds the lock")


@pytest.mark.parametrize(
    ("owner", "taken_over"),
    [
        ({"host": HOST, "process": None}, True),  # a process that has ended
        ({"host": HOST, "process": os.getpid()}, False),
        ({"host": "elsewhere", "process": None}, False),
        ("", False),
    ],
)
def test_without_locks_the_file_of_an_ended_process_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, taken_over: bool
) -> None:
    without_locks(monkeypatch, "no locks")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    file = tmp_path / "run.lock"
    if owner:
        owner = {**owner, "process": owner["process"] or ended.pid}
    file.write_text(json.dumps(owner) if owner else "")
    if taken_over:
        with locked("fit", tmp_path):
            assert json.loads(file.read_text())["process"] == os.getpid()
        return
    who = f"process {owner['process']} on {owner['host']}" if owner else "another process"
    refused(tmp_path, who)
    match = rf"if it has been killed, delete {re.escape(str(file))}"
    with pytest.raises(BlockingIOError, match=match), locked("fit", tmp_path):
        pass


def test_a_lock_on_a_removed_file_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run removes its file, and ends, between our opening and our locking it."""
    file, flock = tmp_path / "run.lock", lock.fcntl.flock

    def late(*args: Any) -> None:
        monkeypatch.undo()
        file.unlink()
        flock(*args)

    monkeypatch.setattr("fcntl.flock", late)
    with locked("fit", tmp_path):
        assert file.exists()
        refused(tmp_path, f"process {os.getpid()} on {HOST}")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["compete", "compete without locks"])
def test_of_many_processes_only_one_holds_the_lock(tmp_path: Path, role: str) -> None:
    subprocess.run([sys.executable, __file__, role, str(tmp_path)], check=True, timeout=100)
    assert list(tmp_path.iterdir()) == []


def compete(path: Path) -> None:
    """Take and release the lock again and again in several processes; fail if two hold it at once."""
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            failed, taken = 1, 0
            try:
                while taken < 60:
                    try:
                        with locked("fit", path):
                            os.close(os.open(path / "alone", os.O_CREAT | os.O_EXCL))
                            time.sleep(0.0005)
                            (path / "alone").unlink()
                            taken += 1
                    except BlockingIOError:
                        time.sleep(0.0002)
                failed = 0
            finally:
                os._exit(failed)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4


if __name__ == "__main__":
    if sys.argv[1] == "compete without locks":
        with pytest.MonkeyPatch.context() as patch:
            without_locks(patch, "no locks")
            compete(Path(sys.argv[2]))
    elif sys.argv[1] == "compete":
        compete(Path(sys.argv[2]))
    else:
        with locked("fit", Path(sys.argv[2])):
            if sys.argv[1] == "fork" and os.fork() == 0:
                time.sleep(5)  # a worker
                os._exit(0)
            os.write(1, b"locked\n")
            time.sleep(60)
