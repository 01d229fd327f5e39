"""A program with a zero perturbation at every use: a zero that is added to the result of the operation.

With the parameters held fixed, the gradient of the loss with respect to this zero is the cotangent of the operation's
output, and for one example after another (`jax.vmap`) it is that of each. Together with the other operands of the
operation, which are recorded on the way, it gives each example's gradient of the parameters there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..._core.compat import scan_counts, varying, varying_axes
from ..._core.jaxpr import REMAT, aval, evaluate, interpret
from .parameter_uses import ParameterUse, UsePlan, rearrange

# By the number of the first use of an operation: one array for each of its outputs that has derivatives.
Perturbations = dict[int, list[Any]]
# By the same number: its operands, with None for those that come from parameters alone.
Records = dict[int, list[Any]]


def zero_perturbations(plan: UsePlan, batch: int) -> Perturbations:
    """Return the zeros for each of `batch` examples, with an axis for each loop behind that of the examples."""

    def of_use(use: ParameterUse) -> list[jax.Array]:
        leading = batch, *(loop.length for loop in use.loops)
        outputs = [aval(x) for x in use.eqn.outvars if jnp.issubdtype(aval(x).dtype, jnp.inexact)]
        # x + (-0.0) is x for every x; -0.0 + 0.0 is 0.0, which a loss that asks for the sign would see.
        return [varying(-jnp.zeros((*leading, *x.shape), x.dtype), varying_axes(x)) for x in outputs]

    return {n: of_use(plan.uses[n]) for n in plan.firsts()}


def run_perturbed(plan: UsePlan, args: Sequence[Any], zeros: Perturbations) -> tuple[list[Any], Records]:
    """Return the outputs of a program to which the perturbations are added, and the operands of its uses."""
    records: Records = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of one operation; of a use, with its perturbations added."""
        step = next(steps)
        if isinstance(step, UsePlan):
            outputs, inner = _run_body(eqn, values, step, zeros)
            records.update(inner)
            return outputs
        outputs = _evaluate(eqn, values)
        if not step:
            return outputs
        parametric = {plan.uses[n].operand for n in step}
        records[step[0]] = [None if k in parametric else value for k, value in enumerate(values)]
        given = iter(zeros[step[0]])
        return [out + next(given) if jnp.issubdtype(out.dtype, jnp.inexact) else out for out in outputs]

    return interpret(plan.closed.jaxpr, plan.closed.consts, args, visit), records


