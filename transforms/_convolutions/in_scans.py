"""Convolutions whose derivatives are quick inside a loop on a CPU: `with_scannable_gradients`.

XLA's CPU backend computes a convolution inside a loop well if its axes are in one order, channels last. Its gradients
are convolutions of other orders, many times slower than outside of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from .._core.jaxpr import at_source, bodies, evaluate, interpret
from .as_products import WITH_BODIES, convolved, has_convolution, plain, run_by, with_bodies


def with_scannable_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun` with convolutions whose derivatives are products, for a loop on a CPU; equal to rounding.

    Convolutions in the layout that XLA computes as it is stay, and so do custom derivative rules and what is inside.
    """
    return run_by(partial(interpret, visit=_visit), fun)


def _visit(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Return the results of one operation, with convolutions replaced in it."""
    name = eqn.primitive.name
    if name == "conv_general_dilated":
        with at_source(eqn):
            return [_convolve(eqn, *values)]
    if not any(map(has_convolution, bodies(eqn))):
        return evaluate(eqn, *values)
    if name == "jit":
        body = eqn.params["jaxpr"]
        with at_source(eqn):
            return interpret(body.jaxpr, body.consts, values, _visit)
    return evaluate(with_bodies(eqn, partial(interpret, visit=_visit)) if name in WITH_BODIES else eqn, *values)


def _convolve(eqn: JaxprEqn, lhs: Any, rhs: Any) -> Any:
    """Return a convolution whose derivatives are products: it is linear in each operand, so they are convolutions too.

    Slices of the operand are recomputed where they are needed: held, they would be as many copies as the window has
    positions. Half precision is added up in single, as XLA does.
    """
    half = jnp.issubdtype(lhs.dtype, jnp.floating) and jnp.finfo(lhs.dtype).bits < 32
    by_xla = partial(eqn.primitive.bind, **eqn.params)

    # Without barriers against common subexpressions, as JAX advises for the body of a scan, where they only cost time.
    @partial(jax.checkpoint, prevent_cse=False)
    def as_products(lhs: Any, rhs: Any) -> Any:
        operands = (x.astype(jnp.float32) if half else x for x in (lhs, rhs))
        out = convolved(eqn, *operands)
        return by_xla(lhs, rhs) if out is None else plain(out)

    @jax.custom_jvp
    def convolve(lhs: Any, rhs: Any) -> Any:
        return by_xla(lhs, rhs) if _is_channels_last(eqn) else as_products(lhs, rhs)

    @partial(convolve.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        """Return the convolution and its derivative, by the product rule."""
        (lhs, rhs), (lhs_tangent, rhs_tangent) = primals, tangents
        # The product rule, d(x * w) = dx * w + x * dw. An operand that is not differentiated costs nothing: its tangent
        # is a symbolic zero.
        terms = []
        if not isinstance(lhs_tangent, SymbolicZero):
            terms.append(as_products(lhs_tangent, rhs))
        if not isinstance(rhs_tangent, SymbolicZero):
            terms.append(as_products(lhs, rhs_tangent))
        return convolve(lhs, rhs), sum(terms[1:], *terms[:1])

    return convolve(lhs, rhs)


def _is_channels_last(eqn: JaxprEqn) -> bool:
    """Return whether a convolution has layout NHWC for images and HWIO for weights, at which XLA is quick in loops."""
    lhs, rhs, out = eqn.params["dimension_numbers"]
    places = tuple(range(1, len(lhs) - 1))
    last = (0, len(lhs) - 1, *places)
    weights = (len(lhs) - 1, len(lhs) - 2, *(i - 1 for i in places))
    return (lhs, rhs, out) == (last, weights, last) and eqn.params["batch_group_count"] == 1
