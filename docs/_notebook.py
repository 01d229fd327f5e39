"""Write notebooks of guides: the same text and code, with the output as that of the cells.

    python docs/_notebook.py        docs/notebooks/start.ipynb and docs/notebooks/ensembles.ipynb

The first cell, which installs the library, is all that a notebook adds. Nothing is executed: outputs are those that
`_render.py` has written into the page.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FOLDER = DOCS / "notebooks"
PAGES = ("start", "ensembles")
REPOSITORY = "https://github.com/plurax/plurax"
INSTALL = f"""\
%pip install --quiet "git+{REPOSITORY}"
# In a checkout, with this folder as the working directory:
# %pip install --quiet --editable ../..
"""
# The line of a page that links to its notebook.
COLAB = re.compile(r"^\[Open this page in Colab\].*\n\n", re.MULTILINE)
BLOCK = re.compile(
    r'^```python\n(?P<code>.*?)^```\n(?:\n```text title="Output[^"]*"\n(?P<output>.*?)^```\n)?',
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)")


def notebook(name: str) -> dict[str, Any]:
    """Return the guide of this name as a notebook: format 4.5, as a dict for `json`."""
    page = COLAB.sub("", (DOCS / f"{name}.md").read_text())
    cells = [_code(INSTALL, "")]
    end = 0
    for block in BLOCK.finditer(page):
        cells += [_text(page[end : block.start()]), _code(block["code"], block["output"] or "")]
        end = block.end()
    cells = [cell for cell in [*cells, _text(page[end:])] if cell["source"]]
    return {
        "cells": [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _text(markdown: str) -> dict[str, Any]:
    """Return a cell of text, whose links lead to the repository."""

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", link[1]))
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}"

    return {"cell_type": "markdown", "metadata": {}, "source": _lines(LINK.sub(absolute, markdown).strip("\n"))}


def _code(code: str, output: str) -> dict[str, Any]:
    """Return a cell of code, with what it prints."""
    shown = [{"name": "stdout", "output_type": "stream", "text": _lines(output)}] if output else []
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}}
    return cell | {"outputs": shown, "source": _lines(code.rstrip("\n"))}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def written(name: str) -> str:
    """Return the text of the notebook's file."""
    return json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the notebooks that have changed."""
    FOLDER.mkdir(exist_ok=True)
    for name in PAGES:
        file = FOLDER / f"{name}.ipynb"
        if not file.exists() or file.read_text() != written(name):
            file.write_text(written(name))
            print(f"notebooks/{name}.ipynb: written anew", flush=True)


if __name__ == "__main__":
    main()
