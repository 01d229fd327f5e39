"""Convolutions whose derivatives are fast inside a loop on a CPU: `with_scannable_gradients`.

XLA's CPU backend computes a convolution inside a loop fast only in one layout, channels last. The gradients are
convolutions in other layouts, many times slower than outside a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._core.compat import JaxprEqn
from .._core.jaxpr import at_source, aval, bodies, evaluate, interpret
from .as_products import WITH_BODIES, convolved, has_convolution, plain, run_by, with_bodies
from .by_rows import gathered, scattered
from .convolution import Convolution


def with_scannable_gradients(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fun` with convolutions whose derivatives are products, for a loop on a CPU; equal to rounding.

    Forward convolutions stay if their layout is channels last. Custom derivative rules are left unchanged.
    """
    return run_by(partial(interpret, visit=_visit), fun)


def _visit(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    """Return the results of one operation, with the convolutions in it replaced."""
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
    """Return a convolution whose derivatives are products; since it is bilinear, they are convolutions too.

    Slices of the operand are recomputed where needed: stored, they would copy it once for each window position. Half
    precision is accumulated in single precision, as in XLA.
    """
    half = jnp.issubdtype(lhs.dtype, jnp.floating) and jnp.finfo(lhs.dtype).bits < 32
    by_xla = partial(eqn.primitive.bind, **eqn.params)
    of = Convolution(eqn)
    rows = (
        _is_channels_last(eqn) and of.groups == 1 and rhs.shape[-2] > 2 and 0 not in (*lhs.shape, *rhs.shape, *of.shape)
    )
    plain_steps = set(of.strides) | set(of.spread) == {1}

    # No barriers against common-subexpression elimination, as JAX advises for a scan body, where they only cost time.
    @partial(jax.checkpoint, prevent_cse=False)
    def as_products(lhs: Any, rhs: Any) -> Any:
        operands = (x.astype(jnp.float32) if half else x for x in (lhs, rhs))
        out = convolved(eqn, *operands)
        return by_xla(lhs, rhs) if out is None else plain(out)

    @partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
    def by_rows(ways: Callable[..., Any], lhs: Any, rhs: Any) -> Any:
        operands = (x.astype(jnp.float32) if half else x for x in (lhs, rhs))
        return ways(of, *operands).astype(aval(eqn.outvars[0]).dtype)

    def of_input(lhs: Any, rhs: Any) -> Any:
        return by_rows(scattered, lhs, rhs) if rows and plain_steps else as_products(lhs, rhs)

    def of_weights(lhs: Any, rhs: Any) -> Any:
        return by_rows(gathered, lhs, rhs) if rows else as_products(lhs, rhs)

    @jax.custom_jvp
    def convolve(lhs: Any, rhs: Any) -> Any:
        return by_xla(lhs, rhs) if _is_channels_last(eqn) else as_products(lhs, rhs)

    @partial(convolve.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        """Return the convolution and its derivative, by the product rule."""
        (lhs, rhs), (lhs_tangent, rhs_tangent) = primals, tangents
        # The product rule, d(x * w) = dx * w + x * dw. An operand that is not differentiated has a symbolic zero as its
        # tangent, and costs nothing.
        terms = []
        if not isinstance(lhs_tangent, SymbolicZero):
            terms.append(of_input(lhs_tangent, rhs))
        if not isinstance(rhs_tangent, SymbolicZero):
            terms.append(of_weights(lhs, rhs_tangent))
        return convolve(lhs, rhs), sum(terms[1:], *terms[:1])

    return convolve(lhs, rhs)


def _is_channels_last(eqn: JaxprEqn) -> bool:
    """Return whether a convolution has layout NHWC for images and HWIO for weights, which is fast in loops."""
    lhs, rhs, out = eqn.params["dimension_numbers"]
    places = tuple(range(1, len(lhs) - 1))
    last = (0, len(lhs) - 1, *places)
    weights = (len(lhs) - 1, len(lhs) - 2, *(i - 1 for i in places))
    return (lhs, rhs, out) == (last, weights, last) and eqn.params["batch_group_count"] == 1
