"""Files of compiled programs: what identifies one, and the program as serialized by JAX."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..._files.document import parse_document, write_document
from ..._files.errors import OtherVersion
from ..._files.reading import open_file
from ..._files.schema import decode

_FORMAT = "plurax program"


class Unfit(Exception):
    """Raised if a file cannot be used. The message completes a sentence that begins with the path."""


@dataclass(frozen=True)
class Line:
    """What a file says of its program.

    Attributes:
      program: what identifies it.
      devices: the numbers of its devices.
      calls: the functions outside XLA that it calls.
      identity: with a key, what identifies the code.
      out: with a key, the structure of the results, as `call_structure.written` returns it.
    """

    program: str
    devices: list[int]
    calls: list[str]
    identity: list[Any] | None = None
    out: Any = None


def read(file: Path, identity: str) -> tuple[Line, bytes] | None:
    """Return what a file says of its program, and the program, or None if there is no file.

    Loading a program executes it, so check owner, checksum and identity first.

    Raises:
      PermissionError: another user may have written the file.
      Unfit: it is damaged, of another version, or was written for another identity and renamed.
      OSError: it cannot be read.
    """
    try:
        # Check the owner of the opened file, since the path may be replaced at any time.
        with open_file("aot", file, file.parent) as opened:
            _refuse_others(file, os.fstat(opened.fileno()))
            found = parse_document(opened, _FORMAT, 1)
            line = decode(Line, found.entries, "line")
    except FileNotFoundError:
        return None
    except OtherVersion as error:
        raise Unfit(f"{error}") from error
    except ValueError as error:
        raise Unfit(f"is damaged: {error}") from error
    # The name contains only a part of the identity, and files can be renamed or copied.
    if line.program != identity:
        raise Unfit("was written for another program, and renamed")
    return line, bytes(found.content)


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


def write(file: Path, line: Line, program: bytes) -> None:
    """Write or replace a file atomically, so that no process reads a part of it."""
    write_document(file, _FORMAT, 1, asdict(line), [program], mode=0o644)
