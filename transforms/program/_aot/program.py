"""A function for arguments of one kind as a program: loaded from a file, or compiled and written to one."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.compat import devices_of, loaded, serialized
from ..._models.split_model import SplitModel
from . import program_file as file
from . import unverified
from .call_structure import nodes, read, written
from .environment import installation, settings_of_a_process
from .signature import CallSignature, Lowered, digest

_FORMAT = "2"
# Custom calls that XLA knows by itself. JAX registers the others with XLA when it first lowers one, so a program that
# is loaded into a process without having been lowered there would call what is not there.
_READY = {"ApproxTopK", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"}
# The files that were found to be stale in this process: two functions may use one alternately.
_stale: set[Path] = set()


class AotProgram:
    """A compiled program.

    Attributes:
      call: the call that it is for.
      path: its file.
      line: the line of JSON in the file, while the program runs by its key alone; None once it is compared with `fun`.
      run: a function of the leaves.
      returns_models: whether there are split models in its result.
    """

    def __init__(self, call: CallSignature, path: Path, run: Any, line: dict[str, Any] | None = None) -> None:
        self.call, self.path, self.line = call, path, line
        self._set(run)

    def _set(self, run: Any) -> None:
        self.run = run
        # Known from the structure of the result, since looking for split models in every result would take time.
        self.returns_models = any(x.node_data() and x.node_data()[0] is SplitModel for x in nodes(run.out_tree))

    def compare(self, lower: Callable[[], Lowered] | None = None, *, at_end: bool = False) -> str | None:
        """Compare the loaded program with `fun`; where they differ, compile `fun`, and replace the file.

        Args:
          lower: traces and lowers `fun`; given where the program has not returned anything yet.
          at_end: whether the process ends, so that no directory is to be made anew.

        Returns:
          A message, where they differ, else None.
        """
        line = self.line
        if line is None:
            return None
        returned, lower = lower is None, lower or functools.cache(self.call.lower)
        try:
            stale = not lower().is_of(self.call, line)
        except Exception as error:
            error.add_note(f"aot: fun was traced to compare it with {self.path}, which {file.remove(self.path)}.")
            raise  # what was in the file is not known, so the next process sees it at its first call
        if not stale:
            self.line = None
            return None
        _stale.add(self.path)
        if at_end and not self.path.exists():
            outcome = "The file is gone."
        else:
            run, failed = _compiled(self.call, lower, self.path, line)
            outcome = " ".join([*failed, f"The file {file.remove(self.path)}."]) if failed else "The file is replaced."
            self._set(run)
        self.line = None  # last, as another thread may be about to run it
        code = "other code than fun is, or with other values that it closes over"
        discard = ", and what has been returned so far is the result of that" if returned else ""
        then = "Discard those results and what they changed of modules" if returned else "Call it again"
        return (
            f"the program of `{self.call.name}` for key {self.call.key!r} was stale: {self.path} was compiled from "
            f"{code}{discard}. {outcome} {then}, and give new code a new key. (If the code is the same, fun does not "
            "trace to the same program each time, as with a loop over a set of strings; then verify=False.)"
        )


def prepare(
    call: CallSignature, directory: Path, structures: dict[Path, Any]
) -> tuple[AotProgram, list[str], str | None]:
    """Load or compile the program for a call.

    Args:
      call: the call.
      directory: the directory of its file.
      structures: by file, the structure of the arguments for which this function has found it by its key; empty at the
        function's first call, whose program is compared later.

    Returns:
      The program, which is still to be compared if it has a `line`; warnings; an error, if it was stale.
    """
    lower = functools.cache(call.lower)
    identity, here = call.identity(lower), installation(call.device)
    # Machines of several kinds may share a directory; other versions are the next ones, and replace the file.
    name = digest([identity, here["device"], here.get("processor")])[:32]
    label = re.sub(r"[^\w.-]+", "_", call.name, flags=re.ASCII)[:60]
    path = directory / f"{label}-{name}.aot"
    if call.key is not None:
        first = not structures and path not in _stale
        if structures.setdefault(path, call.structure) != call.structure:
            # The name of the file does not tell static parts of the arguments apart, which differ: without a key the
            # program's text does.
            return prepare(replace(call, key=None), directory, structures)
        unverified.settle_those_of(path)
    # The first difference is named in the warning: in this order the version is, where its settings differ as well.
    expected = {"format": _FORMAT, "program": digest(identity), **here, **settings_of_a_process(call.names)}
    warnings: list[str] = []
    try:
        found = file.read(path, expected)
        if found:
            line, payload = found
            program = AotProgram(call, path, _load(call, lower, line, payload))
            stale = None
            if call.key is not None and call.verify:
                program.line = line
                # The program of a function's first call is compared later, unless it was traced already to be loaded.
                if not first or lower.cache_info().currsize:
                    stale = program.compare(lower)
            return program, warnings, stale
    except file.Unfit as unfit:
        warnings.append(f"{path} {unfit}; the program is compiled anew, and the file replaced.")
    run, failed = _compiled(call, lower, path, expected)
    return AotProgram(call, path, run), warnings + failed, None


def _compiled(
    call: CallSignature, lower: Callable[[], Lowered], path: Path, expected: dict[str, Any]
) -> tuple[Any, list[str]]:
    """Compile the program and write it; return it, and a warning if it could not be written."""
    compiled = lower().program.compile()
    try:
        file.write(path, expected | _line(call, lower(), compiled), serialized(compiled))
    except Exception as error:  # of many types, depending on what the program holds
        return compiled, [f"{path} cannot be written ({error}); other processes will compile the program again."]
    return compiled, []


def _line(call: CallSignature, lowered: Lowered, compiled: Any) -> dict[str, Any]:
    """Return the entries of a file's line that depend on the program."""
    if jax.process_count() > 1:
        raise RuntimeError("the run has several processes")
    line = {
        "devices": [device.id for device in devices_of(compiled)],
        "calls": sorted(set(re.findall(r"custom_call @([\w.$]+)", lowered.text)) - _READY),
    }
    if call.key is None:
        return line
    return line | {"identity": lowered.identity, "out": written(compiled.out_tree, nodes(call.structure))}


def _load(call: CallSignature, lower: Callable[[], Lowered], line: dict[str, Any], payload: bytes) -> Any:
    """Load a program, after what it calls outside of XLA is registered; raise `Unfit` if that fails."""
    calls = line["calls"]
    if any(not name.startswith("lapack_") for name in calls):
        lower()
    elif calls:
        # JAX looks up LAPACK when it lowers one of its functions; a call before that would crash.
        with jax.default_device(call.device):
            jax.jit(jnp.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))
    try:
        out_tree = lower().program.out_tree if call.key is None else read(line["out"], nodes(call.structure))
        devices = {device.id: device for device in jax.devices(call.device.platform)}
        in_tree = jax.tree.structure((tuple(call.leaves), {}))
        return loaded(payload, in_tree, out_tree, [devices[i] for i in line["devices"]])
    except Exception as error:  # JAX, pickle and XLA raise many kinds for one fact
        raise file.Unfit(f"cannot be loaded ({type(error).__name__}: {error})") from error
