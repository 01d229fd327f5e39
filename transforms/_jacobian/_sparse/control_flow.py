"""Branches, and loops iteration by iteration: on one device, or on several in step.

A value here is a list with the sets, or the known value, of each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import aval
from .index_sets import UNKNOWN, is_set, known, part_of, places_of, rows_of, stacked, united

# Loops of up to so many iterations are followed one by one, with the values that are known in each.
ITERATIONS = 32

# From a program, its constants and the values of its arguments to the values of its outputs.
Run = Callable[[Jaxpr, Sequence[Any], list[list[Any]]], list[list[Any]]]


def branched(eqn: JaxprEqn, values: list[list[Any]], run: Run) -> list[list[Any]]:
    """Return the union over the branches that some device may take: all of them where the index is not known."""
    branches, which = eqn.params["branches"], [known(x) for x in values[0]]
    # An index out of range is clamped, as `lax.switch` does it.
    sure = [int(np.clip(x, 0, len(branches) - 1)) for x in which if x is not None]
    if len(sure) == len(which):
        branches = [branches[i] for i in set(sure)]
    found = [run(branch.jaxpr, branch.consts, values[1:]) for branch in branches]
    return [[united(parts) for parts in zip(*outs, strict=True)] for outs in zip(*found, strict=True)]


def unrolled(eqn: JaxprEqn, values: list[list[Any]], run: Run) -> list[list[Any]]:
    """Return the results of a `scan`, its body followed once for each iteration."""
    closed = eqn.params["jaxpr"]
    consts, carries = scan_counts(eqn.params)
    sliced = list(zip(closed.jaxpr.invars, values, strict=True))[consts + carries :]

    def body(carry: list[list[Any]], i: int) -> list[list[Any]]:
        xs = [[slice_of(x, part, i) for part in value] for x, value in sliced]
        return run(closed.jaxpr, closed.consts, [*values[:consts], *carry, *xs])

    return iterated(eqn, values, body)


def iterated(
    eqn: JaxprEqn, values: list[list[Any]], body: Callable[[list[list[Any]], int], list[list[Any]]]
) -> list[list[Any]]:
    """Return the results of a `scan`: the values carried through it, and the stacked outputs of its iterations.

    Args:
      eqn: the `scan`.
      values: its operands.
      body: a function of the carried values and the number of an iteration that returns the body's results.
    """
    length, (consts, carries) = eqn.params["length"], scan_counts(eqn.params)
    carry, outs = values[consts : consts + carries], {}
    for i in range(length)[:: -1 if eqn.params["reverse"] else 1]:
        found = body(carry, i)
        carry, outs[i] = found[:carries], found[carries:]
    # Outputs are stacked in the order of the iterations' numbers, also where a reversed scan runs them backwards.
    collected = [
        [_collected(x, [outs[i][k][device] for i in range(length)]) for device in range(len(values[0]))]
        for k, x in enumerate(eqn.params["jaxpr"].jaxpr.outvars[carries:])
    ]
    return [*carry, *collected]


def slice_of(x: Any, value: Any, i: int) -> Any:
    """Return the slice of an array that iteration `i` sees as the variable `x` of the body."""
    return part_of(value, places_of(x) + i * math.prod(aval(x).shape))


def _collected(x: Any, parts: list[Any]) -> Any:
    """Return the sets of the iterations stacked; `UNKNOWN` if none of them is a set."""
    columns = next((part.shape[1] for part in parts if is_set(part)), None)
    return UNKNOWN if columns is None else stacked([rows_of(x, part, columns) for part in parts])
