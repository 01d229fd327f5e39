"""The operations of a program as JAX wrote it, counted by what they do and the scopes they are in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn

from ..._core.compat import scan_counts
from ..._core.jaxpr import CALLS, bodies, called
from .._ir.scopes import scope_of

Counts = Counter[tuple[str, str]]
# What runs a program among its parameters, beside the calls.
_RUNS = frozenset({"scan", "while", "cond", "shard_map"})


def count_operations(jaxpr: Jaxpr) -> Counts:
    """How often each operation of each scope is run, of those that a result depends on.

    What a scan repeats counts as often as it does; what a `while` repeats, and each branch of a `cond`, counts once.
    """
    counts: Counts = Counter()
    _count(jaxpr, [True] * len(jaxpr.outvars), "", 1, counts)
    return +counts


def _count(jaxpr: Jaxpr, wanted: Sequence[bool], scope: str, times: int, counts: Counts) -> list[bool]:
    """Count what leads to the outputs that are wanted, and tell which arguments that needs."""
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
    """Likewise for what an operation runs; of a custom rule that is the function alone."""
    name = eqn.primitive.name
    if name in CALLS:
        body, _ = called(eqn)
        # A body that was traced with more arguments than it is called with: all are needed.
        if (len(body.invars), len(body.outvars)) == (len(eqn.invars), len(eqn.outvars)):
            return _count(body, wanted, scope, times, counts)
    if name == "scan":
        (body,), (shared, carried) = bodies(eqn), scan_counts(eqn.params)
        wanted = list(wanted)
        while True:
            inputs = _count(body, wanted, scope, 0, Counter())
            # What is carried on from one turn to the next is needed if the next needs it.
            more = [a or b for a, b in zip(wanted[:carried], inputs[shared : shared + carried], strict=True)]
            if more == wanted[:carried]:
                return _count(body, wanted, scope, times * eqn.params["length"], counts)
            wanted[:carried] = more
    if name == "cond":
        each = [_count(body, wanted, scope, times, counts) for body in bodies(eqn)]
        return [True, *map(any, zip(*each, strict=True))]
    for body in bodies(eqn):
        _count(body, [True] * len(body.outvars), scope, times, counts)
    return [True] * len(eqn.invars)
