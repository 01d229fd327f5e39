"""Links between the documents lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def anchors(document: Path) -> set[str]:
    """What the headings of a Markdown file are linked to by, as GitHub makes it of their words."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    """Return the links and images of a Markdown file that lead to no file, or to no heading of one."""
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


def test_documents_link_to_what_exists() -> None:
    documents = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
    assert ROOT / "README.md" in documents
    found = {str(document.relative_to(ROOT)): broken_links(document) for document in documents}
    assert {name: links for name, links in found.items() if links} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# A part: `x`\n[self](page.md#a-part-x) [web](https://example.org/x) [part](#a-part-x) `f[0](x)` ![](no.png)\n"
        "[gone](a/no.md#b) [there](page.md#no) [here](#no)\n```\nx[1](code)\n# no\n```\n"
    )
    assert broken_links(document) == ["no.png", "a/no.md#b", "page.md#no", "#no"]
