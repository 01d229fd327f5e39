"""A mapped function evaluated over one chunk of its axis after another, the results written in place.

The result is allocated once and each chunk is written into it by `lax.dynamic_update_slice` inside a `lax.scan`, which
XLA does in place. Stacking the chunks instead (`lax.map`) and moving their axis afterwards holds the result twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._axes import Axes, broadcast_axes
from ._weak import weak_like


def map_in_chunks(
    mapped: Callable[[int], Callable[..., Any]],
    args: tuple[Any, ...],
    in_axes: tuple[Axes, ...],
    out_axes: Axes,
    size: int,
    chunk_size: int,
) -> Any:
    """`mapped(size)(*args)`, `chunk_size` slices at a time; the last chunk holds what remains.

    Args:
      mapped: from a size to the function mapped by `jax.vmap` with these axes over an axis of that size.
      args: its arguments, with `size` slices.
      in_axes: an axis specification for each argument.
      out_axes: the axis specification of its output.
      size: the number of slices, at least 1.
      chunk_size: how many to evaluate at once, at least 1.
    """
    leaves, treedef = jax.tree.flatten(args)
    leaf_axes = broadcast_axes(in_axes, args)
    axes = {i: axis % leaves[i].ndim for i, axis in enumerate(leaf_axes) if axis is not None}
    references = [i for i in axes if isinstance(leaves[i], jax.Ref)]
    chunk_size = min(chunk_size, size)

    def evaluate(start: Any, length: int) -> Any:
        slices = list(leaves)
        for i, axis in axes.items():
            whole = leaves[i][...] if i in references else leaves[i]
            slices[i] = lax.dynamic_slice_in_dim(whole, start, length, axis)
        for i in references:
            slices[i] = jax.new_ref(slices[i])
        out = mapped(length)(*_fitted(jax.tree.unflatten(treedef, slices)))
        for i in references:
            leaves[i][...] = lax.dynamic_update_slice_in_dim(leaves[i][...], slices[i][...], start, axes[i])
        return out

    shapes = jax.eval_shape(lambda: evaluate(0, chunk_size))
    out_leaves, out_treedef = jax.tree.flatten(shapes)
    # Counted on the mapped output, so that a negative axis names the same place as it does for `jax.vmap`.
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
        jnp.empty(leaf.shape if axis is None else (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]), leaf.dtype)
        for leaf, axis in zip(out_leaves, positions, strict=True)
    ]
    whole, remaining = divmod(size, chunk_size)
    results, _ = lax.scan(step, results, jnp.arange(whole) * chunk_size)
    if remaining:
        results = write(results, evaluate(whole * chunk_size, remaining), whole * chunk_size)
    results = [weak_like(result, leaf) for result, leaf in zip(results, out_leaves, strict=True)]
    return _fitted(jax.tree.unflatten(out_treedef, results))


def _fitted(tree: Any) -> Any:
    """`tree`, in which sparse arrays, which keep a shape beside their arrays, have as many slices as these."""

    def fit(x: Any) -> Any:
        if not _is_sparse(x) or not x.n_batch:
            return x
        children, kept = x.tree_flatten()
        return x.tree_unflatten(kept | {"shape": (x.data.shape[0], *x.shape[1:])}, children)

    return jax.tree.map(fit, tree, is_leaf=_is_sparse)


def _is_sparse(x: Any) -> bool:
    return type(x).__module__.startswith("jax.experimental.sparse")
