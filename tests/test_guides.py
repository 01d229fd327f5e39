"""The code of each guide runs from top to bottom and prints the output shown."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    "README.md",
    "examples/README.md",
    *(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md")),
    *(f"docs/{path.name}" for path in DOCS.glob("*.md")),
]


def script() -> Any:
    """Import the script that renders the guides."""
    spec = importlib.util.spec_from_file_location("render_guides", DOCS / "_render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GUIDES = script()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=() if path.name == "start.md" else pytest.mark.slow)
        for path in DOCS.glob("*.md")
        if path.name != "dp-sgd.md"
    ],
)
def test_the_code_prints_what_the_page_shows(name: str) -> None:
    assert GUIDES.run((DOCS / name).read_text()).changes == []


def not_run(text: str) -> list[str]:
    """Return a page's Python blocks that are not run, except those titled as another library's code."""
    return re.findall(
        r"^ *(```+python(?!$| title=\"(?:PyTorch|MindSpore)\"$).*|(?<= )```+python$)", text, flags=re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES)
def test_all_code_is_run(page: str) -> None:
    assert not_run((ROOT / page).read_text()) == []


def test_code_that_is_not_run_is_detected() -> None:
    text = '```python\n```\n```python title="x"\n```\n  ```python\n  ```\n```python title="PyTorch"\n```\n'
    assert not_run(text) == ['```python title="x"', "```python"]


PAGE = """# A page

```python
x = 1 / 3
print("a third is", x)
```

```text title="Output"
a third is 0.33333
```

```python
del x
```
"""


def test_figures_of_the_compiler_are_compared_at_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.replace('"Output"', '"Output (jax 0.10.2)"').replace("0.33333", "0.5")
    monkeypatch.setattr(GUIDES.jax, "__version_info__", (0, 12, 1))
    other = GUIDES.run(page)
    assert (other.text, other.changes) == (page, [])
    monkeypatch.setattr(GUIDES.jax, "__version_info__", (0, 10, 2))
    assert len(GUIDES.run(page).changes) == 1


def test_a_page_is_rendered() -> None:
    page = GUIDES.run(PAGE)
    assert page.changes == []
    assert page.text == PAGE
    assert "x" not in page.namespace


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a third is 0", "the third is 0"),
        ("0.33333", "0.34333"),
        ("0.33333", "0.33333 0.5"),
        ("del x", "print(x)"),
        ('\n```text title="Output"\na third is 0.33333\n```\n', ""),
        ('print("a third is", x)', ""),
    ],
)
def test_a_wrong_output_is_detected(old: str, new: str) -> None:
    page = GUIDES.run(PAGE.replace(old, new))
    assert len(page.changes) == 1
    assert GUIDES.run(page.text).changes == []


def test_times_may_differ_but_must_exist() -> None:
    page = PAGE.replace('"Output"', '"Output on one machine"')
    assert GUIDES.run(page.replace("0.33333", "0.5")).changes == []
    assert len(GUIDES.run(page.replace('print("a third is", x)', "")).changes) == 1


def typed(text: str) -> list[str]:
    """Return a page's fenced blocks that are neither executed, nor commands, nor output of a run."""
    text = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^( *```+)([^\n]*)\n(.*?)^\1$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        code
        for _, kind, code in blocks
        if not re.match(r'bash$|python\b|text title="Output', kind)
        and not all(re.match(r" *(make|pip|git|python) ", line) for line in code.splitlines())
    ]


@pytest.mark.parametrize("page", PAGES)
def test_no_output_is_typed_by_hand(page: str) -> None:
    assert typed((ROOT / page).read_text()) == []


def test_typed_output_is_detected() -> None:
    fine = (
        '```python\n1\n```\n```text title="Output"\n1\n```\n'
        "```bash\nls\n```\n```\nmake demo  # it\npip install x\n```\n"
        "<!-- table -->\n```text\n42 ms\n```\n<!-- /table -->\n"
    )
    assert typed(fine) == []
    assert typed(f"{fine}```\n42 ms\n```\n{fine}") == ["42 ms\n"]
    assert typed(f"{fine}- so:\n\n  ```text\n  make it\n  3\n  ```\n") == ["  make it\n  3\n"]
    assert typed("<!-- table -->\n```text\n42\n```\n<!-- /other -->\n") == ["42\n"]


def test_failing_code_is_detected() -> None:
    with pytest.raises(ZeroDivisionError, match="division"):
        GUIDES.run("```python\nx = 1\n```\nand\n```python\nx / 0\n```\n")


@pytest.mark.slow
def test_the_guide_to_privacy_keeps_its_budget() -> None:
    page = GUIDES.run((DOCS / "dp-sgd.md").read_text())
    assert page.changes == []
    found = page.namespace
    assert 3.99 < found["spent"] <= 4.0
    assert 3.8 < found["banded"].epsilon(found["correlated"]) <= 4.0
    assert int(found["correlated"].step) == 60
    accuracy = (found["trained"](found["x"]).argmax(-1) == found["y"]).mean()
    assert accuracy > 0.85
