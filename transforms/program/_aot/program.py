"""A function for arguments of one kind as a program: loaded from a file, or compiled and written to one.

A program that was found by its key alone runs before it is compared with its function. It waits, to be compared before
the next call of its function or of its file, or at the end of the process.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..._core.compat import devices_of, loaded, serialized
from ..._models.split_model import SplitModel
from . import program_file as file
from .call_structure import described, nodes, read, written
from .signature import CallSignature, Lowered

_waiting: list[AotProgram] = []
# The files that were found to be stale in this process: two functions may use one alternately.
_stale: set[Path] = set()


class AotProgram:
    """A compiled program.

    Attributes:
      call: the call that it is for.
      path: its file.
      run: a function of the leaves.
      line: the line of JSON in the file, until the program is found to be that of `fun`; None if it is not to be.
      stale: whether it was found not to be.
      returns_models: whether there are split models in its result.
    """

    def __init__(self, call: CallSignature, path: Path, run: Any, line: dict[str, Any] | None = None) -> None:
        self.call, self.path, self.run, self.line, self.stale, self._process = call, path, run, line, False, os.getpid()
        # Known from the structure of the result, since looking for split models in every result would take time.
        self.returns_models = any(x.node_data() and x.node_data()[0] is SplitModel for x in nodes(run.out_tree))

    def compare(self, lower: Callable[[], Lowered]) -> None:
        """Compare the loaded program with `fun`, which `lower` traces and lowers.

        Raises:
          RuntimeError: they differ: the program is stale. The file is removed, and the next call compiles `fun`.
        """
        line = self.line
        if line is None:  # another thread was first
            return
        try:
            self.stale = not lower().is_of(self.call, line)
        except Exception as error:  # but no interrupt, such as KeyboardInterrupt: then it still waits
            _forget(self)
            # What was in the file is not known, so the next process sees the error at its first call.
            error.add_note(f"aot: fun was traced to compare it with {self.path}, which {file.remove(self.path)}.")
            raise
        _forget(self)
        if self.stale:
            _stale.add(self.path)
            raise RuntimeError(
                f"aot: the program of `{self.call.name}` for key {self.call.key!r} was stale: {self.path} was compiled "
                f"from other code than fun is, or with other values that it closes over. It {file.remove(self.path)}. "
                "Discard what it has returned and changed of modules so far, call it again, and give new code a new "
                "key. (The same code may trace to another program each time, as a loop over a set; then verify=False.)"
            )
        self.line = None


def _forget(program: AotProgram) -> None:
    _waiting[:] = [other for other in _waiting if other is not program]


def _compare_all() -> None:
    """Compare all waiting programs at the end of the process, with warnings instead of errors."""
    for program in list(_waiting):
        if program._process != os.getpid():  # this is a fork of it, without the threads of JAX
            continue
        try:
            with _surroundings(program.call):
                program.compare(program.call.lower)
        except Exception as error:  # an error of the function itself, say: at the end nobody could catch it
            message = str(error)
            if not program.stale:
                message = (
                    f"aot: whether {program.path} is stale is not known, since fun cannot be traced at the end of the "
                    f"process ({type(error).__name__}: {error}), so it {file.remove(program.path)}."
                )
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # a user's filter may make it an error, which would hide the next ones
                warnings.warn(message, stacklevel=1)


def _surroundings(call: CallSignature) -> AbstractContextManager[Any]:
    """Restore the settings around a call, for good as the process ends, and return a context of its mesh."""
    values = jax.config.values
    for name, value in call.settings.items():
        if values[name] != value:
            jax.config.update(name, value)
    if isinstance(call.mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(call.mesh)
    # An empty mesh where the call had none, since the script may have set one after it.
    return jax.set_mesh(call.mesh or Mesh(np.empty((), object), ()))


def prepare(call: CallSignature, directory: Path, known: Collection[AotProgram]) -> AotProgram:
    """Load or compile the program for a call.

    Args:
      call: the call.
      directory: the directory of its file.
      known: the programs of this function for other calls; without any, it is compared later.

    Raises:
      RuntimeError: it is stale.
    """
    others = [x.call.structure for x in known if x.call.structure != call.structure]
    if described(call.structure) in map(described, others):
        # The name of the file does not tell static parts of the arguments apart: without a key the program's text does.
        call = replace(call, key=None)
    lower = functools.cache(call.lower)
    identity = call.identity(lower)
    label = re.sub(r"[^\w.-]+", "_", call.name, flags=re.ASCII)[:60]
    path = directory / f"{label}-{identity[:32]}.aot"
    for other in [x for x in _waiting if x.path == path]:
        other.compare(other.call.lower)
    try:
        found = file.read(path, identity)
        if found:
            line, payload = found
            program = AotProgram(call, path, _load(call, lower, line, payload))
            if call.key is not None and call.verify:
                program.line = line
                # The program of a function's first call is compared later, unless it was traced already to be loaded.
                if known or path in _stale or lower.cache_info().currsize:
                    program.compare(lower)
                else:
                    _waiting.append(program)
                    # What is registered last runs first: before JAX clears any of the backends it has made so far.
                    atexit.unregister(_compare_all)
                    atexit.register(_compare_all)
            return program
    except file.Unfit as unfit:
        warnings.warn(f"aot: {path} {unfit}; the program is compiled anew, and the file replaced.", stacklevel=3)
    compiled = lower().program.compile()
    try:
        file.write(path, {"program": identity} | _line(call, lower(), compiled), serialized(compiled))
    except Exception as error:  # of many types, depending on what the program holds
        message = f"aot: {path} cannot be written ({error}); other processes will compile the program again."
        warnings.warn(message, stacklevel=3)
    return AotProgram(call, path, compiled)


def _line(call: CallSignature, lowered: Lowered, compiled: Any) -> dict[str, Any]:
    """Return the entries of a file's line that depend on the program."""
    if jax.process_count() > 1:
        raise RuntimeError("the run has several processes")
    line = {"devices": [device.id for device in devices_of(compiled)], "calls": lowered.calls}
    if call.key is None:
        return line
    return line | {"identity": lowered.identity, "out": written(compiled.out_tree, nodes(call.structure))}


def _load(call: CallSignature, lower: Callable[[], Lowered], line: dict[str, Any], payload: bytes) -> Any:
    """Load a program, after what it calls outside of XLA is registered; raise `Unfit` if that fails."""
    if line["calls"]:  # JAX looks such functions up when it lowers them; a call before that would crash
        lower()
    try:
        out_tree = lower().program.out_tree if call.key is None else read(line["out"], nodes(call.structure))
        devices = {device.id: device for device in jax.devices(call.device.platform)}
        in_tree = jax.tree.structure((tuple(call.leaves), {}))
        return loaded(payload, in_tree, out_tree, [devices[i] for i in line["devices"]])
    except Exception as error:  # JAX, pickle and XLA raise many kinds for one fact
        raise file.Unfit(f"cannot be loaded ({type(error).__name__}: {error})") from error
