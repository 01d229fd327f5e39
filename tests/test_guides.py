"""The code of the guides runs, from top to bottom of each."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def run(text: str) -> dict[str, Any]:
    """What the Python blocks of a page define, one after another."""
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(block, found)
    return found


@pytest.mark.parametrize("name", [path.name for path in DOCS.glob("*.md") if path.name != "dp-sgd.md"])
def test_the_code_runs(name: str) -> None:
    text = (DOCS / name).read_text()
    run(text)
    assert not re.search(r"^```python$", text, flags=re.MULTILINE), "the site runs what has exec="


def test_code_that_fails_is_noticed() -> None:
    with pytest.raises(ZeroDivisionError, match="division"):
        run('```python exec="1"\nx = 1\n```\nand\n```python\nx / 0\n```\n')


def test_the_guide_to_privacy_keeps_its_budget() -> None:
    found = run((DOCS / "dp-sgd.md").read_text())
    assert 3.99 < found["spent"] <= 4.0
    assert 3.8 < found["banded"].epsilon(found["correlated"]) <= 4.0
    assert int(found["correlated"].step) == 60
    accuracy = (found["trained"](found["x"]).argmax(-1) == found["y"]).mean()
    assert accuracy > 0.85
    assert found["key"].shape == ()
