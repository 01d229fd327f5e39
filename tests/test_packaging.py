"""The wheel has the right files and imports without the source tree."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from . import try_release
from .try_release import PRELUDE, USES, faults

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


def build_wheel(source: Path, folder: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def copy_tree(folder: Path) -> Path:
    """Copy the tree: a build leaves files behind, and picks up leftover ones."""
    unwanted = shutil.ignore_patterns(
        ".git", ".*_cache", ".venv*", ".hypothesis", "build", "dist", "*.egg-info", "__pycache__"
    )
    return shutil.copytree(ROOT, folder, ignore=unwanted)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("tree") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked contents of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(folder / f"plurax-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"plurax-{VERSION}"


@pytest.mark.slow
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


def files_of(*options: str) -> set[str]:
    """Return the repository's files, as listed by git."""
    listed = subprocess.run(["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists the files of the repository")
def test_the_sdist_holds_the_repository_and_nothing_else(sdist: Path) -> None:
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    made = {name for name in found if name in {"PKG-INFO", "setup.cfg"} or name.startswith("plurax.egg-info/")}
    assert files_of() - found == set()
    assert found - made - files_of("--cached", "--others", "--exclude-standard") == set()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "tests/conftest.py", "examples/vmap_tour.py"} <= found


@pytest.mark.slow
def test_the_wheel_from_the_sdist_equals_the_one_from_the_tree(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    of_tree, of_sdist = (
        {name: archive.read(name) for name in archive.namelist()}
        for archive in map(ZipFile, (wheel, build_wheel(sdist, tmp_path)))
    )
    assert of_tree == of_sdist


@pytest.mark.slow
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


LIBRARIES = {
    "privacy": ["jax_privacy", "dp_accounting"],
    "curvature": ["matfree"],
    "export": ["flatbuffers"],
    "files": ["safetensors.numpy"],
    "plot": ["matplotlib.figure"],
    "ray": ["ray"],
    "sklearn": ["sklearn", "sklearn.base"],
    "tensorboard": ["tensorboardX"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("extra", "use"), [(extra, use) for extra, uses in USES.items() for use in uses])
def test_features_work_with_their_extra_and_name_it_without(
    extra: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exec(PRELUDE + USES[extra][use], {})
    for library in LIBRARIES[extra]:
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs? .* install it with:? pip install 'plurax\[{extra}\]'"):
        exec(PRELUDE + USES[extra][use], {})


def test_all_extras_are_tried() -> None:
    of_developers = {"test", "dev", "docs", "bench"}
    # `make accelerators` tries the compiler for TPUs, and `test_compile_for.py` the error without it. Nothing of the
    # library imports Grain, whose loaders `fit` takes as any others; `test_grain.py` tries them.
    assert {*USES, "examples", "tpu", "grain"} == set(PROJECT["project"]["optional-dependencies"]) - of_developers


def test_faults_of_an_extra_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_release, "PRELUDE", "")
    monkeypatch.setattr(try_release, "ALONE", {"count": "1 / 0", "stop": "pass"})
    monkeypatch.setattr(try_release, "USES", {"plot": {"draw": "1 / 0"}, "files": {"write": "pass"}})
    here = Path(sys.executable)
    assert faults(here, None) == [
        "without an extra, count fails: ZeroDivisionError: division by zero",
        "without the extra plot, draw does not name it: ZeroDivisionError: division by zero",
        "without the extra files, write does not name it: ",
    ]
    assert faults(here, "plot") == ["with the extra plot, draw fails: ZeroDivisionError: division by zero"]
    assert faults(here, "files") == []


def test_the_environment_holds_the_version_of_the_tree() -> None:
    assert importlib.metadata.version("plurax") == VERSION


def test_the_changelog_starts_with_unreleased_changes_and_this_version() -> None:
    first, second = re.findall(r"^## \[(.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[:2]
    assert first == "Unreleased]"
    assert re.fullmatch(rf"{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d", second)


def test_the_commit_hooks_pin_the_same_ruff() -> None:
    files = [ROOT / "pyproject.toml", ROOT / ".pre-commit-config.yaml"]
    assert len({re.findall(r"ruff==[\d.]+", file.read_text())[0] for file in files}) == 1


def test_the_version_is_that_of_the_project() -> None:
    import plurax.ensemble
    import plurax.transforms

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert plurax.transforms.__version__ == plurax.ensemble.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_site_and_the_metadata_link_to_one_repository() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    address, name = (re.findall(rf"^{key}: (\S+)$", site, flags=re.MULTILINE)[0] for key in ("repo_url", "repo_name"))
    assert address == f"https://github.com/{name}"
    urls = PROJECT["project"]["urls"]
    assert set(urls) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert {key for key, url in urls.items() if url == address} == {"Homepage", "Source"}
    assert urls["Issues"] == f"{address}/issues"
    for key in ("Documentation", "Changelog"):
        assert (ROOT / urls[key].removeprefix(f"{address}/blob/main/")).is_file()
