"""`make examples` writes the output of the examples into the pages, and nothing from one that fails."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
HEAD = re.compile(r"\$ python examples/\w+\.py  # \d+ cores, jax [\d.]+\n")
DRAWS = """
import os, sys
from pathlib import Path

print("drawn in", os.environ["COLUMNS"], "columns   ")
print("\\r 0 %\\r50 %", end="", file=sys.stderr)
print("\\r100 %", file=sys.stderr)
print("\\rgone\\r    \\r", end="", file=sys.stderr)
print("ε <!-- \\\\1")
Path("demo").mkdir()
Path("demo/draws.png").write_bytes(b"new")
"""
PAGE = """# Page

<!-- draws -->
old
<!-- /draws -->

more <!-- fails -->
<!-- fails -->
as it was
<!-- /fails -->
"""


@pytest.fixture(scope="module")
def capture() -> Any:
    spec = importlib.util.spec_from_file_location("capture", ROOT / "examples/_capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.capture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with an example that draws, one that fails, one that no page shows, and a non-example script."""
    for folder in ("examples", "docs"):
        (tmp_path / folder).mkdir()
    for name, code in {
        "draws": DRAWS,
        "fails": DRAWS.replace("draws", "fails") + "raise ValueError('of no use')",
        "hidden": "",
        "_helper": "",
    }.items():
        (tmp_path / "examples" / f"{name}.py").write_text(code)
    (tmp_path / "examples/README.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("no place here\n")
    (tmp_path / "docs/draws.png").write_bytes(b"old")
    (tmp_path / "docs/fails.png").write_bytes(b"old")
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_output_is_written_between_the_markers_and_the_picture_to_its_path(capture, root):
    before = files(root)
    capture(["draws"], root)
    after = files(root)
    assert {name for name in after if after[name] != before.get(name)} == {"examples/README.md", "docs/draws.png"}
    assert after["docs/draws.png"] == b"new"
    page, count = HEAD.subn("", after["examples/README.md"].decode())
    assert count == 1
    assert page == PAGE.replace("old", "```text\ndrawn in 100 columns\n100 %\nε <!-- \\1\n```")


def test_a_second_run_replaces_it_on_all_pages_with_markers(capture, root):
    (root / "README.md").write_text(PAGE)
    capture(["draws"], root)
    once = files(root)
    assert once["README.md"] == once["examples/README.md"] != PAGE.encode()
    capture(["draws"], root)
    assert files(root) == once


def test_a_failing_example_changes_nothing_and_ends_the_run(capture, root):
    before = files(root)
    with pytest.raises(SystemExit, match=r"(?s)ValueError: of no use.*fails failed; its output was not written"):
        capture(["fails", "draws"], root)
    assert files(root) == before
    with pytest.raises(SystemExit, match="fails failed; its output was not written"):
        capture(["draws", "fails"], root)
    assert (root / "docs/draws.png").read_bytes() == b"new"
    assert (root / "docs/fails.png").read_bytes() == b"old"
    assert "as it was" in (root / "examples/README.md").read_text()


@pytest.mark.parametrize("name", ["draw", "_helper"])
def test_a_script_that_is_not_an_example_is_refused_before_anything_runs(capture, root, name):
    before = files(root)
    with pytest.raises(SystemExit, match=f"no example is named `{name}`; choose from draws, fails, hidden"):
        capture(["draws", name], root)
    assert files(root) == before


@pytest.mark.parametrize("names", [["draws", "hidden"], []])
def test_an_example_without_markers_is_refused_before_anything_runs(capture, root, names):
    before = files(root)
    with pytest.raises(SystemExit, match="no page shows `hidden`; add <!-- hidden --> and <!-- /"):
        capture(names, root)
    assert files(root) == before


def test_without_names_all_are_run(capture, root):
    for name in ("fails", "hidden"):
        (root / "examples" / f"{name}.py").unlink()
    capture([], root)
    assert (root / "docs/draws.png").read_bytes() == b"new"
