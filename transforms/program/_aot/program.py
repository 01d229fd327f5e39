"""The compiled program for one kind of call: loaded from a file, or compiled and written to one.

A program that was found by its key alone runs before it is compared with its function. It is then registered as
waiting, and compared before the next use of its function or its file, or at the end of the process.
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

from ..._core.compat import Dispatched, devices_of, loaded, serialized
from ..._models.split_model import SplitModel
from . import program_file as file
from .call_structure import described, nodes, read, written
from .signature import CallSignature, Lowered

_waiting: list[AotProgram] = []
# Files found stale in this process; two functions may use the same file alternately.
_stale: set[Path] = set()


class AotProgram:
    """A compiled program.

    Attributes:
      call: the call that it was compiled for.
      path: its file.
      run: the program as a function of the leaves of the arguments.
      line: what the file says while the program waits to be compared with `fun`; otherwise None.
      stale: whether the comparison found a difference.
      returns_models: whether its result contains split models.
    """

    def __init__(self, call: CallSignature, path: Path, run: Any, line: file.Line | None = None) -> None:
        self.call, self.path, self.run, self.line, self.stale, self._process = call, path, run, line, False, os.getpid()
        # From the structure of the result, since searching every result for split models would take time.
        self.returns_models = any(x.node_data() and x.node_data()[0] is SplitModel for x in nodes(run.out_tree))
        out, changed = run.out_tree.children()
        self._out = None if self.returns_models or changed.num_leaves else out

    def dispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dispatched | None:
        """Return the program for later calls with such arguments, or None if it has models or callbacks."""
        try:
            return None if self._out is None else Dispatched(self.run, args, kwargs, self._out)
        except AttributeError:
            return None

    def compare(self, lower: Callable[[], Lowered]) -> None:
        """Compare the loaded program with `fun`, which `lower` traces and lowers.

        Raises:
          RuntimeError: the program is stale: it differs. The file is removed, and the next call compiles `fun`.
        """
        line = self.line
        if line is None:  # another thread has compared it
            return
        try:
            self.stale = not lower().is_of(self.call, line)
        except Exception as error:  # after an interrupt, such as KeyboardInterrupt, it still waits
            _forget(self)
            # The file could not be verified, so remove it: the next process sees the error at its first call.
            error.add_note(f"aot: fun was traced to compare it with {self.path}, which {file.remove(self.path)}.")
            raise
        _forget(self)
        if self.stale:
            _stale.add(self.path)
            raise RuntimeError(
                f"aot: the program of `{self.call.name}` for key {self.call.key!r} was stale: {self.path} was compiled "
                f"from different code, or with different values that it closes over. It {file.remove(self.path)}. "
                "Discard its earlier results and changes of modules, call it again, and use a new key for new code. "
                "(If the code traces to another program each time, such as a loop over a set, pass verify=False.)"
            )
        self.line = None


def _forget(program: AotProgram) -> None:
    _waiting[:] = [other for other in _waiting if other is not program]


def _compare_all() -> None:
    """Compare all waiting programs at the end of the process, with warnings instead of errors."""
    for program in list(_waiting):
        if program._process != os.getpid():  # a forked process, without the threads of JAX
            continue
        try:
            with _surroundings(program.call):
                program.compare(program.call.lower)
        except Exception as error:  # such as an error of the function itself, which nothing could catch at exit
            message = str(error)
            if not program.stale:
                message = (
                    f"aot: {program.path} could not be verified, because tracing fun at the end of the process failed "
                    f"({type(error).__name__}: {error}), so it {file.remove(program.path)}."
                )
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # a user's filter may raise it, which would skip the next ones
                warnings.warn(message, stacklevel=1)


def _surroundings(call: CallSignature) -> AbstractContextManager[Any]:
    """Restore the settings of a call, permanently because the process ends, and return a context with its mesh."""
    values = jax.config.values
    for name, value in call.settings.items():
        if values[name] != value:
            jax.config.update(name, value)
    if isinstance(call.mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(call.mesh)
    # If the call had no mesh, set an empty one, since the script may have set one after the call.
    return jax.set_mesh(call.mesh or Mesh(np.empty((), object), ()))


def prepare(call: CallSignature, directory: Path, known: Collection[AotProgram]) -> AotProgram:
    """Load or compile the program for a call.

    Args:
      call: the call.
      directory: the directory of its file.
      known: the programs of this function for other calls; if there are none, the comparison is deferred.

    Raises:
      RuntimeError: the program is stale.
    """
    others = [x.call.structure for x in known if x.call.structure != call.structure]
    if described(call.structure) in map(described, others):
        # The file name does not distinguish these static parts of arguments; without a key, the program's code does.
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
                # Defer the comparison of a function's first program, unless it was already traced to be loaded.
                if known or path in _stale or lower.cache_info().currsize:
                    program.compare(lower)
                else:
                    _waiting.append(program)
                    # Exit handlers run in reverse order: register again, to run before JAX clears its backends.
                    atexit.unregister(_compare_all)
                    atexit.register(_compare_all)
            return program
    except file.Unfit as unfit:
        warnings.warn(f"aot: {path} {unfit}; the program is compiled again, and the file replaced.", stacklevel=4)
    compiled = lower().program.compile()
    try:
        file.write(path, _line(identity, call, lower(), compiled), serialized(compiled))
    except Exception as error:  # of many types, depending on the program
        message = f"aot: {path} cannot be written ({error}); other processes will compile the program again."
        warnings.warn(message, stacklevel=4)
    return AotProgram(call, path, compiled)


def _line(identity: str, call: CallSignature, lowered: Lowered, compiled: Any) -> file.Line:
    """Return what the file says of a program."""
    if jax.process_count() > 1:
        raise RuntimeError("the run has several processes")
    line = file.Line(identity, [device.id for device in devices_of(compiled)], lowered.calls)
    if call.key is None:
        return line
    return replace(line, identity=lowered.identity, out=written(compiled.out_tree, nodes(call.structure)))


def _load(call: CallSignature, lower: Callable[[], Lowered], line: file.Line, payload: bytes) -> Any:
    """Load a program, after registering the functions that it calls outside XLA; raise `Unfit` if loading fails."""
    if line.calls:  # JAX registers such functions during lowering; a call before that would crash
        lower()
    try:
        out_tree = lower().program.out_tree if call.key is None else read(line.out, nodes(call.structure))
        _, _ = out_tree.children()  # the results, and the changes of modules
        devices = {device.id: device for device in jax.devices(call.device.platform)}
        in_tree = jax.tree.structure((tuple(call.leaves), {}))
        program = loaded(payload, in_tree, out_tree, [devices[i] for i in line.devices])
        _ = program.out_info  # raises if the results have another structure
        return program
    except MemoryError:  # which says nothing about the file
        raise
    except Exception as error:  # JAX, pickle and XLA raise many types
        raise file.Unfit(f"cannot be loaded ({type(error).__name__}: {error})") from error
