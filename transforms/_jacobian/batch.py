"""`batch_jacobian`: a Jacobian for each sample of a batch, by `vmap` or by sums over the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, get_args

import jax
import jax.numpy as jnp
import numpy as np

from .._calls.call import Call, pair_of
from .._core.arguments import (
    Argnums,
    argument_name,
    check_argnums,
    check_callable,
    check_choice,
    check_count,
    describe,
    leaf_name,
    wrap_like,
)
from .._core.axes import Axes, axes_per_argument, broadcast_axes, check_in_axes, mapped_size
from .._core.compat import Tracer
from .._core.memory import check_budget
from .._core.weak_types import weak_like
from .._models.hashable import HashablePytree, Opaque
from .._models.split_model import bound_model, is_model
from .._vmap import vmap, vmap_of
from .dense import sizes_of
from .jacobian import Mode, jacobian_of
from .mode import output_shapes

P = ParamSpec("P")
Rows = Literal["vmap", "independent"]


def batch_jacobian(
    fun: Callable[P, Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    in_axes: Axes = 0,
    rows: Rows = "vmap",
    mode: Mode = "auto",
    chunk_size: int | None = None,
    memory_budget: int | str | None = None,
    check: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """Compute the Jacobian of each sample of a batch, for a function that takes the whole batch.

    Args:
      fun: a function of a batch, whose outputs (and auxiliary outputs) have the samples along axis 0.
      argnums: as for `jacfwd`.
      has_aux: whether `fun` returns `(output, aux)`; the result is then `(jacobians, aux)`.
      in_axes: the axis of samples in each argument, as for `vmap`; None for arguments that all samples share.
      rows: "vmap" maps over the samples and passes each to `fun` as a batch of one. "independent" passes the whole
        batch to `fun` and sums over it: correct only if no output of a sample depends on another sample, and then
        cheaper for functions that are slower under `vmap`.
      mode: as for `jacobian`.
      chunk_size: for "vmap" the number of samples to compute at a time; for "independent" of columns or rows.
      memory_budget: as for `vmap`, or as for `jacfwd`.
      check: for "independent", whether to test that no sample depends on another, with one derivative for each sample.
      holomorphic: as for `jacobian`.

    Returns:
      A function of the same arguments that returns the Jacobians, nested as by `jacobian`, with arrays of shape
      `(batch, *output, *argument)`, where output and argument are the shapes for one sample.

    Raises:
      TypeError, ValueError: as for `vmap` and `jacobian`; `rows` is unknown; `check` is set with "vmap"; an output, and
        for "vmap" also an auxiliary array, does not have the samples along axis 0; for "independent", all samples share
        an argument in `argnums`; with `check`, samples depend on others (named in the error), or arguments are traced.

    Warns:
      UserWarning: as for `jacfwd`, about a memory budget.

    Cost:
      "vmap": a Jacobian for each sample. "independent": one evaluation of the batch, and one derivative of it for each
      input element (forward mode) or output element (reverse mode) of one sample.

    Source:
      `torch.func.vmap(jacrev(...))`; the summing trick of PyTorch's tutorial on Jacobians and Hessians.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.transforms import batch_jacobian
      >>> batch_jacobian(jnp.sin, rows="independent")(jnp.zeros((5, 3))).shape
      (5, 3, 3)
    """
    check_callable("batch_jacobian", fun)
    positions = check_argnums("batch_jacobian", argnums)
    in_axes = check_in_axes("batch_jacobian", in_axes)
    check_choice("batch_jacobian", "rows", rows, get_args(Rows))
    if check and rows != "independent":
        raise ValueError('batch_jacobian: check=True is for rows="independent"; rows="vmap" needs no check.')
    check_count("batch_jacobian", "chunk_size", chunk_size, optional=True)
    check_budget("batch_jacobian", memory_budget, chunk_size)
    limits: Any = {"chunk_size": chunk_size, "memory_budget": memory_budget}
    kinds: Any = {"holomorphic": holomorphic}
    # A model that `fun` is bound to becomes an argument of the mapped function, so that its arrays are not closed over.
    owner, function = bound_model(fun)
    of_one = wrap_like(fun, "batch_jacobian", _of_one(function, in_axes, has_aux))
    # `of_one` is a new function in each call of this transform, so the chosen mode is cached under its origin.
    origin = fun, HashablePytree.of(in_axes)
    by_sample = jacobian_of("batch_jacobian", of_one, argnums, has_aux, mode, origin=origin, **kinds)

    def of_batch(*args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian of each example of these arguments."""
        axes = axes_per_argument("batch_jacobian", in_axes, args)
        mapped_size("batch_jacobian", fun, args, kwargs, axes, None, None, "the batch")
        if rows == "vmap":

            def of_sample(owner: Any, kwargs: Any, *args: Any) -> Opaque:
                return Opaque.of(by_sample(*args, owner=owner, kwargs=kwargs))

            return vmap_of("batch_jacobian", of_sample, (None, None, *axes), **limits)(owner, kwargs, *args).value
        call = Call("batch_jacobian", fun, positions, has_aux, args, kwargs, holomorphic=holomorphic)
        call.check_floating(complex_too=False)
        for i in call.selected:
            if None in broadcast_axes(axes[i], args[i]):
                raise ValueError(f'batch_jacobian: all samples share `{argument_name(fun, args, i)}`; use rows="vmap".')
        if check and any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise ValueError("batch_jacobian: check=True needs values, not traced arguments; check outside jit.")
        batch, bare = (owner, args, kwargs), not isinstance(argnums, (tuple, list))
        return _summed(function, call.selected, bare, has_aux, axes, mode, check, batch, {**limits, **kinds})

    def rebuild(fun: Callable[..., Any]) -> Callable[..., Any]:
        options: Any = {"in_axes": in_axes, "rows": rows, "mode": mode, "check": check, **limits, **kinds}
        return batch_jacobian(fun, argnums, has_aux, **options)

    return wrap_like(fun, "batch_jacobian", of_batch, rebuild)


