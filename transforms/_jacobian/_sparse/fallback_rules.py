"""Operations without a rule of their own: a program of other operations that does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._core.jaxpr import CALLS, aval, with_inner


def program_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return a program of other operations that computes the same as an operation; None if there is none."""
    if eqn.effects:
        return None
    compute = _PROGRAMS.get(eqn.primitive.name, eqn.primitive.impl)
    shapes = [jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype) for x in eqn.invars]
    try:
        closed = jax.make_jaxpr(lambda *args: compute(*args, **eqn.params))(*shapes)
    except Exception:  # it wants arrays
        return None
    same = [aval(x).shape for x in closed.jaxpr.outvars] == [aval(x).shape for x in eqn.outvars]
    # A primitive without one is implemented as a compiled program of itself alone.
    kinds = {x.primitive.name for x in with_inner(closed.jaxpr.eqns)} - set(CALLS)
    return closed if same and kinds != {eqn.primitive.name} else None


# ---- Products with sparse matrices


def _bcoo_product(data: Any, indices: Any, other: Any, *, dimension_numbers: Any, lhs_spinfo: Any, **_: Any) -> Any:
    """Multiply each number of the data by the numbers of `other` that it meets, and add the terms where they belong."""
    shape = lhs_spinfo.shape
    batched, last = indices.ndim - 2, indices.ndim - 1
    sparse = range(batched, batched + indices.shape[-1])
    whole = shape[:batched] + data.shape[batched:]
    data = jnp.broadcast_to(data, whole)
    thin = (*indices.shape[:last], *(1,) * (len(whole) - last))
    coordinates = []
    for d in range(len(shape)):
        if d in sparse:
            at = indices[..., d - batched].reshape(thin)
        else:
            axis = d if d < batched else d - len(shape) + len(whole)
            at = jnp.arange(shape[d]).reshape([-1 if i == axis else 1 for i in range(len(whole))])
        coordinates.append(jnp.broadcast_to(at, whole).ravel())
    (contracted, across), (batch, along) = dimension_numbers
    free = [d for d in range(other.ndim) if d not in (*across, *along)]
    rows = other.transpose(*along, *across, *free)
    met = [coordinates[d] for d in (*batch, *contracted)]
    found = rows.at[tuple(met)].get(mode="fill", fill_value=0) if met else rows[None]
    terms = data.reshape(-1, *(1,) * len(free)) * found
    to = [*batch, *(d for d in range(len(shape)) if d not in (*batch, *contracted))]
    if not to:
        return terms.sum(0)
    out = jnp.zeros((*(shape[d] for d in to), *(other.shape[d] for d in free)), terms.dtype)
    return out.at[tuple(coordinates[d] for d in to)].add(terms, mode="drop")


def _bcsr_product(data: Any, indices: Any, ends: Any, other: Any, *, lhs_spinfo: Any, **params: Any) -> Any:
    from jax.experimental.sparse import BCSR

    matrix = BCSR((data, indices, ends), shape=lhs_spinfo.shape).to_bcoo()
    return _bcoo_product(matrix.data, matrix.indices, other, lhs_spinfo=lhs_spinfo, **params)


_PROGRAMS: dict[str, Callable[..., Any]] = {"bcoo_dot_general": _bcoo_product, "bcsr_dot_general": _bcsr_product}
