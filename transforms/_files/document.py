"""Files that begin with JSON, and may go on with binary content; a checksum covers every byte that is interpreted.

The first bytes are the checksum of all that follows them, and the number of bytes of the file, both of fixed length:

    {"checksum": "<64 digits, SHA-256>", "bytes": "<16 digits>", "format": "plurax ...", "version": 1, ...}

So the JSON is that of one line, which other programs can read. A checksum detects damage. It does not protect against
deliberate changes, since anyone can compute it; so what is read is bounded, and its types are checked, all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .._core.version import __version__
from .atomic_write import write_atomically
from .errors import Damaged, OtherVersion
from .reading import open_file, size_of

Piece = bytes | memoryview

_HEAD = re.compile(rb'\{"checksum": "([0-9a-f]{64})", "bytes": "([0-9]{16})", ')
HEAD_SIZE = len(b'{"checksum": "", "bytes": "", ') + 64 + 16
# What earlier releases wrote begins like that.
_EARLIER = re.compile(rb'\{"format": "plurax [a-z]+", "version": ([0-9]+)')
# Bounds of the JSON: bytes, and nested lists and objects. Numbers that belong to members are binary content.
_BYTES, _DEPTH = 1 << 24, 100
# Its objects may take so much memory, about so many bytes for each bracket, comma and string.
_ROOM, _TOKEN = 1 << 26, 32
# Possessive, since a string that does not end would take quadratic time otherwise.
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)|[\[\]{},]', re.DOTALL)
# A surrogate. The parser accepts half of a character, but no file and no terminal does.
_SURROGATES = re.compile(rb"(?<!\\)(?:\\\\)*+\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Document:
    """What a file holds.

    Attributes:
      entries: the entries of its JSON after "plurax".
      content: the bytes after it.
      checksum: that of the file, which identifies it.
    """

    entries: dict[str, Any]
    content: memoryview
    checksum: str


def write_document(
    path: Path,
    form: str,
    version: int,
    entries: Mapping[str, Any],
    content: Sequence[Piece] = (),
    *,
    mode: int = 0o666,
) -> None:
    """Write a file atomically, or replace one.

    Args:
      path: its path.
      form: the name of the format.
      version: its version.
      entries: what to write as JSON.
      content: the binary content.
      mode: the permissions of the file.

    Raises:
      ValueError: `entries` exceed what is read.
      OSError: the file cannot be written.
    """
    write_atomically(path, document(form, version, entries, content), mode=mode)


def document(form: str, version: int, entries: Mapping[str, Any], content: Sequence[Piece] = ()) -> list[Piece]:
    """Return the bytes of a file, in pieces."""
    about = {"format": form, "version": version, "plurax": __version__, **entries}
    try:
        text = json.dumps(about, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a name cannot be written as UTF-8: {error.object[max(0, error.start - 20) : error.end]!r}"
        ) from error
    parse_json(text)  # what could not be read is not written
    rest = [text[1:] + b"\n", *content]
    size = HEAD_SIZE + sum(memoryview(piece).nbytes for piece in rest)
    length = b'"bytes": "%016d", ' % size
    checksum = _sha256([length, *rest]).encode()
    return [b'{"checksum": "%s", ' % checksum + length, *rest]


def read_document(
    what: str, path: Path, form: str, version: int, *, within: Path | None = None, of_json: bool = False
) -> Document:
    """Read a file that `write_document` wrote.

    Args:
      what: the beginning of errors, such as "load: the checkpoint at /runs/a".
      path: its path.
      form: the name of its format.
      version: the version that is read.
      within: as for `open_file`.
      of_json: whether it has no binary content, so that its size is bounded.

    Raises:
      FileNotFoundError, OSError, Damaged: as for `open_file`.
      Damaged: it is of another format, or its bytes are not those that were written.
      OtherVersion: it is whole, but of another version.
    """
    name = "" if within is None else f" {path.relative_to(within).as_posix()}:"
    with open_file(what, path, within) as file:
        try:
            return parse_document(file, form, version, of_json=of_json)
        except OtherVersion as error:
            raise OtherVersion(f"{what} {error}.") from error
        except ValueError as error:
            raise Damaged(f"{what} is damaged:{name} {error}; restore a copy, or write it anew.") from error


def parse_document(file: BinaryIO, form: str, version: int, *, of_json: bool = False) -> Document:
    """Return what an open file holds; arguments are those of `read_document`.

    Raises:
      OtherVersion: as for `read_document`; the message completes a sentence that begins with the file.
      ValueError: it is damaged; the message is a sentence about the file.
    """
    size, head = size_of(file), file.read(HEAD_SIZE)
    match = _HEAD.fullmatch(head)
    if match is None:
        if earlier := _EARLIER.match(head):
            what = f"version {int(earlier[1])} of its format, but plurax {__version__} reads version {version}"
            raise OtherVersion(f"was written in {what}; use a release that reads version {int(earlier[1])}")
        raise ValueError(f"it does not begin as a {form}")
    if size != int(match[2]):
        raise ValueError(f"it has {size} bytes instead of {int(match[2])}")
    if of_json and size > _BYTES:
        raise ValueError(f"it has more than {_BYTES} bytes")
    rest = memoryview(file.read(size - HEAD_SIZE))
    if _sha256([head[head.index(b'"bytes"') :], rest]) != match[1].decode():
        raise ValueError("its checksum does not match its bytes")
    end = _end_of_line(rest)
    entries = parse_json(b"{" + bytes(rest[:end]))
    if (theirs := entries.pop("format", None)) != form:
        raise ValueError(f"it is a {theirs}, not a {form}")
    wrote, written = entries.pop("plurax", None), entries.pop("version", None)
    if written != version:
        this = f"version {written} of its format, by plurax {wrote}, but plurax {__version__} reads version {version}"
        raise OtherVersion(f"was written in {this}; use a release that reads version {written}")
    return Document(entries, rest[end + 1 :], match[1].decode())


def parse_json(text: bytes) -> dict[str, Any]:
    """Return the object that a text holds.

    Raises:
      ValueError: it is no JSON object, has two entries of one name, or exceeds the bounds.
    """
    _check_bounds(text)
    content = json.loads(text.decode(), object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    if not isinstance(content, dict):
        raise ValueError("its JSON is no object")
    return content


def _check_bounds(text: bytes) -> None:
    """Raise if a text would take much memory, or is nested deeply; looks at it once, and copies nothing."""
    if len(text) > _BYTES:
        raise ValueError(f"its JSON has more than {_BYTES} bytes")
    if _SURROGATES.search(text):
        raise ValueError("its JSON has an escaped surrogate")
    # The text as a string, and the strings in it: one that has a wide character takes four bytes for each.
    wide = 4 if b"\\u" in text or not text.isascii() else 1
    left, depth = (_ROOM - 2 * wide * len(text)) // _TOKEN, 0
    for match in _TOKENS.finditer(text):
        token = text[match.start()]
        depth += (token in b"[{") - (token in b"]}")
        left -= 1
        if depth > _DEPTH:
            raise ValueError(f"its JSON is nested more than {_DEPTH} deep")
        if left < 0:
            raise ValueError("its JSON would take too much memory")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("its JSON has two entries of one name")
    return entries


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"its JSON has a number that is too large: {text[:32]}")
    return number


def _constant(text: str) -> float:
    return float(text.replace("Infinity", "inf"))  # Python writes numbers that are not finite in this way


def _end_of_line(data: memoryview) -> int:
    """Return the index of the first line break, or the length if there is none."""
    block = 1 << 16
    for start in range(0, len(data), block):
        at = bytes(data[start : start + block]).find(b"\n")
        if at >= 0:
            return start + at
    return len(data)


def _sha256(pieces: Iterable[Piece]) -> str:
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()