def _of_one(function: Callable[..., Any], in_axes: Axes, has_aux: bool) -> Callable[..., Any]:
    """Return a function of one sample that calls `function` with a batch of one."""

    def of_one(*args: Any, owner: Any, kwargs: Any) -> Any:
        """Return the output of `fun` for a batch of one example, without the batch axis."""
        axes = axes_per_argument("batch_jacobian", in_axes, args)
        out = function(owner, *_expand(args, axes), **kwargs)
        out, aux = pair_of("batch_jacobian", out) if has_aux else (out, None)
        _check_batch("output", out, 1)
        # Scalars and other values in `aux` are shared by all samples, and are returned unchanged.
        _check_batch("aux", jax.tree.map(lambda x: x if getattr(x, "shape", ()) else None, aux), 1)
        only = jax.tree.map(lambda x: jnp.asarray(x)[0] if getattr(x, "shape", ()) else x, (out, aux))
        return only if has_aux else only[0]

    return of_one


def _check_batch(name: str, out: Any, size: int) -> None:
    """Raise if an output, called `name` in the error, does not have the samples along axis 0."""
    for path, leaf in jax.tree.leaves_with_path(out):
        if jnp.shape(leaf)[:1] != (size,):
            what = f"`{leaf_name(name, path)}` is {describe(leaf)}"
            raise ValueError(f"batch_jacobian: {what}, but axis 0 must be the {size} samples; do not reduce them.")


def _expand(args: tuple[Any, ...], axes: tuple[Axes, ...]) -> tuple[Any, ...]:
    """Return `args` with a new axis of size 1 at each position in `axes`."""
    leaves, treedef = jax.tree.flatten(args, is_leaf=is_model)  # changes of a copied model would be lost
    expanded = []
    for leaf, axis in zip(leaves, broadcast_axes(axes, args, is_leaf=is_model), strict=True):
        expanded.append(leaf if axis is None else jnp.expand_dims(leaf, axis % (jnp.ndim(leaf) + 1)))
    return tuple(jax.tree.unflatten(treedef, expanded))


