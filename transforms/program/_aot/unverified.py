"""Programs that have run without being traced, because of a key, and wait to be compared with their functions.

Each is compared before the next call of its function or of its file, and the others at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from . import program_file as file
from .environment import current_mesh

_NO_MESH = Mesh(np.empty((), object), ())


class Unverified(Protocol):
    """A program that can be compared with its function: an `AotProgram`."""

    path: Path
    line: Any
    call: Any

    def compare(self, *, at_end: bool = False) -> str | None:
        """Return what is wrong if the program is not that of its function any more; None if it is."""


@dataclass(frozen=True)
class _Waiting:
    """A program, and the process, settings and mesh in which it was asked for."""

    program: Unverified
    process: int
    settings: dict[str, Any]
    mesh: Any


_waiting: list[_Waiting] = []


def add(program: Unverified) -> None:
    """Let `program` wait to be compared, at the end of the process if not before."""
    values = jax.config.values
    settings = {name: values[name] for name in program.call.names}
    _waiting.append(_Waiting(program, os.getpid(), settings, current_mesh()))
    # The function that is registered last runs first: before JAX clears any of the backends it has made so far.
    atexit.unregister(_settle_all)
    atexit.register(_settle_all)


def settle_those_of(path: Path) -> None:
    """Compare the waiting programs of a file; as `settle`."""
    for found in list(_waiting):
        if found.program.path == path:
            settle(found.program)


def settle(program: Unverified) -> None:
    """Compare a waiting program.

    Raises:
      RuntimeError: it is stale. From now on it is that of its function.
    """
    try:
        message = program.compare()
    except Exception:  # but no interrupt, such as KeyboardInterrupt: then it still waits
        _forget(program)
        raise
    _forget(program)
    if message:
        raise RuntimeError(f"aot: {message}")


def _forget(program: Unverified) -> None:
    _waiting[:] = [found for found in _waiting if found.program is not program]


def _settle_all() -> None:
    """Compare all waiting programs at the end of the process, with warnings instead of errors."""
    for found in list(_waiting):
        if found.process != os.getpid():  # this is a fork of it, without the threads of JAX
            continue
        try:
            with _restored(found):
                message = found.program.compare(at_end=True)
        except Exception as error:  # an error of the function itself, say: at the end nobody could catch it
            message = (
                f"whether {found.program.path} is stale is not known, since fun cannot be traced at the end of the "
                f"process ({type(error).__name__}: {error})."
            )
            if found.program.line is not None:
                message += f" The file {file.remove(found.program.path)}."
        _forget(found.program)
        if message:
            _warn(f"aot: {message}")


def _warn(message: str) -> None:
    try:
        warnings.warn(message, stacklevel=1)
    except Warning:  # the user's filter makes it an error, which must not hide further warnings
        sys.stderr.write(f"{message}\n")


def _restored(found: _Waiting) -> AbstractContextManager[Any]:
    """Restore the settings around a program's call, for good as the process ends, and return a context of its mesh."""
    values = jax.config.values
    for name, value in found.settings.items():
        if values[name] != value:
            jax.config.update(name, value)
    if found.mesh == current_mesh():
        return nullcontext()
    if isinstance(found.mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(found.mesh)
    return jax.set_mesh(found.mesh or _NO_MESH)
