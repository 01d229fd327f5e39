"""Prove that the type checker reads every file: it reports an error seeded into each.

Run by `make types` after the real check, on a copy, with the same configuration and a warm cache.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ERROR = '\n_seeded: int = "wrong"\n'


def main() -> None:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copy(root / "pyproject.toml", copy)
        for part in ("build/types/plurax", "tests"):
            shutil.copytree(root / part, copy / part, ignore=shutil.ignore_patterns("typing"))
        files = sorted(copy.rglob("*.py"))
        for file in files:
            file.write_text(file.read_text() + ERROR)
        command = [sys.executable, "-m", "mypy", "--cache-dir", str(root / ".mypy_cache")]
        report = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        reported = {line.partition(":")[0] for line in report.stdout.splitlines() if '"int"' in line}
        missed = {str(file.relative_to(copy)) for file in files} - reported
    if missed or not files:
        sys.exit(f"the type checker does not read {sorted(missed)}\n{report.stdout}{report.stderr}")
    print(f"the type checker reads all {len(files)} files")


if __name__ == "__main__":
    main()
