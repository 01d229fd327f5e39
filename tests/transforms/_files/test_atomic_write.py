"""Files are written completely or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from plurax.transforms._files.atomic_write import write_atomically


def test_pieces_are_written_in_order_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for pieces in ([b"first"], (b"", memoryview(b"second")[:3], b"!")):
        write_atomically(path, pieces)
        assert path.read_bytes() == b"".join(pieces)
        assert [*path.parent.iterdir()] == [path]


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError("the disk is full")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(path, pieces())
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]
