"""`capture`: count and time the operations of a program, and write them to a file for `trace_diff`."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

from ..._core.arguments import check_count
from ..._core.compat import Jaxpr, JaxprEqn, scan_counts
from ..._core.jaxpr import CALLS, bodies, called
from ..._core.machine import cores, processor
from ..._files.document import parse_document, write_document
from ..._files.reading import open_file
from ..._files.schema import decode
from .._ir.provenance import scope_of
from .._ir.traced_program import TracedProgram
from .timeline import Timeline, timelines

_FORMAT = "plurax capture"


@dataclass(frozen=True)
class _Operation:
    """An operation in a file: its number of runs in a call, and its seconds in each timed call."""

    op: str
    scope: str
    count: int
    seconds: list[float]

    def __post_init__(self) -> None:
        if self.count < 0 or not all(0 <= x < math.inf for x in self.seconds):
            raise ValueError(f"{self} needs a count and seconds that are finite and at least 0")


@dataclass(frozen=True)
class _Content:
    """What a file holds."""

    name: str
    program: str
    machine: str
    operations: list[_Operation]

    def __post_init__(self) -> None:
        names = {(row.op, row.scope) for row in self.operations}
        timed = {len(row.seconds) for row in self.operations if row.seconds}
        if len(names) < len(self.operations) or len(timed) > 1:
            raise ValueError("an operation is repeated, or operations have different numbers of runs")


@dataclass(frozen=True)
class Capture:
    """The operations that a program runs, with their counts and times.

    Attributes:
      name: the name of the function.
      counts: the number of runs of each operation in a call, by `(op, scope)`.
      seconds: the time of these operations in each timed call, for those that have a separate time.
      program: a digest of the compiled program, without names and source lines.
      machine: the devices (on a CPU, the model of the processor), the number of cores, and the versions of JAX. Times
        are comparable only if these are equal.

    Examples:
      >>> from plurax.transforms.program import Capture
      >>> Capture("f", {("sin", "layer"): 2}, {("sin", "layer"): [1e-6, 2e-6]}, "", "cpu").counts
      {('sin', 'layer'): 2}
    """

    name: str
    counts: dict[tuple[str, str], int]
    seconds: dict[tuple[str, str], list[float]]
    program: str
    machine: str


def capture(path: str | os.PathLike[str], fun: Callable[..., Any], *args: Any, repeats: int = 20) -> Capture:
    """Run `fun(*args)` repeatedly, and write its operations and their times to a file for `trace_diff`.

    Args:
      path: the path of the JSON file; an existing file is replaced atomically. Missing directories are created.
      fun: as for `profile`.
      *args: as for `profile`.
      repeats: the number of calls that are timed, as for `profile`; at least two.

    Returns:
      The capture that was written.

    Raises:
      TypeError: `fun` is not callable; the arguments have no values, as inside `jax.jit`; `repeats` is not an int.
      ValueError: `repeats` is less than two.
      OSError: the file cannot be written.

    Cost:
      Compiling `fun`, at most twice, and `repeats` + 1 calls.

    Examples:
      >>> import tempfile, jax.numpy as jnp
      >>> from plurax.transforms.program import capture
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     found = capture(f"{directory}/sine.json", jnp.sin, jnp.ones(3))
      >>> found.counts
      {('sin', ''): 1}
    """
    check_count("capture", "repeats", repeats, least=2)
    (found,) = captures([TracedProgram("capture", fun, args)], repeats)
    operations = [
        {"op": op, "scope": scope, "count": count, "seconds": found.seconds.get((op, scope), [])}
        for (op, scope), count in found.counts.items()
    ]
    names = {"name": found.name, "program": found.program, "machine": found.machine}
    write_document(Path(path), _FORMAT, 1, {**names, "operations": operations})
    return found


def read_capture(api: str, path: str | os.PathLike[str]) -> Capture:
    """Read a capture from a file; raise if the file is not a capture."""
    try:
        with open_file(f"{api}: {os.fspath(path)!r}", Path(path)) as file:
            found = parse_document(file, _FORMAT, 1, of_json=True)
        content = decode(_Content, found.entries, "capture")
    except ValueError as error:
        raise ValueError(f"{api}: {os.fspath(path)!r} is not a capture ({error}); write one with `capture`.") from error
    counts = {(row.op, row.scope): row.count for row in content.operations}
    seconds = {(row.op, row.scope): row.seconds for row in content.operations if row.seconds}
    return Capture(content.name, counts, seconds, content.program, content.machine)


def captures(prepared: Sequence[TracedProgram], repeats: int) -> list[Capture]:
    """Run several programs alternately, and return a capture of each."""
    return list(map(_captured, prepared, timelines([one.separated for one in prepared], repeats)))


def _captured(prepared: TracedProgram, runs: list[Timeline]) -> Capture:
    """Return the capture of a program and its timed runs."""
    program = prepared.separated.program
    counts = count_operations(prepared.traced.jaxpr.jaxpr)
    written = set(counts)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    for name, times in runs[0].counts.items() if runs else ():
        for share in prepared.separated.shares(program.instructions[name]):
            key = share.place.op, share.place.scope
            for i, run in enumerate(runs):
                seconds[key][i] += share.part * run.seconds.get(name, 0.0)
            # Operations of the jaxpr are counted there, so that counts do not depend on fusion. Operations that XLA has
            # added, such as copies, are counted by instructions.
            if key not in written:
                counts[key] += times
    digest = hashlib.sha256(program.anonymous().encode()).hexdigest()
    return Capture(prepared.name, dict(counts), dict(seconds), digest, _machine())


def count_operations(jaxpr: Jaxpr) -> Counter[tuple[str, str]]:
    """Count the runs of each operation of each scope, for the operations that a result depends on.

    The body of a scan counts once for each iteration; the body of a `while`, and each branch of a `cond`, counts once.
    """
    counts = Counter[tuple[str, str]]()

    def count(jaxpr: Jaxpr, wanted: Sequence[bool], scope: str, times: int) -> list[bool]:
        """Count the operations that the wanted outputs depend on; return whether each argument is needed."""
        # Operations are in order, so one backward pass finds all that are needed. XLA drops the others.
        needed = {id(x) for x, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
        for eqn in reversed(jaxpr.eqns):
            outputs = [id(x) in needed for x in eqn.outvars]
            if any(outputs) or eqn.effects:
                inputs = count_one(eqn, outputs, f"{scope}/{eqn.source_info.name_stack}", times)
                needed |= {id(x) for x, is_needed in zip(eqn.invars, inputs, strict=True) if is_needed}
        return [id(x) in needed for x in jaxpr.invars]

    def count_one(eqn: JaxprEqn, wanted: list[bool], scope: str, times: int) -> list[bool]:
        """Do the same for one operation or its inner programs; derivative rules are not counted."""
        name = eqn.primitive.name
        if name in CALLS:
            return count(called(eqn)[0], wanted, scope, times)
        if name == "cond":
            each = [count(body, wanted, scope, times) for body in bodies(eqn)]
            return [True, *map(any, zip(*each, strict=True))]
        if name == "scan":
            (body,), (shared, carried) = bodies(eqn), scan_counts(eqn.params)
            before: list[bool] = []
            # A part of the carry is needed if the next iteration needs it: repeat until there is no change.
            while wanted != before:
                before, inputs = wanted, count(body, wanted, scope, 0)
                more = map(any, zip(wanted[:carried], inputs[shared : shared + carried], strict=True))
                wanted = [*more, *wanted[carried:]]
            return count(body, wanted, scope, times * eqn.params["length"])
        if name in ("while", "shard_map"):  # all outputs and arguments count as needed
            for body in bodies(eqn):
                count(body, [True] * len(body.outvars), scope, times)
        else:
            counts[name, scope_of(f"{scope}/{name}")[1]] += times
        return [True] * len(eqn.invars)

    count(jaxpr, [True] * len(jaxpr.outvars), "", 1)
    return +counts  # unary plus drops zeros, such as for the body of a scan of length 0


def _machine() -> str:
    """Return the devices, cores and versions of JAX; times are comparable only if they are equal."""
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    devices = f"{jax.device_count()} x {device.platform} {kind}, {cores()} cores"
    return f"{devices}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
