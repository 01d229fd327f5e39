"""Change files of the library as if they had been written like that: with the checksum of what is in them then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plurax.transforms._files.document import document


def entries_of(path: Path) -> dict[str, Any]:
    """Return the JSON of a file."""
    entries: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    return entries


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], content: bytes | None = None) -> None:
    """Change the JSON of a file in place, and perhaps its content, and write it with the checksum of that."""
    line, _, before = path.read_bytes().partition(b"\n")
    entries = json.loads(line)
    for name in ("checksum", "bytes", "plurax"):
        entries.pop(name)
    change(entries)
    form, version = entries.pop("format"), entries.pop("version")
    path.write_bytes(b"".join(document(form, version, entries, [before if content is None else content])))
