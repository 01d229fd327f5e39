"""Find the parameter uses of a program: the operations in which its parameters meet its data.

The program computes the loss of one example. A value depends on constants only, on parameters (and constants) only, on
data, or on both. A use is an operation with one operand that depends on parameters only and another that does not. The
gradient of every parameter flows through uses, and through nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..._core.compat import ClosedJaxpr, JaxprEqn, scan_counts
from ..._core.jaxpr import REMAT, aval, evaluate, interpret, with_inner


class Origin(Enum):
    """The origin of a value that does not depend on parameters alone."""

    CONSTANT = "constants"
    DATA = "data"
    BOTH = "parameters and data"


class Parameters(NamedTuple):
    """A value that depends on parameters (and constants) alone.

    Attributes:
      leaves: the indices of the parameters that it is computed from.
      layout: the operations that rearrange the parameters, or a part of them, into it; None if it is computed in any
        other way. Pulling a gradient back through such operations preserves its norm.
      stacked: the numbers of the enclosing loops that slice the parameters, so that each iteration has another slice.
    """

    leaves: frozenset[int]
    layout: tuple[Any, ...] | None
    stacked: frozenset[int]

    def slice_in(self, loop: Loop) -> Parameters:
        """Return the slice that one iteration of a loop receives."""
        layout = None if self.layout is None else (*self.layout, ("slice", loop.number))
        return self._replace(layout=layout, stacked=self.stacked | {loop.number})


class Loop(NamedTuple):
    """A `lax.scan` around a use.

    Attributes:
      number: the number of the loop in the program.
      length: the number of iterations.
    """

    number: int
    length: int


class ParameterUse(NamedTuple):
    """An operation in which parameters meet data.

    Attributes:
      eqn: the operation.
      operand: the index of its operand that depends on parameters alone.
      value: that operand.
      loops: the enclosing loops, outermost first.
      first: the number of the first use of the operation.
      within: the operations whose bodies contain it, outermost first.
    """

    eqn: JaxprEqn
    operand: int
    value: Parameters
    loops: tuple[Loop, ...]
    first: int
    within: tuple[JaxprEqn, ...]

    @property
    def aval(self) -> Any:
        """Return the shape and dtype of the operand."""
        return aval(self.eqn.invars[self.operand])

    def dtypes(self) -> list[Any]:
        """Return the dtypes of the operand and of the results through which gradients flow."""
        results = [aval(x).dtype for x in self.eqn.outvars]
        return [self.aval.dtype, *(dtype for dtype in results if jnp.issubdtype(dtype, jnp.inexact))]


class UsePlan(NamedTuple):
    """A plan for each operation of a program.

    Attributes:
      closed: the program.
      uses: all uses, including those of the enclosing and inner programs.
      steps: for each operation the numbers of its uses, or the plan of its body, or None to evaluate it unchanged.
      outputs: the origin of each output.
      loop: the number of the loop if the program is a loop body; otherwise None.
    """

    closed: ClosedJaxpr
    uses: list[ParameterUse]
    steps: list[list[int] | UsePlan | None]
    outputs: list[Any]
    loop: int | None = None

    def numbers(self) -> list[int]:
        """List the numbers of the uses in this program, including inner programs."""
        return [n for step in self.steps for n in (step.numbers() if isinstance(step, UsePlan) else step or [])]

    def firsts(self) -> list[int]:
        """List the number of the first use of each operation with uses, including inner programs."""
        return [n for n in self.numbers() if self.uses[n].first == n]


# Operations that move the elements of their operand and change at most their signs. They are linear maps L with
# L Lᵀ = 1, so that ‖Lᵀg‖ = ‖g‖: the gradients of the result and of the parameters have the same norm.
_REARRANGING = frozenset(
    """
    copy device_put name neg optimization_barrier reshape reshard rev sharding_constraint squeeze transpose
    """.split()  # noqa: SIM905 (words read better)
)


def of_each(eqn: JaxprEqn) -> bool:
    """Return whether an operation has several operands, and as its results these operands, unchanged."""
    return eqn.primitive.name in ("device_put", "optimization_barrier") and len(eqn.invars) > 1


def find_uses(closed: ClosedJaxpr, parameters: int) -> UsePlan:
    """Find the uses of a program whose first `parameters` arguments are parameters, and all others data."""
    # Complex parameters have no layout: a cast to or from complex numbers drops a part of the gradient.
    args = [
        Parameters(frozenset([i]), () if is_real(var) else None, frozenset())
        for i, var in enumerate(closed.jaxpr.invars[:parameters])
    ]
    return _Finder().plan(closed, [*args, *[Origin.DATA] * (len(closed.jaxpr.invars) - parameters)], ())


def is_real(variable: Any) -> bool:
    """Return whether a variable of a program is real floating point."""
    return jnp.issubdtype(aval(variable).dtype, jnp.floating)


class _RuleInLoop(Exception):
    """Raised if a loop applies a nonlinear backward pass to shared parameters: it must not receive a sum."""


class _Finder:
    """A pass over a program and its bodies that numbers the uses in program order."""

    def __init__(self) -> None:
        self.uses: list[ParameterUse] = []
        self.loops = itertools.count()
        self.within: list[JaxprEqn] = []

    def plan(self, closed: ClosedJaxpr, args: Sequence[Any], loops: tuple[Loop, ...]) -> UsePlan:
        """Return the plan of a program, given the origin of each argument."""
        steps: list[list[int] | UsePlan | None] = []

        def visit(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            """Plan one operation, and return the origins of its results."""
            step, outputs = self.step(eqn, operands, loops)
            steps.append(step)
            # No gradient flows through integers and booleans, so such results are never `Parameters`.
            return [
                out if jnp.issubdtype(aval(var).dtype, jnp.inexact) else _without_gradient([out])
                for out, var in zip(outputs, eqn.outvars, strict=True)
            ]

        outputs = interpret(closed.jaxpr, closed.consts, args, visit, lambda _: Origin.CONSTANT)
        return UsePlan(closed, self.uses, steps, outputs)

    def step(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> tuple[Any, list[Any]]:
        """Return the plan of one operation, and the origins of its results."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        places = [k for k, x in enumerate(operands) if isinstance(x, Parameters)]
        if not places or name == "stop_gradient":
            return None, [_without_gradient(operands)] * count
        alone = all(isinstance(x, Parameters) or x is Origin.CONSTANT for x in operands)
        if not alone and name in ("jit", *REMAT, "scan"):
            inner = self.inner(eqn, operands, loops)
            if inner is not None:
                # `operands` evaluates calls, but no other bodies, from parameters alone. It does not know the results
                # of the others, so their constant results count as data.
                known = [Origin.DATA if x is Origin.CONSTANT and name != "jit" else x for x in inner.outputs]
                return inner, known
        # Gradients are pulled back outside the loop, where only their sum over the iterations would be available.
        shared = any(loop.number not in operands[k].stacked for loop in loops for k in places)
        if shared and has_nonlinear_backward(eqn):
            raise _RuleInLoop
        if alone:
            return None, [_of_parameters(eqn, operands, places, k) for k in range(count)]
        if not any(jnp.issubdtype(aval(var).dtype, jnp.inexact) for var in eqn.outvars):
            return None, [_without_gradient(operands)] * count
        first = len(self.uses)
        self.uses += [ParameterUse(eqn, k, operands[k], loops, first, tuple(self.within)) for k in places]
        return list(range(first, len(self.uses))), [Origin.BOTH] * count

    def inner(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> UsePlan | None:
        """Return the plan of a body; None if parameters come out of it, so that the whole operation is one use."""
        before = len(self.uses)
        self.within.append(eqn)
        found = None
        try:
            if eqn.primitive.name == "scan":
                with suppress(_RuleInLoop):
                    found = self.scan(eqn, operands, loops)
            else:
                body = eqn.params["jaxpr"]
                closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())  # a checkpoint has a Jaxpr
                found = self.plan(closed, operands, loops)
                if eqn.primitive.name in REMAT and any(isinstance(x, Parameters) for x in found.outputs):
                    found = None
        finally:
            self.within.pop()
        if found is None:
            del self.uses[before:]
        return found

    def scan(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> UsePlan | None:
        """Return the plan of a loop body; None if a carried or returned value depends on parameters alone."""
        consts, carry = scan_counts(eqn.params)
        shared, state, slices = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
        if any(isinstance(x, Parameters) for x in state):
            return None
        loop = Loop(next(self.loops), eqn.params["length"])
        # A constant that changes with each iteration is data for the operations in the body.
        state = [_without_gradient([x, Origin.DATA]) for x in state]
        slices = [
            x.slice_in(loop) if isinstance(x, Parameters) else _without_gradient([x, Origin.DATA]) for x in slices
        ]
        before = len(self.uses)
        # A carry may start from data and depend on parameters too after an iteration. Analyze the body until its
        # origins reach a fixed point; this ends, because origins only grow, up to `BOTH`.
        while True:
            del self.uses[before:]
            found = self.plan(eqn.params["jaxpr"], [*shared, *state, *slices], (*loops, loop))
            if any(isinstance(x, Parameters) for x in found.outputs):
                return None
            after = [_without_gradient([x, y]) for x, y in zip(state, found.outputs[:carry], strict=True)]
            if after == state:
                return found._replace(loop=loop.number)
            state = after


def _without_gradient(operands: Sequence[Any]) -> Origin:
    """Return the origin of a result through which no gradient flows, or only gradients of earlier uses."""
    if Origin.BOTH in operands:
        return Origin.BOTH
    # A value computed from the slice of an iteration is not constant in the body.
    changing = any(isinstance(x, Parameters) and x.stacked for x in operands)
    return Origin.DATA if changing or Origin.DATA in operands else Origin.CONSTANT


def _of_parameters(eqn: JaxprEqn, operands: list[Any], places: list[int], output: int) -> Parameters | Origin:
    """Describe an output of an operation on constants and on parameters, the operands at `places`."""
    values: list[Parameters] = [operands[k] for k in places]
    leaves = frozenset[int]().union(*(value.leaves for value in values))
    stacked = frozenset[int]().union(*(value.stacked for value in values))
    layouts = tuple(value.layout for value in values if value.layout is not None and value.stacked == stacked)
    # If a parameter occurs twice, both parts of its gradient add up, which changes the norm.
    distinct = sum(len(value.leaves) for value in values) == len(leaves)
    step: Any = None
    if of_each(eqn):
        one = operands[output]
        return (
            one if one is Origin.CONSTANT or one.layout is None else one._replace(layout=(*one.layout, ("moved", "")))
        )
    if len(layouts) == len(eqn.invars) == 1:
        step = _moved(eqn) or _part(eqn, output)
    elif len(layouts) == len(eqn.invars) and eqn.primitive.name == "concatenate" and distinct:
        return Parameters(leaves, (("concatenate", eqn.params["dimension"], layouts),), stacked)
    return Parameters(leaves, None if step is None else (*layouts[0], step), stacked)


def has_nonlinear_backward(eqn: JaxprEqn) -> bool:
    """Return whether the backward pass of an operation is not linear in its cotangents.

    A `jax.custom_vjp` may apply any function to them, and a rounding operation (float8 casts too) rounds them.
    """

    def is_nonlinear(eqn: JaxprEqn) -> bool:
        to_float8 = is_cast(eqn) and aval(eqn.outvars[0]).dtype.itemsize == 1
        return to_float8 or eqn.primitive.name.startswith(("reduce_precision", "custom_vjp"))

    return any(map(is_nonlinear, with_inner([eqn])))


def rearrange(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Evaluate an operation of a layout on wider dtypes than the program has; None for any other operation."""
    if is_cast(eqn):  # keep the wider dtype: a layout contains only casts between real dtypes
        return values if is_real(eqn.outvars[0]) else None
    if eqn.primitive.name == "concatenate":
        values = [x.astype(jnp.result_type(*values)) for x in values]
    elif not (_moved(eqn) or _part(eqn, 0)):
        return None
    return evaluate(eqn, *values)


def _moved(eqn: JaxprEqn) -> Any:
    """Describe an operation that moves the elements of its operand, changing at most their sign or dtype; else None.

    Casts to complex numbers do not qualify: their transpose drops the imaginary part of a gradient.
    """
    name = eqn.primitive.name
    known = name in _REARRANGING or is_cast(eqn)
    if name == "broadcast_in_dim":  # one that copies elements does not qualify: their gradients add up
        known = aval(eqn.invars[0]).size == aval(eqn.outvars[0]).size
    if len(eqn.invars) > 1 or not known or not is_real(eqn.outvars[0]):
        return None
    return name, eqn.params["permutation"] if name == "transpose" else str(eqn.params)


def _part(eqn: JaxprEqn, output: int) -> Any:
    """Describe an operation that takes a part of an array: the start, stop and stride on each axis; else None."""
    if eqn.primitive.name == "slice":
        return "part", eqn.params["start_indices"], eqn.params["limit_indices"], eqn.params["strides"]
    if eqn.primitive.name == "split":
        shape, axis, sizes = aval(eqn.invars[0]).shape, eqn.params["axis"], eqn.params["sizes"]
        start, stop = [0] * len(shape), list(shape)
        start[axis] = int(sum(sizes[:output]))
        stop[axis] = start[axis] + int(sizes[output])
        return "part", tuple(start), tuple(stop), None
    return None


def disjoint(one: Parameters, other: Parameters) -> bool:
    """Return whether two values share no element of the parameters."""
    if not one.leaves & other.leaves:
        return True
    # Compare parts only if they are the first step, where their indices refer to the parameter itself.
    boxes = [value.layout[0] for value in (one, other) if value.layout and value.layout[0][0] == "part"]
    if len(one.leaves | other.leaves) > 1 or len(boxes) < 2:
        return False
    (_, starts, stops, _), (_, other_starts, other_stops, _) = boxes
    return any(
        stop <= other_start or other_stop <= start
        for start, stop, other_start, other_stop in zip(starts, stops, other_starts, other_stops, strict=True)
    )


def is_cast(eqn: JaxprEqn) -> bool:
    """Return whether an operation changes the dtype."""
    return eqn.primitive.name == "convert_element_type"


def sharing(uses: Sequence[ParameterUse]) -> list[list[int]]:
    """Group the numbers of the uses that share elements of the parameters."""
    groups: list[list[int]] = []
    for n, use in enumerate(uses):
        joined = [group for group in groups if any(not disjoint(use.value, uses[m].value) for m in group)]
        groups = [group for group in groups if group not in joined] + [[*itertools.chain(*joined), n]]
    return groups
