"""`laplacian`: the trace of a Hessian in one forward pass, which carries first derivatives and Laplacians.

Each value x of a program carries its derivatives J along all directions, and its Laplacian L. For y = f(x), with a sum
over the directions k,

    J_y = f'(x) J        L_y = f'(x) L + sum_k f''(x)[J_k, J_k].

The second term is zero where an operation is linear, so that a layer `x @ W` costs one product for each direction, and
tanh a few operations on each element. Forward-over-reverse mode evaluates each layer twice for each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax

from .._calls.call import Call
from .._core.arguments import Argnums
from .._core.compat import Jaxpr, JaxprEqn, NeedsValues
from .._core.jaxpr import PLAIN, aval, called, evaluate, interpret
from .._core.weak_types import weak_like
from .._jacobian.dense import checkpoint
from .directions import Slopes, aligned, of_coordinates, product_over_positions
from .hessian_trace import diagonal, of_scalar, total

P = ParamSpec("P")

# Elementwise and not linear in any operand; so is a division by what moves.
_CURVED = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 integer_pow lgamma
    log log1p log2 logistic one_minus_square polynomial pow rsqrt sin sinh sqrt square tan tanh
    """.split()  # noqa: SIM905 (words read better)
)

# A value, its derivatives along all directions (`Slopes`), and its Laplacian; both are None for a constant.
Triple = tuple[Any, Any, Any]


def laplacian(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
) -> Callable[P, Any]:
    """Compute the Laplacian of a scalar function, the trace of its Hessian, exactly and in one forward pass.

    Args:
      fun: as for `hessian_trace`.
      argnums: as for `hessian_trace`.
      has_aux: as for `hessian_trace`.
      chunk_size: how many directions to carry at a time; None carries all at once.
      memory_budget: as for `hessian_trace`.

    Returns:
      A function of the same arguments that returns a scalar.

    Raises:
      TypeError, ValueError: as for `hessian_trace`.

    Warns:
      UserWarning: as for `jacfwd`.

    Cost:
      A third to two thirds of the operations of `hessian_trace` for networks, and memory for a copy of the largest
      intermediate values for each direction. As long as a program treats the positions along axis 0 of its only array
      separately (one layer for each particle), the directions of all positions share such a copy. Loops and branches
      are differentiated twice as a whole. Functions that cannot be traced this way (`jax.custom_vjp`, branches on
      values) are computed as by `hessian_trace`. Wrap the result in `jax.jit`.
      Determinants take the inverse of their matrix: where it is nearly singular (conditions of 1e4 in float32), the
      relative error was 3e-3 in the median, and 1e-3 for second derivatives by `jax.jacfwd`.

    Source:
      Li et al. 2024, "A computational framework for neural network-based variational Monte Carlo with Forward
      Laplacian".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import laplacian
      >>> laplacian(lambda x: jnp.exp(x[0]) * x[1] ** 2)(jnp.array([0.0, 3.0]))
      Array(11., dtype=float32)
    """
    return of_scalar("laplacian", fun, argnums, has_aux, chunk_size, memory_budget, _laplacian)


def _laplacian(call: Call, chunk_size: int | None) -> jax.Array:
    """Return the Laplacian, in one pass over the program if it can be traced, else as the sum of the diagonal."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(call.primals)]
    size = sum(map(jnp.size, leaves))
    try:
        closed = jax.make_jaxpr(lambda *primals: call(*primals)[0])(*call.primals)
        if not size:
            return jnp.zeros((), closed.out_avals[0].dtype)

        def along(directions: jax.Array | None) -> jax.Array:
            return weak_like(_along(closed.jaxpr, closed.consts, leaves, directions), *leaves)

        if chunk_size is None or chunk_size >= size:
            return along(jnp.arange(size) if len(leaves) > 1 else None)
        # Directions beyond `size`, which pad the last chunk, match no element and so are zero vectors.
        chunks = jnp.arange(-(-size // chunk_size) * chunk_size).reshape(-1, chunk_size)
        return weak_like(lax.map(checkpoint(along), chunks).sum(), *leaves)
    except (TypeError, *NeedsValues):  # a jax.custom_vjp, or a branch on values
        return total(diagonal("laplacian", call, chunk_size))


def _along(jaxpr: Jaxpr, consts: Sequence[Any], leaves: Sequence[jax.Array], directions: jax.Array | None) -> jax.Array:
    """Return the sum of second derivatives along unit vectors.

    Args:
      jaxpr: the program.
      consts: the values of its constants.
      leaves: its arguments.
      directions: indices into the concatenated leaves; None for all, with a single leaf.
    """
    start, triples = 0, []
    for leaf in leaves:
        if directions is None:
            triples.append((leaf, of_coordinates(leaf), jnp.zeros_like(leaf)))
            continue
        places = jnp.arange(start, start + leaf.size)
        units = (directions[:, None] == places).astype(leaf.dtype).reshape(-1, *leaf.shape)
        triples.append((leaf, Slopes(units), jnp.zeros_like(leaf)))
        start += leaf.size
    ((value, _, found),) = _propagate(jaxpr, consts, triples)
    return jnp.zeros_like(value) if found is None else found


def _propagate(jaxpr: Jaxpr, consts: Sequence[Any], triples: Sequence[Triple]) -> list[Triple]:
    """Return the triples of a program's results."""
    return interpret(jaxpr, consts, triples, _visit, lambda value: (value, None, None))


