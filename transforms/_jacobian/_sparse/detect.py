"""Dependence: the numbers of its arguments that the results of a program depend on, followed through its operations.

The program is that of a derivative, from tangents (or cotangents) to others. With each value go its index sets.
Values that depend on constants only are computed by JAX itself, as zeros among them remove entries. The results of an
operation without a rule are taken to depend on all of its operands: an entry too many costs time, one too few makes a
wrong number.
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
from ..._core.jaxpr import CALLS, IDENTITIES, aval, called, evaluate, holds_refs, interpret, with_inner
from .collectives import communicates, on_devices
from .control_flow import ITERATIONS, branched, iterated, slice_of, unrolled
from .fallback_rules import program_of, sets_by_batches
from .index_sets import UNKNOWN, Lazy, PartlyKnown, is_set, known, refuse_refs, rows_of, stacked, unit_sets
from .indexing import evaluated_partly, may_be_partly_known
from .primitive_rules import sets_of_results

# Their results differ between platforms, or from one run to the next, so they are never known.
_ELSEWHERE = frozenset({"platform_index", "rng_bit_generator", "rng_uniform"})


def dependence(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return for each output of a program its index sets, and the primitives on the way that have no rule.

    Args:
      jaxpr: the program.
      consts: its constants; those that are traced count as unknown.
      args: for each argument its sets, a matrix of shape (its size, columns), or `UNKNOWN`.

    Returns:
      Such a matrix for each output, or `UNKNOWN` where it depends on nothing; the names of primitives without a rule.
    """
    without_rule: list[str] = []
    return _run(jaxpr, consts, args, without_rule), without_rule


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], without_rule: list[str]) -> list[Any]:
    return interpret(jaxpr, consts, args, lambda eqn, values: _visit(eqn, values, without_rule))


def _visit(eqn: JaxprEqn, values: list[Any], without_rule: list[str]) -> list[Any]:
    """Return the sets of an operation's results, by the first of these that applies; `UNKNOWN` for empty ones."""
    name = eqn.primitive.name
    if not any(map(is_set, values)):
        return _constant(eqn, values)
    refuse_refs(eqn)
    if not any(map(_holds_tangents, eqn.outvars)):  # a comparison of tangents
        return [UNKNOWN] * len(eqn.outvars)
    if name == "shard_map":
        found = on_devices(eqn, values, lambda eqn, values: _visit(eqn, values, without_rule), without_rule)
    elif communicates(eqn):
        # Outside of `shard_map` the other devices are not followed. The caller keeps every entry, and warns.
        raise NotImplementedError(f"`{name}` lets devices exchange numbers")
    elif name in CALLS:
        found = _run(*called(eqn), values, without_rule)
    elif name in _LOOPS:
        found = _LOOPS[name](eqn, values, without_rule)
    elif (ruled := sets_of_results(eqn, values)) is not None:
        found = ruled
    elif (program := program_of(eqn)) is not None:
        found = _run(program.jaxpr, program.consts, values, without_rule)
    else:
        found, whole = sets_by_batches(eqn, values)
        if not whole:
            without_rule.append(name)
    return [
        value if not is_set(value) or (value.nnz and _holds_tangents(x)) else UNKNOWN
        for value, x in zip(found, eqn.outvars, strict=True)
    ]


def _holds_tangents(x: Any) -> bool:
    """Return whether a result can hold a tangent: a truth value only chooses, and tangents nearby make the same choice.

    Integers can, although JAX gives them no tangents: a user's derivative rule may round a tangent by its bits.
    """
    return aval(x).dtype not in (np.bool_, jax.dtypes.float0)