def _summed(
    function: Any, selected: Any, bare: bool, has_aux: bool, axes: Any, mode: str, check: bool, batch: Any, options: Any
) -> Any:
    """Return the Jacobians of all samples of a batch from derivatives of the whole batch.

    The output f_b of sample b depends on x_b alone. So derivatives with respect to shifts s of the samples equal those
    with respect to the samples, and one pass over the batch gives them for all b:

        d f_b(x_b + s) / ds = d f_b / d x_b             forward mode: a tangent for each input element of one sample
        d sum_c f_c(x_c + s_c) / d s_b = d f_b / d x_b  reverse mode: a cotangent for each output element of one sample
    """

    def moved(*call: Any) -> Any:
        """Evaluate `function` at the arguments plus shifts, which have the samples along axis 0."""
        *shifts, owner, args, kwargs = call
        sums = list(args)
        for i, shift in zip(selected, shifts, strict=True):
            leaves, treedef = jax.tree.flatten(args[i])
            pairs = zip(leaves, jax.tree.leaves(shift), broadcast_axes(axes[i], args[i]), strict=True)
            sums[i] = jax.tree.unflatten(treedef, [x + jnp.moveaxis(s, 0, axis) for x, s, axis in pairs])
        return function(owner, *sums, **kwargs)

    def shifted(*call: Any) -> Any:
        """Evaluate `function` with one shift added to all samples."""
        return moved(*jax.tree.map(lambda s: jnp.expand_dims(s, 0), call[:-3]), *call[-3:])

    def summed(*call: Any) -> Any:
        """Evaluate `function` with a separate shift for each sample, and sum the outputs over the samples."""
        out = moved(*call)
        out, aux = out if has_aux else (out, None)
        total = jax.tree.map(lambda x: x.sum(axis=0), out)
        return (total, aux) if has_aux else total

    def no_shifts(i: int) -> Any:
        leaves, treedef = jax.tree.flatten(batch[1][i])
        pairs = zip(leaves, broadcast_axes(axes[i], batch[1][i]), strict=True)
        return jax.tree.unflatten(treedef, [jnp.zeros_like(jnp.moveaxis(x, axis, 0)) for x, axis in pairs])

    samples = tuple(map(no_shifts, selected))
    size = len(jax.tree.leaves(samples)[0])
    one = jax.tree.map(lambda x: weak_like(jnp.zeros(x.shape[1:], x.dtype), x), samples)
    every = tuple(range(len(selected)))
    out = output_shapes("batch_jacobian", Call("batch_jacobian", shifted, every, has_aux, (*one, *batch), {}))
    _check_batch("output", out, size)
    if check and size:
        _check_independent(Call("batch_jacobian", moved, every, has_aux, (*samples, *batch), {}), size)
    inputs, outputs = sum(sizes_of(one)), sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(out))
    forward = mode == "forward" or (mode == "auto" and inputs <= outputs)
    evaluator, fun, shifts = ("forward", shifted, one) if forward else ("reverse", summed, samples)
    positions = 0 if bare else every
    return jacobian_of("batch_jacobian", fun, positions, has_aux, evaluator, row_axis=1, **options)(*shifts, *batch)


def _check_independent(call: Call, size: int) -> None:
    """Raise if the output of a sample depends on another sample: such derivatives must be zero.

    The call is a function of shifts, with one for each sample along axis 0.
    """
    # A fixed seed, so that the check is deterministic.
    generator = np.random.default_rng(0)
    _, push, _ = jax.linearize(call, *call.primals, has_aux=True)
    # A random direction misses a dependence only if it happens to be orthogonal to the derivative.
    directions = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), call.primals)

    def influence(sample: jax.Array) -> jax.Array:
        """Return for each sample whether its output depends on `sample`."""
        moved = push(*jax.tree.map(lambda x: jnp.zeros_like(x).at[sample].set(x[sample]), directions))
        return jnp.stack([(x != 0).reshape(size, -1).any(axis=1) for x in jax.tree.leaves(moved)]).any(axis=0)

    # One sample at a time, so that the check needs no more memory than one derivative of the batch.
    found = np.asarray(vmap(influence, chunk_size=1)(jnp.arange(size)))
    pairs = np.argwhere(found & ~np.eye(size, dtype=bool))
    if len(pairs):
        named = ", ".join(f"{j} on {i}" for i, j in pairs[:5].tolist())
        more = f"; and {len(pairs) - 5} more pairs" if len(pairs) > 5 else ""
        remedy = 'use rows="vmap" to call fun on each sample alone, or jacobian for the whole matrix'
        raise ValueError(f"batch_jacobian: samples depend on others ({named}{more}); {remedy}.")
