"""Run examples at full size, and write their output and pictures into the pages that show them.

    python examples/_capture.py                     all examples
    python examples/_capture.py maxwell laplacian   these two

The output of `NAME.py` goes between `<!-- NAME -->` and `<!-- /NAME -->` of a page, and its picture to `docs/NAME.png`.
If an example fails, the run stops, and the pages keep the previous output of that example.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "examples/README.md")


def shown(script: Path, folder: Path) -> str:
    """Return a Markdown block with the output of a script, which runs in `folder`, in lines of 100 characters."""
    settings = {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # progress bars and warnings, in order
    )
    # A progress bar rewrites its line after each \r; only the last version stays visible.
    lines = [line.rpartition("\r")[2].rstrip() for line in done.stdout.decode().split("\n")]
    text = "\n".join(lines).strip("\n")
    if done.returncode:
        raise SystemExit(f"{text}\n{script.stem} failed; its output was not written")
    command = f"$ python examples/{script.name}  # {os.cpu_count()} cores, jax {importlib.metadata.version('jax')}"
    return f"```text\n{command}\n{text}\n```"


def marks(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", flags=re.DOTALL)


def replace(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def capture(names: list[str], root: Path) -> None:
    """Run the named examples, or all, and write their output into the pages."""
    scripts = {path.stem: path for path in sorted(root.glob("examples/[!_]*.py"))}
    pages = [root / page for page in PAGES]
    for name in names:
        if name not in scripts:
            raise SystemExit(f"no example is named `{name}`; choose from {', '.join(scripts)}")
    for name in names or scripts:
        if not any(marks(name).search(page.read_text()) for page in pages):
            raise SystemExit(f"no page shows `{name}`; add <!-- {name} --> and <!-- /{name} --> to a page")
    for name in names or scripts:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            block = shown(scripts[name], Path(folder))
            picture = Path(folder) / "demo" / f"{name}.png"
            if picture.exists():
                replace(root / "docs" / picture.name, picture.read_bytes())
        for page in pages:
            content = page.read_text()
            changed = marks(name).sub(lambda _, block=block: f"{block}\n", content)
            if changed != content:
                replace(page, changed.encode())
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    capture(sys.argv[1:], ROOT)
