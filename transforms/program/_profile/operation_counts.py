"""The operations of a jaxpr, counted by primitive and scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import CALLS, bodies, called
from .._ir.scopes import scope_of

Counts = Counter[tuple[str, str]]
# Operations, besides calls, that run a program among their parameters.
_RUNS = frozenset({"scan", "while", "cond", "shard_map"})


def count_operations(jaxpr: Jaxpr) -> Counts:
    """Count how often each operation of each scope is run, of those that a result depends on.

    The body of a scan counts once for each iteration; the body of a `while`, and each branch of a `cond`, once.
    """
    counts: Counts = Counter()
    _count(jaxpr, [True] * len(jaxpr.outvars), "", 1, counts)
    return +counts  # without zeros, which the body of a scan of length 0 leaves


def _count(jaxpr: Jaxpr, wanted: Sequence[bool], scope: str, times: int, counts: Counts) -> list[bool]:
    """Count the operations that lead to the outputs that are wanted; return for each argument whether they need it."""
    # As `jaxpr` is in order, one pass backwards finds all that is needed. XLA drops the rest, so it is not counted.
    needed = {id(x) for x, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted}
    for eqn in reversed(jaxpr.eqns):
        outputs = [id(x) in needed for x in eqn.outvars]
        if not (any(outputs) or eqn.effects):
            continue
        name = eqn.primitive.name
        inside = "/".join(filter(None, [scope, str(eqn.source_info.name_stack)]))
        if name in CALLS or name in _RUNS:
            inputs = _inside(eqn, outputs, inside, times, counts)
        else:
            counts[name, scope_of(f"{inside}/{name}")[1]] += times
            inputs = [True] * len(eqn.invars)
        needed |= {id(x) for x, is_needed in zip(eqn.invars, inputs, strict=True) if is_needed}
    return [id(x) in needed for x in jaxpr.invars]


def _inside(eqn: JaxprEqn, wanted: list[bool], scope: str, times: int, counts: Counts) -> list[bool]:
    """Do the same for the programs that an operation runs; of a custom derivative rule that is the function alone."""
    name = eqn.primitive.name
    if name in CALLS:
        return _count(called(eqn)[0], wanted, scope, times, counts)
    if name == "scan":
        (body,), (shared, carried) = bodies(eqn), scan_counts(eqn.params)
        wanted = list(wanted)
        while True:
            inputs = _count(body, wanted, scope, 0, Counter())
            # A part of the carry is needed if the next iteration needs it, and so on until there is no change.
            more = [a or b for a, b in zip(wanted[:carried], inputs[shared : shared + carried], strict=True)]
            if more == wanted[:carried]:
                return _count(body, wanted, scope, times * eqn.params["length"], counts)
            wanted[:carried] = more
    if name == "cond":
        each = [_count(body, wanted, scope, times, counts) for body in bodies(eqn)]
        return [True, *map(any, zip(*each, strict=True))]
    # Loops with a condition, and what runs on several devices: all is wanted and needed.
    for body in bodies(eqn):
        _count(body, [True] * len(body.outvars), scope, times, counts)
    return [True] * len(eqn.invars)
