"""docs/coverage*.md: each case of the source documents has its functions and existing tests."""

import re
from pathlib import Path

import pytest

from .test_links import broken_links, missing_tests

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [f"coverage-{name}.md" for name in ("mapping", "compiling", "programs", "derivatives", "modules")]
CASES = range(1, 44)


def cases(text: str) -> dict[str, dict[str, str]]:
    """Return the items of each section by its title."""
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    item = re.compile(r"^- \*\*(\w+?)s?:\*\*((?:.|\n(?!- |#))*)", flags=re.MULTILINE)
    return {
        title: {name: content.strip() for name, content in item.findall(body)}
        for title, body in zip(sections[::2], sections[1::2], strict=True)
    }


def faults(docs: Path) -> list[str]:
    """Return the faults: cases that are missing or incomplete, or name a test or a link that does not exist."""
    found = []
    titles: list[str] = []
    for page in PAGES:
        for title, items in cases((docs / page).read_text()).items():
            titles.append(title)
            if not items.get("Example", not title[0].isdigit()):
                found.append(f"{title!r} has no example")
            if "`" not in items.get("Function", ""):
                found.append(f"{title!r} names no function")
            if not re.search(r"\[`test_\w+`\]\([^)]+\)", items.get("Test", "")):
                found.append(f"{title!r} names no test")
        found += [f"{test} does not exist" for test in missing_tests(docs / page)]
        found += [f"{link} is broken" for link in broken_links(docs / page)]
    numbers = [int(title.partition(".")[0]) for title in titles if title[0].isdigit()]
    found += [f"case {i} occurs {numbers.count(i)} times" for i in CASES if numbers.count(i) != 1]
    return found + [f"case {i} is unknown" for i in sorted(set(numbers) - set(CASES))]


def test_every_case_is_listed_with_its_tests() -> None:
    assert faults(DOCS) == []
    assert sorted(PAGES) == sorted(path.name for path in DOCS.glob("coverage-*.md"))
    overview = (DOCS / "coverage.md").read_text()
    for page in PAGES:
        [listed] = re.findall(rf"\]\({page}\) \| (.*?) \|", overview)
        ranges = re.findall(r"(\d+)(?: to (\d+))?", listed)
        numbers = [i for first, last in ranges for i in range(int(first), int(last or first) + 1)]
        titles = cases((DOCS / page).read_text())
        assert sorted(numbers) == sorted(int(title.partition(".")[0]) for title in titles if title[0].isdigit())


@pytest.mark.parametrize(
    ("page", "old", "new", "fault"),
    [
        ("compiling", r"^## 13\..*\n", "", "case 13 occurs 0 times"),
        ("modules", r"^## 43\.", "## 42.", "case 42 occurs 2 times"),
        ("modules", r"^## 43\.", "## 44.", "case 44 is unknown"),
        ("mapping", r"`vmap`", "vmap", "'4. A module with parameters under vmap' names no function"),
        ("compiling", r"^- \*\*Example:.*\n", "", "'18. A map instead of a loop' has no example"),
        ("derivatives", r"\[`hessian`\]\(\S+\)", "Hessians", "'The Hessian of Σ a³' names no function"),
        ("compiling", r"\[`test_h\w+`\]\([^)]*\)", "none", "'18. A map instead of a loop' names no test"),
        (
            "compiling",
            r"test_hswish_\w+",
            "test_swish",
            "test_swish in ../tests/cases/test_compile_cases.py does not exist",
        ),
        ("compiling", r"test_aot_cases", "test_ahead", "../tests/cases/test_ahead.py is broken"),
        ("mapping", r"\(api/privacy.md\)", "(api/private.md)", "api/private.md is broken"),
    ],
)
def test_each_fault_is_detected(page: str, old: str, new: str, fault: str, tmp_path: Path) -> None:
    for name in ("tests", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    docs = tmp_path / "docs"
    docs.mkdir()
    for other in DOCS.iterdir():
        (docs / other.name).symlink_to(other)
    changed = docs / f"coverage-{page}.md"
    text, count = re.subn(old, new, changed.read_text(), flags=re.MULTILINE)
    assert count > 0
    changed.unlink()
    changed.write_text(text)
    assert fault in faults(docs)
