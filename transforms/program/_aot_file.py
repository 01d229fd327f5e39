"""A compiled program in a file: a checksum of the rest, a line of JSON, and the program as JAX writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._whole_file import write_whole

_SIZE = hashlib.sha256().digest_size


class Unfit(Exception):
    """Why a file cannot be used: the end of a sentence that begins with its path."""


def read(file: Path, expected: Mapping[str, str]) -> tuple[dict[str, Any], bytes] | None:
    """The line and the program, or None where there is no file.

    The program is not looked at here, and whoever reads it runs it: so first everything else is.

    Raises:
      Unfit: it cannot be read, is damaged, or its line has something else under a name of `expected`.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unfit(f"cannot be read ({error})") from error
    rest = memoryview(content)[_SIZE:]
    if hashlib.sha256(rest).digest() != content[:_SIZE]:
        raise Unfit("is damaged: it does not have the checksum that it was written with")
    end = content.index(b"\n", _SIZE)
    line = json.loads(content[_SIZE:end])
    for name, ours in expected.items():
        if line.get(name) != ours:
            raise Unfit(f"was made for {name} {line.get(name)!r}, but here it is {ours!r}")
    return line, content[end + 1 :]


def write(file: Path, line: Mapping[str, Any], program: bytes) -> None:
    """Write a file, or replace it: in one step, so that nobody finds half of it."""
    rest = json.dumps(line).encode() + b"\n" + program
    write_whole(file, (hashlib.sha256(rest).digest(), rest))
