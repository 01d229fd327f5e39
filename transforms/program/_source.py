"""Lines of source: whose they are."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.extend.core import JaxprEqn

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OF_JAX = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (jax, jaxlib))
_OWN = str(Path(__file__).parents[1]) + os.sep
# Where what is looked at is called.
_CALLERS = tuple(str(Path(__file__).parent / name) for name in ("_prepared.py", "_fold.py"))


def users_line(stack: Iterable[str]) -> str:
    """Of the lines that led to something, the innermost first, the first that is the user's own.

    Where all are in installed packages it is the first that is not in JAX; empty where there is none. What is outside
    of these tools, which is the line that calls them, does not count.
    """
    inside = itertools.takewhile(lambda line: not line.startswith(_CALLERS), stack)
    lines = [line for line in inside if not line.startswith((_OWN, *_OF_JAX))]
    return next((line for line in lines if not _INSTALLED.search(line)), lines[0] if lines else "")


def source_of(eqn: JaxprEqn) -> str:
    """The line of the user's code that an operation comes from, as `file:line`; empty where it is not known."""
    traceback = eqn.source_info.traceback
    frames: Any = traceback.frames if traceback is not None else ()
    return users_line(f"{frame.file_name}:{frame.line_num}" for frame in frames)


def where(eqn: JaxprEqn) -> str:
    """The scopes around an operation, and the line that it comes from, for a message."""
    line, scope = os.path.basename(source_of(eqn)) or "unknown line", str(eqn.source_info.name_stack)
    return f"{scope} ({line})" if scope else line
