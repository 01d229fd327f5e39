"""The operations of a program and their times, written to a file for a later comparison: `capture`."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib

from ..._core.arguments import check_count
from ..._core.machine import cores, processor
from ..._runs.atomic_write import write_atomically
from .._ir.traced_program import TracedProgram
from .operation_counts import count_operations
from .timeline import Timeline, timelines

_FORMAT = "plurax capture 1"


@dataclass(frozen=True)
class Capture:
    """The operations that a program runs, and how long they took in some runs.

    Attributes:
      name: the name of the function.
      counts: how often each operation of each scope runs in a call, by `(op, scope)`.
      seconds: how long these took in each run, for those that have a time of their own.
      program: a digest of the compiled program, apart from names and lines of source.
      machine: the devices (on a CPU the model of the processor), the cores and the versions of JAX, for which alone
        times can be compared.

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
    """Run `fun(*args)` some times and write its operations and their times to a file, for `trace_diff`.

    Args:
      path: the file, JSON; an existing one is replaced when the new one is complete. Missing folders are made.
      fun: as for `profile`.
      *args: as for `profile`.
      repeats: the number of calls that are timed, as for `profile`; at least two.

    Returns:
      The capture that was written.

    Raises:
      TypeError: `fun` cannot be called, `repeats` is not a whole number.
      ValueError: `repeats` is less than two.
      OSError: the file cannot be written.

    Cost:
      Compiling `fun`, at most twice, and one call more than `repeats`.

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
    head = {"format": _FORMAT, "name": found.name, "program": found.program, "machine": found.machine}
    content = {**head, "operations": operations}
    write_atomically(Path(path), [(json.dumps(content, indent=1) + "\n").encode()])
    return found


def read_capture(api: str, path: str | os.PathLike[str]) -> Capture:
    """Return the capture in a file; raise if it is not one."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        rows, names = content["operations"], [content[name] for name in ("name", "program", "machine")]
        for row in rows:
            times = row["seconds"]
            # By `type`, as True is an instance of int as well.
            fits = type(row["count"]) is int and row["count"] >= 0 and isinstance(times, list)
            if not fits or not all(type(x) in (int, float) and 0 <= x < math.inf for x in times):
                raise ValueError(f"{row} has no whole number as its count, or no times in seconds")
        if not all(isinstance(x, str) for x in [*names, *(row[key] for row in rows for key in ("op", "scope"))]):
            raise ValueError("one of its names is not a string")
        counts = {(row["op"], row["scope"]): row["count"] for row in rows}
        times_of = {(row["op"], row["scope"]): list(map(float, row["seconds"])) for row in rows if row["seconds"]}
        if len(counts) < len(rows) or len(set(map(len, times_of.values()))) > 1:
            raise ValueError("an operation is there twice, or has more runs than another")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"{api}: {os.fspath(path)!r} is not a capture ({error}); write one with `capture`.") from error
    name, program, machine = names
    return Capture(name, counts, times_of, program, machine)


def captures(prepared: Sequence[TracedProgram], repeats: int) -> list[Capture]:
    """Run some programs alternately, and return a capture of each."""
    return list(map(_captured, prepared, timelines([one.separated for one in prepared], repeats)))


def _captured(prepared: TracedProgram, runs: list[Timeline]) -> Capture:
    """Return the capture of a program that was run."""
    program = prepared.separated.program
    counts: dict[tuple[str, str], int] = dict(count_operations(prepared.traced.jaxpr.jaxpr))
    seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    added: dict[tuple[str, str], int] = defaultdict(int)
    for name, times in runs[0].counts.items() if runs else ():
        for share in prepared.separated.shares(program.instructions[name]):
            key = share.place.op, share.place.scope
            for i, run in enumerate(runs):
                seconds[key][i] += share.part * run.seconds.get(name, 0.0)
            # Operations of the jaxpr are counted there, where a count does not depend on fusion; only those that XLA
            # has added, such as copies, are counted by instructions.
            if key not in counts:
                added[key] += times
    digest = hashlib.sha256(program.anonymous().encode()).hexdigest()
    return Capture(prepared.name, {**counts, **added}, dict(seconds), digest, _machine())


def _machine() -> str:
    """Return the devices, cores and versions of JAX, with which alone times can be compared."""
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    devices = f"{jax.device_count()} x {device.platform} {kind}, {cores()} cores"
    return f"{devices}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
