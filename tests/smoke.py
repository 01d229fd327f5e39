"""Run the tests marked `smoke` with the newest or the oldest supported versions, in an environment of its own.

Afterwards that environment and `.venv` read each other's files (`exchange.py`).

    python tests/smoke.py newest  # Python 3.13 and the newest release of each library, in .venv-newest
    python tests/smoke.py oldest  # Python 3.11 and the versions of constraints-oldest.txt, in .venv-oldest

Without such an interpreter on the PATH or in pyenv nothing is tested, which fails where the variable CI is set.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / ".venv" / "bin" / "python"
PYTHONS = {"newest": "3.13", "oldest": "3.11"}
OPTIONS = {
    "newest": ["--upgrade", "--upgrade-strategy", "eager"],
    "oldest": ["--constraint", "constraints-oldest.txt"],
}
SHOWN = ("jax", "flax", "optax", "numpy")


def candidates(version: str) -> Iterator[str]:
    """Yield the interpreters that may have this version."""
    yield from filter(None, [shutil.which(f"python{version}"), sys.executable])
    if shutil.which("pyenv"):
        root = Path(_output("pyenv", "root"))
        versions = [x for x in _output("pyenv", "versions", "--bare").split() if x.startswith(f"{version}.")]
        yield from (str(root / "versions" / x / "bin" / "python") for x in versions)


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version, or None."""
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return next((path for path in candidates(version) if _output(path, "-c", show) == version), None)


def _output(*command: str) -> str:
    """Return what a command prints; nothing if it fails, as a shim of pyenv does for a version that is not chosen."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def environment(name: str, python: str) -> Path:
    """Return the interpreter of the environment, installed anew if what it depends on has changed."""
    folder = ROOT / f".venv-{name}"
    needs = "".join((ROOT / file).read_text() for file in ("pyproject.toml", "constraints-oldest.txt"))
    stamp, own = folder / ".ready", folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != needs:
        print(f"installing plurax and its tools into {folder.name} (minutes the first time)", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *OPTIONS[name], "--editable", ".[test,plot]"], cwd=ROOT, check=True)
        stamp.write_text(needs)
    return own


def main(name: str) -> int:
    """Run the tests; return the exit status."""
    python = interpreter(PYTHONS[name])
    if python is None:
        print(f"NOT TESTED on {name}: no Python {PYTHONS[name]} on the PATH or in pyenv")
        return 1 if os.environ.get("CI") else 0
    own = environment(name, python)
    show = f"from importlib.metadata import version; print(*(f'{{x}} {{version(x)}}' for x in {SHOWN}), sep=', ')"
    print(f"smoke-{name}: Python {PYTHONS[name]}, {_output(str(own), '-c', show)}", flush=True)
    pytest = [str(own), "-m", "pytest", "--quiet", "--numprocesses", "auto", "--dist", "loadgroup", "--cases", "1"]
    status = subprocess.run([*pytest, "-m", "smoke and not optimized"], cwd=ROOT, check=False).returncode
    return status or max(exchange(str(DEFAULT), str(own)), exchange(str(own), str(DEFAULT)))


def exchange(writer: str, reader: str) -> int:
    """Let one interpreter read and continue what the other one has written; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        for python, action in ((writer, "write"), (reader, "read")):
            command = [python, str(ROOT / "tests" / "exchange.py"), action, folder]
            if status := subprocess.run(command, check=False).returncode:
                return status
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["newest"], ["oldest"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
