"""Files that begin with JSON: nothing is believed before the checksum of all of it has been verified."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plurax.transforms._files.document import parse_json, read_document, write_document
from plurax.transforms._files.errors import Damaged, OtherVersion

from ..._files import rewrite, with_checksum
from ...fuzz_files import forget_peak, peak

pytestmark = pytest.mark.smoke
ENTRIES: dict[str, Any] = {"name": "größer 🐁", "numbers": [1, -0.5, 1e300], "none": None, "deep": {"a": [[], {}]}}
CONTENT = bytes(range(256)) * 5


def read(path: Path, version: int = 3, **options: Any) -> Any:
    return read_document(f"load: {path}", path, "plurax test", version, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_document(tmp_path / "file", "plurax test", 3, ENTRIES, [CONTENT[:7], memoryview(CONTENT[7:])])
    return tmp_path / "file"


def test_what_was_written_is_read(path: Path) -> None:
    document = read(path)
    assert document.entries == ENTRIES
    assert bytes(document.content) == CONTENT
    first = json.loads(path.read_bytes().split(b"\n")[0])  # other programs can read it
    assert (first["format"], first["version"], first["name"]) == ("plurax test", 3, ENTRIES["name"])
    assert document.checksum == first["checksum"]


def test_content_may_be_empty_and_may_hold_line_breaks(tmp_path: Path) -> None:
    for content in (b"", b"\n", b"\n\n{}", b"x" * 200_000 + b"\n"):
        write_document(tmp_path / "file", "plurax test", 3, {"long": "x" * 70_000}, [content])
        assert bytes(read(tmp_path / "file").content) == content


def test_every_bit_and_every_cut_is_noticed(path: Path) -> None:
    data = path.read_bytes()
    for bit in [*range(8 * (len(data) - len(CONTENT))), *random.Random(0).sample(range(8 * len(data)), 300)]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match=r"^load: .* is damaged: its? .*; restore a copy, or write it anew"):
            read(path)
    for size in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(Damaged):
            read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(Damaged, match=f"it has {len(data) + 1} bytes instead of {len(data)}"):
        read(path)


def test_the_version_is_compared_after_the_checksum(path: Path) -> None:
    rewrite(path, lambda entries: entries.update(version=4))
    with pytest.raises(OtherVersion, match=r"in version 4 of its format, by plurax .* plurax .* reads version 3; "):
        read(path)
    path.write_bytes(path.read_bytes().replace(b'"version": 4', b'"version": 5'))
    with pytest.raises(Damaged, match="its checksum does not match"):
        read(path)


def test_a_file_of_another_format(path: Path) -> None:
    with pytest.raises(Damaged, match="it is a plurax test, not a plurax other"):
        read_document("load", path, "plurax other", 3)
    path.write_text("{}")
    with pytest.raises(Damaged, match="it does not begin as a plurax test"):
        read(path)


def test_a_file_of_json_is_bounded(path: Path) -> None:
    path.write_bytes(with_checksum(path.read_bytes() + bytes(2**26)))
    assert len(read(path).content) == len(CONTENT) + 2**26
    with pytest.raises(Damaged, match="it has more than 16777216 bytes"):
        read(path, of_json=True)


NOT_JSON = {
    "[1]": "is no object",
    '{"a": 1, "a": 2}': "two entries of one name",
    '{"a": ' + "[" * 200 + "]" * 200 + "}": "nested more than 100 deep",
    '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}": "nested more than 100 deep",
    '{"a": ' + "9" * 5000 + "}": "Exceeds the limit",
    '{"a": 1e999}': "a number that is too large: 1e999",
    '{"a": "\\ud83d"}': "an escaped surrogate",
    '{"a": "\\\\\\ud83d"}': "an escaped surrogate",
    '{"a": "' + '\\"' * 10**6 + "}": "Unterminated string",  # in linear time
    '{"x": 1' + "]" * 10**6: "Extra data|Expecting",
    '{"a": [' + "{}," * 2**20 + "{}]}": "would take too much memory",
    '{"a": }': "Expecting value",
    "": "Expecting value",
}


@pytest.mark.parametrize("text", NOT_JSON, ids=lambda text: f"{text[:12]}")
def test_json_that_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=NOT_JSON[text]):
        parse_json(text.encode())


def test_brackets_and_digits_in_strings_are_text() -> None:
    entries = {"a": "[" * 1000 + '\\"' + "{" * 1000, "b": "9" * 9000, "c": "\\" * 7, "d": "D:\\udacity", "e\\udab": 1}
    assert parse_json(json.dumps(entries).encode()) == entries
    state = np.random.default_rng(0).bit_generator.state  # integers of 128 bits
    assert parse_json(json.dumps(state).encode()) == state


def test_the_memory_of_json_is_bounded() -> None:
    """Of strings of escapes, of empty strings, of characters of four bytes."""
    for text in ('"' + '\\"' * 2**22 + '"', "[" + '"",' * 2**21 + '""]', '"🐁' + "x" * 2**23 + '"', "9" * 4000):
        data, low = f'{{"a": {text}}}'.encode(), forget_peak()
        with suppress(ValueError):
            parse_json(data)
        assert peak() - low < 2 * len(data) + 2**26


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        write_document(tmp_path / "file", "plurax test", 3, {"a": deep})
    assert list(tmp_path.iterdir()) == []
