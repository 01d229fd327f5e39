"""The fuzzer of files, for a short time, and files with which it must fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plurax.transforms._files.document import write_document

from . import fuzz_files
from .fuzz_files import FORMATS, Format, attack, main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS if fmt.name != "Orbax"])
def test_damaged_files_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = "400" if name == "run" else "100"
    failures = main(["--seed", "1", "--every", every, "--seconds", "15", "--show", "5", name])
    assert failures == 0, capsys.readouterr().out


def test_damaged_checkpoints_of_orbax_are_refused() -> None:
    """In a process of its own, since Orbax leaves reads that it has begun."""
    options = ["--every", "400", "--seconds", "30", "--show", "5", "Orbax"]
    found = subprocess.run([sys.executable, fuzz_files.__file__, *options], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]


def write(path: Path, seed: int) -> None:
    write_document(path / "file", "plurax test", 1, {"numbers": [1, 2, seed], "name": "x"})


def read_all(path: Path) -> Any:
    entries = json.loads((path / "file").read_text())
    return entries["numbers"], entries["name"]


def read_more(path: Path) -> Any:
    return [read_all(path), len(b"x" * 2**27)]


def test_a_reader_that_believes_everything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_files, "SECONDS", 0.2)
    monkeypatch.setattr(fuzz_files, "HUGE", 2**20)
    monkeypatch.setattr(fuzz_files, "ENDLESS", [])  # such a reader would fill the memory
    for read in (read_all, read_more):
        found = attack(Format("test", write, read), 0, 20, float("inf")).counts
        for name in ("SILENT", "RAW ERRORS", "HANGS", "FILES ELSEWHERE", "MEMORY"):
            assert found[name] or (name == "MEMORY" and read is read_all), name
