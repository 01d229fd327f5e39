"""A compiled program in a file: a checksum of the rest, a line of JSON, and the program as JAX writes it."""

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
    """The reason why a file cannot be used: the end of a sentence that begins with its path."""


def read(file: Path, identity: str) -> tuple[dict[str, Any], bytes] | None:
    """Return the line and the program, or None where there is no file.

    To load the program is to run it, so owner, checksum and identity are compared first.

    Raises:
      PermissionError: somebody else may have written it.
      Unfit: it cannot be read, is damaged, or was written for another identity, under another name.
    """
    try:
        # The owner is that of the opened file, since another may be put under its name at any time.
        with file.open("rb") as opened:
            found, content = os.fstat(opened.fileno()), opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unfit(f"cannot be read ({error})") from error
    _refuse_others(file, found)
    rest = memoryview(content)[_SIZE:]  # without a copy, as a program may be large
    if hashlib.sha256(rest).digest() != content[:_SIZE]:
        raise Unfit("is damaged: it does not have the checksum that it was written with")
    end = content.index(b"\n", _SIZE)
    line = json.loads(content[_SIZE:end])
    # The name has a part of the identity only, and files can be renamed or copied.
    if line["program"] != identity:
        raise Unfit("was made for another program, and renamed")
    return line, content[end + 1 :]


def _refuse_others(file: Path, found: os.stat_result) -> None:
    """Raise if a file belongs to another user than us and root, or if everybody may write it.

    The directory does not matter: a file that somebody puts in the place of ours belongs to them. The group may write,
    since with the umask of many systems it may write every file that a user makes.
    """
    if not hasattr(os, "geteuid"):  # Windows, where the mode says nothing
        return
    problem = ""
    if found.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to another user (number {found.st_uid})"
    elif found.st_mode & stat.S_IWOTH:
        problem = f"may be written by everybody (its mode is {stat.S_IMODE(found.st_mode):o})"
    if problem:
        raise PermissionError(f"aot: {file} {problem}, and its code would run; delete it, or give your own directory.")


def remove(file: Path) -> str:
    """Remove a file; return what became of it, as the end of a sentence."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be removed ({error}); remove it"
    return "is removed"


def write(file: Path, line: Mapping[str, Any], program: bytes) -> None:
    """Write a file, or replace it, in one step, so that no process reads half of it."""
    rest = json.dumps(line).encode() + b"\n" + program
    write_atomically(file, (hashlib.sha256(rest).digest(), rest), mode=0o644)
