"""Dependence: the numbers of its arguments that the results of a program depend on, followed through its operations.

The program is that of a derivative, from tangents (or cotangents) to others. With each value go its index sets.
Values that depend on constants only are computed by JAX itself, as zeros among them remove entries. The results of an
operation without a rule are taken to depend on all of its operands: an entry too many costs time, one too few makes a
wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import Tracer
from ..._core.jaxpr import CALLS, IDENTITIES, aval, called, evaluate, holds_refs, interpret, with_inner
from .control_flow import Run, branched, repeated, scanned
from .fallback_rules import program_of
from .index_sets import UNKNOWN, Lazy, PartlyKnown, is_set, known, mixed
from .indexing import evaluated_partly, may_be_partly_known
from .primitive_rules import sets_of_results

# Their results differ between platforms, devices, or from one run to the next, so they are never known.
_ELSEWHERE = frozenset({"platform_index", "rng_bit_generator", "rng_uniform", "shard_map"})
_CONTROL_FLOW = {"cond": branched, "scan": scanned, "while": repeated}


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

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return interpret(jaxpr, consts, args, visit)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the sets of an operation's results, by the first of these that applies; `UNKNOWN` for empty ones."""
        name = eqn.primitive.name
        if not any(map(is_set, values)):
            return _constant(eqn, values, run)
        if holds_refs(eqn):  # no variable of the program leads from what is written to what is read
            raise NotImplementedError(f"`{name}` may write what is asked about to a `jax.Ref`")
        if not any(map(_holds_tangents, eqn.outvars)):  # a comparison of tangents
            return [UNKNOWN] * len(eqn.outvars)
        if name in CALLS:
            found = run(*called(eqn), values)
        elif name in _CONTROL_FLOW:
            found = _CONTROL_FLOW[name](eqn, values, run)
        elif (ruled := sets_of_results(eqn, values)) is not None:
            found = ruled
        elif (program := program_of(eqn)) is not None:
            found = run(program.jaxpr, program.consts, values)
        else:
            _refuse_exchange(eqn)
            without_rule.append(name)
            found = mixed(eqn, values, [()] * len(eqn.invars), [()] * len(eqn.outvars))
        return [
            value if not is_set(value) or (value.nnz and _holds_tangents(x)) else UNKNOWN
            for value, x in zip(found, eqn.outvars, strict=True)
        ]

    return run(jaxpr, consts, args), without_rule


def _refuse_exchange(eqn: JaxprEqn) -> None:
    """Raise if an operation sends numbers along a named axis of a transform around us, which are not followed.

    The program that is asked about has such an axis inside of `shard_map` only, which is one operation here.
    """
    names = jax.tree.leaves([eqn.params.get(key) for key in ("axes", "axis_name")])
    if any(isinstance(name, str) for name in names):
        raise NotImplementedError(f"`{eqn.primitive.name}` lets devices exchange numbers")


def _holds_tangents(x: Any) -> bool:
    """Return whether a result can hold a tangent: a truth value only chooses, and tangents nearby make the same choice.

    Integers can, although JAX gives them no tangents: a user's derivative rule may round a tangent by its bits.
    """
    return aval(x).dtype not in (np.bool_, jax.dtypes.float0)


def _constant(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the results of an operation none of whose operands is a set: known as far as the operands are."""
    nothing = [UNKNOWN] * len(eqn.outvars)
    values = [UNKNOWN if isinstance(value, Tracer) else value for value in values]
    if eqn.primitive.name in IDENTITIES:
        return values[: len(eqn.outvars)]
    unsure = any(value is UNKNOWN for value in values)
    if eqn.primitive.name in CALLS:
        return run(*called(eqn), values)
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
        elsewhere = any(x.primitive.name in _ELSEWHERE for x in with_inner([eqn]))
        if elsewhere or (some and not may_be_partly_known(eqn)):
            return nothing
        try:
            # Without the mesh around, whose explicit axes would be part of the types of NumPy's arrays.
            with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return evaluated_partly(eqn, operands) if some else evaluate(eqn, *operands)
        except (NameError, NotImplementedError):  # an index along a named axis of a transform around the trace
            return nothing

    def number(i: int) -> Lazy:
        return Lazy(lambda: compute()[i])

    return [number(i) for i in range(len(eqn.outvars))]


def _operand(value: Any) -> Any:
    """Return a known value as an array of NumPy: the type of one of JAX has a mesh, which may not be the one around."""
    value = value.value() if isinstance(value, Lazy) else value
    found = known(value)
    return value if found is None else found
