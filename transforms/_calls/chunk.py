"""Evaluate a mapped function over chunks of the mapped axis, writing the results in place.

The result is allocated once. Inside a `lax.scan`, each chunk is written into it by `lax.dynamic_update_slice`, which
XLA does in place. Stacking the chunks instead (`lax.map`) and moving their axis afterwards would hold the result twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._core.axes import Axes, broadcast_axes
from .._core.weak_types import weak_like
from .explicit_sharding import explicit_sharding


def map_in_chunks(
    mapped: Callable[[int], Callable[..., Any]],
    args: tuple[Any, ...],
    in_axes: tuple[Axes, ...],
    out_axes: Axes,
    size: int,
    chunk_size: int,
) -> Any:
    """Evaluate `mapped(size)(*args)`, `chunk_size` slices at a time; the last chunk has the remaining slices.

    Args:
      mapped: a function from a size to the function mapped by `jax.vmap`, with these axes, over that many slices.
      args: the arguments of the mapped function, with `size` slices.
      in_axes: an axis specification for each argument.
      out_axes: the axis specification of the output.
      size: the number of slices, at least 1.
      chunk_size: how many to evaluate at once, at least 1.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaf_axes = broadcast_axes(in_axes, args)
    axes = {i: axis % leaves[i].ndim for i, axis in enumerate(leaf_axes) if axis is not None}
    # A `jax.Ref` cannot be sliced: each chunk uses a new one, and its values are written back into the user's `Ref`.
    references = [i for i in axes if isinstance(leaves[i], jax.Ref)]
    chunk_size = min(chunk_size, size)

    # The start is dynamic, so that one loop body serves all chunks; a static start would need a program for each.
    def evaluate(start: Any, length: int) -> Any:
        """Return the output for `length` slices from `start` on."""
        slices = list(leaves)
        for i, axis in axes.items():
            array = leaves[i][...] if i in references else leaves[i]
            slices[i] = lax.dynamic_slice_in_dim(array, start, length, axis)
        for i in references:
            slices[i] = jax.new_ref(slices[i])
        out = mapped(length)(*_fitted(jax.tree.unflatten(treedef, slices)))
        for i in references:
            leaves[i][...] = lax.dynamic_update_slice_in_dim(leaves[i][...], slices[i][...], start, axes[i])
        return out

    # Filled inside `first`, from the types of the traced output.
    shardings: list[Any] = []

    def first() -> Any:
        out = evaluate(0, chunk_size)
        shardings.extend(map(explicit_sharding, jax.tree.leaves(out)))
        return out

    shapes = jax.eval_shape(first)
    out_leaves, out_treedef = jax.tree.flatten(shapes)
    # Resolved with the rank of the mapped output, so that a negative axis means the same as for `jax.vmap`.
    positions = [
        None if axis is None else axis % len(leaf.shape)
        for leaf, axis in zip(out_leaves, broadcast_axes(out_axes, shapes), strict=True)
    ]

    def write(results: list[jax.Array], chunk: Any, start: Any) -> list[jax.Array]:
        return [
            new if axis is None else lax.dynamic_update_slice_in_dim(result, new, start, axis)
            for result, new, axis in zip(results, jax.tree.leaves(chunk), positions, strict=True)
        ]

    def step(results: list[jax.Array], start: jax.Array) -> tuple[list[jax.Array], None]:
        return write(results, evaluate(start, chunk_size), start), None

    results = [
        # Every element is written below, so nothing has to be zeroed; sharded like each chunk.
        jnp.empty(_with_size(leaf.shape, axis, size), leaf.dtype, out_sharding=sharding)
        for leaf, axis, sharding in zip(out_leaves, positions, shardings, strict=True)
    ]
    # The last chunk may be smaller: padding it would compute unused slices, and would split random keys differently.
    count, remaining = divmod(size, chunk_size)
    results, _ = lax.scan(step, results, jnp.arange(count) * chunk_size)
    if remaining:
        results = write(results, evaluate(count * chunk_size, remaining), count * chunk_size)
    # `jnp.empty` has a strong type, but `jax.vmap` preserves weak types.
    results = [weak_like(result, leaf) for result, leaf in zip(results, out_leaves, strict=True)]
    return _fitted(jax.tree.unflatten(out_treedef, results))


def _with_size(shape: tuple[int, ...], axis: int | None, size: int) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], size, *shape[axis + 1 :])


def map_parts_in_chunks(
    mapped: Callable[[int], Callable[..., Any]],
    args: tuple[Any, ...],
    in_axes: tuple[Axes, ...],
    out_axes: Axes,
    size: int,
    parts: int,
    chunk_size: int,
) -> Any:
    """Map in chunks over an axis that is sharded over devices; each device maps slices of its own shard.

    Args:
      mapped: as for `map_in_chunks`.
      args: as for `map_in_chunks`.
      in_axes: as for `map_in_chunks`.
      out_axes: as for `map_in_chunks`.
      size: as for `map_in_chunks`.
      parts: how many shards the axis is divided into.
      chunk_size: how many slices to evaluate at once, over all devices.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaf_axes = [
        axis if axis is None else axis % jnp.ndim(leaf)
        for leaf, axis in zip(leaves, broadcast_axes(in_axes, args), strict=True)
    ]

    # A chunk of consecutive slices would be on one device. So the axis is reshaped to (parts, slices of a part), and
    # all devices take a chunk of their own part at the same time.
    def split(x: Any, axis: int | None) -> Any:
        return x if axis is None else x.reshape(*x.shape[:axis], parts, -1, *x.shape[axis + 1 :])

    def of_part(*leaves: Any) -> Any:
        args = jax.tree.unflatten(treedef, leaves)
        return map_in_chunks(mapped, args, in_axes, out_axes, size // parts, -(-chunk_size // parts))

    # The axis of parts goes directly in front of the axis of slices. A negative axis decreases by one for that, since
    # the inner map has added the axis of slices after it.
    outer = jax.tree.map(lambda axis: axis if axis >= 0 else axis - 1, out_axes)
    # Compiled as one program, which runs on the mesh of its arguments; outside of `jit`, a new array has no mesh.
    out = jax.jit(jax.vmap(of_part, leaf_axes, outer))(*map(split, leaves, leaf_axes))
    out_leaves, out_treedef = jax.tree.flatten(out)

    def join(x: Any, axis: int | None) -> Any:
        axis = axis if axis is None else axis % jnp.ndim(x)
        return x if axis is None else x.reshape(*x.shape[:axis], size, *x.shape[axis + 2 :])

    return jax.tree.unflatten(out_treedef, map(join, out_leaves, broadcast_axes(outer, out)))


def _fitted(tree: Any) -> Any:
    """Return `tree` with the static shapes of its sparse arrays corrected to match the arrays inside them."""

    def fit(x: Any) -> Any:
        if not _is_sparse(x) or not x.n_batch:
            return x
        children, kept = x.tree_flatten()
        return x.tree_unflatten(kept | {"shape": (x.data.shape[0], *x.shape[1:])}, children)

    return jax.tree.map(fit, tree, is_leaf=_is_sparse)


def _is_sparse(x: Any) -> bool:
    return type(x).__module__.startswith("jax.experimental.sparse")
