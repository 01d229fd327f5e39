"""The code of the guides runs, from top to bottom of each."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def run(text: str) -> dict[str, Any]:
    """What the Python blocks of a page that the site runs define, one after another."""
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python exec=.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(block, found)
    return found


# Which other tests run.
ELSEWHERE = {"dp-sgd.md", "coming-from-torch.md", "coming-from-mindspore.md"}


@pytest.mark.parametrize("name", [path.name for path in DOCS.glob("*.md") if path.name not in ELSEWHERE])
def test_the_code_runs(name: str) -> None:
    run((DOCS / name).read_text())


def not_run(text: str) -> list[str]:
    """The Python blocks of a page that the site would only show, but for those titled as another library's code."""
    return re.findall(r"^(```python(?! exec=| title=\"(?:PyTorch|MindSpore)\"$).*)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", [path.name for path in DOCS.glob("*.md")])
def test_all_code_is_run(name: str) -> None:
    assert not_run((DOCS / name).read_text()) == []


def test_code_that_is_not_run_is_noticed() -> None:
    text = '```python\n```\n```python title="x"\n```\n```python exec="1"\n```\n```python title="PyTorch"\n```\n'
    assert not_run(text) == ["```python", '```python title="x"']


def test_code_that_fails_is_noticed() -> None:
    with pytest.raises(ZeroDivisionError, match="division"):
        run('```python exec="1"\nx = 1\n```\nand\n```python exec="1"\nx / 0\n```\n')


def test_the_guide_to_privacy_keeps_its_budget() -> None:
    found = run((DOCS / "dp-sgd.md").read_text())
    assert 3.99 < found["spent"] <= 4.0
    assert 3.8 < found["banded"].epsilon(found["correlated"]) <= 4.0
    assert int(found["correlated"].step) == 60
    accuracy = (found["trained"](found["x"]).argmax(-1) == found["y"]).mean()
    assert accuracy > 0.85
    assert found["key"].shape == ()
