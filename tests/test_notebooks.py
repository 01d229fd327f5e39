"""The notebooks match the guides, in the format that Jupyter and Colab read."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> Any:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS, GUIDES = script("_notebook"), script("_render")
FILES = sorted((DOCS / "notebooks").glob("*.ipynb"))


def faults(notebook: dict[str, Any]) -> list[str]:
    """Return deviations from notebook format 4.5, as far as our notebooks use it."""
    found = []
    if notebook.keys() != {"cells", "metadata", "nbformat", "nbformat_minor"}:
        found.append(f"the notebook has {sorted(notebook)}")
    if (notebook.get("nbformat"), notebook.get("nbformat_minor")) != (4, 5):
        found.append("the format is not 4.5")
    ids = [cell.get("id", "") for cell in notebook["cells"]]
    if len(set(ids)) < len(ids) or not all(re.fullmatch(r"[\w-]{1,64}", x) for x in ids):
        found.append("ids are missing, or not unique")
    common = {"id", "cell_type", "metadata", "source"}
    keys = {"markdown": common, "code": common | {"execution_count", "outputs"}}
    texts = []
    for cell in notebook["cells"]:
        if cell.keys() != keys.get(cell["cell_type"]):
            found.append(f"a cell of type {cell['cell_type']} has {sorted(cell)}")
        texts.append(cell["source"])
        for output in cell.get("outputs", []):
            if output.keys() != {"output_type", "name", "text"} or output["output_type"] != "stream":
                found.append(f"an output has {sorted(output)}")
            texts.append(output["text"])
    for lines in texts:
        whole = [*lines[:-1], f"{lines[-1]}\n"] if lines and not lines[-1].endswith("\n") else lines
        if not lines or not all(re.fullmatch(r"[^\n]*\n", line) for line in whole):
            found.append(f"lines are not whole: {lines[:2]}")
    return found


def test_each_page_has_its_notebook() -> None:
    assert [file.stem for file in FILES] == sorted(NOTEBOOKS.PAGES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_up_to_date(file: Path) -> None:
    assert file.read_text() == NOTEBOOKS.written(file.stem), "run: make guides"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_has_the_code_the_output_and_the_text_of_its_page(file: Path) -> None:
    install, *cells = json.loads(file.read_text())["cells"]
    page = (DOCS / f"{file.stem}.md").read_text()
    blocks = list(GUIDES.BLOCK.finditer(page))
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) + "\n" for cell in code] == [block["code"] for block in blocks]
    shown = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in code]
    assert shown == [block["output"] or "" for block in blocks]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    words = GUIDES.BLOCK.sub("", NOTEBOOKS.COLAB.sub("", page))
    without_links = [re.sub(r"\]\([^)\s]+", "](", x).split() for x in (text, words)]
    assert without_links[0] == without_links[1]
    assert re.fullmatch(r'%pip install --quiet "git\+https://\S+"\n', install["source"][0])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_is_valid(file: Path) -> None:
    assert faults(json.loads(file.read_text())) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_links_lead_into_the_repository(file: Path) -> None:
    text = "".join(line for cell in json.loads(file.read_text())["cells"] for line in cell["source"])
    links = re.findall(r"\]\(([^)\s#]+)", text)
    inside = [link.removeprefix(f"{NOTEBOOKS.REPOSITORY}/blob/main/") for link in links if "/blob/main/" in link]
    assert inside
    assert all(link.startswith("https://") for link in links)
    assert [path for path in inside if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_links_to_its_notebook(file: Path) -> None:
    (line,) = NOTEBOOKS.COLAB.findall((DOCS / f"{file.stem}.md").read_text())
    assert f"/plurax/plurax/blob/main/docs/notebooks/{file.name})" in line


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"nbformat_minor": 4}, "the format is not 4.5"),
        ({"cells": [{"cell_type": "markdown", "id": "a b", "metadata": {}, "source": ["x"]}]}, "ids are missing"),
        ({"cells": [{"cell_type": "code", "id": "a", "metadata": {}, "source": ["x"]}]}, "a cell of type code has"),
        ({"cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["x\ny"]}]}, "lines are not whole"),
    ],
)
def test_a_faulty_notebook_is_detected(change: dict[str, Any], fault: str) -> None:
    (found,) = faults(NOTEBOOKS.notebook("start") | change)
    assert found.startswith(fault)
