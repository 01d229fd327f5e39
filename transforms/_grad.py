"""`grad` and `value_and_grad`: reverse-mode gradients with any cotangent, of arrays and of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._arguments import (
    Argnums,
    argument_name,
    check_argnums,
    check_callable,
    describe,
    leaf_name,
    resolve_argnums,
    wrap_like,
)
from ._changes import call_with_models, passing_through
from ._model import (
    Parts,
    is_parts,
    models_of,
    named_arrays,
    owner_of,
    parts_of,
    refuse_shared_state,
    split,
    to_parts,
    update,
)


def grad(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False, *, cotangent: Any = None
) -> Callable[..., Any]:
    """Differentiate `fun` in reverse mode.

    As `jax.grad`, but `cotangent` takes outputs of any shape, and a Flax NNX module is differentiated with respect to
    its `nnx.Param` state.

    Args:
      fun: a function, a bound method or a module, with an output of real numbers: a scalar, unless `cotangent` is
        given. With `has_aux` it returns a pair of that output and anything else.
      argnums: an int, which gives the bare gradient, or a tuple of ints, which gives a tuple. Negative numbers count
        from the end of the positional arguments.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(gradient, aux)`.
      cotangent: what multiplies the output's derivative from the left. None needs a scalar output. A Python number
        stands for an array full of it, for each output. Arrays match the output in structure, shape and dtype.

    Returns:
      A function of the same arguments that returns the gradient, with the structure, shapes and dtypes of the arguments
      it is taken for. For a module that is the `nnx.State` of its `nnx.Param`s, as `nnx.grad` gives and optax takes.
      Other state that `fun` changes (BatchNorm statistics, dropout keys) ends up in the module.

    Raises:
      TypeError: `argnums` or `cotangent` of a wrong type; an argument that is not of floating point; an output that is
        not a real scalar without `cotangent`.
      ValueError: `argnums` empty, out of range, or naming an argument twice; a `cotangent` of another structure, shape
        or dtype than the output; modules that share a variable; a module whose parameters `fun` assigns, or whose
        structure it changes.

    Cost:
      `fun` runs once, and its transpose once: about three times its FLOPs. Memory for all its residuals.

    Source:
      `jax.grad`; `mindspore.grad`, whose ones-seeded gradient is `cotangent=1.0`; `flax.nnx.grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import grad
      >>> grad(lambda x, y: x * x * y, argnums=(0, 1))(3.0, 2.0)
      (Array(12., dtype=float32, weak_type=True), Array(9., dtype=float32, weak_type=True))
      >>> grad(jnp.square, cotangent=1.0)(jnp.arange(3.0))
      Array([0., 2., 4.], dtype=float32)
    """
    both = _value_and_grad("grad", fun, argnums, has_aux, cotangent)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrap_like(fun, "grad", gradient)


def value_and_grad(
    fun: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False, *, cotangent: Any = None
) -> Callable[..., Any]:
    """Evaluate `fun` and differentiate it in reverse mode, in one pass.

    As `jax.value_and_grad`, with what `grad` here adds to it.

    Args:
      fun: as for `grad`. It runs once.
      argnums: as for `grad`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `((output, aux), gradient)`.
      cotangent: as for `grad`.

    Returns:
      A function of the same arguments that returns the value and the gradient.

    Raises:
      TypeError, ValueError: as for `grad`.

    Cost:
      As `grad`: the value comes with it.

    Source:
      `jax.value_and_grad`; `mindspore.value_and_grad`; `flax.nnx.value_and_grad`.

    Example:
      >>> from plurax.transforms import value_and_grad
      >>> value_and_grad(lambda x: x**2)(3.0)
      (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    both = _value_and_grad("value_and_grad", fun, argnums, has_aux, cotangent)
    return wrap_like(fun, "value_and_grad", both)


def _value_and_grad(
    api: str, fun: Callable[..., Any], argnums: Argnums, has_aux: bool, cotangent: Any
) -> Callable[..., Any]:
    check_callable(api, fun)
    positions = check_argnums(api, argnums)
    owner, function = owner_of(fun)

    def both(*args: Any, **kwargs: Any) -> Any:
        selected = resolve_argnums(api, fun, positions, args)
        models = models_of((owner, args, kwargs))
        refuse_shared_state(api, fun, owner, args, kwargs)
        owner_parts, arg_parts, kwarg_parts = to_parts((owner, args, kwargs))
        primals = tuple(_trainable(arg_parts[i]) for i in selected)
        for i, primal in zip(selected, primals, strict=True):
            _check_differentiable(api, argument_name(fun, args, i), primal)

        def of_primals(primals: tuple[Any, ...]) -> tuple[Any, Any]:
            filled = list(arg_parts)
            for i, primal in zip(selected, primals, strict=True):
                filled[i] = _with_trainable(arg_parts[i], primal)
            before = (owner_parts, tuple(filled), kwarg_parts)
            out, left = call_with_models(function, before)
            after = [split(model) for model in left]
            for i, (then, now) in enumerate(zip(parts_of(before), after, strict=True)):
                _refuse_restructured(api, left[i], then, now)
                assigned = set(then.changes(now)) & set(named_arrays(then.trainable))
                if assigned:
                    _refuse_assigned(api, assigned - passing_through(function, before)[i])
            out, aux = _pair(api, out) if has_aux else (out, None)
            return out, (aux, after)

        out, vjp, (aux, after) = jax.vjp(of_primals, primals, has_aux=True)
        (gradients,) = vjp(_seed(api, out, cotangent))
        for model, changed in zip(models, after, strict=True):
            update(model, changed)
        gradients = [_gradient(arg_parts[i], values) for i, values in zip(selected, gradients, strict=True)]
        value = (out, aux) if has_aux else out
        return value, (tuple(gradients) if isinstance(argnums, (tuple, list)) else gradients[0])

    return both


def _trainable(tree: Any) -> Any:
    """What of an argument is differentiated: a model's trainable arrays, everything else whole."""
    return jax.tree.map(lambda x: x.trainable if isinstance(x, Parts) else x, tree, is_leaf=is_parts)


def _with_trainable(tree: Any, values: Any) -> Any:
    """The inverse of `_trainable`: `tree` with `values` in their places."""

    def put(x: Any, value: Any) -> Any:
        return Parts(x.structure, value, x.rest) if isinstance(x, Parts) else value

    return jax.tree.map(put, tree, values, is_leaf=is_parts)


def _gradient(tree: Any, values: Any) -> Any:
    """The gradient of an argument in the form that its models ask for."""

    def shape(x: Any, value: Any) -> Any:
        return x.structure.gradient(value, x.rest) if isinstance(x, Parts) else value

    return jax.tree.map(shape, tree, values, is_leaf=is_parts)


def _check_differentiable(api: str, name: str, primal: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(primal):
        dtype = getattr(leaf, "dtype", None) or (type(leaf) if isinstance(leaf, (float, complex)) else None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"{api}: argument `{leaf_name(name, path)}` is {describe(leaf)}, but only arrays of floating point "
                "can be differentiated; convert it, or leave it out of argnums."
            )


def _pair(api: str, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(
            f"{api}: with has_aux=True, fun must return a pair (output, aux), but it returned {describe(out)}."
        )
    return tuple(out)


def _refuse_restructured(api: str, model: Any, before: Parts, after: Parts) -> None:
    if after.structure != before.structure:
        path = min(after.arrays().keys() ^ before.arrays().keys(), default="configuration")
        raise ValueError(
            f"{api}: fun changes the structure of {type(model).__name__} (`{path}`), but only the values of its "
            "variables can be carried along; do not add variables in it (such as by sow), nor change attributes."
        )


def _refuse_assigned(api: str, assigned: set[str]) -> None:
    if assigned:
        raise ValueError(
            f"{api}: fun assigns the parameter `{min(assigned)}` of a model it is differentiated with; keep values "
            "that fun computes in another kind of variable, such as nnx.BatchStat."
        )


def _seed(api: str, out: Any, cotangent: Any) -> Any:
    """The cotangent of `out`: ones for a scalar, a Python number broadcast, anything else checked against it."""
    if not jax.tree.leaves(out):
        raise TypeError(f"{api}: fun must return a number or arrays to differentiate, but it returned {describe(out)}.")
    if cotangent is None:
        if not _is_leaf(out) or jnp.shape(out) != () or not jnp.issubdtype(_dtype(out), jnp.floating):
            raise TypeError(
                f"{api}: without a cotangent, fun must return one real scalar, but it returned {_outline(out)}; pass "
                "cotangent=1.0 to seed every element with one, an array like the output, or has_aux=True if it "
                "returns a pair (output, aux)."
            )
        return lax.full_like(out, 1)
    if _is_number(cotangent):
        return jax.tree.map(lambda leaf: _broadcast(api, "the output", cotangent, leaf), out)
    if _structure(cotangent) != _structure(out):
        raise ValueError(
            f"{api}: cotangent has the structure {_structure(cotangent)}, but the output has {_structure(out)}; "
            "give one array for each output."
        )

    def match(path: Any, seed: Any, leaf: Any) -> Any:
        place = leaf_name("output", path)
        if _is_number(seed):
            return _broadcast(api, place, seed, leaf)
        if not hasattr(seed, "dtype"):
            raise TypeError(f"{api}: the cotangent of {place} must be a number or an array, but got {describe(seed)}.")
        seed = jnp.asarray(seed)
        if seed.shape != jnp.shape(leaf) or seed.dtype != _dtype(leaf):
            raise ValueError(
                f"{api}: the cotangent of {place} is {describe(seed)}, but that output is {_outline(leaf)}; give an "
                "array of the same shape and dtype, or a Python number to broadcast."
            )
        return seed

    return jax.tree.map_with_path(match, cotangent, out)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, (bool, np.generic))


def _broadcast(api: str, place: str, number: complex, leaf: Any) -> Any:
    if isinstance(number, complex) and not jnp.issubdtype(_dtype(leaf), jnp.complexfloating):
        raise TypeError(f"{api}: cotangent={number} is complex, but {place} is real; pass a real number.")
    return lax.full_like(leaf, number)


def _dtype(x: Any) -> Any:
    return jnp.result_type(x)


def _is_leaf(out: Any) -> bool:
    return _structure(out) == _structure(0)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _outline(out: Any) -> str:
    if not _is_leaf(out):
        return f"a pytree {_structure(out)}"
    return f"an array of shape {jnp.shape(out)} and dtype {_dtype(out)}"
