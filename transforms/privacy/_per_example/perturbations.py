"""Run a program with a zero perturbation (a "tap") at every parameter use: a zero added to the operation's result.

With the parameters held fixed, the gradient of the loss with respect to this zero is the cotangent of the operation's
output, for each example under `jax.vmap`. Together with the other operands of the operation, which the forward pass
records, it determines each example's gradient of the parameters at that use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.compat import JaxprEqn, scan_counts, varying, varying_axes
from ..._core.jaxpr import REMAT, aval, evaluate, interpret
from .in_backward import InBackward
from .parameter_uses import UsePlan, of_each, rearrange
from .rules import clipped_rows

# Keyed by the number of an operation's first use: one array for each floating-point output.
Perturbations = dict[int, list[Any]]
# Keyed likewise: the operands, with None for those that depend on parameters alone.
Records = dict[int, list[Any]]


def zero_perturbations(plan: UsePlan, batch: int, inside: InBackward | None = None) -> Perturbations:
    """Return the zeros for `batch` examples: axis 0 is the examples, followed by an axis for each enclosing loop.

    Args:
      plan: the plan of the program.
      batch: the number of examples.
      inside: the uses that have a backward rule of their own; their zeros are those that it takes for norms.
    """

    def of_use(n: int) -> list[jax.Array]:
        use = plan.uses[n]
        if inside is not None and n in inside.uses:
            return inside.entries(plan, n, batch)
        leading = batch, *(loop.length for loop in use.loops)
        outputs = [aval(x) for x in use.eqn.outvars if jnp.issubdtype(aval(x).dtype, jnp.inexact)]
        # x + (-0.0) is x for every x, while -0.0 + 0.0 is 0.0, whose sign bit differs.
        return [varying(-jnp.zeros((*leading, *x.shape), x.dtype), varying_axes(x)) for x in outputs]

    return {n: of_use(n) for n in plan.firsts()}


def run_perturbed(
    plan: UsePlan,
    args: Sequence[Any],
    zeros: Perturbations,
    inside: InBackward | None = None,
    before: Records | None = None,
) -> tuple[list[Any], Records]:
    """Return the outputs of a program with the perturbations added, and the operands of its uses.

    Args:
      plan: the plan of the program.
      args: its arguments.
      zeros: the perturbations; uses without them are evaluated unchanged.
      inside: the uses that have a backward rule of their own, which replaces perturbation and record.
      before: the records of the enclosing program.
    """
    records: Records = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of one operation, with perturbations added if it is a use."""
        step = next(steps)
        if isinstance(step, UsePlan):
            outputs, inner = _run_body(eqn, values, step, zeros, inside, {**(before or {}), **records})
            records.update(inner)
            return outputs
        if step and inside is not None and step[0] in inside.uses:
            known = {**(before or {}), **records}
            lookups = [(plan.uses[n], known[n][1]) for n in inside.lookups.get(step[0], [])]
            rows = [clipped_rows(use, index).reshape(-1) for use, index in lookups]
            return inside.run(plan.uses[step[0]], values, zeros[step[0]], rows)
        outputs = evaluate(eqn, *values)
        if not step or step[0] not in zeros:
            return outputs
        parametric = {plan.uses[n].operand for n in step}
        records[step[0]] = [None if k in parametric else value for k, value in enumerate(values)]
        given = iter(zeros[step[0]])
        return [out + next(given) if jnp.issubdtype(out.dtype, jnp.inexact) else out for out in outputs]

    return interpret(plan.closed.jaxpr, plan.closed.consts, args, visit), records


