"""Branches and loops: short loops are followed iteration by iteration, longer ones by the sets of their bodies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import aval
from .index_sets import UNKNOWN, is_set, known, matrix_at, part_of, places_of, rows_of, stacked, unit_sets, united

# Loops of up to so many iterations are followed one by one, with the values that are known in each.
_ITERATIONS = 32

# From a program, its constants and the values of its arguments to the values of its outputs.
Run = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]


def branched(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the union over the branches that may be taken: all of them where the index is not known."""
    branches, index = eqn.params["branches"], known(values[0])
    if index is not None:  # one out of range is clamped, as `lax.switch` does it
        branches = [branches[int(np.clip(index, 0, len(branches) - 1))]]
    found = [run(branch.jaxpr, branch.consts, values[1:]) for branch in branches]
    return [united(parts) for parts in zip(*found, strict=True)]


def scanned(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the sets of a `scan`: the values carried through it, and the stacked outputs of its iterations."""
    closed, length, (consts, carries) = eqn.params["jaxpr"], eqn.params["length"], scan_counts(eqn.params)
    variables, outputs = closed.jaxpr.invars, closed.jaxpr.outvars[carries:]
    columns = next(value.shape[1] for value in values if is_set(value))
    by_operands = None if length <= _ITERATIONS else _body(closed, values, slice(consts, consts + carries), run)
    carry, outs = values[consts : consts + carries], {}
    for i in range(length)[:: -1 if eqn.params["reverse"] else 1]:
        xs = [
            part_of(value, places_of(x) + i * math.prod(aval(x).shape))
            for x, value in list(zip(variables, values, strict=True))[consts + carries :]
        ]
        operands = [*values[:consts], *carry, *xs]
        if by_operands is None:
            found = run(closed.jaxpr, closed.consts, operands)
        else:
            has, sets = by_operands
            # `sets` are in terms of the body's operands, `table` has these in terms of the inputs asked about.
            table = stacked(
                [rows_of(x, v, columns) for x, v, flag in zip(variables, operands, has, strict=True) if flag]
            )
            found = [out @ table if is_set(out) else UNKNOWN for out in sets]
        carry, outs[i] = found[:carries], found[carries:]
    # Outputs are stacked in the order of the iterations' numbers, also where a reversed scan runs them backwards.
    collected = [
        stacked([matrix_at([], [], (0, columns)), *(rows_of(x, outs[i][k], columns) for i in range(length))])
        for k, x in enumerate(outputs)
    ]
    return [*carry, *collected]


def repeated(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the sets of a `while_loop`: the union of those after zero, one, two iterations, until it does not grow."""
    skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    columns = next(value.shape[1] for value in values if is_set(value))
    values, closed = values[skipped:], eqn.params["body_jaxpr"]
    variables = closed.jaxpr.invars
    has, sets = _body(closed, values, slice(consts, len(values)), run)
    now = [rows_of(x, value, columns) for x, value in zip(variables, values, strict=True)]
    while True:
        table = stacked([matrix_at([], [], (0, columns)), *(x for x, flag in zip(now, has, strict=True) if flag)])
        after = [old + out @ table if is_set(out) else old for old, out in zip(now[consts:], sets, strict=True)]
        if sum(x.nnz for x in after) == sum(x.nnz for x in now[consts:]):
            return after
        now[consts:] = after


def _body(closed: Any, values: list[Any], carried: slice, run: Run) -> tuple[list[bool], list[Any]]:
    """Return which operands of a loop's body have sets in some iteration, and its results' sets over these operands.

    Carried values are known in no iteration, since they change from one to the next.
    """
    jaxpr = closed.jaxpr
    has = [is_set(value) for value in values]
    # A fixed point: a carried value has a set if it starts with one, or if the body gives it one from the others.
    while True:
        sizes = [math.prod(aval(x).shape) if flag else 0 for x, flag in zip(jaxpr.invars, has, strict=True)]
        units, _ = unit_sets(sizes)
        given = [
            unit if flag else (UNKNOWN if i >= carried.start else value)
            for i, (value, flag, unit) in enumerate(zip(values, has, units, strict=True))
        ]
        found = run(jaxpr, closed.consts, given)
        now = [old or is_set(new) for old, new in zip(has[carried], found, strict=False)]
        if now == has[carried]:
            return has, found
        has[carried] = now
