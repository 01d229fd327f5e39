"""Find the argument elements that each result element of a program depends on, operation by operation.

The program is a derivative, a linear function of tangents (or cotangents). Each value carries index sets. Values that
depend on constants only are evaluated by JAX, since zeros among them remove entries. The results of an operation
without a rule are assumed to depend on all operands: a superfluous entry costs time, but a missing one gives wrong
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from ..._core.compat import Jaxpr, JaxprEqn, Tracer
from ..._core.jaxpr import CALLS, IDENTITIES, aval, called, evaluate, holds_refs, interpret, with_inner
from .control_flow import Run, branched, repeated, scanned
from .fallback_rules import program_of
from .index_sets import UNKNOWN, Lazy, PartlyKnown, is_set, known, mixed
from .indexing import evaluated_partly, may_be_partly_known
from .primitive_rules import sets_of_results

# Primitives whose results differ between platforms, devices or runs, and so are never known.
_ELSEWHERE = frozenset({"empty", "platform_index", "rng_bit_generator", "rng_uniform", "shard_map"})
_CONTROL_FLOW = {"cond": branched, "scan": scanned, "while": repeated}


def dependence(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the index sets of each output of a program, and the names of primitives in it without a rule.

    Args:
      jaxpr: the program.
      consts: the program's constants; traced constants count as unknown.
      args: for each argument its sets, a matrix of shape (size of the argument, columns), or `UNKNOWN`.

    Returns:
      Such a matrix for each output, or `UNKNOWN` if it depends on no input; the names of primitives without a rule.
    """
    without_rule: list[str] = []

    def run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return interpret(jaxpr, consts, args, visit)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the sets of an operation's results, by the first method that applies; `UNKNOWN` for empty sets."""
        name = eqn.primitive.name
        if not any(map(is_set, values)):
            return _constant(eqn, values, run)
        if holds_refs(eqn):  # no variable of the program connects a write to a `jax.Ref` with a read
            raise NotImplementedError(f"`{name}` may write values that depend on the inputs to a `jax.Ref`")
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
    """Raise if an operation communicates along a named axis of an outer transform, which cannot be followed.

    The program itself has such an axis only inside `shard_map`, which is a single operation here.
    """
    names = jax.tree.leaves([eqn.params.get(key) for key in ("axes", "axis_name")])
    if any(isinstance(name, str) for name in names):
        raise NotImplementedError(f"`{eqn.primitive.name}` communicates between devices")


def _holds_tangents(x: Any) -> bool:
    """Return whether a result can hold a tangent: booleans cannot, as they only select, and are locally constant.

    Integers can, although JAX gives them no tangents: a custom derivative rule may round a tangent by its bits.
    """
    return aval(x).dtype not in (np.bool_, jax.dtypes.float0)


def _constant(eqn: JaxprEqn, values: list[Any], run: Run) -> list[Any]:
    """Return the results of an operation on operands without sets, known as far as the operands are known."""
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

    # Computed only if a rule needs the value, which is rare.
    @cache
    def compute() -> list[Any]:
        """Evaluate the operation as far as operands are known; `UNKNOWN` if it can differ from run to run."""
        operands = [_operand(value) for value in values]
        some = any(operand is UNKNOWN or isinstance(operand, PartlyKnown) for operand in operands)
        elsewhere = any(x.primitive.name in _ELSEWHERE for x in with_inner([eqn]))
        if elsewhere or (some and not may_be_partly_known(eqn)):
            return nothing
        try:
            # Without the surrounding mesh, whose explicit axes would be part of the types of NumPy arrays.
            with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return evaluated_partly(eqn, operands) if some else evaluate(eqn, *operands)
        except (NameError, NotImplementedError):  # an index along a named axis of an outer transform
            return nothing

    def number(i: int) -> Lazy:
        return Lazy(lambda: compute()[i])

    return [number(i) for i in range(len(eqn.outvars))]


def _operand(value: Any) -> Any:
    """Return a known value as a NumPy array: a JAX array's type has a mesh, possibly not the current one."""
    value = value.value() if isinstance(value, Lazy) else value
    found = known(value)
    return value if found is None else found
