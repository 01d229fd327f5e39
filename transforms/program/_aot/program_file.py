"""Files of compiled programs: a checksum of the rest, a line of JSON, and the program as serialized by JAX."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._runs.atomic_write import write_atomically

_SIZE = hashlib.sha256().digest_size


class Unfit(Exception):
    """Raised if a file cannot be used. The message completes a sentence that begins with the path."""


def read(file: Path, identity: str) -> tuple[dict[str, Any], bytes] | None:
    """Return the JSON line and the program, or None if there is no file.

    Loading a program executes it, so check owner, checksum and identity first.

    Raises:
      PermissionError: another user may have written the file.
      Unfit: the file cannot be read, is damaged, or was written for another identity and renamed.
    """
    try:
        # Check the owner of the opened file, since the path may be replaced at any time.
        with file.open("rb") as opened:
            found, content = os.fstat(opened.fileno()), opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unfit(f"cannot be read ({error})") from error
    _refuse_others(file, found)
    rest = memoryview(content)[_SIZE:]  # no copy, since a program may be large
    if hashlib.sha256(rest).digest() != content[:_SIZE]:
        raise Unfit("is damaged: its checksum does not match its content")
    end = content.index(b"\n", _SIZE)
    line = json.loads(content[_SIZE:end])
    # The name contains only a part of the identity, and files can be renamed or copied.
    if line["program"] != identity:
        raise Unfit("was written for another program, and renamed")
    return line, content[end + 1 :]


def _refuse_others(file: Path, found: os.stat_result) -> None:
    """Raise if a file belongs to a user other than the current one and root, or if everybody may write to it.

    The directory is not checked: a file that another user puts there belongs to that user. The group may write, since
    under the umask of many systems it may write to every file that a user creates.
    """
    if not hasattr(os, "geteuid"):  # Windows, where the mode has no meaning
        return
    problem = ""
    if found.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to another user (number {found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        problem = f"may be written by everybody (its mode is {stat.S_IMODE(found.st_mode):o})"
    if problem:
        raise PermissionError(f"aot: {file} {problem}, and its code would run; delete it, or pass your own directory.")


def remove(file: Path) -> str:
    """Remove a file; return a phrase that describes the result."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be removed ({error}); remove it"
    return "is removed"


def write(file: Path, line: Mapping[str, Any], program: bytes) -> None:
    """Write or replace a file atomically, so that no process reads a part of it."""
    rest = json.dumps(line).encode() + b"\n" + program
    write_atomically(file, (hashlib.sha256(rest).digest(), rest), mode=0o644)
