"""Links between the documents resolve, and the tests that they name exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a Markdown file."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    """Return the links and images of a Markdown file whose file or heading does not exist."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@cache
def names_of_tests(file: Path) -> set[str]:
    """Return the names of the tests in a file, including methods."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def missing_tests(document: Path) -> list[str]:
    """Return the tests that a Markdown file links as [`test_x`](file) and that do not exist in the file."""
    named = re.findall(r"\[`(test_\w+)`\]\(([^)#]+)\)", document.read_text())
    files = [(test, name, document.parent / name) for test, name in named]
    return [f"{test} in {name}" for test, name, file in files if file.is_file() and test not in names_of_tests(file)]


DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("benchmarks/*.md"),
]


def test_links_of_documents_exist() -> None:
    assert ROOT / "README.md" in DOCUMENTS
    found = {str(document.relative_to(ROOT)): broken_links(document) for document in DOCUMENTS}
    assert {name: links for name, links in found.items() if links} == {}


def test_documents_name_tests_that_exist() -> None:
    found = {str(document.relative_to(ROOT)): missing_tests(document) for document in DOCUMENTS}
    assert {name: tests for name, tests in found.items() if tests} == {}


def test_a_missing_test_is_detected(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_here(): ...\nclass Test_that:\n    def test_there(self): ...\n")
    document = tmp_path / "page.md"
    document.write_text("[`test_here`](test_it.py), [`test_there`](test_it.py), [`test_nowhere`](test_it.py)")
    assert missing_tests(document) == ["test_nowhere in test_it.py"]


def test_a_broken_link_is_detected(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# A part: `x`\n[self](page.md#a-part-x) [web](https://example.org/x) [part](#a-part-x) `f[0](x)` ![](no.png)\n"
        "[gone](a/no.md#b) [there](page.md#no) [here](#no)\n```\nx[1](code)\n# no\n```\n"
    )
    assert broken_links(document) == ["no.png", "a/no.md#b", "page.md#no", "#no"]
