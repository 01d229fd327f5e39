"""The checkpoints of a run on a disk that is full, read-only or failing; `test_fit.py` tests the rest."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms._runs.processes import Group
from plurax.transforms._runs.run_directory import Resume, RunDirectory


def opened(directory: Any, resume: Resume = "auto") -> AbstractContextManager[RunDirectory | None]:
    return RunDirectory.open("fit", directory, 2, Group((jax.process_index(),)), resume, 7)


def written(store: RunDirectory | None, write: Any) -> None:
    assert store is not None
    store.write(5, None, write)


def test_a_checkpoint_that_cannot_be_written_warns(tmp_path: Path) -> None:
    def fail(path: Path, held: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def mistake(path: Path, held: Any) -> None:
        raise ValueError("no member")  # not a failing disk

    match = rf"^fit: the checkpoint of step 5 in {re.escape(str(tmp_path))} cannot be written: .*No space left on dev"
    with pytest.warns(UserWarning, match=match), opened(tmp_path) as store:
        written(store, fail)
    with opened(tmp_path) as store:
        assert store is not None
        store.write(5, None, fail)
        with pytest.warns(UserWarning, match=match):
            store.write(6, None, lambda *_: None)
    with pytest.raises(ValueError, match="no member"), opened(tmp_path) as store:
        written(store, mistake)


def test_a_checkpoint_holds_copies_and_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    later, found = threading.Event(), []

    def write(path: Path, held: Any) -> None:
        assert later.wait(60)
        found.append((path.name, held))

    state: dict[str, Any] = {"x": jnp.arange(3.0), "n": np.arange(2), "key": jax.random.key(1), "one": 1}
    with opened(tmp_path) as store:
        assert store is not None
        store.write(7, state, write)
        jax.jit(lambda x: x + 1, donate_argnums=0)(state["x"]).block_until_ready()
        state["n"] += 1
        assert state["x"].is_deleted()
        later.set()
    ((name, held),) = found
    assert name == "step_00000007"
    assert (held["x"].tolist(), held["n"].tolist(), held["one"].tolist()) == ([0.0, 1.0, 2.0], [0, 1], 1)
    assert held["key"] == jax.random.key(1)


def test_the_room_for_a_checkpoint_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"x": jnp.ones((3, 256)), "key": jax.random.split(jax.random.key(0), 3)}
    disk = SimpleNamespace(free=3 * 1024 + 3 * 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with opened(tmp_path) as store:
        assert store is not None
        store.check_room(7, state)
        disk.free -= 1
        with pytest.raises(
            OSError, match="fit: a checkpoint after step 7 needs 3.02 KiB, but the disk has 3.02 K"
        ) as no:
            store.check_room(7, state)
        assert (no.value.errno, no.value.filename) == (errno.ENOSPC, str(tmp_path))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As root a test cannot take its own permission away, so the call fails."""

    def fail(*args: Any) -> Any:
        raise OSError(code, os.strerror(code), str(args[0]))

    monkeypatch.setattr(os, "ftruncate" if code == errno.ENOSPC else "open", fail)
    with pytest.raises(OSError, match="fit: checkpoint_dir cannot be written at step 7: ") as raised, opened(tmp_path):
        pass
    assert (raised.value.errno, raised.value.filename) == (code, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="checkpoint_dir cannot be written at step 7"), opened(tmp_path):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_a_second_run_removes_nothing_of_the_first(tmp_path: Path) -> None:
    """The unfinished checkpoint of a run that is writing looks like that of a killed one."""
    unfinished = tmp_path / f".step_00000003.{'0' * 32}.unfinished"
    with opened(tmp_path):
        unfinished.mkdir()
        with pytest.raises(BlockingIOError, match=f"a run of process {os.getpid()} on"), opened(tmp_path):
            pass
        assert unfinished.exists()
    with opened(tmp_path):
        assert not unfinished.exists()


def test_without_a_directory_nothing_is_opened() -> None:
    with opened(None) as store:
        assert store is None
