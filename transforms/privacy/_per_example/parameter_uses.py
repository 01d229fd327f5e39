"""Where the parameters of a program meet its data.

The program is that of one example. A value comes from constants, from the parameters alone, from the data, or from
both. A use is an operation on a value that comes from parameters alone and one that does not: the gradient of every
parameter goes through uses, and through nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import REMAT, aval, evaluate, interpret, with_inner


class Origin(Enum):
    """Where a value comes from that does not come from parameters alone."""

    CONSTANT = "constants"
    DATA = "data"
    BOTH = "parameters and data"


class Parameters(NamedTuple):
    """A value that comes from parameters (and constants) alone.

    Attributes:
      leaves: the parameters that it is computed from.
      layout: the operations that rearrange the parameters, or a part of them, into it; None where it is computed in
        another way. Such an operation keeps the norm of a gradient that goes back through it.
      stacked: the loops around it, by number, in each iteration of which it is another slice of the parameters.
    """

    leaves: frozenset[int]
    layout: tuple[Any, ...] | None
    stacked: frozenset[int]

    def slice_in(self, loop: Loop) -> Parameters:
        """Return the slice of it that an iteration of a loop gets."""
        layout = None if self.layout is None else (*self.layout, ("slice", loop.number))
        return self._replace(layout=layout, stacked=self.stacked | {loop.number})


class Loop(NamedTuple):
    """A `lax.scan` around a use.

    Attributes:
      number: which one.
      length: how many iterations it takes.
    """

    number: int
    length: int


class ParameterUse(NamedTuple):
    """An operation in which parameters meet data.

    Attributes:
      eqn: the operation.
      operand: which of its operands comes from parameters alone.
      value: that operand.
      loops: the loops around it, outermost first.
      first: the number of the first use of the operation.
      within: the operations in whose bodies it is, outermost first.
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


class UsePlan(NamedTuple):
    """What to do with each operation of a program.

    Attributes:
      closed: the program.
      uses: all uses, including those of the programs around and inside this one.
      steps: for each operation the uses in it (their numbers), the plan of its body, or None to evaluate it as it is.
      outputs: where each output comes from.
      loop: the number of the loop whose body this is; None for another program.
    """

    closed: ClosedJaxpr
    uses: list[ParameterUse]
    steps: list[list[int] | UsePlan | None]
    outputs: list[Any]
    loop: int | None = None

    def numbers(self) -> list[int]:
        """List the uses in it, inner programs included."""
        return [n for step in self.steps for n in (step.numbers() if isinstance(step, UsePlan) else step or [])]

    def firsts(self) -> list[int]:
        """List the first use of each operation that has any, inner programs included."""
        return [n for n in self.numbers() if self.uses[n].first == n]


# Operations that move the numbers of their operand, and change none but for its sign. They are linear maps L with
# L Lᵀ = 1, so that ‖Lᵀg‖ = ‖g‖: the norm of a gradient of the result is that of the parameters.
_REARRANGING = frozenset(["copy", "neg", "reshape", "rev", "sharding_constraint", "squeeze", "transpose"])


def find_uses(closed: ClosedJaxpr, parameters: int) -> UsePlan:
    """Find the uses of a program whose first `parameters` arguments are the parameters, and all others the data."""
    # Complex parameters have no layout: a cast to or from them drops a part of the gradient.
    args = [
        Parameters(frozenset([i]), () if is_real(var) else None, frozenset())
        for i, var in enumerate(closed.jaxpr.invars[:parameters])
    ]
    return _Finder().plan(closed, [*args, *[Origin.DATA] * (len(closed.jaxpr.invars) - parameters)], ())


def is_real(variable: Any) -> bool:
    """Return whether a variable of a program is of real floating point."""
    return jnp.issubdtype(aval(variable).dtype, jnp.floating)


class _RuleInLoop(Exception):
    """A backward pass that is not linear, of the same parameters in each iteration: it must not see their sum."""


