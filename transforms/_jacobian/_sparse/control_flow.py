"""Rules for branches and loops: short loops iteration by iteration, longer loops by the sets of their bodies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._core.compat import Jaxpr, JaxprEqn, scan_counts
from ..._core.jaxpr import aval
from .index_sets import UNKNOWN, is_set, known, matrix_at, part_of, places_of, rows_of, stacked, unit_sets, united

# Loops of up to this many iterations are followed one iteration at a time, with the values known in each.
_ITERATIONS = 32

# A function from a program, its constants and the values of its arguments to the values of its outputs.
Run = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]


def branched(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the union over the branches that may be taken: all branches if the index is not known."""
    branches, index = eqn.params["branches"], known(values[0])
    if index is not None:  # an index out of range is clamped, as in `lax.switch`
        branches = [branches[int(np.clip(index, 0, len(branches) - 1))]]
    found = [run(branch.jaxpr, branch.consts, values[1:]) for branch in branches]
    return [united(parts) for parts in zip(*found, strict=True)]


def scanned(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the sets of the results of a `scan`: the final carry and the stacked outputs."""
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
            # `sets` are over the body's operands; `table` has the sets of these operands over the inputs.
            table = stacked(
                [rows_of(x, v, columns) for x, v, flag in zip(variables, operands, has, strict=True) if flag]
            )
            found = [out @ table if is_set(out) else UNKNOWN for out in sets]
        carry, outs[i] = found[:carries], found[carries:]
    # Outputs are stacked by iteration index, also if a reversed scan runs the iterations backwards.
    collected = [
        stacked([matrix_at([], [], (0, columns)), *(rows_of(x, outs[i][k], columns) for i in range(length))])
        for k, x in enumerate(outputs)
    ]
    return [*carry, *collected]


def repeated(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the sets of a `while_loop`: the union over all numbers of iterations, found as a fixed point."""
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
    """Return which operands of a loop's body have sets in any iteration, and its results' sets over these operands.

    Carried values count as unknown, since they change from one iteration to the next.
    """
    jaxpr = closed.jaxpr
    has = [is_set(value) for value in values]
    # Fixed point: a carried value has a set if it has one initially, or if the body's result for it has one.
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