def _visit(eqn: JaxprEqn, triples: list[Triple]) -> list[Triple]:
    """Return the results of one operation, with their derivatives and Laplacians."""
    name = eqn.primitive.name
    values = [value for value, *_ in triples]
    moving = [i for i, (_, slopes, _) in enumerate(triples) if slopes is not None]
    # Operations with rules of their own (`CUSTOM`) are not interpreted here: `jax.jvp` below applies them.
    if moving and _is_slogdet(eqn):
        return _of_slogdet(eqn, *triples)
    if name in PLAIN:
        return _propagate(*called(eqn), triples)
    out = evaluate(eqn, *values)
    smooth = [j for j, x in enumerate(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not moving or not smooth or name == "stop_gradient":
        return [(x, None, None) for x in out]

    def of_moving(*moved: Any) -> list[Any]:
        given = dict(zip(moving, moved, strict=True))
        found = evaluate(eqn, *(given.get(i, x) for i, x in enumerate(values)))
        return [found[j] for j in smooth]

    points, laplacians = (tuple(triples[i][part] for i in moving) for part in (0, 2))
    given = [slopes for _, slopes, _ in triples]
    over = product_over_positions(eqn, values, given)
    if over is not None:
        return [(out[0], over, jax.jvp(of_moving, points, laplacians)[1][0])]
    given, axis = aligned(eqn, given)
    slopes = tuple(x.array for x in given if x is not None)

    curved = name in _CURVED or (name == "div" and moving == [1])
    if curved and len(moving) == 1 and jnp.shape(points[0]) == jnp.shape(out[0]):
        return [_of_each_element(name, out[0], of_moving, points[0], Slopes(slopes[0], axis), laplacians[0])]

    # The second is zero where the operation is linear: JAX drops such tangents, and XLA computations with zeros.
    def both(directions: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:  # f'(x) d and f''(x)[d, d]
        return jax.jvp(lambda *points: jax.jvp(of_moving, points, directions)[1], points, directions)

    firsts, seconds = jax.vmap(both)(slopes)
    carried = jax.jvp(of_moving, points, laplacians)[1]
    results: list[Triple] = [(x, None, None) for x in out]
    for j, slope, curvature, bent in zip(smooth, firsts, carried, seconds, strict=True):
        results[j] = out[j], Slopes(slope, axis), curvature + bent.sum(axis=0)
    return results


def _of_each_element(name: str, out: Any, fun: Callable[[Any], list[Any]], x: Any, moved: Slopes, bent: Any) -> Triple:
    """Return the triple of an elementwise function: with f' and f'' once, instead of once for each direction."""
    if name == "tanh":  # five operations for each number, nine by the rule of JAX
        first = (1 - out) * (1 + out)
        second = -2 * out * first
    else:
        ones = jnp.ones_like(x)
        first, second = jax.jvp(lambda x: jax.jvp(fun, (x,), (ones,))[1][0], (x,), (ones,))
    return out, moved._replace(array=first * moved.array), first * bent + second * (moved.array**2).sum(axis=0)


def _is_slogdet(eqn: JaxprEqn) -> bool:
    """Return whether an operation is a call of `jnp.linalg.slogdet`, possibly mapped, with real matrices."""
    if eqn.primitive.name != "jit" or eqn.params["name"] != "slogdet":
        return False
    matrix = aval(eqn.invars[0])
    if not jnp.issubdtype(matrix.dtype, jnp.floating) or matrix.shape[-1:] != matrix.shape[-2:-1]:
        return False
    # A user's function may have that name. JAX keeps traces, so that equal calls have the same program.
    return any(eqn.params["jaxpr"] is program for program in _programs_of_slogdet(matrix))


def _programs_of_slogdet(matrix: Any) -> Iterator[Any]:
    for method in (None, "lu", "qr"):
        call = partial(jnp.linalg.slogdet, method=method) if method else jnp.linalg.slogdet
        for _ in range(matrix.ndim - 1):
            yield from (eqn.params.get("jaxpr") for eqn in jax.make_jaxpr(call)(matrix).eqns)
            call = jax.vmap(call)


def _of_slogdet(eqn: JaxprEqn, triple: Triple) -> list[Triple]:
    """Return the sign of determinants, and the logarithm of their magnitude with derivatives and Laplacian.

    With the inverse matrix V, the first derivatives are tr(V J) and the second ones -tr(V J V J), which takes one
    product of matrices for each direction. The rule of JAX solves two systems of equations instead. If each direction
    moves one row or column of the matrix, as that of an electron in a Slater determinant does, J has rank one, and
    tr(V J V J) = tr(V J)².
    """
    matrix, moved, bent = triple
    sign, logarithm = evaluate(eqn, matrix)
    inverse = jnp.linalg.inv(matrix)
    transposed = jnp.swapaxes(inverse, -1, -2)
    curvature = (transposed * bent).sum((-2, -1))
    last = matrix.ndim - 1
    if moved.axis in (last - 1, last):
        # (directions of a row, ..., rows): one number for each direction, which then becomes a row of its own.
        each = (transposed * moved.array).sum(last + (moved.axis != last))
        slope = jnp.moveaxis(each, -1, 0).reshape(-1, *each.shape[1:-1])
        return [(sign, None, None), (logarithm, Slopes(slope), curvature - (slope**2).sum(axis=0))]
    kept = jnp.matmul(inverse, moved.array, precision="highest")  # accelerators round factors by default
    seconds = (kept * jnp.swapaxes(kept, -1, -2)).sum((0, -2, -1))
    slope = (transposed * moved.array).sum((-2, -1))
    return [(sign, None, None), (logarithm, Slopes(slope, moved.axis), curvature - seconds)]
