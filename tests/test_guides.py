"""The code of the guides runs, from top to bottom of each."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    "examples/README.md",
    "benchmarks/README.md",
    *(f"docs/{path.name}" for path in DOCS.glob("*.md")),
]


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
    return re.findall(r"^ *(```+python(?! exec=| title=\"(?:PyTorch|MindSpore)\"$).*)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])  # whose code test_readme.py runs
def test_all_code_is_run(page: str) -> None:
    assert not_run((ROOT / page).read_text()) == []


def test_code_that_is_not_run_is_noticed() -> None:
    text = '```python\n```\n```python title="x"\n```\n```python exec="1"\n```\n```python title="PyTorch"\n```\n'
    assert not_run(text) == ["```python", '```python title="x"']


def typed(text: str) -> list[str]:
    """The fenced blocks of a page that neither are executed, nor are commands, nor come from a run, between marks."""
    text = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^( *```+)([^\n]*)\n(.*?)^\1$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        code
        for _, kind, code in blocks
        if not re.match(r"bash$|python\b", kind)
        and not all(re.match(r" *(make|pip|git|python) ", line) for line in code.splitlines())
    ]


@pytest.mark.parametrize("page", PAGES)
def test_no_output_is_typed_by_hand(page: str) -> None:
    assert typed((ROOT / page).read_text()) == []


def test_typed_output_is_noticed() -> None:
    fine = (
        '```python exec="1"\n1\n```\n```bash\nls\n```\n```\nmake demo  # it\npip install x\n```\n'
        "<!-- table -->\n```text\n42 ms\n```\n<!-- /table -->\n"
    )
    assert typed(fine) == []
    assert typed(f"{fine}```\n42 ms\n```\n{fine}") == ["42 ms\n"]
    assert typed(f"{fine}- so:\n\n  ```text\n  make it\n  3\n  ```\n") == ["  make it\n  3\n"]
    assert typed("<!-- table -->\n```text\n42\n```\n<!-- /other -->\n") == ["42\n"]


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
