"""What a user installs: the wheel's files, and that it imports without this tree."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("transforms", "ensemble")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]

IMPORT = """
import sys
target, libraries = sys.argv[1:]
sys.path += [target, libraries]
import importlib.metadata, plurax.transforms, plurax.ensemble
print(plurax.transforms.__file__)
print(plurax.ensemble.__file__)
print(importlib.metadata.version("plurax"))
"""


def pip(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree: a build leaves files behind, and takes along what it finds of them."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "tree")
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    wanted = {
        f"plurax/{path.relative_to(ROOT).as_posix()}"
        for folder in FOLDERS
        for path in [*(ROOT / folder).rglob("*.py"), ROOT / folder / "py.typed"]
    }
    information = f"plurax-{VERSION}.dist-info/"
    files = set(ZipFile(wheel).namelist())
    assert {name for name in files if not name.startswith(information)} == wanted
    assert information + "licenses/LICENSE" in files


def test_the_wheel_imports_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip("install", "--no-deps", "--target", target, wheel)
    # -I: no working directory, no PYTHONPATH; -S: no .pth files, so no editable install.
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT, str(target), sysconfig.get_path("purelib")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    transforms, ensemble, version = run.stdout.split()
    assert Path(transforms) == target / "plurax/transforms/__init__.py"
    assert Path(ensemble) == target / "plurax/ensemble/__init__.py"
    assert version == VERSION


def test_without_the_wheel_that_import_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", IMPORT, str(tmp_path), sysconfig.get_path("purelib")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "No module named 'plurax" in run.stderr


def test_the_listed_packages_are_the_folders_of_the_tree() -> None:
    inits = [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    found = {".".join(["plurax", *path.parent.relative_to(ROOT).parts]) for path in inits}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_environment_holds_the_version_of_the_tree() -> None:
    assert importlib.metadata.version("plurax") == VERSION


def test_the_commit_hooks_pin_the_same_ruff() -> None:
    files = [ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml"]
    assert len({re.findall(r"ruff==[\d.]+", file.read_text())[0] for file in files}) == 1
