"""Where the parameters of a program meet its data.

The program is that of one example. A value comes from constants, from the parameters alone, from the data, or from
both. A use is an operation on a value that comes from parameters alone and one that does not: the gradient of every
parameter goes through uses, and through nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ..._core.compat import scan_counts
from ..._core.jaxpr import REMAT, aval, bodies, evaluate, interpret


class Origin(Enum):
    """Where a value comes from that does not come from parameters alone."""

    CONSTANT = "constants"
    DATA = "data"
    BOTH = "parameters and data"


class Parameters(NamedTuple):
    """A value that comes from parameters (and constants) alone.

    Attributes:
      leaves: the parameters that it is computed from.
      layout: how it is a rearrangement of them, or of a part of them, but for a factor: the operations; None where not.
        Such an operation keeps the norm of a gradient that goes back through it, but for the factor.
      stacked: the loops around it, by number, in each turn of which it is another slice of the parameters.
      linear: whether real gradients go back through all that it is computed by as through one linear map.
    """

    leaves: frozenset[int]
    layout: tuple[Any, ...] | None
    stacked: frozenset[int]
    linear: bool


class Loop(NamedTuple):
    """A `lax.scan` around a use.

    Attributes:
      number: which one.
      length: how many turns it takes.
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
      within: the operations whose bodies it stands in, outermost first.
    """

    eqn: JaxprEqn
    operand: int
    value: Parameters
    loops: tuple[Loop, ...]
    first: int
    within: tuple[JaxprEqn, ...]


class UsePlan(NamedTuple):
    """What to do with each operation of a program.

    Attributes:
      steps: for each operation the uses in it (their numbers), the plan of its body, or None to evaluate it as it is.
      outputs: where each output comes from.
      loop: the number of the loop whose body this is; None for another program.
    """

    steps: list[list[int] | UsePlan | None]
    outputs: list[Any]
    loop: int | None = None

    def numbers(self) -> list[int]:
        """The uses in it, inner programs included."""
        found: list[int] = []
        for step in self.steps:
            found += step.numbers() if isinstance(step, UsePlan) else step or []
        return found

    def firsts(self) -> list[int]:
        """The first use of each operation that has any, inner programs included."""
        found: list[int] = []
        for step in self.steps:
            found += step.firsts() if isinstance(step, UsePlan) else (step or [])[:1]
        return found


# Operations that move the numbers of their operand, and change none but for its sign. A reshape or a transpose is told
# apart from others of its kind by its parameters.
_REARRANGING = frozenset(["copy", "neg", "reshape", "rev", "sharding_constraint", "squeeze", "transpose"])


def find_uses(closed: ClosedJaxpr, parameters: int) -> tuple[UsePlan, list[ParameterUse]]:
    """The uses of a program whose first `parameters` arguments are the parameters, and all others the data."""
    finder = _Finder()
    args: list[Any] = []
    for i, var in enumerate(closed.jaxpr.invars[:parameters]):
        args.append(Parameters(frozenset([i]), () if is_real(var) else None, frozenset(), is_real(var)))
    args += [Origin.DATA] * (len(closed.jaxpr.invars) - parameters)
    return finder.plan(closed.jaxpr, args, ()), finder.uses


def is_real(variable: Any) -> bool:
    """Whether a variable of a program is of real floating point."""
    return jnp.issubdtype(aval(variable).dtype, jnp.floating)


class _RuleInLoop(Exception):
    """A backward pass that is not linear, of the same parameters in each turn of a loop: it must not see their sum."""


class _Finder:
    def __init__(self) -> None:
        self.uses: list[ParameterUse] = []
        self.loops = 0
        self.within: list[JaxprEqn] = []

    def plan(self, jaxpr: Jaxpr, args: Sequence[Any], loops: tuple[Loop, ...]) -> UsePlan:
        steps: list[list[int] | UsePlan | None] = []

        def visit(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            step, outputs = self.step(eqn, operands, loops)
            steps.append(step)
            return [
                out if jnp.issubdtype(aval(var).dtype, jnp.inexact) else _known([out])
                for out, var in zip(outputs, eqn.outvars, strict=True)
            ]

        outputs = interpret(jaxpr, [None] * len(jaxpr.constvars), args, visit, lambda _: Origin.CONSTANT)
        return UsePlan(steps, outputs)

    def step(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> tuple[Any, list[Any]]:
        """What to do with an operation, and where its results come from."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        places = [k for k, x in enumerate(operands) if isinstance(x, Parameters)]
        if not places or name == "stop_gradient":
            return None, [_known(operands)] * count
        if all(isinstance(x, Parameters) or x is Origin.CONSTANT for x in operands):
            outputs = [_rearranged(eqn, operands, places, k) for k in range(count)]
            if outputs and has_nonlinear_backward(eqn) and any(loop.number not in outputs[0].stacked for loop in loops):
                raise _RuleInLoop
            return None, list(outputs)
        if name in ("jit", *REMAT, "scan"):
            inner = self.inner(eqn, operands, loops)
            if inner is not None:
                # Of another program than a call the outputs are not computed again, so they may as well be data.
                known = [Origin.DATA if x is Origin.CONSTANT and name != "jit" else x for x in inner.outputs]
                return inner, known
        if not any(jnp.issubdtype(aval(var).dtype, jnp.inexact) for var in eqn.outvars):
            return None, [_known(operands)] * count
        uses = [
            ParameterUse(eqn, k, operands[k], loops, len(self.uses), tuple(self.within))
            for k in places
            if jnp.issubdtype(aval(eqn.invars[k]).dtype, jnp.inexact)
        ]
        numbers = list(range(len(self.uses), len(self.uses) + len(uses)))
        self.uses += uses
        return numbers, [Origin.BOTH] * count

    def inner(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> UsePlan | None:
        """The plan of a body; None where parameters come out of it alone, so that it must be taken as a whole."""
        before = len(self.uses), self.loops
        self.within.append(eqn)
        found = None
        try:
            if eqn.primitive.name == "scan":
                with suppress(_RuleInLoop):
                    found = self.scan(eqn, operands, loops)
            else:
                body = eqn.params["jaxpr"]
                found = self.plan(getattr(body, "jaxpr", body), operands, loops)
                if eqn.primitive.name in REMAT and any(isinstance(x, Parameters) for x in found.outputs):
                    found = None
        finally:
            self.within.pop()
        if found is None:
            del self.uses[before[0] :]
            self.loops = before[1]
        return found

    def scan(self, eqn: JaxprEqn, operands: list[Any], loops: tuple[Loop, ...]) -> UsePlan | None:
        consts, carry = scan_counts(eqn.params)
        shared, state, slices = operands[:consts], operands[consts : consts + carry], operands[consts + carry :]
        if any(isinstance(x, Parameters) for x in state):
            return None
        loop = Loop(self.loops, eqn.params["length"])
        self.loops += 1
        # What is another constant in each turn is no constant for an operation in the body.
        state = [_known([x, Origin.DATA]) for x in state]
        slices = [_slice_of(x, loop) if isinstance(x, Parameters) else _known([x, Origin.DATA]) for x in slices]
        body = eqn.params["jaxpr"].jaxpr
        before = len(self.uses), self.loops
        while True:  # until what is carried no longer comes from more than before
            del self.uses[before[0] :]
            self.loops = before[1]
            found = self.plan(body, [*shared, *state, *slices], (*loops, loop))
            if any(isinstance(x, Parameters) for x in found.outputs):
                return None
            after = [_known([x, y]) for x, y in zip(state, found.outputs[:carry], strict=True)]
            if after == state:
                return found._replace(loop=loop.number)
            state = after


def _slice_of(value: Parameters, loop: Loop) -> Parameters:
    layout = None if value.layout is None else (*value.layout, ("slice", loop.number))
    return value._replace(layout=layout, stacked=value.stacked | {loop.number})


def _known(operands: Sequence[Any]) -> Origin:
    """Where a value comes from through which no gradient of a parameter goes, or only that of earlier uses."""
    if Origin.BOTH in operands:
        return Origin.BOTH
    # What comes from another slice of the parameters in each turn of a loop is no constant in its body.
    changing = any(isinstance(x, Parameters) and x.stacked for x in operands)
    return Origin.DATA if changing or Origin.DATA in operands else Origin.CONSTANT


def _rearranged(eqn: JaxprEqn, operands: list[Any], places: list[int], output: int) -> Parameters:
    """Where an output of an operation on parameters, which are the operands at `places`, and constants comes from."""
    values: list[Parameters] = [operands[k] for k in places]
    leaves = frozenset[int]().union(*(value.leaves for value in values))
    stacked = frozenset[int]().union(*(value.stacked for value in values))
    layouts = [value.layout for value in values if value.layout is not None and value.stacked == stacked]
    linear = all(value.linear for value in values) and not has_nonlinear_backward(eqn)
    step: Any = None
    if len(layouts) == len(values) == 1:
        step = _moved(eqn) or _scaled(eqn, places[0]) or _part(eqn, output)
    elif len(layouts) == len(values) == len(eqn.invars) and eqn.primitive.name == "concatenate":
        distinct = sum(len(value.leaves) for value in values) == len(leaves)
        if distinct and not any(map(is_scaled, layouts)):
            return Parameters(leaves, (("concatenate", eqn.params["dimension"], tuple(layouts)),), stacked, linear)
    return Parameters(leaves, None if step is None else (*layouts[0], step), stacked, linear)


def has_nonlinear_backward(eqn: JaxprEqn) -> bool:
    """Return whether cotangents go back through an operation other than linearly.

    A `jax.custom_vjp` may do anything with them, and a rounding rounds them too.
    """
    inside = (inner for body in bodies(eqn) for inner in body.eqns)
    rounds = eqn.primitive.name == "reduce_precision" or (is_cast(eqn) and aval(eqn.outvars[0]).dtype.itemsize == 1)
    return rounds or eqn.primitive.name.startswith("custom_vjp") or any(map(has_nonlinear_backward, inside))


def rearrange(eqn: JaxprEqn, place: int, values: list[Any]) -> list[Any] | None:
    """The results of an operation that a layout may have, on wider numbers than those of the program.

    Args:
      eqn: an operation on parameters and constants.
      place: the first operand that comes from parameters.
      values: the operands, of which those from parameters are in their wider dtype.

    Returns:
      None for any other operation.
    """
    if is_cast(eqn):
        return values if is_real(eqn.outvars[0]) else None
    if _scaled(eqn, place):
        values[1 - place] = jnp.asarray(values[1 - place]).astype(values[place].dtype)
    elif eqn.primitive.name == "concatenate":
        values = [x.astype(jnp.result_type(*values)) for x in values]
    elif not (_moved(eqn) or _part(eqn, 0)):
        return None
    return evaluate(eqn, *values)


def _moved(eqn: JaxprEqn) -> Any:
    """An operation that moves the numbers of its operand and changes none, or only their sign or dtype.

    A cast to complex numbers is another: of a gradient that goes back through it the imaginary part is dropped.
    """
    name = eqn.primitive.name
    known = name in _REARRANGING or is_cast(eqn) or _is_reshape(eqn)
    if len(eqn.invars) > 1 or not known or not is_real(eqn.outvars[0]):
        return None
    return name, eqn.params["permutation"] if name == "transpose" else str(eqn.params)


def _scaled(eqn: JaxprEqn, place: int) -> Any:
    """A product of the operand at `place` and one constant number."""
    if (eqn.primitive.name, place) not in (("mul", 0), ("mul", 1), ("div", 0)):
        return None
    factor = eqn.invars[1 - place]
    if aval(factor).shape:
        return None
    # Of what is no literal the value is not known here: it is like no other.
    return "scaled", eqn.primitive.name, factor.val if isinstance(factor, Literal) else object()


def _part(eqn: JaxprEqn, output: int) -> Any:
    """A part of an array: the first and the last place of it, for each axis."""
    shape = aval(eqn.invars[0]).shape
    if eqn.primitive.name == "slice":
        return "part", eqn.params["start_indices"], eqn.params["limit_indices"], eqn.params["strides"]
    if eqn.primitive.name == "split":
        axis, sizes = eqn.params["axis"], eqn.params["sizes"]
        start = [0] * len(shape)
        start[axis] = int(sum(sizes[:output]))
        stop = list(shape)
        stop[axis] = start[axis] + int(sizes[output])
        return "part", tuple(start), tuple(stop), None
    return None


def is_scaled(layout: tuple[Any, ...]) -> bool:
    """Whether the numbers of a layout are those of the parameters times a factor."""
    return any(step[0] == "scaled" for step in layout)


def disjoint(one: Parameters, other: Parameters) -> bool:
    """Whether two values have no number of the parameters in common."""
    if not one.leaves & other.leaves:
        return True
    boxes = [value.layout[0] for value in (one, other) if value.layout and value.layout[0][0] == "part"]
    if len(one.leaves | other.leaves) > 1 or len(boxes) < 2:
        return False
    (_, starts, stops, _), (_, other_starts, other_stops, _) = boxes
    return any(
        stop <= other_start or other_stop <= start
        for start, stop, other_start, other_stop in zip(starts, stops, other_starts, other_stops, strict=True)
    )


def is_cast(eqn: JaxprEqn) -> bool:
    """Whether an operation changes the dtype."""
    return eqn.primitive.name == "convert_element_type"


def _is_reshape(eqn: JaxprEqn) -> bool:
    """Whether it only adds axes of size 1."""
    return eqn.primitive.name == "broadcast_in_dim" and aval(eqn.invars[0]).size == aval(eqn.outvars[0]).size
