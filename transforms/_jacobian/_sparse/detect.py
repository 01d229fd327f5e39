"""Which numbers of its arguments the results of a program depend on: sets, carried from operation to operation.

What is looked at is a derivative as a program, in which tangents, or cotangents, go in and come out. Constants are
computed by JAX itself, and what an operation without a rule gives is taken to depend on all that goes in: too many
entries cost time, too few would be wrong numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import Tracer, scan_counts
from ..._core.jaxpr import CALLS, IDENTITIES, aval, bodies, called, evaluate, holds_refs, interpret
from .collectives import crosses, on_devices
from .control_flow import ITERATIONS, branched, iterated, unrolled
from .fallback_rules import program_of, sets_by_batches
from .index_sets import UNKNOWN, Later, Partly, is_set, known, refuse_refs, rows_of, stacked, unit_sets
from .indexing import keeps_apart, partly_computed
from .primitive_rules import sets_of_results

# What these give is something else on another platform, or at another time.
_ELSEWHERE = frozenset({"platform_index", "rng_bit_generator", "rng_uniform"})


def dependence(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """For each output of a program the matrix (its size, columns) of what it depends on, and what has no rule.

    Args:
      jaxpr: the program.
      consts: its constants; those that are traced count as unknown.
      args: for each argument such a matrix, or `UNKNOWN`.

    Returns:
      A matrix for each output, or `UNKNOWN` where it depends on nothing; the names of primitives without a rule.
    """
    blind: list[str] = []
    return _run(jaxpr, consts, args, blind), blind


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], blind: list[str]) -> list[Any]:
    return interpret(jaxpr, consts, args, lambda eqn, values: _visit(eqn, values, blind))


def _visit(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    name = eqn.primitive.name
    if not any(map(is_set, values)):
        return _constant(eqn, values)
    refuse_refs(eqn)
    if not any(map(_holds_tangents, eqn.outvars)):
        return [UNKNOWN] * len(eqn.outvars)
    if name == "shard_map":
        found = on_devices(eqn, values, lambda eqn, values: _visit(eqn, values, blind), blind)
    elif crosses(eqn):
        raise NotImplementedError(f"`{name}` lets devices exchange numbers")
    elif name in CALLS:
        found = _run(*called(eqn), values, blind)
    elif name in _LOOPS:
        found = _LOOPS[name](eqn, values, blind)
    elif (ruled := sets_of_results(eqn, values)) is not None:
        found = ruled
    elif (program := program_of(eqn)) is not None:
        found = _run(program.jaxpr, program.consts, values, blind)
    else:
        found, whole = sets_by_batches(eqn, values)
        if not whole:
            blind.append(name)
    return [
        value if not is_set(value) or (value.nnz and _holds_tangents(x)) else UNKNOWN
        for value, x in zip(found, eqn.outvars, strict=True)
    ]


def _holds_tangents(x: Any) -> bool:
    """Whether a result can hold a tangent; a truth value only chooses, and tangents nearby make the same choice.

    Whole numbers can, though JAX gives them none: a rule that a user wrote may round a tangent by its bits.
    """
    return aval(x).dtype not in (np.bool_, jax.dtypes.float0)


def _constant(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """What an operation gives that nothing asked about goes into: known as far as its operands are."""
    nothing = [UNKNOWN] * len(eqn.outvars)
    values = [UNKNOWN if isinstance(value, Tracer) else value for value in values]
    if eqn.primitive.name in IDENTITIES:
        return values[: len(eqn.outvars)]
    unsure = any(value is UNKNOWN for value in values)
    if eqn.primitive.name in CALLS:
        return _run(*called(eqn), values, [])
    if eqn.primitive.name == "shard_map":
        return on_devices(eqn, values, _constant, [])
    if eqn.effects or holds_refs(eqn):
        return nothing
    if unsure and not (keeps_apart(eqn) and any(value is not UNKNOWN for value in values)):
        return nothing

    @cache
    def compute() -> list[Any]:
        operands = [_operand(value) for value in values]
        some = any(operand is UNKNOWN or isinstance(operand, Partly) for operand in operands)
        if (some and not keeps_apart(eqn)) or not _always_the_same(eqn):
            return nothing
        try:
            with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return partly_computed(eqn, operands) if some else evaluate(eqn, *operands)
        except (NameError, NotImplementedError):
            # An index along an axis that is mapped around all of this; what a `shard_map` divides over further axes.
            return nothing

    def number(i: int) -> Later:
        return Later(lambda: compute()[i])

    return [number(i) for i in range(len(eqn.outvars))]


def _always_the_same(eqn: JaxprEqn) -> bool:
    """Tell whether an operation, or what is inside it, gives the same on every platform, and each time."""
    inner = (x for body in bodies(eqn) for x in body.eqns)
    return eqn.primitive.name not in _ELSEWHERE and all(map(_always_the_same, inner))


def _operand(value: Any) -> Any:
    """Return what is known as NumPy's array: one of JAX's is typed by a mesh, which may not be the one around us."""
    if isinstance(value, Later):
        value = value.value()
    found = known(value)
    return value if found is None else found


# ---- Branches and loops


def _alone(rule: Callable[..., list[list[Any]]]) -> Callable[[JaxprEqn, list[Any], list[str]], list[Any]]:
    """Use what is written for several devices for one."""

    def on_one(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
        def run(jaxpr: Jaxpr, consts: Sequence[Any], args: list[list[Any]]) -> list[list[Any]]:
            return [[out] for out in _run(jaxpr, consts, [arg for (arg,) in args], blind)]

        return [out for (out,) in rule(eqn, [[value] for value in values], run)]

    return on_one


def _body(closed: Any, values: list[Any], carried: slice, blind: list[str]) -> tuple[list[bool], list[Any]]:
    """Which operands of a loop's body have sets in some turn, and the sets of its results in terms of these operands.

    What is carried is known in no turn, since it changes from one to the next.
    """
    jaxpr = closed.jaxpr
    has = [is_set(value) for value in values]
    start = carried.start
    while True:
        sizes = [math.prod(aval(x).shape) if flag else 0 for x, flag in zip(jaxpr.invars, has, strict=True)]
        units, _ = unit_sets(sizes)
        given = [
            unit if flag else (UNKNOWN if i >= start else value)
            for i, (value, flag, unit) in enumerate(zip(values, has, units, strict=True))
        ]
        seen: list[str] = []
        found = _run(jaxpr, closed.consts, given, seen)
        count = carried.stop - carried.start
        now = [old or is_set(new) for old, new in zip(has[carried], found[:count], strict=True)]
        if now == has[carried]:
            blind.extend(seen)
            return has, found
        has[carried] = now


def _scanned(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    """A loop of few iterations is gone through one by one; of a longer one the body is looked at once."""
    closed = eqn.params["jaxpr"]
    if eqn.params["length"] <= ITERATIONS:
        return _alone(unrolled)(eqn, values, blind)
    consts, carries = scan_counts(eqn.params)
    columns = next(value.shape[1] for value in values if is_set(value))
    variables = closed.jaxpr.invars
    has, found = _body(closed, values, slice(consts, consts + carries), blind)

    def body(carry: list[list[Any]], i: int) -> list[list[Any]]:
        rows = []
        for k, (x, flag) in enumerate(zip(variables, has, strict=True)):
            size = math.prod(aval(x).shape)
            if not flag:
                continue
            if k < consts:
                rows.append(values[k])
            elif k < consts + carries:
                rows.append(rows_of(x, carry[k - consts][0], columns))
            else:
                rows.append(values[k][i * size : (i + 1) * size])
        table = stacked(rows)
        return [[out @ table if is_set(out) else UNKNOWN] for out in found]

    return [out for (out,) in iterated(eqn, [[value] for value in values], body)]


def _repeated(eqn: JaxprEqn, values: list[Any], blind: list[str]) -> list[Any]:
    """A loop of any number of turns: what is carried after none, one, two and so on, together."""
    skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    values, closed = values[skipped:], eqn.params["body_jaxpr"]
    columns = next((value.shape[1] for value in values if is_set(value)), 0)
    if not columns:
        return [UNKNOWN] * len(eqn.outvars)
    has, found = _body(closed, values, slice(consts, len(values)), blind)
    variables = closed.jaxpr.invars
    fixed = [value for value, flag in zip(values[:consts], has, strict=False) if flag]
    now = [rows_of(x, v, columns) for x, v in zip(variables[consts:], values[consts:], strict=True)]
    while True:
        table = stacked([*fixed, *(x for x, flag in zip(now, has[consts:], strict=True) if flag)])
        after = [old + out @ table if is_set(out) else old for old, out in zip(now, found, strict=True)]
        if all(new.nnz == old.nnz for new, old in zip(after, now, strict=True)):
            return after
        now = after


_LOOPS: dict[str, Callable[[JaxprEqn, list[Any], list[str]], list[Any]]] = {
    "cond": _alone(branched),
    "scan": _scanned,
    "while": _repeated,
}