class _Finder:
    """One pass over a program and its bodies, which numbers the uses in the order of the operations."""

    def __init__(self) -> None:
        self.uses: list[ParameterUse] = []
        self.loops = itertools.count()
        self.within: list[JaxprEqn] = []

    def plan(self, closed: ClosedJaxpr, args: Sequence[Any], loops: tuple[Loop, ...]) -> UsePlan:
        """Return the plan of a program, given where each of its arguments comes from."""
        steps: list[list[int] | UsePlan | None] = []

        def visit(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            """Plan one operation, and return where its results come from."""
            step, outputs = self.step(eqn, operands, loops)
            steps.append(step)
            # No gradient goes through integers and booleans, so for what follows they are never `Parameters`.
            return [
                out if jnp.issubdtype(aval(var).dtype, jnp.inexact) else _without_gradient([out])
                for out, var in zip(outputs, eqn.outvars, strict=True)
            ]

        outputs = interpret(closed.jaxpr, closed.consts, args, visit, lambda _: Origin.CONSTANT)
        return UsePlan(closed, self.uses, steps, outputs)

    def step(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> tuple[Any, list[Any]]:
        """Return what to do with an operation, and where its results come from."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        places = [k for k, x in enumerate(operands) if isinstance(x, Parameters)]
        if not places or name == "stop_gradient":
            return None, [_without_gradient(operands)] * count
        alone = all(isinstance(x, Parameters) or x is Origin.CONSTANT for x in operands)
        if not alone and name in ("jit", *REMAT, "scan"):
            inner = self.inner(eqn, operands, loops)
            if inner is not None:
                # To find operands again from parameters alone, only a call is run once more. What another program
                # returns is not known then, so its constants are taken for data.
                known = [Origin.DATA if x is Origin.CONSTANT and name != "jit" else x for x in inner.outputs]
                return inner, known
        # Outside of the loop, where parameters are pulled back, only the sum over its iterations would be seen.
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
        """Return the plan of a body; None where parameters come out of it alone, so that it is one use as a whole."""
        before = len(self.uses)
        self.within.append(eqn)
        found = None
        try:
            if eqn.primitive.name == "scan":
                with suppress(_RuleInLoop):
                    found = self.scan(eqn, operands, loops)
            else:
                body = eqn.params["jaxpr"]
                closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())  # a checkpoint's is open
                found = self.plan(closed, operands, loops)
                if eqn.primitive.name in REMAT and any(isinstance(x, Parameters) for x in found.outputs):
                    found = None
        finally:
            self.within.pop()
        if found is None:
            del self.uses[before:]
        return found

    def scan(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> UsePlan | None:
        """Return the plan of the body of a loop; None where parameters alone are carried or come out."""
        consts, carry = scan_counts(eqn.params)
        shared, state, slices = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
        if any(isinstance(x, Parameters) for x in state):
            return None
        loop = Loop(next(self.loops), eqn.params["length"])
        # What is another constant in each iteration is no constant for an operation in the body.
        state = [_without_gradient([x, Origin.DATA]) for x in state]
        slices = [
            x.slice_in(loop) if isinstance(x, Parameters) else _without_gradient([x, Origin.DATA]) for x in slices
        ]
        before = len(self.uses)
        # What is carried starts from data, say, and may come from parameters too after an iteration: go through the
        # body until nothing is added. `BOTH` is the most there is, so this ends.
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
    """Return where a value comes from through which no parameter's gradient goes, or only that of earlier uses."""
    if Origin.BOTH in operands:
        return Origin.BOTH
    # What comes from another slice of the parameters in each iteration of a loop is no constant in its body.
    changing = any(isinstance(x, Parameters) and x.stacked for x in operands)
    return Origin.DATA if changing or Origin.DATA in operands else Origin.CONSTANT


def _of_parameters(eqn: JaxprEqn, operands: list[Any], places: list[int], output: int) -> Parameters:
    """Describe an output of an operation on parameters, which are the operands at `places`, and constants."""
    values: list[Parameters] = [operands[k] for k in places]
    leaves = frozenset[int]().union(*(value.leaves for value in values))
    stacked = frozenset[int]().union(*(value.stacked for value in values))
    layouts = tuple(value.layout for value in values if value.layout is not None and value.stacked == stacked)
    # Of a parameter that is there twice, the two parts of the gradient would add up, and the norm be another.
    distinct = sum(len(value.leaves) for value in values) == len(leaves)
    step: Any = None
    if len(layouts) == len(eqn.invars) == 1:
        step = _moved(eqn) or _part(eqn, output)
    elif len(layouts) == len(eqn.invars) and eqn.primitive.name == "concatenate" and distinct:
        return Parameters(leaves, (("concatenate", eqn.params["dimension"], layouts),), stacked)
    return Parameters(leaves, None if step is None else (*layouts[0], step), stacked)


def has_nonlinear_backward(eqn: JaxprEqn) -> bool:
    """Return whether cotangents go back through an operation other than linearly.

    A `jax.custom_vjp` may do anything with them, and a rounding (to float8 too) rounds them.
    """

    def is_nonlinear(eqn: JaxprEqn) -> bool:
        to_float8 = is_cast(eqn) and aval(eqn.outvars[0]).dtype.itemsize == 1
        return to_float8 or eqn.primitive.name.startswith(("reduce_precision", "custom_vjp"))

    return any(map(is_nonlinear, with_inner([eqn])))


def rearrange(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Evaluate an operation that a layout may have, on wider numbers than those of the program; None for any other."""
    if is_cast(eqn):  # the wider dtype stays: only a cast between real dtypes is in a layout
        return values if is_real(eqn.outvars[0]) else None
    if eqn.primitive.name == "concatenate":
        values = [x.astype(jnp.result_type(*values)) for x in values]
    elif not (_moved(eqn) or _part(eqn, 0)):
        return None
    return evaluate(eqn, *values)


def _moved(eqn: JaxprEqn) -> Any:
    """Describe an operation that moves the numbers of its operand and changes none, or only their sign or dtype.

    A cast to complex numbers is another: of a gradient that goes back through it the imaginary part is dropped.
    """
    name = eqn.primitive.name
    known = name in _REARRANGING or is_cast(eqn)
    if name == "broadcast_in_dim":  # which only adds axes of size 1; another one copies numbers, whose gradients add up
        known = aval(eqn.invars[0]).size == aval(eqn.outvars[0]).size
    if len(eqn.invars) > 1 or not known or not is_real(eqn.outvars[0]):
        return None
    return name, eqn.params["permutation"] if name == "transpose" else str(eqn.params)


def _part(eqn: JaxprEqn, output: int) -> Any:
    """Describe a part of an array: its first and last place along each axis."""
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
    """Return whether two values have no number of the parameters in common."""
    if not one.leaves & other.leaves:
        return True
    # Only a first step that is a part counts: its places are those in the parameter itself.
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
