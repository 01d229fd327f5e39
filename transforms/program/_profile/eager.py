"""A program evaluated operation by operation, as it is written, each timed: scans and loops iteration by iteration."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import CALLS, aval, called, evaluate, interpret
from ..._core.source_lines import source_of
from .._ir.cost import flops
from .._ir.hlo import HloProgram
from .._ir.provenance import Provenance
from .._ir.scopes import scope_of

# Instructions whose cost is known only once XLA has compiled them: see `_cost`.
_REWRITTEN = frozenset({"while", "reduce-window"})


@dataclass
class Cost:
    """The cost of all operations of one place together.

    Attributes:
      seconds: how long they took.
      count: how many there were.
      flops: their floating point operations.
      bytes: the bytes that they read and wrote.
    """

    seconds: float = 0.0
    count: int = 0
    flops: int = 0
    bytes: float = 0.0

    def add(self, seconds: float, count: int, flops: int, moved: float) -> None:
        """Add the cost of some operations."""
        self.seconds += seconds
        self.count += count
        self.flops += flops
        self.bytes += moved


class Eager:
    """One evaluation.

    Args:
      known: flops and bytes by the `id` of an operation; filled here, and shared by evaluations of one program.

    Attributes:
      costs: the cost of the operations of each place.
    """

    def __init__(self, known: dict[int, tuple[int, int]]) -> None:
        self.costs: dict[Provenance, Cost] = defaultdict(Cost)
        self._known = known

    def run(self, closed: Any, args: Sequence[Any], scope: str = "", source: str = "") -> list[Any]:
        """Evaluate a program whose scopes are all inside `scope`, and which is called in the line `source`."""
        return interpret(closed.jaxpr, closed.consts, args, partial(self._visit, scope, source))

    def _visit(self, scope: str, source: str, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Evaluate and time one operation, or those of the program that it runs."""
        name = eqn.primitive.name
        scope = "/".join(filter(None, [scope, str(eqn.source_info.name_stack)]))
        source = source_of(eqn) or source
        if name in CALLS:
            return self.run(ClosedJaxpr(*called(eqn)), values, scope, source)
        if name in _LOOPS:
            return _LOOPS[name](eqn.params, values, lambda body, args: self.run(body, args, scope, source))
        begin = time.perf_counter()
        out = jax.block_until_ready(evaluate(eqn, *values))
        took = time.perf_counter() - begin
        if id(eqn) not in self._known:
            self._known[id(eqn)] = _cost(eqn, values)
        self.costs[Provenance(name, scope_of(f"{scope}/{name}")[1], source)].add(took, 1, *self._known[id(eqn)])
        return out


def _cost(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[int, int]:
    """Return the flops and bytes of one operation, by the HLO that it is lowered to."""
    if eqn.effects:  # lowered alone it might run its effect, or need a token
        return 0, 0
    lowered: Any = jax.jit(partial(evaluate, eqn)).lower(*values)
    program = HloProgram(lowered.as_text("hlo"))
    if any(x.opcode in _REWRITTEN for x in program.instructions.values()):
        # Only the compiled text has the number of a loop's iterations. And a cumulative sum is lowered as a window over
        # all elements before, of quadratic cost, which XLA rewrites.
        program = HloProgram(lowered.compile().as_text())
    work = sum(times * flops(program, x) for x, times in program.runs())
    # Tokens have no size, and keys no bytes.
    avals = [x for x in map(aval, [*eqn.invars, *eqn.outvars]) if hasattr(x, "size") and hasattr(x.dtype, "itemsize")]
    return work, sum(x.size * x.dtype.itemsize for x in avals)


Run = Callable[[Any, Sequence[Any]], list[Any]]


def _scan(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    """Evaluate a scan as a loop of Python over the slices of `xs`."""
    shared, carried = scan_counts(params)
    constants, carry, xs = values[:shared], values[shared : shared + carried], values[shared + carried :]
    iterations = range(params["length"])
    ys: list[list[Any]] = []
    for i in reversed(iterations) if params["reverse"] else iterations:
        out = run(params["jaxpr"], [*constants, *carry, *(x[i] for x in xs)])
        carry = out[:carried]
        ys.append(out[carried:])
    if params["reverse"]:
        ys.reverse()
    if not ys:  # of length 0: nothing to stack
        empty = [x.aval for x in params["jaxpr"].jaxpr.outvars[carried:]]
        return [*carry, *(jnp.zeros((0, *x.shape), x.dtype) for x in empty)]
    return [*carry, *map(jnp.stack, zip(*ys, strict=True))]


def _while(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = values[:cond], values[cond:body], values[body:]
    while run(params["cond_jaxpr"], [*of_test, *carry])[0]:
        carry = run(params["body_jaxpr"], [*of_body, *carry])
    return carry


def _cond(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    which, *rest = values
    # An index out of range is clamped, as by `lax.switch`.
    return run(params["branches"][min(max(int(which), 0), len(params["branches"]) - 1)], rest)


_LOOPS: dict[str, Callable[[dict[str, Any], list[Any], Run], list[Any]]]
_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
