"""`derivative`: derivatives of any order, by Taylor mode where it is as accurate as nested forward mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from ._calls.call import check_dtypes
from ._core.arguments import argument_name, check_callable, check_count, wrap_like
from ._core.compat import ClosedJaxpr, Jaxpr, JaxprEqn, NeedsValues, jaxpr_as_fun, jet_rules
from ._core.jaxpr import PLAIN, aval, called, evaluate, interpret
from ._models.mutation import call_with_models, refuse_changes
from ._models.split_model import bound_model, refuse_shared_state, split_tree

P = ParamSpec("P")
R = TypeVar("R")

# Primitives whose outputs have no derivative: their Taylor terms are zero.
_CONSTANT = frozenset("and ceil eq floor ge gt is_finite le lt ne not or round sign stop_gradient xor".split())  # noqa: SIM905 (words read better)

# Primitives whose rule in jet agrees with nested jvp, to rounding, wherever both are finite. These rules in jet are not
# trusted; all were measured against nested jvp:
#   wrong or failing: atanh (NaN outside its domain), clamp, rem, erf_inv, convert_element_type to integers, gather with
#     mode "fill", abs (1 at NaN, where nested jvp has NaN), custom rules (ignored);
#   NaN where the derivative is finite or infinite: sqrt, rsqrt, log, log1p and pow at and below zero, atan2 at zero,
#     div and negative powers at poles, polynomial and one_minus_square at infinity; max, min, cummax and cummin lose
#     NaN;
#   cancellation: tanh, expm1, log1p, asinh and atanh near zero (no correct digit of tanh(1e-8)), acosh and erfc.
_EXACT = frozenset(
    """
    add add_any broadcast_in_dim complex concatenate conj conv_general_dilated convert_element_type copy cos cosh
    cumprod cumsum dot_general dynamic_slice dynamic_update_slice erf exp fft imag logistic mul neg pad real reduce_max
    reduce_min reduce_sum reduce_window_sum reshape rev scatter-add select_n sin sinh slice split square squeeze stack
    sub transpose unstack
    """.split()  # noqa: SIM905 (words read better)
)

# Linear in each operand: if the other operands are constant, the primitive is applied to each coefficient by itself.
# The rules of jet would add products with zeros, which XLA has to compute, since 0 * inf is not 0.
_MULTILINEAR = frozenset(["conv_general_dilated", "dot_general", "mul"])


# The lowest order with Taylor mode. Below it nested tangents are as fast or faster, since XLA merges their equal
# operations, and recognizes the derivatives of a sine or an exponential that repeat. But each order doubles the number
# of tangents, and the time of tracing and compiling them.
_FIRST = 6


class _Inexact(Exception):
    """Taylor mode would be less accurate than nested forward mode."""


def derivative(fun: Callable[P, R], order: int) -> Callable[P, R]:
    """Differentiate `fun` `order` times with respect to its first argument, along the direction of ones.

    Equals `jax.jvp` with tangents of ones, nested `order` times; for an elementwise function this is the derivative at
    each element. From order 6 on it uses one Taylor-mode pass with the rules of `jax.experimental.jet` if those of all
    primitives that depend on the argument are as accurate as nesting. Otherwise it uses nested forward mode: for lower
    orders, loops, branches, sorting, solving, custom rules, half precision, and functions such as `tanh` and `log`.
    Where `fun` or a derivative overflows, one mode may give an infinity and the other NaN.

    Args:
      fun: a function, a bound method, or a module that does not change its state. Its first argument is a
        floating-point array or a pytree of them, passed by position; all other arguments are held constant. Its outputs
        are floating-point arrays.
      order: the number of differentiations. 0 gives `fun` itself.

    Returns:
      A function of the same arguments that returns the derivative, with the structure, shapes and dtypes of the output.

    Raises:
      TypeError: `fun` is not callable; `order` is not an integer; the first argument or an output is not
        floating-point.
      ValueError: `order` is negative; there is no positional argument; a module would change its own state (BatchNorm
        in training, dropout); modules share a variable.

    Cost:
      Taylor mode: about order² / 2 evaluations of `fun`, and memory for `order` times its intermediates. Nested forward
      mode: up to 3 to the power of `order` evaluations, of which XLA merges most under `jax.jit`, so that up to order 5
      it takes no longer than Taylor mode. `fun` is traced at every call: wrap the result in `jax.jit`.

    Source:
      `jax.experimental.jet`; Griewank and Walther, Evaluating Derivatives, chapter 13; `mindspore.ops.derivative`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import derivative
      >>> derivative(lambda x: x**4, 2)(jnp.array([1.0, 2.0]))
      Array([12., 48.], dtype=float32)
    """
    check_callable("derivative", fun)
    check_count("derivative", "order", order, 0)
    if order == 0:
        return fun
    owner, function = bound_model(fun)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        """Return the derivative with respect to the first argument."""
        if not args:
            raise ValueError("derivative: the call has no positional argument; pass the first argument by position.")
        x, *rest = args
        _check_floating(argument_name(fun, args, 0), x)
        refuse_shared_state("derivative", fun, owner, args, kwargs)
        owner_parts, rest_parts, kwarg_parts = split_tree((owner, rest, kwargs))

        def of_first(x: Any) -> Any:
            arguments = (owner_parts, (x, *rest_parts), kwarg_parts)
            out, models = call_with_models(function, arguments)
            refuse_changes("derivative: fun", function, arguments, models, "which would be lost")
            _check_floating("output", out)
            return out

        return _differentiate(of_first, order, jax.tree.map(jnp.asarray, x))

    return wrap_like(fun, "derivative", differentiated, lambda fun: derivative(fun, order))


def _check_floating(name: str, tree: Any) -> None:
    """Raise if a leaf is not floating-point."""
    cures = "convert it, or keep it out of the first argument and the output"
    fact = f"only floating-point arrays have derivatives; {cures}"
    check_dtypes("derivative", name, tree, jnp.inexact, fact)


def _differentiate(fun: Callable[[Any], Any], order: int, x: Any) -> Any:
    """Return the derivative of a function of one argument, for high orders by Taylor mode if it is as accurate."""
    if order < _FIRST:
        return _nested(fun, order, x)
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(x)
    except NeedsValues:
        return _nested(fun, order, x)  # fun branches on values, which jvp has and a jaxpr does not
    leaves = jax.tree.leaves(x)
    try:
        # Traced first, so that nothing is computed in vain if an operation turns out to be inexact.
        found = jaxpr_as_fun(jax.make_jaxpr(partial(_taylor, closed, order))(leaves))(*leaves)
    except _Inexact:
        found = _nested(lambda leaves: jaxpr_as_fun(closed)(*leaves), order, leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _nested(fun: Callable[[Any], Any], order: int, x: Any) -> Any:
    """Return the derivative by `order` nested `jax.jvp`s."""
    if order == 0:
        return fun(x)
    return jax.jvp(lambda x: _nested(fun, order - 1, x), (x,), (jax.tree.map(jnp.ones_like, x),))[1]


def _taylor(closed: ClosedJaxpr, order: int, leaves: Sequence[Any]) -> list[Any]:
    """Return the derivatives of a program's outputs, from one pass over it with Taylor coefficients.

    Raises:
      _Inexact: nested forward mode would be more accurate.
    """
    # x + t has the coefficients 1, 0, 0, ... of t, t², t³, ...; the last coefficient of fun(x + t) is the derivative
    # divided by order!.
    pairs = [(x, [jnp.ones_like(x)] + [jnp.zeros_like(x)] * (order - 1)) for x in leaves]
    if not all(_fits(order, x.dtype) for x in leaves):
        raise _Inexact
    outputs = _propagate(closed.jaxpr, closed.consts, pairs)
    return [
        jnp.zeros_like(value) if terms is None else terms[-1] * float(math.factorial(order)) for value, terms in outputs
    ]


def _propagate(jaxpr: Jaxpr, consts: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the outputs of `jaxpr`, each with its coefficients, or with None if it does not depend on x."""
    return interpret(jaxpr, consts, pairs, _expand, lambda value: (value, None))


