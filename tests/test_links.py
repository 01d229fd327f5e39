"""Links between the documents lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def broken_links(document: Path) -> list[str]:
    """Return the links and images of a Markdown file whose target is a file that is not there."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)", text)
    paths = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    return [path for path in paths if path and not (document.parent / path).exists()]


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
        "[self](page.md#part) [web](https://example.org/x) [part](#part) `f[0](x)` ![image](no.png) [gone](a/no.md#b)\n"
        "```\nx[1](code)\n```\n"
    )
    assert broken_links(document) == ["no.png", "a/no.md"]
