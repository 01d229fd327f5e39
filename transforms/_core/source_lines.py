"""Find the line of the user's source that an operation comes from, among lines of this package and of JAX."""

from __future__ import annotations

import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib

from .compat import JaxprEqn

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_OF_JAX = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (jax, jaxlib))
# The folder that this package is imported from: a source checkout is not in site-packages.
_OWN = tuple(folder + os.sep for folder in sys.modules["plurax.transforms"].__path__)


def call_users(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's function so that `users_line` ignores the stack above this call."""
    # `users_line` cuts the stack at this file, so that the line that called a tool is never taken for a line of `fun`.
    return fun(*args, **kwargs)


def is_ours(file: str) -> bool:
    """Return whether a source file belongs to this package."""
    return file.startswith(_OWN)


def is_installed(file: str) -> bool:
    """Return whether a source file, or a line of one, belongs to an installed package or to the standard library."""
    return _INSTALLED.search(file) is not None or file.startswith(_STANDARD)


def users_line(stack: Iterable[str]) -> str:
    """Return the user's line from a stack of lines, innermost first.

    This is the first line outside of installed packages, or else the first line outside of JAX; empty if there is none.
    Lines outside of `call_users`, such as the one that calls a tool, are ignored.
    """
    inside = itertools.takewhile(lambda line: not line.startswith(__file__), stack)
    lines = [line for line in inside if not is_ours(line) and not line.startswith(_OF_JAX)]
    return next((line for line in lines if not is_installed(line)), lines[0] if lines else "")


def source_of(eqn: JaxprEqn) -> str:
    """Return the line of the user's code that an operation comes from, as `file:line`; empty if it is not known."""
    traceback = eqn.source_info.traceback
    frames: Any = traceback.frames if traceback is not None else ()
    return users_line(f"{frame.file_name}:{frame.line_num}" for frame in frames)


def where(eqn: JaxprEqn) -> str:
    """Return the named scopes and the source line of an operation as text for a message."""
    line, scope = os.path.basename(source_of(eqn)) or "unknown line", str(eqn.source_info.name_stack)
    return f"{scope} ({line})" if scope else line
