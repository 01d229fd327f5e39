"""docs/coverage.md: each thing that the source documents do has its functions, and tests that there are."""

import re
from pathlib import Path

import pytest

from .test_links import broken_links, missing_tests

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/coverage.md"
ROWS = range(1, 44)


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables, below their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in found if row[-1] != "test" and set("".join(row)) - set("-| ")]


def faults(page: Path) -> list[str]:
    """What is wrong with the page: rows missing or empty, tests that there are not, links that lead nowhere."""
    text = page.read_text()
    table = rows(text)
    numbers = [int(row[0]) for row in table if row[0].isdigit()]
    found = [f"row {i} is there {numbers.count(i)} times" for i in ROWS if numbers.count(i) != 1]
    found += [f"there is no row {i} to be" for i in sorted(set(numbers) - set(ROWS))]
    for row in table:
        name, numbered = row[0], row[0].isdigit()
        if len(row) != (5 if numbered else 3) or not all(row):
            found.append(f"row {name} lacks a cell")
        elif "`" not in row[2 if numbered else 1]:
            found.append(f"row {name} names no function")
        if not re.search(r"\[`test_\w+`\]\([^)]+\)", row[-1]):
            found.append(f"row {name} names no test")
    found += [f"there is no {test}" for test in missing_tests(page)]
    return found + [f"{link} leads nowhere" for link in broken_links(page)]


def test_everything_is_there_and_proved() -> None:
    assert faults(PAGE) == []
    assert not [line for line in PAGE.read_text().splitlines() if line[:1] != "|" and len(line) > 120]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (r"^\| 13 .*\n", "", "row 13 is there 0 times"),
        (r"^\| 43 ", "| 42 ", "row 42 is there 2 times"),
        (r"^\| 43 ", "| 44 ", "there is no row 44 to be"),
        (r"`vmap`(?=\]\(api/transforms.md\) \| \[vmap_tour\])", "", "row 1 names no function"),
        (r"(?<=^\| 1 ).*\| (?=\[`test)", "| | `vmap` | | ", "row 1 lacks a cell"),
        (
            r"(?<=^\| gradients by position, seeded, with aux).*\[`grad`\]",
            " | gradients",
            "row gradients by position, seeded, with aux names no function",
        ),
        (r"\[`test_h\w+`\]\([^)]*\)", "there is none", "row 18 names no test"),
        (r"test_hswish_\w+", "test_swish", "there is no test_swish in ../tests/cases/test_compile_cases.py"),
        (r"test_aot_cases", "test_ahead", "../tests/cases/test_ahead.py leads nowhere"),
        (r"\(api/privacy.md\)", "(api/private.md)", "api/private.md leads nowhere"),
    ],
)
def test_each_fault_is_found(old: str, new: str, fault: str, tmp_path: Path) -> None:
    for name in ("tests", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    docs = tmp_path / "docs"
    docs.mkdir()
    for other in (ROOT / "docs").iterdir():
        (docs / other.name).symlink_to(other)
    (docs / PAGE.name).unlink()
    text, count = re.subn(old, new, PAGE.read_text(), flags=re.MULTILINE)
    assert count > 0
    (docs / PAGE.name).write_text(text)
    assert fault in faults(docs / PAGE.name)
