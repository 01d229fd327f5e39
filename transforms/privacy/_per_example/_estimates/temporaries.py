"""Estimates of temporary memory, from shapes: of an ordinary gradient, and of what a method keeps beyond it.

They decide for "auto" on accelerators, where the memory of a program is known only after compiling it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...._core.compat import JaxprEqn, Literal, struct_like
from ...._core.jaxpr import ELEMENTWISE, REMAT, aval, evaluate, interpret
from ..in_backward import InBackward
from ..loss import ExampleProgram
from ..parameter_uses import ParameterUse
from ..rules import norm_cost

# Operations that XLA computes again wherever their result is read, so that only their operands are kept.
_RECOMPUTED = ELEMENTWISE | {"broadcast_in_dim", "iota", "reshape", "rev", "slice", "squeeze", "transpose"}


def ordinary_bytes(program: ExampleProgram) -> int:
    """Return a lower estimate of the temporary bytes of an ordinary gradient, for each example.

    These are the values that the forward pass keeps for the backward pass (residuals), but for those that XLA computes
    again from others, and the largest array.
    """
    inputs = map(aval, program.closed.jaxpr.invars[len(program.parameters) :])
    example = [struct_like(x, x.shape, x.dtype) for x in inputs]

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.primitive.name == "jit":  # evaluated as a part of the program, so that its operations are known
            body = eqn.params["jaxpr"]
            return interpret(body.jaxpr, body.consts, values, visit)
        return evaluate(eqn, *values)

    def residuals(parameters: list[Any], example: list[Any]) -> Any:
        def loss(parameters: list[Any]) -> Any:
            closed = program.closed
            outputs = interpret(closed.jaxpr, closed.consts, [*parameters, *example], visit)
            return jax.tree.unflatten(program.treedef, outputs)[0]

        return jax.vjp(loss, parameters)[1]

    closed = jax.make_jaxpr(residuals)(program.parameters, example)
    sources = {out: eqn for eqn in closed.jaxpr.eqns for out in eqn.outvars}
    counted: set[Any] = set()

    def kept_for(variable: Any) -> int:
        """Return the bytes to keep for a value, beyond those that were counted before."""
        alone, found, pending = _bytes(aval(variable)), 0, [variable]
        while pending:
            one = pending.pop()
            if isinstance(one, Literal) or one in counted or one not in sources:  # arguments are no temporaries
                continue
            counted.add(one)
            if sources[one].primitive.name in _RECOMPUTED:
                pending += sources[one].invars
            else:
                found += _bytes(aval(one))
        return min(alone, found)

    largest = max((_bytes(aval(out)) for eqn in closed.jaxpr.eqns for out in eqn.outvars), default=0)
    return sum(map(kept_for, closed.jaxpr.outvars)) + largest


def added_bytes(program: ExampleProgram, inside: InBackward | None) -> int:
    """Return the bytes that norms keep beyond an ordinary gradient until the sum is known, for each example.

    Args:
      program: the loss.
      inside: the uses whose norms are computed inside the backward pass, which keep nothing; None if there are none.
    """
    alone = frozenset[int]() if inside is None else inside.uses
    return sum(_added_at(use, program) for n, use in enumerate(program.uses) if n not in alone)


def _added_at(use: ParameterUse, program: ExampleProgram) -> int:
    """Return the bytes of an example's gradient form at a use; of recomputed activations too."""
    if use.value.layout is None:
        return sum(program.parameters[i].nbytes for i in use.value.leaves)
    numbers = norm_cost(use)[1]
    loops = math.prod(loop.length for loop in use.loops)
    cotangent = loops * sum(aval(out).size for out in use.eqn.outvars if jnp.issubdtype(aval(out).dtype, jnp.inexact))
    if not any(eqn.primitive.name in REMAT for eqn in use.within):
        numbers = min(numbers, cotangent)  # an ordinary gradient keeps the activations too
    return numbers * use.aval.dtype.itemsize


def _bytes(x: Any) -> int:
    """Return the bytes of an array of this shape and dtype; keys count as nothing."""
    return 0 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x.size * x.dtype.itemsize
