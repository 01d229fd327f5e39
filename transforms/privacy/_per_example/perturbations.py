"""A program with a tap at every use: a zero that is added to what comes out of the operation.

With the parameters held fixed, the gradient of the loss with respect to a tap is the cotangent of the operation's
output, and for one example after another (`jax.vmap`) it is that of each. Together with the other operands of the
operation, which are recorded on the way, it gives each example's gradient of the parameters there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import scan_counts, varying, varying_axes
from ..._core.jaxpr import REMAT, aval, evaluate, interpret
from .parameter_uses import ParameterUse, UsePlan, rearrange

# By the number of the first use of an operation: one array for each of its outputs that has derivatives.
Perturbations = dict[int, list[Any]]
# By the same number: its operands, with None for those that come from parameters alone.
Records = dict[int, list[Any]]


def zero_perturbations(plan: UsePlan, uses: Sequence[ParameterUse], batch: int) -> Perturbations:
    """The taps for each of `batch` examples, with an axis for each loop behind that of the examples."""

    def zeros(use: ParameterUse, out: Any) -> jax.Array:
        shape = batch, *(loop.length for loop in use.loops), *out.shape
        return varying(-jnp.zeros(shape, out.dtype), varying_axes(out))  # -0.0 + -0.0 is -0.0, but 0.0 + -0.0 is not

    return {n: [zeros(uses[n], aval(x)) for x in outputs_with_derivatives(uses[n].eqn)] for n in plan.firsts()}


def outputs_with_derivatives(eqn: JaxprEqn) -> list[Any]:
    """The output variables of an operation that are of floating point."""
    return [var for var in eqn.outvars if jnp.issubdtype(aval(var).dtype, jnp.inexact)]


def run_perturbed(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    plan: UsePlan,
    uses: Sequence[ParameterUse],
    zeros: Perturbations,
) -> tuple[list[Any], Records]:
    """The outputs of a program with taps, and what it has recorded."""
    records: Records = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        step = next(steps)
        if isinstance(step, UsePlan):
            outputs, inner = _INNER[eqn.primitive.name](eqn, values, step, uses, zeros)
            records.update(inner)
            return outputs
        outputs = _evaluate(eqn, values)
        if not step:
            return outputs
        parametric = {uses[n].operand for n in step}
        records[step[0]] = [None if k in parametric else value for k, value in enumerate(values)]
        given = iter(zeros[step[0]])
        return [out + next(given) if jnp.issubdtype(out.dtype, jnp.inexact) else out for out in outputs]

    return interpret(jaxpr, consts, args, visit), records


def _evaluate(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """The results of an operation; of a product without the axes of size 1, which XLA on CPU copies the result for."""
    if eqn.primitive.name != "dot_general":
        return evaluate(eqn, *values)
    contract, batch = eqn.params["dimension_numbers"]
    squeezed, contracted, mapped = [], [], []
    for value, *used in zip(values, contract, batch, strict=True):
        left = [axis for axis, size in enumerate(value.shape) if size != 1 or any(axis in axes for axes in used)]
        squeezed.append(value.reshape([value.shape[axis] for axis in left]))
        contracted.append(tuple(left.index(axis) for axis in used[0]))
        mapped.append(tuple(left.index(axis) for axis in used[1]))
    params = eqn.params | {"dimension_numbers": (tuple(contracted), tuple(mapped))}
    (out,) = evaluate(eqn.replace(params=params), *squeezed)
    shape = aval(eqn.outvars[0]).shape
    if 1 < out.ndim < len(shape):
        out = lax.optimization_barrier(out)
    return [out.reshape(shape)]


def _of_jit(
    eqn: JaxprEqn, values: list[Any], plan: UsePlan, uses: Sequence[ParameterUse], zeros: Perturbations
) -> tuple[Any, Records]:
    body = eqn.params["jaxpr"]
    return run_perturbed(body.jaxpr, body.consts, values, plan, uses, zeros)


def _of_remat(
    eqn: JaxprEqn, values: list[Any], plan: UsePlan, uses: Sequence[ParameterUse], zeros: Perturbations
) -> tuple[Any, Records]:
    body = eqn.params["jaxpr"]

    def run(values: list[Any], zeros: Perturbations) -> tuple[Any, Records]:
        return run_perturbed(body, [], values, plan, uses, zeros)

    inner = {n: zeros[n] for n in plan.firsts()}
    return jax.checkpoint(run, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(values, inner)


def _of_scan(
    eqn: JaxprEqn, values: list[Any], plan: UsePlan, uses: Sequence[ParameterUse], zeros: Perturbations
) -> tuple[Any, Records]:
    body = eqn.params["jaxpr"]
    consts, carry = scan_counts(eqn.params)

    def iteration(
        state: list[Any], slices: tuple[list[Any], Perturbations]
    ) -> tuple[list[Any], tuple[list[Any], Records]]:
        of_iteration, zeros = slices
        outputs, records = run_perturbed(
            body.jaxpr, body.consts, [*values[:consts], *state, *of_iteration], plan, uses, zeros
        )
        return outputs[:carry], (outputs[carry:], records)

    inner = {n: zeros[n] for n in plan.firsts()}
    state, (stacked, records) = lax.scan(
        iteration,
        values[consts : consts + carry],
        (values[consts + carry :], inner),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*state, *stacked], records


_INNER = {"jit": _of_jit, "scan": _of_scan} | dict.fromkeys(REMAT, _of_remat)


# A value that does not come from parameters and constants alone.
_UNKNOWN = object()


class _Wide(NamedTuple):
    """What a rearrangement has given: of numbers like the parameters, in a wider dtype, and of the parameters."""

    value: jax.Array
    plain: jax.Array


def operands(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    plan: UsePlan,
    uses: Sequence[ParameterUse],
    wanted: frozenset[int],
) -> dict[int, Any]:
    """The operands of the uses `wanted`, computed from the parameters alone, with axes for stacked loops in front.

    Args:
      jaxpr: the program.
      consts: its constants.
      args: the parameters; the data may be left out.
      plan: what `find_uses` gave.
      uses: likewise.
      wanted: numbers of uses.
    """
    return _operands(jaxpr, consts, args, plan, uses, wanted)[0]


def rearranged(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    parameters: Sequence[Any],
    plan: UsePlan,
    uses: Sequence[ParameterUse],
    wanted: frozenset[int],
) -> dict[int, Any]:
    """The operands of the uses `wanted`, which have a layout, of numbers that are wider than those of the program.

    A linear function of `args`, in which nothing is rounded to fewer digits on the way; otherwise as `operands`. What
    they are multiplied by may have been computed from the `parameters`.
    """
    found = _operands(jaxpr, consts, list(map(_Wide, args, parameters)), plan, uses, wanted)[0]
    return {n: x.value for n, x in found.items()}


def _operands(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    plan: UsePlan,
    uses: Sequence[ParameterUse],
    wanted: frozenset[int],
) -> tuple[dict[int, Any], list[Any]]:
    """The operands of the uses, and the outputs as far as they are known."""
    found: dict[int, Any] = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        step = next(steps)
        unknown = [_UNKNOWN] * len(eqn.outvars)
        if isinstance(step, UsePlan) and eqn.primitive.name == "jit":
            body = eqn.params["jaxpr"]
            inside, outputs = _operands(body.jaxpr, body.consts, values, step, uses, wanted)
            found.update(inside)
            return outputs
        if isinstance(step, UsePlan):
            if not wanted.isdisjoint(step.numbers()):
                found.update(_operands_inside(eqn, values, step, uses, wanted))
            return unknown
        for n in step or []:
            if n in wanted:
                found[n] = values[uses[n].operand]
        if step or any(value is _UNKNOWN for value in values):
            return unknown
        places = [k for k, value in enumerate(values) if isinstance(value, _Wide)]
        if not places:
            return evaluate(eqn, *values)
        plain = evaluate(eqn, *[x.plain if isinstance(x, _Wide) else x for x in values])
        moved = rearrange(eqn, places[0], [x.value if isinstance(x, _Wide) else x for x in values])
        return plain if moved is None else list(map(_Wide, moved, plain))

    missing = [_UNKNOWN] * (len(jaxpr.invars) - len(args))
    outputs = interpret(jaxpr, consts, [*args, *missing], visit)
    return found, outputs


def _operands_inside(
    eqn: JaxprEqn, values: list[Any], plan: UsePlan, uses: Sequence[ParameterUse], wanted: frozenset[int]
) -> dict[int, Any]:
    body = eqn.params["jaxpr"]
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", [])
    if eqn.primitive.name != "scan":
        return operands(jaxpr, consts, values, plan, uses, wanted)
    shared, carry = scan_counts(eqn.params)
    start = shared + carry
    before = [*values[:shared], *[_UNKNOWN] * carry]
    known = [None if x is _UNKNOWN else x for x in values[start:]]

    def of_iteration(slices: list[Any], wanted: frozenset[int]) -> dict[int, Any]:
        filled = [_UNKNOWN if x is None else x for x in slices]
        return operands(jaxpr, consts, [*before, *filled], plan, uses, wanted)

    inside = wanted.intersection(plan.numbers())
    stacked = frozenset(n for n in inside if plan.loop in uses[n].value.stacked)
    found: dict[int, Any] = {}
    if stacked:
        found |= jax.vmap(lambda slices: of_iteration(slices, stacked))(known)
    if inside - stacked:
        found |= of_iteration([None] * len(known), inside - stacked)
    return found
