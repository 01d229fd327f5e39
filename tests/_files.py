"""Change files of the library as if they had been written like that: with the checksum of what is in them then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def entries_of(path: Path) -> dict[str, Any]:
    """Return the JSON of a file."""
    entries: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    return entries


def rewrite(
    path: Path, change: Callable[[dict[str, Any]], Any] = lambda entries: None, content: bytes | None = None
) -> None:
    """Change the JSON of a file in place, and perhaps its content, and write it with the checksum of that."""
    line, _, before = path.read_bytes().partition(b"\n")
    entries = json.loads(line)
    change(entries)
    path.write_bytes(
        with_checksum(
            json.dumps(entries, ensure_ascii=False).encode(errors="surrogatepass")
            + b"\n"
            + (before if content is None else content)
        )
    )


def with_checksum(data: bytes) -> bytes:
    """Return the bytes of a file with the checksum and the size that belong to the rest of them."""
    head = b'{"checksum": "%s", "bytes": "%016d", ' % (b"0" * 64, len(data))
    rest = data[data.index(b'"bytes": "') + len(b'"bytes": "') :].partition(b", ")[2]
    head = head[: -len(b'"bytes": "", ') - 16] + b'"bytes": "%016d", ' % (len(head) + len(rest))
    signed = head[head.index(b'"bytes"') :] + rest
    return head.replace(b"0" * 64, hashlib.sha256(signed).hexdigest().encode(), 1) + rest