def _evaluate(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Return the results of an operation; a product is taken without axes of size 1.

    XLA on CPU copies the result of a product that has such axes.
    """
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
        out = lax.optimization_barrier(out)  # keeps the reshape out of the product
    return [out.reshape(shape)]


def _run_body(eqn: JaxprEqn, values: list[Any], plan: UsePlan, zeros: Perturbations) -> tuple[list[Any], Records]:
    """Return what a call, a checkpoint or a loop returns with perturbations in its body, and the records of that."""
    if eqn.primitive.name == "jit":
        return run_perturbed(plan, values, zeros)
    # Only its own zeros: all that enters a checkpoint is kept for the backward pass, and a loop gives each iteration
    # its slice.
    inner = {n: zeros[n] for n in plan.firsts()}
    if eqn.primitive.name in REMAT:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(partial(run_perturbed, plan), **options)(values, inner)
    consts, carry = scan_counts(eqn.params)

    def iteration(state: list[Any], slices: tuple[list[Any], Perturbations]) -> tuple[list[Any], Any]:
        of_iteration, zeros = slices
        outputs, records = run_perturbed(plan, [*values[:consts], *state, *of_iteration], zeros)
        return outputs[:carry], (outputs[carry:], records)

    state, (stacked, records) = lax.scan(
        iteration,
        values[consts : consts + carry],
        (values[consts + carry :], inner),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*state, *stacked], records


# A value that does not come from parameters and constants alone.
_UNKNOWN = object()


class _Wide(NamedTuple):
    """The result of a rearrangement: of numbers like the parameters, in a wider dtype, and of the parameters."""

    value: jax.Array
    plain: jax.Array


def operands(plan: UsePlan, args: Sequence[Any], wanted: frozenset[int]) -> dict[int, Any]:
    """Compute the operands of the uses `wanted` from the parameters alone, with axes for stacked loops in front.

    Args:
      plan: the plan of the program.
      args: the parameters; the data may be left out.
      wanted: numbers of uses.
    """
    return _operands(plan, args, wanted)[0]


def rearranged(plan: UsePlan, args: Sequence[Any], parameters: Sequence[Any], wanted: frozenset[int]) -> dict[int, Any]:
    """Compute the operands of the uses `wanted`, which have a layout, of numbers wider than those of the program.

    A linear function of `args`, in which nothing is rounded to fewer digits on the way; otherwise as `operands`. What
    they are multiplied by may have been computed from the `parameters`.
    """
    found = operands(plan, list(map(_Wide, args, parameters)), wanted)
    return {n: x.value for n, x in found.items()}


def _operands(plan: UsePlan, args: Sequence[Any], wanted: frozenset[int]) -> tuple[dict[int, Any], list[Any]]:
    """Return the operands of the uses, and the outputs as far as they are known."""
    found: dict[int, Any] = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of one operation, unknown where data is in them, and keep the operands that are wanted."""
        step = next(steps)
        unknown = [_UNKNOWN] * len(eqn.outvars)
        if isinstance(step, UsePlan) and eqn.primitive.name == "jit":
            inside, outputs = _operands(step, values, wanted)
            found.update(inside)
            return outputs
        if isinstance(step, UsePlan):
            if not wanted.isdisjoint(step.numbers()):
                is_scan = eqn.primitive.name == "scan"
                found.update(_in_scan(eqn, step, values, wanted) if is_scan else operands(step, values, wanted))
            return unknown
        found.update((n, values[plan.uses[n].operand]) for n in step or [] if n in wanted)
        if step or any(value is _UNKNOWN for value in values):
            return unknown
        places = [k for k, value in enumerate(values) if isinstance(value, _Wide)]
        if not places:
            return evaluate(eqn, *values)
        # An operation that is no rearrangement goes on with the parameters' own numbers: it may give a factor.
        plain = evaluate(eqn, *[x.plain if isinstance(x, _Wide) else x for x in values])
        moved = rearrange(eqn, places[0], [x.value if isinstance(x, _Wide) else x for x in values])
        return plain if moved is None else list(map(_Wide, moved, plain))

    missing = [_UNKNOWN] * (len(plan.closed.jaxpr.invars) - len(args))
    outputs = interpret(plan.closed.jaxpr, plan.closed.consts, [*args, *missing], visit)
    return found, outputs


def _in_scan(eqn: JaxprEqn, plan: UsePlan, values: list[Any], wanted: frozenset[int]) -> dict[int, Any]:
    """Return the operands of uses in a loop: of stacked parameters for all iterations, of others once."""
    shared, carry = scan_counts(eqn.params)
    before = [*values[:shared], *[_UNKNOWN] * carry]
    known = [None if x is _UNKNOWN else x for x in values[shared + carry :]]  # None is a pytree, which `vmap` takes

    def of_iteration(slices: list[Any], wanted: frozenset[int]) -> dict[int, Any]:
        return operands(plan, [*before, *(_UNKNOWN if x is None else x for x in slices)], wanted)

    inside = wanted.intersection(plan.numbers())
    stacked = frozenset(n for n in inside if plan.loop in plan.uses[n].value.stacked)
    found: dict[int, Any] = {}
    if stacked:
        found |= jax.vmap(lambda slices: of_iteration(slices, stacked))(known)
    if inside - stacked:
        found |= of_iteration([None] * len(known), inside - stacked)
    return found
