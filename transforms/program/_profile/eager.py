"""Evaluate a program operation by operation, and time each; scans and loops run iteration by iteration."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.compat import ClosedJaxpr, JaxprEqn, scan_counts
from ..._core.jaxpr import CALLS, aval, called, evaluate, interpret
from ..._core.source_lines import source_of
from .._ir.cost import flops
from .._ir.hlo import HloProgram
from .._ir.provenance import Provenance, scope_of

# Instructions whose cost is known only after XLA has compiled them: see `_cost`.
_REWRITTEN = frozenset({"while", "reduce-window"})


# The total seconds, number of runs, flops and bytes of the operations of each provenance.
Costs = dict[Provenance, np.ndarray]


def evaluate_timed(closed: Any, args: Sequence[Any], known: dict[int, tuple[int, int]]) -> tuple[list[Any], Costs]:
    """Evaluate a program, and return its results and costs.

    Args:
      closed: the program.
      args: its arguments.
      known: a cache of flops and bytes by the `id` of an operation, shared by the evaluations of one program.
    """
    costs: Costs = defaultdict(lambda: np.zeros(4))

    def run(scope: str, source: str, closed: Any, args: Sequence[Any]) -> list[Any]:
        return interpret(closed.jaxpr, closed.consts, args, partial(visit, scope, source))

    def visit(scope: str, source: str, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Evaluate and time one operation, or those of its inner program, in `scope` and called at line `source`."""
        name = eqn.primitive.name
        scope, source = f"{scope}/{eqn.source_info.name_stack}", source_of(eqn) or source
        if name in CALLS:
            return run(scope, source, ClosedJaxpr(*called(eqn)), values)
        if name in _LOOPS and eqn.params.get("length") != 0:  # a scan without iterations has no ys to stack
            return _LOOPS[name](eqn.params, values, partial(run, scope, source))
        begin = time.perf_counter()
        out = jax.block_until_ready(evaluate(eqn, *values))
        took = time.perf_counter() - begin
        if id(eqn) not in known:
            known[id(eqn)] = _cost(eqn, values)
        costs[Provenance(name, scope_of(f"{scope}/{name}")[1], source)] += (took, 1, *known[id(eqn)])
        return out

    return run("", "", closed, args), costs


def _cost(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[int, int]:
    """Return the flops and bytes of one operation, from the HLO that it is lowered to."""
    if eqn.effects:  # lowered separately, it might run its effect or need a token
        return 0, 0
    lowered: Any = jax.jit(partial(evaluate, eqn)).lower(*values)
    program = HloProgram(lowered.as_text("hlo"))
    if any(x.opcode in _REWRITTEN for x in program.instructions.values()):
        # Only the compiled text has the number of iterations of a loop. And a cumulative sum is lowered to a window
        # over all earlier elements, of quadratic cost, which XLA rewrites.
        program = HloProgram(lowered.compile().as_text())
    work = sum(times * flops(program, x) for x, times in program.runs())
    # Tokens have no size, and key dtypes no itemsize.
    avals = [x for x in map(aval, [*eqn.invars, *eqn.outvars]) if hasattr(x, "size") and hasattr(x.dtype, "itemsize")]
    return work, sum(x.size * x.dtype.itemsize for x in avals)


Run = Callable[[Any, Sequence[Any]], list[Any]]


def _scan(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    """Evaluate a scan as a Python loop over the slices of `xs`."""
    shared, carried = scan_counts(params)
    constants, carry, xs = values[:shared], values[shared : shared + carried], values[shared + carried :]
    ys: dict[int, list[Any]] = {}
    for i in range(params["length"])[:: -1 if params["reverse"] else 1]:
        out = run(params["jaxpr"], [*constants, *carry, *(x[i] for x in xs)])
        carry, ys[i] = out[:carried], out[carried:]
    return [*carry, *map(jnp.stack, zip(*(ys[i] for i in sorted(ys)), strict=True))]


def _while(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    cond, body = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_test, of_body, carry = values[:cond], values[cond:body], values[body:]
    while run(params["cond_jaxpr"], [*of_test, *carry])[0]:
        carry = run(params["body_jaxpr"], [*of_body, *carry])
    return carry


def _cond(params: dict[str, Any], values: list[Any], run: Run) -> list[Any]:
    which, *rest = values
    # Clamp an index out of range, as `lax.switch` does.
    return run(params["branches"][min(max(int(which), 0), len(params["branches"]) - 1)], rest)


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