def _expand(eqn: JaxprEqn, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the results of one operation with their Taylor coefficients."""
    name, values, series = eqn.primitive.name, [x for x, _ in pairs], [terms for _, terms in pairs]
    if name in PLAIN:
        return _propagate(*called(eqn), pairs)
    reached = [i for i, terms in enumerate(series) if terms is not None]
    if not reached or name in _CONSTANT:
        return [(x, None) for x in evaluate(eqn, *values)]
    place = reached[0]
    order = len(series[place])
    if not all(_fits(order, aval(x).dtype) for x in eqn.outvars):
        raise _Inexact
    if reached == [place] and (name in _MULTILINEAR or (name == "div" and place == 0)):
        value, *terms = (
            evaluate(eqn, *values[:place], x, *values[place + 1 :])[0] for x in (values[place], *series[place])
        )
        return [(value, terms)]
    # In some versions of JAX `split`, `stack` and `unstack` are different primitives, or have no rule.
    rules = jet_rules()
    trusted = name in _EXACT and eqn.primitive in rules
    is_power = name == "integer_pow" and eqn.params["y"] > 0
    if not (trusted or is_power or (name == "gather" and eqn.params["mode"] != GatherScatterMode.FILL_OR_DROP)):
        raise _Inexact
    filled = [[jnp.zeros(jnp.shape(x), jnp.result_type(x))] * order if terms is None else terms for x, terms in pairs]
    out, terms = rules[eqn.primitive](values, filled, **eqn.params)
    return list(zip(out, terms, strict=True)) if eqn.primitive.multiple_results else [(out, terms)]


def _fits(order: int, dtype: Any) -> bool:
    """Return whether this dtype can hold Taylor coefficients, which are derivatives divided by order!.

    Half precision has too few digits. Products of two coefficients are as small as 1 / order!², which must be above the
    smallest normal number of the dtype.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    info = jnp.finfo(dtype)
    return info.bits >= 32 and math.factorial(order) ** 2 < 1 / float(info.tiny)
