"""The gallery shows every example with a thumbnail of its result."""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in ROOT.glob("examples/[!_]*.py"))


def script() -> Any:
    """Import the script that writes the gallery."""
    spec = importlib.util.spec_from_file_location("write_gallery", ROOT / "docs/_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GALLERY = script()


def test_every_example_has_a_card() -> None:
    assert sorted(GALLERY.examples()) == NAMES
    page = (ROOT / "docs/gallery.md").read_text()
    assert [name for name in NAMES if page.count(f"](../examples/{name}.py)") != 1] == []


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/gallery.md").read_text() == GALLERY.page(), "run `python docs/_gallery.py`"


@pytest.mark.parametrize("name", NAMES)
def test_a_thumbnail_loads_quickly(name: str) -> None:
    content = (ROOT / f"docs/thumbs/{name}.png").read_bytes()
    assert len(content) < 40_000
    assert struct.unpack(">II", content[16:24]) == GALLERY.SIZE  # from the PNG header


def test_every_thumbnail_has_an_example() -> None:
    assert sorted(path.stem for path in (ROOT / "docs/thumbs").iterdir()) == NAMES


def test_a_new_example_is_detected(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples/README.md").write_text("| [`new.py`](#x) | a new idea |\n\n## `new.py`: what is new?\n")
    assert "](../examples/README.md#newpy-what-is-new)<br>A new idea<br>[`new.py`]" in GALLERY.page(tmp_path)
