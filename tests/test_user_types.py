"""With an installed copy, type checkers show the types in `typing/user_script.py`, and the values have those types."""

import ast
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import typing
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import jax
import numpy as np
import pytest

from .test_packaging import ROOT, build_wheel, copy_tree

SCRIPT = ROOT / "tests/typing/user_script.py"
CORRECT, WRONG = SCRIPT.read_text().split("def wrong()")
LINES = enumerate(CORRECT.splitlines(), 1)
# The stated type of each line by its number, and the lines that have an error.
STATED = {i: found[1] for i, line in LINES if (found := re.match(r" *reveal_type\(.*  # (.*)", line))}
ERRORS = {CORRECT.count("\n") + i for i, line in enumerate(WRONG.splitlines(), 1) if re.match(r"    \w", line)}
OF_JAX_NUMPY = {CORRECT.count("\n") + i for i, line in enumerate(WRONG.splitlines(), 1) if "jacobian(jnp." in line}

# The cache holds the libraries, separate from that of `make types`, whose options differ.
MYPY = ["--config-file=", f"--cache-dir={ROOT / '.pytest_cache/mypy'}", "--disable-error-code=import-untyped"]
CHECKERS = {"mypy": [*MYPY, "--python-executable"], "pyright": ["--pythonpath"]}
SHOWN = {"mypy": r':(\d+): note: Revealed type is "(.*)"', "pyright": r':(\d+):\d+ - information: Type of .* is "(.*)"'}
FAULTY = {"mypy": r":(\d+): error: ", "pyright": r":(\d+):\d+ - error: "}
# Nothing is downloaded: the wheels include pyright and node. Pyright would otherwise look for a newer version.
OFFLINE = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", "PYRIGHT_PYTHON_FORCE_VERSION": ""}


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start both checkers on the script, in an environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "env", symlinks=True)
    python, script = folder / "env/bin/python", folder / SCRIPT.name
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    ZipFile(build_wheel(copy_tree(folder / "tree"), folder)).extractall(site)
    # This environment's libraries, without its .pth files, so that the editable install is not found.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    script.write_text(SCRIPT.read_text())
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", name, *options, python, script], cwd=folder, env=os.environ | OFFLINE, **output
        )
        for name, options in CHECKERS.items()
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()
        process.stdout.close()


def fits(value: Any, stated: ast.expr) -> bool:
    """Whether a value has a type, including the type arguments in brackets."""
    if not isinstance(stated, ast.Subscript):
        name = ast.unparse(stated)
        return name == "Any" or (isinstance(value, jax.Array) if name == "Array" else type(value).__name__ == name)
    name, types = (
        ast.unparse(stated.value),
        stated.slice.elts if isinstance(stated.slice, ast.Tuple) else [stated.slice],
    )
    if type(value).__name__ != name:
        return False
    if ast.unparse(types[-1]) == "...":
        return True
    groups = {
        "tuple": lambda: [value],
        "list": lambda: ((x,) for x in value),
        "dict": lambda: value.items(),
        "Ensemble": lambda: ((member,) for member in value),
        "TrainState": lambda: ((member,) for member in value.ensemble),
        "DPState": lambda: [(value.model,)],
    }[name]()
    return all(len(group) == len(types) and all(map(fits, group, types)) for group in groups)


@pytest.mark.slow
def test_stated_types_are_true(checks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process while the checkers run."""
    seen: dict[int, Any] = {}
    monkeypatch.setattr(typing, "reveal_type", lambda x: seen.update({sys._getframe(1).f_lineno: x}))
    runpy.run_path(str(SCRIPT))
    assert seen.keys() == STATED.keys()
    assert {i for i, x in seen.items() if not fits(x, ast.parse(STATED[i], mode="eval").body)} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKERS)
def test_a_checker_shows_the_types_and_finds_the_errors(checks: dict[str, subprocess.Popen[str]], name: str) -> None:
    report = checks[name].communicate()[0]
    shown = {int(i): re.sub(r"\b(\w+\.)+(?=\w)", "", found) for i, found in re.findall(SHOWN[name], report)}
    # The type arguments that NumPy gives an array without any depend on its version.
    assert {i: re.sub(r"^ndarray\[.*\]$", "ndarray", found) for i, found in shown.items()} == STATED, report
    # With the types of NumPy 2.0, mypy accepts all calls of the Jacobian of a function of `jax.numpy`.
    unseen = OF_JAX_NUMPY if name == "mypy" and np.__version__.startswith("2.0.") else set()
    assert {int(i) for i in re.findall(FAULTY[name], report)} == ERRORS - unseen, report


@pytest.mark.parametrize(
    ("value", "stated"),
    [(1, "str"), (1, "Array"), ((1, 2), "tuple[int]"), ({"a": 1}, "dict[str, str]"), ([1, "a"], "list[int]")],
)
def test_values_of_another_type_do_not_fit(value: Any, stated: str) -> None:
    assert not fits(value, ast.parse(stated, mode="eval").body)
    assert fits(value, ast.parse("Any", mode="eval").body)
