"""`grad` and `value_and_grad`: reverse-mode gradients with any cotangent, of arrays and of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

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
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    cotangent: Any = None,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, tuple[Any, Any]]:
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
        call = Call(api, fun, positions, has_aux, args, kwargs, holomorphic=holomorphic, filters=filters)
        call.check_floating(allow_int=allow_int)
        # `rest` carries the auxiliary output and the state of models through JAX; `finish` writes the state back.
        out, vjp, rest = jax.vjp(call, *call.primals, has_aux=True)
        if holomorphic:
            check_complex(api, out)
        values = vjp(seed(api, out, cotangent, holomorphic))
        aux = call.finish(rest)
        gradients = tuple(call.gradient(i, value) for i, value in enumerate(values))
        value = (out, aux) if has_aux else out
        return value, (gradients if isinstance(argnums, (tuple, list)) else gradients[0])

    return both


def seed(api: str, out: Any, cotangent: Any, holomorphic: bool = False) -> Any:
    """Return the cotangent of `out`: one for a scalar, a Python number broadcast, anything else checked against it."""
    if cotangent is None and jax.tree.leaves(out):
        cure = "pass cotangent=1.0 to seed every element with one, an array like the output, or has_aux=True if it "
        who = f"{api}: without a cotangent, fun"
        return scalar_seed(who, out, f"{cure}returns a pair (output, aux)", "complex" if holomorphic else "real")
    # An output without arrays has no derivative, whatever the cotangent: `check_output` raises.
    if _is_number(cotangent) or not jax.tree.leaves(out):
        check_output(api, out)
        return jax.tree.map(lambda leaf: _broadcast(api, "the output", cotangent, leaf), out)
    expected: Any = jax.tree.structure(out)
    found: Any = jax.tree.structure(cotangent)
    if found != expected:
        raise ValueError(
            f"{api}: cotangent has the structure {found}, but the output has {expected}; give one array for each "
            "output."
        )

    def match(path: Any, seed: Any, leaf: Any) -> Any:
        """Return the cotangent of one output, checked against it."""
        place = leaf_name("output", path)
        if _is_number(seed):
            check_output(api, leaf, place)
            return _broadcast(api, place, seed, leaf)
        if not hasattr(seed, "dtype"):
            raise TypeError(f"{api}: the cotangent of {place} must be a number or an array, but got {describe(seed)}.")
        # The cotangent space of integers is empty: JAX takes zeros of dtype float0 for them, and nothing else.
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            if seed.dtype == jax.dtypes.float0 and jnp.shape(seed) == jnp.shape(leaf):
                return seed
            raise TypeError(
                f"{api}: the cotangent of {place} is {describe(seed)}, but that output is {_outline(leaf)}, which has "
                "no derivative; give zeros of its shape and dtype jax.dtypes.float0."
            )
        # Arrays are not broadcast: a cotangent of another shape most likely belongs to another output.
        seed = jnp.asarray(seed)
        if seed.shape != jnp.shape(leaf) or seed.dtype != jnp.result_type(leaf):
            raise ValueError(
                f"{api}: the cotangent of {place} is {describe(seed)}, but that output is {_outline(leaf)}; give an "
                "array of the same shape and dtype, or a Python number to broadcast."
            )
        return seed

    return jax.tree.map_with_path(match, cotangent, out)


def scalar_seed(who: str, out: Any, cure: str, kind: str = "real") -> Any:
    """Return the 1 that starts the transpose of a "real" or "complex" scalar; raise for other outputs."""
    dtypes = {"real": jnp.floating, "complex": jnp.complexfloating}[kind]
    if not _is_leaf(out) or jnp.shape(out) != () or not jnp.issubdtype(jnp.result_type(out), dtypes):
        raise TypeError(f"{who} must return one {kind} scalar, but it returned {_outline(out)}; {cure}.")
    return lax.full_like(out, 1)


# NumPy's scalars have a dtype, so that they count as arrays: `np.float64` is a float as well.
def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))


def _broadcast(api: str, place: str, number: complex, leaf: Any) -> Any:
    """Return a number in the shape, dtype and weak type of an output."""
    if isinstance(number, complex) and not jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise TypeError(f"{api}: cotangent={number} is complex, but {place} is real; pass a real number.")
    # Inside a `shard_map`, the cotangent of an output that differs over devices has to differ over the same.
    axes = varying_axes(leaf)
    return (
        varying(jnp.full(leaf.shape, number, leaf.dtype), axes)
        if axes
        else weak_like(lax.full_like(leaf, number), leaf)
    )


def _is_leaf(out: Any) -> bool:
    # Not `treedef_is_leaf`, which counts nodes: `None` and `()` are one node too.
    structure: Any = jax.tree.structure(out)
    return structure == jax.tree.structure(0)


def _outline(out: Any) -> str:
    """Return a short description of an output for an error."""
    if not _is_leaf(out):
        return f"a pytree {jax.tree.structure(out)}"
    return f"an array of shape {jnp.shape(out)} and dtype {jnp.result_type(out)}"
