"""The checkpoints of a run: failing disks, threads, interrupts, other processes; `test_fit.py` tests the rest."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import threading
import time
import warnings
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plurax.transforms._files.document import document
from plurax.transforms._runs import checkpoint_writer, run_directory
from plurax.transforms._runs.checkpoint import Checkpoint
from plurax.transforms._runs.checkpoint_writer import CheckpointWriter
from plurax.transforms._runs.held_rows import copied
from plurax.transforms._runs.manifest import About, outline
from plurax.transforms._runs.processes import Group
from plurax.transforms._runs.run_directory import Resume, RunDirectory


def opened(directory: Any, resume: Resume = "auto") -> AbstractContextManager[RunDirectory | None]:
    return RunDirectory.open("fit", directory, 2, Group((jax.process_index(),)), resume, 7)


STATE: dict[str, Any] = {
    "x": jnp.arange(6.0).reshape(2, 3),
    "n": np.arange(2, dtype=np.int32),
    "key": jax.random.split(jax.random.key(1)),
}
OUTLINES = {"state": outline(STATE, drop_axis=True)}


def begun(path: Path, state: Any = STATE) -> CheckpointWriter:
    return CheckpointWriter.begin("fit", path, {"state": state}, 2, outlines=OUTLINES, about=About(), copies=True)


def read(path: Path) -> Any:
    return Checkpoint.open("fit", path).load({"state": STATE}, OUTLINES, 2)["state"]


def fails_with(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def run(directory: Path, where: str, error: Exception, then: tuple[int, ...] = ()) -> None:
    """Write a checkpoint of step 5, which fails, and others."""
    with pytest.MonkeyPatch.context() as patch, opened(directory) as store:
        assert store is not None
        patch.setattr(Path if where == "mkdir" else checkpoint_writer, where, fails_with(error))
        store.write(5, begun)
        store._thread.submit(lambda: None).result()  # after all else
        patch.undo()
        for step in then:
            store.write(step, begun)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "run.lock")


@pytest.mark.parametrize("where", ["mkdir", "_write_rows", "replace_directory"])
def test_a_checkpoint_that_cannot_be_written_warns(tmp_path: Path, where: str) -> None:
    match = rf"^fit: the checkpoint of step 5 in {re.escape(str(tmp_path))} cannot be written: .*No space left on dev"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.warns(UserWarning, match=match + ".*It was the last one of the run"):
        run(tmp_path, where, full)
    assert names(tmp_path) == []
    with pytest.warns(UserWarning, match=match + ".*The run goes on"):
        run(tmp_path, where, full, then=(6, 7, 8))
    assert names(tmp_path) == ["step_00000007", "step_00000008"]


@pytest.mark.parametrize("where", ["members_held", "_write_rows", "replace_directory"])
def test_a_mistake_is_no_failing_disk(tmp_path: Path, where: str) -> None:
    with pytest.raises(ValueError, match="no member"):
        run(tmp_path, where, ValueError("no member"))
    assert names(tmp_path) == []


def test_a_checkpoint_holds_copies_and_is_written_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, put = threading.Event(), checkpoint_writer._write_rows

    def write_later(*args: Any) -> Any:
        assert later.wait(60)
        return put(*args)

    monkeypatch.setattr(checkpoint_writer, "_write_rows", write_later)
    state = {**STATE, "x": STATE["x"] + 0, "n": STATE["n"] + 0}
    with opened(tmp_path) as store:
        assert store is not None
        store.write(7, lambda path: begun(path, state))
        jax.jit(lambda x: x + 1, donate_argnums=0)(state["x"]).block_until_ready()
        state["n"] += 1
        assert state["x"].is_deleted()
        assert not (tmp_path / "step_00000007").exists()
        later.set()
    found = read(tmp_path / "step_00000007")
    np.testing.assert_array_equal(found["x"], STATE["x"])
    np.testing.assert_array_equal(found["n"], STATE["n"])
    assert (found["key"] == STATE["key"]).all()


def test_an_error_in_the_run_does_not_lose_the_checkpoint_before_it(tmp_path: Path) -> None:
    def fails() -> None:
        with opened(tmp_path) as store:
            assert store is not None
            store.write(7, begun)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    np.testing.assert_array_equal(read(tmp_path / "step_00000007")["x"], STATE["x"])


def test_an_error_in_the_run_does_not_hide_a_checkpoint_that_failed(tmp_path: Path) -> None:
    def fails() -> None:
        with pytest.MonkeyPatch.context() as patch, opened(tmp_path) as store:
            assert store is not None
            patch.setattr(checkpoint_writer, "_write_rows", fails_with(OSError("no disk")))
            store.write(7, begun)
            raise ZeroDivisionError

    match = "step 7 .* cannot be written: no disk. The run ends by another error"
    with pytest.warns(UserWarning, match=match), pytest.raises(ZeroDivisionError):
        fails()


def test_copies_are_freed_when_they_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []

    def noted(held: Any, members: Any) -> Any:
        found = copied(held, members)
        copies.extend(weakref.ref(array) for array, _ in found.values())
        return found

    monkeypatch.setattr(checkpoint_writer, "copied", noted)
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="cannot be written"):
            run(tmp_path, "_write_rows", OSError("no disk"))
        assert len(copies) == 6
        assert all(copy() is None for copy in copies)
    finally:
        gc.enable()


def test_after_its_note_a_process_leaves_the_directory_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = begun(tmp_path / "step_00000007"), Path.write_bytes

    def publish(path: Path, content: bytes) -> int:
        size = write(path, content)
        writer.unfinished.rename(tmp_path / "elsewhere")
        return size

    monkeypatch.setattr(Path, "write_bytes", publish)
    writer.leave_note(writer.write_rows())
    assert names(tmp_path) == ["elsewhere"]


class FirstOfTwo(Group):
    """The first process, whose companion holds no members."""

    def gather(self, value: Any) -> list[Any]:
        return [value, {"checksums": {}, "files": {}} if isinstance(value, dict) else [] if value == [0, 1] else None]


TWO = FirstOfTwo((0, 1))


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "of", lambda tree: TWO)


def opened_by_two(directory: Path) -> AbstractContextManager[RunDirectory | None]:
    return RunDirectory.open("fit", directory, 2, TWO, "auto", 7)


def leave_note(directory: Path, seconds: float = 0.2) -> None:
    """Do what the other process does, which writes for some time."""
    (unfinished,) = directory.glob(".step_*.unfinished")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with (unfinished / "arrays" / "1").open("a") as file:
            file.write("x")
        time.sleep(0.05)
    (unfinished / "arrays" / "1").unlink()
    (unfinished / "notes").mkdir(exist_ok=True)
    (unfinished / "notes" / "1.json").write_bytes(
        b"".join(document("plurax note", 1, {}, [b'{"checksums": {}, "files": {}}']))
    )


def test_what_processes_say_is_enough_if_a_note_is_not_seen(with_another: None, tmp_path: Path) -> None:
    with opened_by_two(tmp_path) as store:
        assert store is not None
        store.write(7, begun)
        time.sleep(0.3)
        assert not (tmp_path / "step_00000007").exists()
    assert names(tmp_path) == ["step_00000007"]
    held = sorted(path.name for path in (tmp_path / "step_00000007").iterdir())
    assert held == ["arrays", "numbers.bin", "plurax.json"]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_waits_for_others_as_long_as_they_write(
    with_another: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
    error: type[BaseException],
) -> None:
    monkeypatch.setattr(run_directory, "_PATIENCE", 1.0 if answers else 0.3)

    def fails() -> None:
        with opened_by_two(tmp_path) as store:
            assert store is not None
            store.write(7, begun)
            store._pending[0].rows.result()
            if answers:
                threading.Thread(target=leave_note, args=[tmp_path, 2.5]).start()
            raise error

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(error):
            fails()
    assert names(tmp_path) == (["step_00000007"] if answers else [])
    texts = [f"{one.message}" for one in caught]
    assert len(texts) == (not answers)
    for text in texts:
        assert re.search("step 7 in .* cannot be written: not all processes have written .*ends by another error", text)


def test_an_interrupt_elsewhere_does_not_lose_the_checkpoint(with_another: None, tmp_path: Path) -> None:
    """The other process is interrupted while it waits for its thread, which goes on."""

    class Interrupted(FirstOfTwo):
        def gather(self, value: Any) -> list[Any]:
            return [value, ["KeyboardInterrupt", ""]]

    def run() -> None:
        with opened_by_two(tmp_path) as store:
            assert store is not None
            store.write(7, begun)
            store._pending[0].rows.result()
            threading.Thread(target=leave_note, args=[tmp_path]).start()
            object.__setattr__(store, "group", Interrupted((0, 1)))

    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        run()
    assert names(tmp_path) == ["step_00000007"]


def test_a_second_interrupt_ends_the_wait(with_another: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def fails() -> None:
        with opened_by_two(tmp_path) as store:
            assert store is not None
            store.write(7, begun)
            store._pending[0].rows.result()
            monkeypatch.setattr(CheckpointWriter, "bytes_written", interrupt)
            raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert names(tmp_path) == []


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