def _run_body(
    eqn: JaxprEqn,
    values: list[Any],
    plan: UsePlan,
    zeros: Perturbations,
    inside: InBackward | None,
    before: Records,
) -> tuple[list[Any], Records]:
    """Run a call, a checkpoint or a loop with perturbations in its body; return its results and records."""
    if eqn.primitive.name == "jit":
        return run_perturbed(plan, values, zeros, inside, before)
    # Pass only the zeros of this body: every input of a checkpoint is kept for the backward pass, and a loop slices its
    # inputs for each iteration.
    inner = {n: zeros[n] for n in plan.firsts() if n in zeros}
    if eqn.primitive.name in REMAT:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        run = partial(run_perturbed, plan, inside=inside, before=before)
        return jax.checkpoint(run, **options)(values, inner)
    consts, carry = scan_counts(eqn.params)

    def iteration(state: list[Any], slices: tuple[list[Any], Perturbations]) -> tuple[list[Any], Any]:
        of_iteration, zeros = slices
        outputs, records = run_perturbed(plan, [*values[:consts], *state, *of_iteration], zeros, inside, before)
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


# Marks a value that does not depend on parameters and constants alone.
_UNKNOWN = object()


def operands(plan: UsePlan, args: Sequence[Any], wanted: frozenset[int], wider: bool = False) -> dict[int, Any]:
    """Compute the parameter operands of the uses `wanted` from the parameters, with leading axes for stacked loops.

    Args:
      plan: the plan of the program.
      args: the parameters; the data may be omitted.
      wanted: the numbers of the uses.
      wider: whether the parameters have wider dtypes than the program and keep them, without rounding. All of `wanted`
        must then have a layout.
    """
    return _operands(plan, args, wanted, wider)[0]


def _operands(
    plan: UsePlan, args: Sequence[Any], wanted: frozenset[int], wider: bool
) -> tuple[dict[int, Any], list[Any]]:
    """Return the operands of the uses, and the outputs, with `_UNKNOWN` for those that depend on data."""
    found: dict[int, Any] = {}
    steps = iter(plan.steps)

    def visit(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        """Return the results of one operation, unknown if they depend on data, and collect the wanted operands."""
        step = next(steps)
        unknown = [_UNKNOWN] * len(eqn.outvars)
        if isinstance(step, UsePlan):
            if eqn.primitive.name != "jit" and wanted.isdisjoint(step.numbers()):
                return unknown
            if eqn.primitive.name == "scan":
                found.update(_in_scan(eqn, step, values, wanted, wider))
                return unknown
            inside, outputs = _operands(step, values, wanted, wider)
            found.update(inside)
            return outputs if eqn.primitive.name == "jit" else unknown
        found.update((n, values[plan.uses[n].operand]) for n in step or [] if n in wanted)
        if wider and of_each(eqn):  # some of its operands may be unknown
            return values
        if step or any(value is _UNKNOWN for value in values):
            return unknown
        return (rearrange(eqn, values) or unknown) if wider else evaluate(eqn, *values)

    missing = [_UNKNOWN] * (len(plan.closed.jaxpr.invars) - len(args))
    # A layout contains no constants.
    known = (lambda _: _UNKNOWN) if wider else (lambda value: value)
    outputs = interpret(plan.closed.jaxpr, plan.closed.consts, [*args, *missing], visit, known)
    return found, outputs


def _in_scan(eqn: JaxprEqn, plan: UsePlan, values: list[Any], wanted: frozenset[int], wider: bool) -> dict[int, Any]:
    """Return the operands of uses in a loop: for all iterations if their parameters are stacked, otherwise once."""
    shared, carry = scan_counts(eqn.params)
    before = [*values[:shared], *[_UNKNOWN] * carry]
    known = [None if x is _UNKNOWN else x for x in values[shared + carry :]]  # `vmap` accepts None: an empty pytree

    def of_iteration(slices: list[Any], wanted: frozenset[int]) -> dict[int, Any]:
        return operands(plan, [*before, *(_UNKNOWN if x is None else x for x in slices)], wanted, wider)

    inside = wanted.intersection(plan.numbers())
    stacked = frozenset(n for n in inside if plan.loop in plan.uses[n].value.stacked)
    found: dict[int, Any] = {}
    if stacked:
        found |= jax.vmap(lambda slices: of_iteration(slices, stacked))(known)
    if inside - stacked:
        found |= of_iteration([None] * len(known), inside - stacked)
    return found
