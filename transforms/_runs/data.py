"""Checks and conversion of the arrays that users train on: all examples, or one batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.arguments import describe, leaf_name


def is_array_like(value: Any) -> bool:
    """Return whether a value is an array of any library, such as a tensor of PyTorch or a table of pandas."""
    return isinstance(value, jax.Array) or hasattr(value, "__array__")


def as_arrays(api: str, name: str, tree: Any) -> Any:
    """Return a pytree with the arrays of other libraries as NumPy arrays; all other leaves stay as they are.

    Args:
      api: the caller's name in errors.
      name: the name of `tree` in errors.
      tree: the arguments of a loss, or examples.

    Raises:
      TypeError: a leaf is neither a number nor an array of numbers, for example a string.
    """
    leaves, structure = jax.tree.flatten(tree)
    if all([isinstance(x, jax.Array) for x in leaves]):
        return tree  # handled early, since a step may be shorter than the checks below
    arrays = [_as_array(leaf) for leaf in leaves]
    if all(x is leaf for x, leaf in zip(arrays, leaves, strict=True)):
        return tree
    for (path, leaf), x in zip(jax.tree.leaves_with_path(tree), arrays, strict=True):
        if x is None:
            what = f"`{leaf_name(name, path)}` is {describe(leaf)}, not a number or an array of numbers"
            raise TypeError(f"{api}: {what}; convert it, or leave it out.")
    return jax.tree.unflatten(structure, arrays)


def examples(api: str, data: Any, argument: str = "data") -> tuple[Any, int]:
    """Return all examples as by `as_arrays`, and their number; raise if the arrays differ in length."""
    data = as_arrays(api, argument, data)
    lengths: dict[str, int] = {}
    for path, x in jax.tree.leaves_with_path(data):
        name = leaf_name(argument, path)
        if not isinstance(x, (jax.Array, np.ndarray)) or not x.ndim:
            raise TypeError(f"{api}: `{name}` is {describe(x)}, not an array with the examples along axis 0; pass one.")
        lengths[name] = x.shape[0]
    if not lengths:
        raise ValueError(f"{api}: {argument} has no arrays, so there are no examples; pass arrays of examples.")
    (first, count), *others = lengths.items()
    for name, length in others:
        if length != count:
            raise ValueError(f"{api}: `{first}` has {count} examples, but `{name}` has {length}; make them equal.")
    return data, count


def _as_array(leaf: Any) -> Any:
    """Return a leaf, as a NumPy array if it is an array of another library; None if it does not hold numbers."""
    # A variable of Flax has `__jax_array__`.
    if isinstance(leaf, (jax.Array, bool, int, float, complex)) or hasattr(leaf, "__jax_array__"):
        return leaf
    if not isinstance(leaf, (np.ndarray, np.generic)):
        if not hasattr(leaf, "__array__"):
            return None
        leaf = np.asarray(leaf)
    return leaf if jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool else None
