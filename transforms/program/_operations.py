"""The operations of a program as JAX wrote it, counted by what they do and the scopes they are in."""

from __future__ import annotations

from collections import Counter

from jax.extend.core import Jaxpr, JaxprEqn

from .._jaxpr import CALLS, bodies
from ._scopes import scope_of

Counts = Counter[tuple[str, str]]


def count_operations(jaxpr: Jaxpr) -> Counts:
    """How often each operation of each scope is run, of those that a result depends on.

    What a scan repeats counts as often as it does; what a `while` repeats, and each branch of a `cond`, counts once.
    """
    counts: Counts = Counter()
    _count(jaxpr, "", 1, counts)
    return counts


def _count(jaxpr: Jaxpr, scope: str, times: int, counts: Counts) -> None:
    needed = {id(x) for x in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if not (eqn.effects or any(id(x) in needed for x in eqn.outvars)):
            continue
        needed |= {id(x) for x in eqn.invars}
        name = eqn.primitive.name
        inside = "/".join(filter(None, [scope, str(eqn.source_info.name_stack)]))
        if name in CALLS or name in {"scan", "while", "cond"}:
            for body in _distinct(eqn):
                _count(body, inside, times * eqn.params.get("length", 1), counts)
        else:
            counts[name, scope_of(f"{inside}/{name}")[1]] += times


def _distinct(eqn: JaxprEqn) -> list[Jaxpr]:
    """What an operation runs: of a custom rule the function alone."""
    if eqn.primitive.name in CALLS:
        body = eqn.params[CALLS[eqn.primitive.name]]
        return [getattr(body, "jaxpr", body)]
    return bodies(eqn)
