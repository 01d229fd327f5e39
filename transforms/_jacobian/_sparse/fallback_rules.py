"""Operations without a rule: find an equivalent program of other operations."""

from __future__ import annotations

import jax

from ..._core.compat import ClosedJaxpr, JaxprEqn, sparse_product
from ..._core.jaxpr import CALLS, aval, with_inner


def program_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return a program of other operations that computes the same as this operation; None if there is none."""
    if eqn.effects:
        return None
    compute = sparse_product(eqn.primitive.name) or eqn.primitive.impl
    shapes = [jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype) for x in eqn.invars]
    try:
        closed = jax.make_jaxpr(lambda *args: compute(*args, **eqn.params))(*shapes)
    except Exception:  # the implementation cannot be traced: it needs arrays
        return None
    same = [aval(x).shape for x in closed.jaxpr.outvars] == [aval(x).shape for x in eqn.outvars]
    # A primitive without such a program is implemented by compiling the primitive alone.
    kinds = {x.primitive.name for x in with_inner(closed.jaxpr.eqns)} - set(CALLS)
    return closed if same and kinds != {eqn.primitive.name} else None