def _constant(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an operation none of whose operands is a set: known as far as the operands are."""
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
    if unsure and not (may_be_partly_known(eqn) and any(value is not UNKNOWN for value in values)):
        return nothing

    # Computed when a rule asks for the value, which for most constants is never.
    @cache
    def compute() -> list[Any]:
        """Evaluate the operation as far as its operands are known, `UNKNOWN` where it may differ from run to run."""
        operands = [_operand(value) for value in values]
        some = any(operand is UNKNOWN or isinstance(operand, PartlyKnown) for operand in operands)
        if (some and not may_be_partly_known(eqn)) or not _always_the_same(eqn):
            return nothing
        try:
            # Without the mesh around, whose explicit axes would be part of the types of NumPy's arrays.
            with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return evaluated_partly(eqn, operands) if some else evaluate(eqn, *operands)
        except (NameError, NotImplementedError):
            # An index along an axis of a `vmap` around the trace; a value that a `shard_map` divides over further axes.
            return nothing

    def number(i: int) -> Lazy:
        return Lazy(lambda: compute()[i])

    return [number(i) for i in range(len(eqn.outvars))]


def _always_the_same(eqn: JaxprEqn) -> bool:
    """Return whether an operation, with all that is inside it, has the same result on every platform and each time."""
    return all(x.primitive.name not in _ELSEWHERE for x in with_inner([eqn]))


def _operand(value: Any) -> Any:
    """Return a known value as an array of NumPy: the type of one of JAX has a mesh, which may not be the one around."""
    value = value.value() if isinstance(value, Lazy) else value
    found = known(value)
    return value if found is None else found


# ---- Branches and loops


def _alone(rule: Callable[..., list[list[Any]]]) -> Callable[[JaxprEqn, list[Any], list[str]], list[Any]]:
    """Adapt a rule for the values of several devices to those of one."""

    def on_one(eqn: JaxprEqn, values: list[Any], without_rule: list[str]) -> list[Any]:
        def run(jaxpr: Jaxpr, consts: Sequence[Any], args: list[list[Any]]) -> list[list[Any]]:
            return [[out] for out in _run(jaxpr, consts, [arg for (arg,) in args], without_rule)]

        return [out for (out,) in rule(eqn, [[value] for value in values], run)]

    return on_one


def _body(closed: Any, values: list[Any], carried: slice, without_rule: list[str]) -> tuple[list[bool], list[Any]]:
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
        seen: list[str] = []
        found = _run(jaxpr, closed.consts, given, seen)
        now = [old or is_set(new) for old, new in zip(has[carried], found, strict=False)]
        if now == has[carried]:
            without_rule.extend(seen)
            return has, found
        has[carried] = now


def _scanned(eqn: JaxprEqn, values: list[Any], without_rule: list[str]) -> list[Any]:
    """Return the sets of a `scan`: of a short one by iterations, of a longer one by products with those of its body."""
    closed = eqn.params["jaxpr"]
    if eqn.params["length"] <= ITERATIONS:
        return _alone(unrolled)(eqn, values, without_rule)
    consts, carries = scan_counts(eqn.params)
    columns = next(value.shape[1] for value in values if is_set(value))
    variables = closed.jaxpr.invars
    has, found = _body(closed, values, slice(consts, consts + carries), without_rule)

    def body(carry: list[list[Any]], i: int) -> list[list[Any]]:
        xs = [slice_of(x, value, i) for x, value in list(zip(variables, values, strict=True))[consts + carries :]]
        operands = [*values[:consts], *(value for (value,) in carry), *xs]
        # `found` is in terms of the body's operands, `table` these in terms of the inputs asked about.
        table = stacked([rows_of(x, v, columns) for x, v, flag in zip(variables, operands, has, strict=True) if flag])
        return [[out @ table if is_set(out) else UNKNOWN] for out in found]

    return [out for (out,) in iterated(eqn, [[value] for value in values], body)]


def _repeated(eqn: JaxprEqn, values: list[Any], without_rule: list[str]) -> list[Any]:
    """Return the sets of a `while_loop`: the union of those after zero, one, two iterations, until it does not grow."""
    skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    values, closed = values[skipped:], eqn.params["body_jaxpr"]
    columns = next((value.shape[1] for value in values if is_set(value)), 0)
    if not columns:
        return [UNKNOWN] * len(eqn.outvars)
    has, found = _body(closed, values, slice(consts, len(values)), without_rule)
    variables = closed.jaxpr.invars
    now = [rows_of(x, v, columns) for x, v in zip(variables[consts:], values[consts:], strict=True)]
    while True:
        table = stacked([x for x, flag in zip([*values[:consts], *now], has, strict=True) if flag])
        after = [old + out @ table if is_set(out) else old for old, out in zip(now, found, strict=True)]
        if all(new.nnz == old.nnz for new, old in zip(after, now, strict=True)):
            return after
        now = after


_LOOPS: dict[str, Callable[[JaxprEqn, list[Any], list[str]], list[Any]]] = {
    "cond": _alone(branched),
    "scan": _scanned,
    "while": _repeated,
}
