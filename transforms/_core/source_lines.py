"""Lines of source: which are the user's, which are ours, and which are JAX's."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.extend.core import JaxprEqn

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OF_JAX = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (jax, jaxlib))
# Wherever this package is imported from: in a checkout it is in no installed package.
_OWN = tuple(folder + os.sep for folder in sys.modules["plurax.transforms"].__path__)


def call_users(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's function for a tool that looks at programs; the source lines of its operations end here."""
    # `users_line` cuts a stack at this file, so that the line that called the tool is never taken for a line of `fun`.
    return fun(*args, **kwargs)


def is_ours(file: str) -> bool:
    """Return whether a file of source is one of this package."""
    return file.startswith(_OWN)


def users_line(stack: Iterable[str]) -> str:
    """Return the user's own line, of the lines that led to something, innermost first.

    If all of them are in installed packages, it is the first one outside of JAX; empty if there is none. The line that
    calls a tool (what is outside of `call_users`) does not count.
    """
    inside = itertools.takewhile(lambda line: not line.startswith(__file__), stack)
    lines = [line for line in inside if not is_ours(line) and not line.startswith(_OF_JAX)]
    return next((line for line in lines if not _INSTALLED.search(line)), lines[0] if lines else "")


def source_of(eqn: JaxprEqn) -> str:
    """Return the line of the user's code that an operation comes from, as `file:line`; empty if it is not known."""
    traceback = eqn.source_info.traceback
    frames: Any = traceback.frames if traceback is not None else ()
    return users_line(f"{frame.file_name}:{frame.line_num}" for frame in frames)


def where(eqn: JaxprEqn) -> str:
    """Return the scopes around an operation, and the line that it comes from, for a message."""
    line, scope = os.path.basename(source_of(eqn)) or "unknown line", str(eqn.source_info.name_stack)
    return f"{scope} ({line})" if scope else line
