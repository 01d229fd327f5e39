"""Only regular files are opened, and inside a directory of ours no links."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from plurax.transforms._files import reading
from plurax.transforms._files.errors import Damaged
from plurax.transforms._files.reading import open_file

# Windows has neither pipes nor devices in its file system.
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")


def test_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("a")
    with open_file("load", tmp_path / "a", tmp_path) as file:
        assert file.read() == b"abc"
        assert reading.size_of(file) == 3
    with open_file("load", tmp_path / "link") as file:  # as a user passes it
        assert file.read() == b"abc"
    with pytest.raises(FileNotFoundError):
        open_file("load", tmp_path / "b")


def test_links_within_a_directory_are_refused(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    home.mkdir()
    (elsewhere / "a").write_bytes(b"abc")
    (home / "to_file").symlink_to(elsewhere / "a")
    (home / "to_folder").symlink_to(elsewhere)
    (home / "to_itself").symlink_to("to_itself")
    (home / "to_nothing").symlink_to("nothing")
    for name in ("to_file", "to_folder/a", "to_itself", "to_nothing"):
        with pytest.raises(Damaged, match=f"^load is damaged: {name} is a link; put the file itself there"):
            open_file("load", home / name, home)


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device", "a directory"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("x")
    elif kind == "a directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(Damaged, match=f"^load is {kind}, not a file; put a file there"):
        open_file("load", path)


def test_a_path_through_a_file_or_a_loop(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "a" / "b", tmp_path / "loop", tmp_path / ("x" * 300)):
        with pytest.raises(Damaged, match=r"^load cannot be opened: "):
            open_file("load", path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_errors_of_the_system_are_raised_as_what_they_are(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"")

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(reading.os, "open", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        open_file("load", tmp_path / "a")
    assert not isinstance(caught.value, ValueError)


def open_all(files: ExitStack, path: Path, count: int) -> None:
    for _ in range(count):
        files.enter_context(open_file("load", path))


def test_too_many_open_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        with ExitStack() as files, pytest.raises(OSError, match="Too many open files"):
            open_all(files, tmp_path / "a", used + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
