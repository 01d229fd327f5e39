"""`grad` and `value_and_grad`: reverse-mode gradients with any cotangent, of arrays and of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._calls.call import Call, check_complex, check_output
from ._calls.primals import dtype_of
from ._core.arguments import Argnums, check_argnums, check_callable, describe, leaf_name, wrap_like
from ._core.compat import varying, varying_axes
from ._core.weak_types import weak_like
from ._models.split_model import separate_filters

P = ParamSpec("P")
R = TypeVar("R")


def grad(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    cotangent: Any = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """Differentiate `fun` in reverse mode.

    As `jax.grad`, but with `cotangent` the output may have any shape, and a Flax NNX module is differentiated with
    respect to its `nnx.Param` state.

    Args:
      fun: a function, a bound method or a module with real output: a scalar, unless `cotangent` is given. With
        `has_aux` it returns a pair of this output and anything else.
      argnums: an int, which gives the bare gradient, or a tuple of ints, which gives a tuple. Negative numbers count
        from the end of the positional arguments. An `nnx.DiffState` gives a position and a filter that selects the
        variables of the module to differentiate.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(gradient, aux)`.
      cotangent: the vector in the vector-Jacobian product. None needs a scalar output and stands for 1. A Python number
        is broadcast to every output. Arrays must match the output in structure, shape and dtype.
      holomorphic: whether `fun` is holomorphic, as for `jax.grad`: its arguments, its output and the derivative are
        complex. This is not checked. Without it, complex arguments of a real function give the complex gradient of
        `jax.grad`.
      allow_int: whether `argnums` may name integer and boolean arguments, as for `jax.grad`: they have no derivative,
        so their gradients are zeros of dtype `jax.dtypes.float0`.

    Returns:
      A function of the same arguments that returns the gradient, with the structure, shapes and dtypes of the
      differentiated arguments. The gradient of a module is an `nnx.State` of its `nnx.Param`s, as returned by
      `nnx.grad` and accepted by optax. For an Equinox module it is as returned by `eqx.filter_grad`. Functions and
      strings in arguments have the gradient None. Other state that `fun` changes (BatchNorm statistics, dropout keys)
      is updated in the module.

    Raises:
      TypeError: `fun` is not callable; `argnums` or `cotangent` has a wrong type; an argument or an output is not
        floating-point (with `holomorphic`, complex); without `cotangent`, the output is not a real scalar (with
        `holomorphic`, a complex scalar).
      ValueError: `argnums` is empty, out of range, or names an argument twice; `cotangent` differs from the output in
        structure, shape or dtype; modules share a variable; `fun` assigns parameters of a module or changes its
        structure.

    Cost:
      `fun` and its transpose run once each: about three times the FLOPs of `fun`. Memory for all residuals.

    Source:
      `jax.grad`; `mindspore.grad`, whose ones-seeded gradient is `cotangent=1.0`; `flax.nnx.grad`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import grad
      >>> grad(lambda x, y: x * x * y, argnums=(0, 1))(3.0, 2.0)
      (Array(12., dtype=float32, weak_type=True), Array(9., dtype=float32, weak_type=True))
      >>> grad(jnp.square, cotangent=1.0)(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """
    options: Any = {"cotangent": cotangent, "holomorphic": holomorphic, "allow_int": allow_int}
    both = _value_and_grad("grad", fun, argnums, has_aux, **options)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrap_like(fun, "grad", gradient, lambda fun: grad(fun, argnums, has_aux, **options))


def value_and_grad(
    fun: Callable[P, R],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    cotangent: Any = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[R, Any]]:
    """Evaluate `fun` and differentiate it in reverse mode, in one pass.

    As `jax.value_and_grad`, with the additions of `grad` here.

    Args:
      fun: as for `grad`; it is evaluated once.
      argnums: as for `grad`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `((output, aux), gradient)`.
      cotangent: as for `grad`.
      holomorphic: as for `grad`.
      allow_int: as for `grad`.

    Returns:
      A function of the same arguments that returns the value and the gradient.

    Raises:
      TypeError, ValueError: as for `grad`.

    Cost:
      That of `grad`.

    Source:
      `jax.value_and_grad`; `mindspore.value_and_grad`; `flax.nnx.value_and_grad`.

    Examples:
      >>> from plurax.transforms import value_and_grad
      >>> value_and_grad(lambda x: x**2)(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    options: Any = {"cotangent": cotangent, "holomorphic": holomorphic, "allow_int": allow_int}
    both = _value_and_grad("value_and_grad", fun, argnums, has_aux, **options)
    return wrap_like(fun, "value_and_grad", both, lambda fun: value_and_grad(fun, argnums, has_aux, **options))


def _value_and_grad(
    api: str,
    fun: Callable[..., Any],
    argnums: Argnums,
    has_aux: bool,
    cotangent: Any,
    holomorphic: bool,
    allow_int: bool,
) -> Callable[..., Any]:
    """Return the function that `grad` and `value_and_grad` share; errors begin with `api`."""
    check_callable(api, fun)
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)

    def both(*args: Any, **kwargs: Any) -> Any:
        """Return the value and the gradients; with `has_aux`, the value is a pair with the auxiliary output."""
        call = Call(api, fun, positions, has_aux, args, kwargs, holomorphic=holomorphic, filters=filters)
        call.check_floating(allow_int=allow_int)
        # `rest` carries the auxiliary output and the state of models through JAX; `finish` writes the state back.
        out, vjp, rest = jax.vjp(call, *call.primals, has_aux=True)
        if holomorphic:
            check_complex(api, out)
        values = vjp(seed(api, out, cotangent, holomorphic))
        aux = call.finish(rest)
        gradients = call.form.gradients(values)
        value = (out, aux) if has_aux else out
        return value, (gradients if isinstance(argnums, (tuple, list)) else gradients[0])

    return both


def seed(api: str, out: Any, cotangent: Any, holomorphic: bool = False) -> Any:
    """Return the cotangent of `out`: 1 for None and a scalar, a broadcast Python number, or checked arrays."""
    # For an output without arrays, and for a single integer, no cotangent and no pair helps.
    if not jax.tree.leaves(out) or (cotangent is None and jax.tree_util.all_leaves([out])):
        check_output(api, out)
    if cotangent is None:
        cure = "pass cotangent=1.0 to seed every element with one, an array like the output, or has_aux=True if it "
        who = f"{api}: without a cotangent, fun"
        return scalar_seed(who, out, f"{cure}returns a pair (output, aux)", "complex" if holomorphic else "real")
    if _is_number(cotangent):
        cotangent = jax.tree.map(lambda _: cotangent, out)
    structure: Any = jax.tree.structure(out)
    found: Any = jax.tree.structure(cotangent)
    if found != structure:
        raise ValueError(f"{api}: cotangent has the structure {found}, but the output {structure}; make them match.")
    return jax.tree.map_with_path(partial(_matched, api), cotangent, out)


def _matched(api: str, path: Any, given: Any, leaf: Any) -> Any:
    """Return the checked cotangent of one output; a number gets the output's shape, dtype and weak type."""
    place, dtype = leaf_name("output", path), jnp.result_type(leaf)
    if _is_number(given):
        check_output(api, leaf, place)
        if isinstance(given, complex) and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{api}: cotangent={given} is complex, but {place} is real; pass a real number.")
        # Inside a `shard_map`, an output that varies over mesh axes needs a cotangent that varies over the same axes.
        axes = varying_axes(leaf)
        if axes:
            return varying(jnp.full(leaf.shape, given, dtype), axes)
        return weak_like(lax.full_like(leaf, given), leaf)
    wanted = f"a number, or an array of shape {jnp.shape(leaf)} and dtype {dtype}"
    # The cotangent space of integers is trivial: JAX accepts only zeros of dtype float0 for them.
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype, wanted = jax.dtypes.float0, f"zeros of shape {jnp.shape(leaf)} and dtype jax.dtypes.float0"
    # Arrays are not broadcast: a cotangent of another shape was most likely meant for another output.
    if getattr(given, "dtype", None) != dtype or jnp.shape(given) != jnp.shape(leaf):
        kind = ValueError if hasattr(given, "dtype") and dtype != jax.dtypes.float0 else TypeError
        raise kind(f"{api}: the cotangent of {place} is {describe(given)}, which does not match it; pass {wanted}.")
    return given if dtype == jax.dtypes.float0 else jnp.asarray(given)


def scalar_seed(who: str, out: Any, cure: str, kind: str = "real") -> Any:
    """Return the 1 that starts the transpose of a "real" or "complex" scalar; raise for other outputs."""
    dtypes = {"real": jnp.floating, "complex": jnp.complexfloating}[kind]
    is_leaf = jax.tree_util.all_leaves([out])
    dtype = dtype_of(out)
    if not is_leaf or dtype is None or jnp.shape(out) != () or not jnp.issubdtype(dtype, dtypes):
        found = describe(out) if is_leaf else f"a pytree {jax.tree.structure(out)}"
        raise TypeError(f"{who} must return one {kind} scalar, but it returned {found}; {cure}.")
    return lax.full_like(out, 1)


# NumPy scalars have a dtype and count as arrays, although `np.float64` is also a Python float.
def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))
