"""The fuzzer of files, for a short time, and files with which it must fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plurax.transforms._files.document import write_document

from . import fuzz_files
from .fuzz_files import FORMATS, Format, attack, main

pytestmark = pytest.mark.slow


# Orbax leaves reads that it has begun.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS])
def test_damaged_files_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = "400" if name in ("run", "Orbax") else "100"
    failures = main(["--seed", "1", "--every", every, "--seconds", "15", "--show", "5", name])
    assert failures == 0, capsys.readouterr().out


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
