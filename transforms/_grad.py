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

    As `jax.grad`, but `cotangent` takes outputs of any shape, and a Flax NNX module is differentiated with respect to
    its `nnx.Param` state.

    Args:
      fun: a function, a bound method or a module, with an output of real numbers: a scalar, unless `cotangent` is
        given. With `has_aux` it returns a pair of that output and anything else.
      argnums: an int, which gives the bare gradient, or a tuple of ints, which gives a tuple. Negative numbers count
        from the end of the positional arguments. An `nnx.DiffState` gives a position and a filter: which variables of
        the module there are differentiated.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(gradient, aux)`.
      cotangent: what multiplies the output's derivative from the left. None needs a scalar output. A Python number is
        broadcast to each output. Arrays match the output in structure, shape and dtype.
      holomorphic: whether `fun` is a holomorphic function, as for `jax.grad`: its arguments and its output are complex,
        and so is the derivative. That it is one is not checked. Without it, complex arguments of a real function give
        the complex gradient that `jax.grad` gives.
      allow_int: whether `argnums` may name arguments of integers and booleans, as for `jax.grad`: they have no
        derivative, so their gradients are zeros of dtype `jax.dtypes.float0`.

    Returns:
      A function of the same arguments that returns the gradient, with the structure, shapes and dtypes of the arguments
      it is taken for. For a module that is the `nnx.State` of its `nnx.Param`s, as `nnx.grad` gives and optax takes;
      for an Equinox module what `eqx.filter_grad` gives. Functions and text in arguments have None for their gradient.
      Other state that `fun` changes (BatchNorm statistics, dropout keys) ends up in the module.

    Raises:
      TypeError: `argnums` or `cotangent` of a wrong type; an argument or an output that is not of floating point (with
        `holomorphic` complex); an output that is not a real scalar (with `holomorphic` a complex one) without
        `cotangent`.
      ValueError: `argnums` empty, out of range, or naming an argument twice; a `cotangent` of another structure, shape
        or dtype than the output; modules that share a variable; a module whose parameters `fun` assigns, or whose
        structure it changes.

    Cost:
      `fun` runs once, and its transpose once: about three times its FLOPs. Memory for all its residuals.

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
      fun: as for `grad`. It runs once.
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
      As `grad`: the value comes with it.

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
    """Return the function behind `grad` and `value_and_grad`; `api` is the one that errors name."""
    check_callable(api, fun)
    plain, filters = separate_filters(argnums)
    positions = check_argnums(api, plain)

    def both(*args: Any, **kwargs: Any) -> Any:
        """Return the value and the gradients; with `has_aux`, the value comes with the auxiliary output."""
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
    """Return the cotangent of `out`: one for a scalar, a Python number broadcast, anything else checked against it."""
    if not jax.tree.leaves(out):
        check_output(api, out)  # raises: an output without arrays has no derivative, whatever the cotangent
    if cotangent is None:
        cure = "pass cotangent=1.0 to seed every element with one, an array like the output, or has_aux=True if it "
        who = f"{api}: without a cotangent, fun"
        return scalar_seed(who, out, f"{cure}returns a pair (output, aux)", "complex" if holomorphic else "real")
    if _is_number(cotangent):
        cotangent = jax.tree.map(lambda _: cotangent, out)
    structure: Any = jax.tree.structure(out)
    found: Any = jax.tree.structure(cotangent)
    if found != structure:
        raise ValueError(f"{api}: cotangent has the structure {found}, but the output {structure}; make them alike.")
    return jax.tree.map_with_path(partial(_matched, api), cotangent, out)


def _matched(api: str, path: Any, given: Any, leaf: Any) -> Any:
    """Return the cotangent of one output, checked against it; a number in the output's shape, dtype and weak type."""
    place, dtype = leaf_name("output", path), jnp.result_type(leaf)
    if _is_number(given):
        check_output(api, leaf, place)
        if isinstance(given, complex) and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{api}: cotangent={given} is complex, but {place} is real; pass a real number.")
        # Inside a `shard_map`, the cotangent of an output that differs over devices has to differ over the same.
        axes = varying_axes(leaf)
        if axes:
            return varying(jnp.full(leaf.shape, given, dtype), axes)
        return weak_like(lax.full_like(leaf, given), leaf)
    wanted = f"a number, or an array of shape {jnp.shape(leaf)} and dtype {dtype}"
    # The cotangent space of integers is empty: JAX takes zeros of dtype float0 for them, and nothing else.
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype, wanted = jax.dtypes.float0, f"zeros of shape {jnp.shape(leaf)} and dtype jax.dtypes.float0"
    # Arrays are not broadcast: a cotangent of another shape most likely belongs to another output.
    if getattr(given, "dtype", None) != dtype or jnp.shape(given) != jnp.shape(leaf):
        kind = ValueError if hasattr(given, "dtype") and dtype != jax.dtypes.float0 else TypeError
        raise kind(f"{api}: the cotangent of {place} is {describe(given)}, but must be like it; give {wanted}.")
    return given if dtype == jax.dtypes.float0 else jnp.asarray(given)


def scalar_seed(who: str, out: Any, cure: str, kind: str = "real") -> Any:
    """Return the 1 that starts the transpose of a "real" or "complex" scalar; raise for other outputs."""
    dtypes = {"real": jnp.floating, "complex": jnp.complexfloating}[kind]
    is_leaf = jax.tree_util.all_leaves([out])
    if not is_leaf or jnp.shape(out) != () or not jnp.issubdtype(jnp.result_type(out), dtypes):
        found = describe(out) if is_leaf else f"a pytree {jax.tree.structure(out)}"
        raise TypeError(f"{who} must return one {kind} scalar, but it returned {found}; {cure}.")
    return lax.full_like(out, 1)


# NumPy's scalars have a dtype, so that they count as arrays: `np.float64` is a float as well.
def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))
