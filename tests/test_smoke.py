"""The tests marked `smoke` cover each folder, and the versions that they run on are those of the metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from . import smoke

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def folder_of_tests(folder: Path) -> Path:
    """Return the folder of tests of a folder of the source, or of the nearest one around it."""
    return next(path for path in [folder, *folder.parents] if (ROOT / "tests" / path).is_dir())


@pytest.mark.smoke
def test_each_folder_has_a_smoke_test() -> None:
    """A folder without tests of its own counts with the one around it."""
    marked = {path.parent for path in (ROOT / "tests").rglob("test_*.py") if "mark.smoke" in path.read_text()}
    inits = [path for top in ("transforms", "ensemble") for path in (ROOT / top).rglob("__init__.py")]
    folders = {path.parent.relative_to(ROOT) for path in inits}
    assert len(folders) > 25
    missing = {str(folder) for folder in folders if not any(folder_of_tests(folder) in _under(path) for path in marked)}
    assert missing == set()


def _under(path: Path) -> list[Path]:
    relative = path.relative_to(ROOT / "tests")
    return [relative, *relative.parents]


def floors(requirements: list[str]) -> dict[str, str]:
    """Return the lowest version of each requirement that has one."""
    found = (re.match(r"([\w.-]+)(?:\[\w,]+\])?>=([\w.]+)", x) for x in requirements)
    return {match[1].lower(): match[2] for match in found if match}


def test_the_oldest_versions_are_those_of_the_metadata() -> None:
    """Development tools that only `bench`, `docs` and `dev` need are left out."""
    extras = PROJECT["optional-dependencies"]
    left_out = {"bench", "docs", "dev", "tpu"}
    wanted = floors([*PROJECT["dependencies"], *(x for name, xs in extras.items() if name not in left_out for x in xs)])
    lines = (ROOT / "constraints-oldest.txt").read_text().split()
    pins = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    assert set(pins) == {*wanted, "jaxlib"}
    for name, version in wanted.items():
        numbers, pinned = ([int(x) for x in text.split(".")] for text in (version, pins[name]))
        assert pinned[: len(numbers)] == numbers, f"{name} is pinned to {pins[name]}, but its minimum is {version}"
    assert pins["jaxlib"] == pins["jax"]


def test_nothing_pins_jax_from_above_but_the_benchmarks() -> None:
    extras = PROJECT["optional-dependencies"]
    pinned = {name for name, xs in extras.items() for x in xs if re.match(r"jax(lib)?\b.*(<|==)", x)}
    assert pinned == {"bench"}
    assert not [x for x in PROJECT["dependencies"] if "<" in x or "==" in x]


def test_an_interpreter_is_found_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smoke.interpreter(".".join(map(str, sys.version_info[:2])))
    fake = tmp_path / "python9.9"
    fake.write_text("#!/bin/sh\necho 9.8\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smoke.interpreter("9.9") is None
    fake.write_text("#!/bin/sh\necho 9.9\n")
    assert smoke.interpreter("9.9") == str(fake)


@pytest.mark.parametrize(("variable", "status"), [("", 0), ("true", 1)])
def test_a_missing_interpreter_is_reported(
    variable: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CI", variable)
    monkeypatch.setattr(smoke, "interpreter", lambda version: None)
    assert smoke.main("newest") == status
    assert capsys.readouterr().out == "NOT TESTED on newest: no Python 3.13 on the PATH or in pyenv\n"


@pytest.mark.slow
def test_files_are_exchanged(tmp_path: Path) -> None:
    assert smoke.exchange(sys.executable, sys.executable) == 0
    command = [sys.executable, str(ROOT / "tests" / "exchange.py")]
    assert subprocess.run([*command, "read", str(tmp_path)], check=False, capture_output=True).returncode == 1
