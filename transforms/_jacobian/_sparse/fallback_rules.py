"""Operations without a rule of their own: a program that does the same, or the batch axes that JAX's `vmap` proves."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..._core.jaxpr import CALLS, aval, called
from .index_sets import mixed

# Factorisations and transforms: each number of a result does depend on its whole matrix, or line.
_MIXES_ITS_MATRIX = frozenset(
    """
    cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
    symmetric_product tridiagonal
    """.split()  # noqa: SIM905 (words read better)
)


def sets_by_batches(eqn: JaxprEqn, values: list[Any]) -> tuple[list[Any], bool]:
    """Return sets over all of a matrix, or line, for operations that mix exactly these, else over all operands.

    Of other operations the rule for `vmap` does not prove how large a slice must be.

    Returns:
      The sets; whether it is known that they have no entry too many.
    """
    tight = eqn.primitive.name in _MIXES_ITS_MATRIX
    axes = range(_mapped_axes(eqn) if tight else 0)
    return mixed(eqn, values, [axes] * len(eqn.invars), [axes] * len(eqn.outvars)), tight


def _mapped_axes(eqn: JaxprEqn) -> int:
    """Return how many leading axes an operation is mapped over, as JAX's own rule proves.

    If mapping the operation on the slices gives this very operation, each slice of its results is made of the same
    slices of its operands.
    """
    avals = [aval(x) for x in (*eqn.invars, *eqn.outvars)]
    most = min(x.ndim for x in avals)
    for count in range(most, 0, -1):
        if len({x.shape[:count] for x in avals}) == 1 and _is_mapped(eqn, count):
            return count
    return 0


def _is_mapped(eqn: JaxprEqn, count: int) -> bool:
    """Return whether `vmap` over the first `count` axes of the operation on one slice gives this very operation."""

    def bind(*slices: Any) -> Any:
        return eqn.primitive.bind(*slices, **eqn.primitive.get_bind_params(eqn.params))

    mapped = reduce(lambda fun, _: jax.vmap(fun), range(count), bind)
    slices = [jax.ShapeDtypeStruct(aval(x).shape[count:], aval(x).dtype) for x in eqn.invars]
    try:
        # The rule for `vmap` does not look at the slices: only lowering shows that they are too small.
        one = jax.tree.leaves(jax.jit(bind).lower(*slices).out_info)
        if [x.shape for x in one] != [aval(x).shape[count:] for x in eqn.outvars]:
            return False
        other = _single_eqn(jax.make_jaxpr(mapped)(*map(_struct, eqn.invars)).jaxpr)
        if other is None or other.primitive is not eqn.primitive or other.params != eqn.params:
            return False
        return all(aval(x).shape == aval(y).shape for x, y in zip(eqn.outvars, other.outvars, strict=True))
    except Exception:  # no rule, or one that does not take the slices
        return False


def _single_eqn(jaxpr: Jaxpr) -> JaxprEqn | None:
    """Return the only operation of a program, if there is one, and it has the program's arguments and results."""
    if len(jaxpr.eqns) != 1:
        return None
    (eqn,) = jaxpr.eqns
    if list(eqn.invars) != list(jaxpr.invars) or list(eqn.outvars) != list(jaxpr.outvars):
        return None
    return _single_eqn(called(eqn)[0]) if eqn.primitive.name in CALLS else eqn


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval(x).shape, aval(x).dtype)


def program_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return a program of other operations that computes the same as an operation; None if there is none."""
    name = eqn.primitive.name
    if eqn.effects or name in _MIXES_ITS_MATRIX:
        return None
    # Some primitives are implemented in terms of others, which have rules.
    compute = _PROGRAMS.get(name, eqn.primitive.impl)
    try:
        closed = jax.make_jaxpr(lambda *args: compute(*args, **eqn.params))(*map(_struct, eqn.invars))
    except Exception:  # it wants arrays
        return None
    same = [aval(x).shape for x in closed.jaxpr.outvars] == [aval(x).shape for x in eqn.outvars]
    only = _single_eqn(closed.jaxpr)
    return closed if same and (only is None or only.primitive is not eqn.primitive) else None


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
