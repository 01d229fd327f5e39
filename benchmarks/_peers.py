"""Install the extra `bench` into the current environment, without libraries that are not available for it.

python benchmarks/_peers.py
"""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def install(*what: str) -> bool:
    return subprocess.run([*PIP, *what], cwd=ROOT, check=False).returncode == 0


def remove_what_cannot_be_imported() -> None:
    """Uninstall a torchvision that does not fit the build of torch: others import it if it is there, and fail."""
    installed = subprocess.run([sys.executable, "-m", "pip", "show", "--quiet", "torchvision"], check=False).returncode
    if installed == 0 and subprocess.run([sys.executable, "-c", "import torchvision"], check=False).returncode:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)


def main() -> None:
    install_all()
    remove_what_cannot_be_imported()


def install_all() -> None:
    if install("--editable", ".[bench]"):
        return
    print("installing them together failed; installing one library after another")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["bench"]
    own = [one.replace("plurax[", ".[") for one in wanted if one.startswith("plurax[")]
    if not install("--editable", *own):
        raise SystemExit("the extras that the benchmarks need could not be installed")
    absent = [one for one in wanted if not one.startswith("plurax[") and not install(one)]
    print("not available for this Python or this machine, so the tables lack their rows:", ", ".join(absent) or "none")


if __name__ == "__main__":
    main()
