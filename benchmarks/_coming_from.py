"""Compute the results of PyTorch or MindSpore for the left cells of the pages for their users.

python _coming_from.py torch|mindspore      needs that library, not JAX; writes tests/coming_from_NAME.json

A page has blocks of code and tables `| theirs | Plurax | what differs |`. This script runs the blocks titled "PyTorch"
or "MindSpore", and each left cell that is a single code span. `tests/test_coming_from.py` compares the results of the
right cells with these.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}


class Row(NamedTuple):
    """A row of a table: the code of both sides, or None for a cell that is not a single code span."""

    line: str
    theirs: str | None
    ours: str | None


class Block(NamedTuple):
    """A block of code of the other library, or of JAX, which the page executes."""

    code: str
    theirs: bool


def pieces(page: str) -> Iterator[Row | Block]:
    """Yield the blocks and rows of a page in order."""
    lines, info, code = page.splitlines(), None, []
    in_table = False
    for line in lines:
        if info is not None:
            if line == "```":
                if info.startswith("python"):
                    yield Block("\n".join(code) + "\n", "title=" in info)
                info, code = None, []
            else:
                code.append(line)
        elif line.startswith("```"):
            info = line[3:]
        elif not line.startswith("|"):
            in_table = False
        elif in_table:
            yield _row(line)
        elif set(line) <= set("|-: "):
            in_table = True


def _row(line: str) -> Row:
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    theirs = re.fullmatch("`([^`]+)`", cells[0])
    ours = re.findall("`([^`]+)`", cells[1]) if len(cells) == 3 else []
    return Row(line, theirs and theirs[1].replace(r"\|", "|"), ours[0].replace(r"\|", "|") if len(ours) == 1 else None)


def program(page: str) -> str:
    """Return the other library's side of a page as a program that stores each left cell's value in a dict `values`."""
    lines, seen = ["values = {}"], set()
    for piece in pieces(page):
        if isinstance(piece, Block) and piece.theirs:
            lines.append(piece.code)
        elif isinstance(piece, Row) and piece.theirs and piece.theirs not in seen:
            seen.add(piece.theirs)
            lines.append(f"values[{piece.theirs!r}] = (\n    {piece.theirs}\n)")
    return "\n".join(lines) + "\n"


def digest(page: str) -> str:
    """Return a digest of the code of the other library."""
    return hashlib.sha256(program(page).encode()).hexdigest()[:16]


def leaves(x: Any) -> list[Any]:
    """Return the arrays, numbers and strings in `x` as JAX flattens them, with sorted dict keys."""
    if x is None:
        return []
    if isinstance(x, dict):
        return [leaf for key in sorted(x) for leaf in leaves(x[key])]
    if isinstance(x, (tuple, list)):
        return [leaf for item in x for leaf in leaves(item)]
    if isinstance(x, (str, bool, int, float)):
        return [x]
    if hasattr(x, "asnumpy"):  # MindSpore
        x = x.asnumpy()
    elif hasattr(x, "detach"):  # PyTorch
        x = x.detach().numpy()
    return [_rounded(x.tolist())]


def _rounded(x: Any) -> Any:
    """Round the numbers in nested lists to the digits of float32."""
    if isinstance(x, list):
        return [_rounded(item) for item in x]
    return float(f"{x:.9g}") if isinstance(x, float) else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=TITLES, help="library to run")
    parser.add_argument("--out", type=Path, help="output file (default tests/coming_from_NAME.json)")
    options = parser.parse_args()
    name, target = options.name, (options.out or ROOT / f"tests/coming_from_{options.name}.json").absolute()
    page = (ROOT / f"docs/coming-from-{name}.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MindSpore writes files into the working directory
        path = Path(folder) / "page.py"  # MindSpore compiles functions from their source file
        path.write_text(program(page))
        values = runpy.run_path(str(path))["values"]
        os.chdir(ROOT)
    found = {
        "version": importlib.import_module(name).__version__.partition("+")[0],
        "program": digest(page),
        "values": {code: leaves(value) for code, value in values.items()},
    }
    lines = ",\n".join(f"    {json.dumps(code)}: {json.dumps(value)}" for code, value in found["values"].items())
    head = json.dumps({key: found[key] for key in ("version", "program")}, indent=2).removesuffix("\n}")
    target.write_text(f'{head},\n  "values": {{\n{lines}\n  }}\n}}\n')
    print(f"{target}: {len(values)} cells of {TITLES[name]} {found['version']}")


if __name__ == "__main__":
    main()
